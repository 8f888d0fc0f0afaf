"""Reading a ``config.json``: every option is understood, or rejected by name."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

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


class Options:
    """Options of a ``config.json`` that knows which of them were read.

    Attributes:
      kind: The model type, such as ``"llama"``, or the architecture of timm.

    Args:
      config: ``config.json`` as a dict.
      names: names of the tensors of the checkpoint, if they are known.
      interpolate_positions: whether the caller asks for images of other sizes.
      kind: the model type, if the config does not say.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        names: Iterable[str] | None = None,
        *,
        interpolate_positions: bool = False,
        kind: str | None = None,
    ):
        self.kind = str(kind or config.get("model_type") or config.get("architecture"))
        self._config = dict(config)
        self._names = None if names is None else frozenset(names)
        self._read = set(_IGNORED)
        self._interpolates = interpolate_positions

    def of(self, config: Mapping[str, Any], kind: str | None = None) -> "Options":
        """Return the options of a part of the model. It takes over what the caller asks for."""
        part = Options(
            config, self._names, interpolate_positions=self._interpolates, kind=kind or self.kind
        )
        self._interpolates = False
        return part

    def has(self, name: str, default: bool) -> bool:
        """Whether the checkpoint has a tensor; the ``default`` if its tensors are not known."""
        if self._names is None:
            return default
        return any(n == name or n.endswith(f".{name}") for n in self._names)

    def interpolation(self, method: T) -> T | None:
        """Return the method, if the caller asks for images of other sizes."""
        asked, self._interpolates = self._interpolates, False
        return method if asked else None

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Read an option. A missing or null one is the ``default``.

        Raises:
          ValueError: if it is missing and has no default.
        """
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
        """Read an option that must have one of the supported values; the first is the default.

        Raises:
          ValueError: for another value.
        """
        value = self.get(name, supported[0])
        if value not in supported:
            expected = " or ".join(repr(v) for v in supported)
            raise ValueError(f"{self.kind}: {name} {value!r} is not supported, only {expected}")
        return value

    def ignore(self, *names: str) -> None:
        """Accept options that do not change the output."""
        self._read.update(names)

    def reject_unread(self) -> None:
        """Raise for options that nobody read, unless they are null, false or empty.

        Raises:
          ValueError: with the names and values; if the model cannot do what the caller asks for.
        """
        if self._interpolates:
            raise ValueError(
                f"{self.kind}: has no positions of image patches; leave interpolate_positions out"
            )
        unread = {
            name: value
            for name, value in self._config.items()
            if name not in self._read and value not in (None, False, [], {}, ())
        }
        if unread:
            options = ", ".join(f"{name}={value!r}" for name, value in sorted(unread.items()))
            raise ValueError(f"{self.kind}: unknown options in config.json: {options}")
