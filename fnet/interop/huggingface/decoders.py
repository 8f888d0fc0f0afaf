"""Transformers for text: Llama, Mistral, Qwen, Gemma, GPT-2, OLMo 2, Phi-3, SmolLM."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from fnet import layers, models
from fnet.interop.huggingface.checkpoint import PretrainedModel, Tensor
from fnet.interop.huggingface.options import Options

ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in transformers."""

_T = (1, 0)  # torch stores [out, in]


def activation(options: Options, name: str, default: str = "silu") -> str:
    """Read the name of an activation, and translate it."""
    return ACTIVATIONS[options.require(name, default, *ACTIVATIONS)]


def dense_tensors(name: str, path: str, *, bias: bool, transposed: bool = True) -> list[Tensor]:
    """Tensors of a dense layer: a kernel, [out, in] in the file if ``transposed``, and a bias."""
    tensors = [Tensor(f"{name}.weight", f"{path}/kernel", _T if transposed else None)]
    return tensors + ([Tensor(f"{name}.bias", f"{path}/bias")] if bias else [])


def norm_tensors(name: str, path: str, *, bias: bool = False) -> list[Tensor]:
    """Tensors of a norm: a scale, and perhaps a bias."""
    tensors = [Tensor(f"{name}.weight", f"{path}/scale")]
    return tensors + ([Tensor(f"{name}.bias", f"{path}/bias")] if bias else [])


def head_tensors(tied: bool) -> list[Tensor]:
    """Tensors of a head without bias. A tied one may be in the file, too."""
    if tied:
        return [Tensor("lm_head.weight", "embedding/embedding", optional=True)]
    return [Tensor("lm_head.weight", "head/kernel", _T)]


def as_pretrained(model: models.LanguageModel, tensors: Sequence[Tensor]) -> PretrainedModel:
    """Attach the names of tensors to a language model."""
    return PretrainedModel(*model, tuple(tensors))


class Rotary(NamedTuple):
    """A rotary position embedding, as `fnet.layers.attention` takes it.

    Attributes:
      frequencies: Radians per position, or a function from the length of the sequence to them.
      scale: Factor of rotated features.
    """

    frequencies: tuple[float, ...] | Callable[[int], tuple[float, ...]]
    scale: float = 1.0


def rotary_embedding(
    kind: str, head_dim: int, parameters: dict[str, Any], max_positions: int
) -> Rotary:
    """Frequencies of a rotary position embedding, from ``rope_parameters``.

    ``default``: base^(-2 i / D). ``linear`` divides all by a factor (Chen et al. 2023). ``llama3``
    divides low frequencies by a factor, and interpolates between low and high ones (Llama Team
    2024, "The Llama 3 Herd of Models"). ``yarn`` interpolates over the features, and scales them
    (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models").

    ``longrope`` divides each by a factor of its own (Ding et al. 2024, "LongRoPE"). There is one
    list of factors for sequences within the original context, and one for longer ones. The length
    is that of the row, or the number of positions that a cache can hold. So a text that outgrows
    the original context while it is generated has the long factors from its first token.
    transformers computes the keys of such a text again when it does.

    Args:
      kind: model type, for errors.
      head_dim: D, features per head.
      parameters: options of the embedding, such as ``rope_theta`` and ``rope_type``.
      max_positions: ``max_position_embeddings``, 0 if unknown.

    Returns:
      The frequencies and the scale.

    Raises:
      ValueError: for another type, an unknown option or a missing one.
    """
    p = dict(parameters)
    rope = p.pop("rope_type", None) or p.pop("type", None) or "default"
    p.pop("type", None)
    if kind == "phi3" and rope in ("su", "yarn"):  # names in old configs
        rope = "longrope"
    if rope not in _SCALINGS:
        raise ValueError(
            f"{kind}: rope_type {rope!r} is not supported, only {', '.join(sorted(_SCALINGS))}"
        )
    base = p.pop("rope_theta", 10_000.0)
    rotated = int(head_dim * p.pop("partial_rotary_factor", 1.0))
    original = p.pop("original_max_position_embeddings", None) or max_positions
    if rope in ("llama3", "yarn", "longrope") and not original:
        raise ValueError(f"{kind}: config.json has no max_position_embeddings, which {rope} needs")
    frequencies = tuple(base ** (-i / rotated) for i in range(0, rotated, 2))
    try:
        rotary = _SCALINGS[rope](frequencies, p, base, original, max_positions)
    except KeyError as e:
        raise ValueError(f"{kind}: rope_type {rope!r} needs the option {e}") from None
    if p:
        raise ValueError(f"{kind}: unknown rope options {p}")
    return rotary


_Frequencies = tuple[float, ...]


def _linear(frequencies: _Frequencies, p: dict[str, Any], *_: Any) -> Rotary:
    factor = p.pop("factor")
    return Rotary(tuple(f / factor for f in frequencies))


def _llama3(
    frequencies: _Frequencies, p: dict[str, Any], base: float, original: int, max_positions: int
) -> Rotary:
    del base, max_positions
    factor, low, high = (p.pop(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))

    def scaled(f: float) -> float:
        # The number of turns within the original context.
        turns = original * f / (2 * math.pi)
        share = float(min(max((turns - low) / (high - low), 0.0), 1.0))
        return (1 - share) * f / float(factor) + share * f

    return Rotary(tuple(scaled(f) for f in frequencies))


def _yarn(
    frequencies: _Frequencies, p: dict[str, Any], base: float, original: int, max_positions: int
) -> Rotary:
    factor = p.pop("factor", None) or max_positions / original
    mscale, mscale_all_dim = p.pop("mscale", None), p.pop("mscale_all_dim", None)
    scale = p.pop("attention_factor", None)
    if scale is None:
        scale = _yarn_scale(factor, 1.0)
        if mscale and mscale_all_dim:
            scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)

    def feature(turns: float) -> float:
        """Index of the feature pair that turns so often within the original context."""
        return len(frequencies) * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    first, last = feature(p.pop("beta_fast", None) or 32), feature(p.pop("beta_slow", None) or 1)
    if p.pop("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    last += 0.001 if first == last else 0

    def scaled(i: int, f: float) -> float:
        share = min(max((i - first) / (last - first), 0.0), 1.0)
        return share * f / factor + (1 - share) * f

    return Rotary(tuple(scaled(i, f) for i, f in enumerate(frequencies)), float(scale))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def _longrope(
    frequencies: _Frequencies, p: dict[str, Any], base: float, original: int, max_positions: int
) -> Rotary:
    del base
    factor, scale = p.pop("factor", None), p.pop("attention_factor", None)
    if scale is None:
        factor = factor or max_positions / original
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {name: p.pop(f"{name}_factor") for name in ("short", "long")}
    for name, values in factors.items():
        if len(values) != len(frequencies):
            raise ValueError(
                f"longrope: {name}_factor must have {len(frequencies)} numbers, got {len(values)}"
            )
    by_name = {
        name: tuple(f / by for f, by in zip(frequencies, values, strict=True))
        for name, values in factors.items()
    }
    return Rotary(lambda length: by_name["long" if length > original else "short"], float(scale))


_SCALINGS: dict[str, Callable[..., Rotary]] = {
    "default": lambda frequencies, *_: Rotary(frequencies),
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}


def rope_parameters(
    options: Options, *, theta: float = 10_000.0, partial: float = 1.0
) -> dict[str, Any]:
    """Options of the rotary embedding, as written by any version of transformers."""
    parameters = dict(options.get("rope_scaling", None) or options.get("rope_parameters", {}))
    parameters.setdefault("rope_theta", options.get("rope_theta", theta))
    parameters.setdefault("partial_rotary_factor", options.get("partial_rotary_factor", partial))
    # transformers prefers it to that of the parameters.
    default = 4096 if options.kind == "phi3" else None
    original = options.get("original_max_position_embeddings", default)
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    options.get("rope_parameters", None)
    return parameters


def decoder(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, OLMo 2, Phi-3 and SmolLM 3.

    They differ in options of the same layers.
    """
    kind = options.kind
    gemma, gemma_pair = kind.startswith("gemma"), kind in ("gemma2", "gemma3_text")
    width, blocks = options.get("hidden_size"), options.get("num_hidden_layers")
    heads = options.get("num_attention_heads")
    groups = options.get("num_key_value_heads", heads)
    default_dim = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}.get(kind)
    head_dim = options.get("head_dim", default_dim or width // heads)
    eps = options.get("rms_norm_eps", 1e-5 if kind in ("olmo2", "phi3") else 1e-6)
    norm = functools.partial(layers.rms_norm, eps=eps, offset=1.0 if gemma else 0.0)

    bias = kind == "qwen2" or options.get("attention_bias", False)
    output_bias = bias and kind != "qwen2"
    mlp_bias = options.get("mlp_bias", False)
    tied = options.get("tie_word_embeddings", gemma or kind == "smollm3")
    fused = kind == "phi3"
    qk_norm = kind in ("qwen3", "gemma3_text", "olmo2")
    caps = (50.0, 30.0) if kind == "gemma2" else (None, None)
    soft_cap = options.nullable("attn_logit_softcapping", caps[0]) if gemma_pair else None
    scale = options.get("query_pre_attn_scalar", 256) ** -0.5 if gemma_pair else None
    options.require("use_bidirectional_attention", False)

    rotaries = _rotaries(options, head_dim)
    windows = _windows(options, blocks)
    _check_cache_lengths(kind, rotaries["sliding"], windows)
    no_rope = _layers_without_rope(options, blocks)

    feed_forward = layers.feed_forward(
        width,
        options.get("intermediate_size"),
        activation=_activation(options),
        bias=mlp_bias,
        fused=fused,
    )

    def block(i: int) -> layers.Block:
        rotary = rotaries["sliding" if windows[i] else "full"]
        attention = layers.attention(
            width,
            heads,
            groups=groups,
            head_dim=head_dim,
            causal=True,
            window=windows[i],
            rotary=None if no_rope[i] else rotary.frequencies,
            rotary_scale=rotary.scale,
            bias=bias,
            output_bias=output_bias,
            fused=fused,
            qk_norm=norm if qk_norm else None,
            qk_norm_over="heads" if kind == "olmo2" else "head",
            scale=scale,
            soft_cap=soft_cap,
        )
        return layers.Block(attention, feed_forward)

    model = models.language_model(
        vocabulary=options.get("vocab_size"),
        width=width,
        blocks=[block(i) for i in range(blocks)],
        norm=norm,
        pre_norm=kind != "olmo2",
        post_norm=norm if gemma_pair or kind == "olmo2" else None,
        embed_scale=math.sqrt(width) if gemma else None,
        tied=tied,
        soft_cap=options.nullable("final_logit_softcapping", caps[1]) if gemma_pair else None,
        dtype=dtype,
    )

    if kind == "olmo2":
        norms = {
            "post_attention_layernorm": "mixer_post_norm",
            "post_feedforward_layernorm": "feed_forward_post_norm",
        }
    elif gemma_pair:
        norms = {
            "input_layernorm": "mixer_norm",
            "post_attention_layernorm": "mixer_post_norm",
            "pre_feedforward_layernorm": "feed_forward_norm",
            "post_feedforward_layernorm": "feed_forward_post_norm",
        }
    else:
        norms = {
            "input_layernorm": "mixer_norm",
            "post_attention_layernorm": "feed_forward_norm",
        }
    projections = (
        {"qkv_proj": "query_key_value"}
        if fused
        else {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    )
    expansions = {"gate_up_proj": "expand"} if fused else {"gate_proj": "gate", "up_proj": "up"}

    tensors = [Tensor("model.embed_tokens.weight", "embedding/embedding")]
    for i in range(blocks):
        name, path = f"model.layers.{i}", f"blocks/{i}"
        for theirs, ours in norms.items():
            tensors += norm_tensors(f"{name}.{theirs}", f"{path}/{ours}")
        for theirs, ours in projections.items():
            tensors += dense_tensors(
                f"{name}.self_attn.{theirs}", f"{path}/mixer/{ours}", bias=bias
            )
        tensors += dense_tensors(
            f"{name}.self_attn.o_proj", f"{path}/mixer/output", bias=output_bias
        )
        for theirs in ("q", "k") if qk_norm else ():
            ours = {"q": "query_norm", "k": "key_norm"}[theirs]
            tensors += norm_tensors(f"{name}.self_attn.{theirs}_norm", f"{path}/mixer/{ours}")
        for theirs, ours in (*expansions.items(), ("down_proj", "contract")):
            tensors += dense_tensors(
                f"{name}.mlp.{theirs}", f"{path}/feed_forward/{ours}", bias=mlp_bias
            )
    tensors += norm_tensors("model.norm", "norm") + head_tensors(tied)
    return as_pretrained(model, tensors)


def _activation(options: Options) -> str:
    if not options.kind.startswith("gemma"):
        return activation(options, "hidden_act")
    # Configs of Gemma 1 say "gelu" and mean its approximation.
    legacy = options.get("hidden_act", "gelu_pytorch_tanh")
    name = options.get("hidden_activation", legacy)
    if name not in ("gelu", "gelu_pytorch_tanh"):
        raise ValueError(f"{options.kind}: hidden_activation {name!r} is not supported")
    return "gelu"


def _rotaries(options: Options, head_dim: int) -> dict[str, Rotary]:
    """Position embeddings of layers with full attention and with a sliding window."""
    max_positions = options.get("max_position_embeddings", 0)

    def frequencies(parameters: dict[str, Any]) -> Rotary:
        return rotary_embedding(options.kind, head_dim, parameters, max_positions)

    if options.kind != "gemma3_text":
        theta = 2_000_000.0 if options.kind == "smollm3" else 10_000.0
        both = frequencies(rope_parameters(options, theta=theta))
        return {"full": both, "sliding": both}
    by_kind = options.get("rope_parameters", {})
    full = dict(by_kind.get("full_attention") or options.get("rope_scaling", {}))
    full.setdefault("rope_theta", options.get("rope_theta", 1_000_000.0))
    sliding = dict(by_kind.get("sliding_attention") or {})
    sliding.setdefault("rope_theta", options.get("rope_local_base_freq", 10_000.0))
    options.ignore("rope_scaling", "rope_theta", "rope_local_base_freq")
    return {"full": frequencies(full), "sliding": frequencies(sliding)}


def _windows(options: Options, blocks: int) -> list[int | None]:
    """Sliding window of each block, or None for full attention."""
    kind = options.kind
    if kind in ("llama", "gemma", "olmo2"):
        return [None] * blocks
    window = options.nullable("sliding_window", None if kind == "phi3" else 4096)
    if kind in ("qwen2", "qwen3", "smollm3"):
        window = window if options.get("use_sliding_window", False) else None
        first = options.get("max_window_layers", 28)
        default = ["sliding_attention" if i >= first else "full_attention" for i in range(blocks)]
    elif kind in ("gemma2", "gemma3_text"):
        pattern = 2 if kind == "gemma2" else options.get("sliding_window_pattern", 6)
        pattern = options.get("_sliding_window_pattern", pattern)
        default = [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(blocks)
        ]
    else:
        default = ["sliding_attention" if window else "full_attention"] * blocks
    kinds = options.get("layer_types", default)
    if len(kinds) != blocks or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"{kind}: layer_types must name sliding_attention or full_attention for each of the "
            f"{blocks} layers, got {kinds}"
        )
    return [window if k == "sliding_attention" else None for k in kinds]


def _check_cache_lengths(kind: str, rotary: Rotary, windows: Sequence[int | None]) -> None:
    """Raise if frequencies depend on the length, but a window's cache does not show it."""
    if not callable(rotary.frequencies):
        return
    longest = rotary.frequencies(2**31)
    for window in windows:
        if window is not None and rotary.frequencies(window) != longest:
            raise ValueError(
                f"{kind}: longrope with sliding_window {window}, within the original context, is "
                "not supported"
            )


def _layers_without_rope(options: Options, blocks: int) -> list[bool]:
    if options.kind != "smollm3":
        return [False] * blocks
    interval = options.get("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(blocks)]
    return [not has_rope for has_rope in options.get("no_rope_layers", default)]


def gpt2(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """GPT-2: learned positions, layer norms with biases; kernels are stored [in, out]."""
    width, blocks = options.get("n_embd"), options.get("n_layer")
    options.require("scale_attn_weights", True)
    options.require("scale_attn_by_inverse_layer_idx", False)
    options.require("add_cross_attention", False)
    tied = options.get("tie_word_embeddings", True)
    options.ignore("reorder_and_upcast_attn", "n_ctx")
    summary = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
    options.ignore(*(f"summary_{name}" for name in summary))
    attention = layers.attention(width, options.get("n_head"), causal=True)
    feed_forward = layers.feed_forward(
        width,
        options.get("n_inner", 4 * width),
        activation=activation(options, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    model = models.language_model(
        vocabulary=options.get("vocab_size"),
        width=width,
        blocks=[layers.Block(attention, feed_forward)] * blocks,
        norm=functools.partial(layers.layer_norm, eps=options.get("layer_norm_epsilon", 1e-5)),
        positions=options.get("n_positions", 1024),
        tied=tied,
        dtype=dtype,
    )
    tensors = [
        Tensor("transformer.wte.weight", "embedding/embedding"),
        Tensor("transformer.wpe.weight", "pos_embedding"),
    ]
    for i in range(blocks):
        name, path = f"transformer.h.{i}", f"blocks/{i}"
        tensors += norm_tensors(f"{name}.ln_1", f"{path}/mixer_norm", bias=True)
        tensors += norm_tensors(f"{name}.ln_2", f"{path}/feed_forward_norm", bias=True)
        for theirs, ours in {
            "attn.c_attn": "mixer/query_key_value",
            "attn.c_proj": "mixer/output",
            "mlp.c_fc": "feed_forward/expand",
            "mlp.c_proj": "feed_forward/contract",
        }.items():
            tensors += dense_tensors(
                f"{name}.{theirs}", f"{path}/{ours}", bias=True, transposed=False
            )
    tensors += norm_tensors("transformer.ln_f", "norm", bias=True) + head_tensors(tied)
    return as_pretrained(model, tensors)
