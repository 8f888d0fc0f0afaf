"""Reading a ``config.json``: every option is understood, or rejected by name."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# Options of training, generation and files, which do not change logits.
_IGNORED = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "_num_labels",
    "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop",
    "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "drop_path_rate", "dtype", "early_stopping", "embd_pdrop",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "hidden_dropout_prob", "id2label", "initializer_factor", "initializer_range", "is_decoder",
    "is_encoder_decoder", "is_llama_config", "label2id", "length_penalty", "max_length",
    "max_position_embeddings", "min_length", "model_type", "n_special", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_past", "output_scores", "pad_token_id",
    "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class",
    "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache",
})  # fmt: skip

_REQUIRED = object()


class Option(NamedTuple):
    """An option of ``config.json`` as the source of a value.

    Attributes:
      name: Its name.
      default: Its value if it is missing; without one, the option is required.
      nullable: Whether null means None, and not the default.

    Example:
      >>> from fnet.interop.huggingface import Option
      >>> Option("head_dim", 128).default
      128
    """

    name: str
    default: Any = _REQUIRED
    nullable: bool = False


Source = Any
"""A value, or where it comes from: an `Option`, or a function of `Options`."""

Read = Callable[["Options"], Any]


class Options:
    """Options of a ``config.json`` that knows which of them were read.

    ``kind`` is the model type, such as ``"llama"``, or the architecture of timm. ``names`` are
    those of the checkpoint's tensors, if they are known.
    """

    def __init__(self, config: Mapping[str, Any], kind: str, names: Iterable[str] | None = None):
        self.kind = kind
        self._config = dict(config)
        self._names = None if names is None else frozenset(names)
        self._read = set(_IGNORED)

    def of(self, config: Mapping[str, Any]) -> "Options":
        """Return the options of a part of the model, such as its image tower."""
        return Options(config, self.kind, self._names)

    def has(self, name: str, default: bool) -> bool:
        """Whether the checkpoint has a tensor; the ``default`` if its tensors are not known."""
        if self._names is None:
            return default
        return any(n == name or n.endswith(f".{name}") for n in self._names)

    def starts(self, prefix: str) -> bool:
        """Whether the checkpoint has tensors whose names start so."""
        return any(name.startswith(prefix) for name in self._names or ())

    def value(self, source: Source) -> Any:
        """Return a value from its source."""
        if isinstance(source, Option):
            get = self.nullable if source.nullable else self.get
            return get(source.name, source.default)
        return source(self) if callable(source) else source

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Read an option; if missing or null, the ``default``, or a ValueError if there is none."""
        self._read.add(name)
        value = self._config.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.kind}: config.json has no {name}")
        return default

    def nullable(self, name: str, default: Any) -> Any:
        """Read an option whose null means None, and that has a default if it is missing."""
        self._read.add(name)
        return self._config.get(name, default)

    def require(self, name: str, *supported: Any) -> Any:
        """Read an option that must have one of the supported values; the first is the default."""
        return self.check(name, self.get(name, supported[0]), supported)

    def check(self, name: str, value: Any, supported: Iterable[Any]) -> Any:
        """Return a value of an option if it is supported, else raise ValueError."""
        if value not in supported:
            expected = " or ".join(repr(v) for v in supported)
            raise ValueError(f"{self.kind}: {name} {value!r} is not supported, only {expected}")
        return value

    def ignore(self, *patterns: str) -> None:
        """Accept options that do not change the output; ``*`` stands for any text."""
        for pattern in patterns:
            self._read.update(fnmatch.filter(self._config, pattern))

    def reject_unread(self) -> None:
        """Raise ValueError for options that nobody read, unless they are null, false or empty."""
        unread = {
            name: value
            for name, value in self._config.items()
            if name not in self._read and value not in (None, False, [], {}, ())
        }
        if unread:
            options = ", ".join(f"{name}={value!r}" for name, value in sorted(unread.items()))
            raise ValueError(f"{self.kind}: unknown options in config.json: {options}")
