"""Transformers for text: Llama, Mistral, Qwen, Gemma, Cohere, GPT, OLMo, Phi and others."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet import layers, models
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.family import Family, activation, register
from fnet.interop.huggingface.names import (
    AFTER,
    AROUND,
    BEFORE,
    LLAMA_NAMES,
    mlp,
    norms,
    qk_norms,
    table,
)
from fnet.interop.huggingface.options import Option, Options, Source
from fnet.interop.huggingface.rotary import Rope
from fnet.layer import Layer, Params, State, from_function, stateless
from fnet.layers.norm import expand_like
from fnet.layers.stack import Parallel
from fnet.precision import upcast

Norm = Callable[[int], Layer]
"""A norm as a function of the width."""

_Keys = Literal["own", "passed_on", "given"]

_GLM4_NORMS = norms(mixer_post="post_self_attn_layernorm", feed_forward_post="post_mlp_layernorm")

_NEOX_NAMES = table("""
embedding                       gpt_neox.embed_in
blocks/*/mixer_norm             gpt_neox.layers.*.input_layernorm
blocks/*/mixer/query_key_value  gpt_neox.layers.*.attention.query_key_value
blocks/*/mixer/output           gpt_neox.layers.*.attention.dense
blocks/*/feed_forward_norm      gpt_neox.layers.*.post_attention_layernorm
blocks/*/feed_forward/expand    gpt_neox.layers.*.mlp.dense_h_to_4h
blocks/*/feed_forward/contract  gpt_neox.layers.*.mlp.dense_4h_to_h
norm                            gpt_neox.final_layer_norm
head                            embed_out
""")

_GPTJ_NAMES = table("""
embedding                       transformer.wte
blocks/*/mixer_norm             transformer.h.*.ln_1
blocks/*/mixer/query            transformer.h.*.attn.q_proj
blocks/*/mixer/key              transformer.h.*.attn.k_proj
blocks/*/mixer/value            transformer.h.*.attn.v_proj
blocks/*/mixer/output           transformer.h.*.attn.out_proj
blocks/*/feed_forward/expand    transformer.h.*.mlp.fc_in
blocks/*/feed_forward/contract  transformer.h.*.mlp.fc_out
norm                            transformer.ln_f
head                            lm_head
""")

_FALCON_NAMES = table("""
embedding                       transformer.word_embeddings
blocks/*/mixer_norm             transformer.h.*.input_layernorm
blocks/*/mixer/query_key_value  transformer.h.*.self_attention.query_key_value
blocks/*/mixer/output           transformer.h.*.self_attention.dense
blocks/*/feed_forward/expand    transformer.h.*.mlp.dense_h_to_4h
blocks/*/feed_forward/contract  transformer.h.*.mlp.dense_4h_to_h
norm                            transformer.ln_f
head                            lm_head
""")

_DENSE_NAMES = LLAMA_NAMES | table("""
blocks/*/mixer/output           model.layers.*.self_attn.dense
norm                            model.final_layernorm
""")

_PERSIMMON_NAMES = _DENSE_NAMES | BEFORE | qk_norms("q_layernorm", "k_layernorm")

_PLAIN_NAMES = LLAMA_NAMES | BEFORE | mlp("up_proj", "down_proj")
"""Names of a Llama whose feed-forward layers have no gate."""

_APERTUS_NORMS = norms(mixer="attention_layernorm", feed_forward="feedforward_layernorm")
_APERTUS_NAMES = (
    _PLAIN_NAMES
    | _APERTUS_NORMS
    | table("""
blocks/*/feed_forward/hidden_norm/alpha_p  model.layers.*.mlp.act_fn.alpha_p
blocks/*/feed_forward/hidden_norm/alpha_n  model.layers.*.mlp.act_fn.alpha_n
""")
)

_BIGCODE_NAMES = table("""
embedding                       transformer.wte
pos_embedding                   transformer.wpe.weight
blocks/*/mixer_norm             transformer.h.*.ln_1
blocks/*/mixer/query_key_value  transformer.h.*.attn.c_attn
blocks/*/mixer/output           transformer.h.*.attn.c_proj
blocks/*/feed_forward_norm      transformer.h.*.ln_2
blocks/*/feed_forward/expand    transformer.h.*.mlp.c_fc
blocks/*/feed_forward/contract  transformer.h.*.mlp.c_proj
norm                            transformer.ln_f
head                            lm_head
""")

_GPT2_NAMES = _BIGCODE_NAMES | table("""
blocks/*/mixer/query_key_value  transformer.h.*.attn.c_attn  ab
blocks/*/mixer/output           transformer.h.*.attn.c_proj  ab
blocks/*/feed_forward/expand    transformer.h.*.mlp.c_fc     ab
blocks/*/feed_forward/contract  transformer.h.*.mlp.c_proj   ab
""")


# Fields and not arguments of a function: a family gives any of them, next to those of variants,
# and `decoder` tells them apart by their names.
class Decoder(NamedTuple):
    """The arguments of `decoder` that are no fields of a variant.

    Attributes:
      width, blocks, heads, hidden, vocabulary: sizes.
      norm: norm as a function of the width.
      groups, head_dim, fused, window: as for `fnet.layers.attention`.
      positions, tied: as for `fnet.models.language_model`.
      activation, gated, hidden_norm: as for `fnet.layers.feed_forward`.
      fused_gate: whether gate and up are one array; None: as ``fused``.
      bias, mlp_bias: whether dense layers have biases: of attention, of feed-forward layers.
      parallel: whether attention and feed-forward layer both read the input of their block.
      qk_norm: norm of queries and keys per ``head``, or over all ``heads``; None: no norm.
      residual_scale: factor of each branch.
      full_every, full_first: blocks with full attention: each n-th, and the first ones.
      layer_types: ``sliding_attention`` or ``full_attention`` for each block, in place of these.
      rope: rotary embeddings; None: no rotation.
      rotates: blocks that rotate: ``sliding`` for those with a window, one number per block, or
        None for all.
      experts: feed-forward layer of sparse blocks, such as `fnet.layers.experts`; None: none.
      sparse: which blocks have experts, one number per block; None: all.
      recurrent: mixer of blocks without attention, such as `fnet.layers.mamba2`.
      recurs: which blocks have it; None: none.
      full: arguments of attention in blocks without a window, in place of the others: ``head_dim``,
        ``groups`` and ``values``.
      shared: how many of the last blocks read the keys and values of the last earlier block with
        the same window.
      shared_hidden: ``hidden`` of these; None: as in others.
      output: as for `fnet.layers.Block`.
      inputs: ``block_inputs`` of the model, as a function of the dtype.

    Example:
      >>> from fnet import layers
      >>> from fnet.interop.huggingface.decoders import Decoder
      >>> Decoder(8, 2, 2, 16, vocabulary=11, norm=layers.rms_norm).gated
      True
    """

    width: int
    blocks: int
    heads: int
    hidden: int
    vocabulary: int
    norm: Norm
    groups: int | None = None
    head_dim: int | None = None
    positions: int | None = None
    tied: bool = False
    activation: str = "silu"
    gated: bool = True
    hidden_norm: Layer | None = None
    fused: bool = False
    fused_gate: bool | None = None
    bias: bool = False
    mlp_bias: bool = False
    parallel: bool = False
    qk_norm: Literal["head", "heads"] | None = None
    residual_scale: float = 1.0
    window: int | None = None
    full_every: int | None = None
    full_first: int = 0
    layer_types: Sequence[str] | None = None
    rope: Rope | None = None
    rotates: Sequence[int] | Literal["sliding"] | None = None
    experts: Layer | None = None
    sparse: Sequence[int] | None = None
    recurrent: Layer | None = None
    recurs: Sequence[bool] | None = None
    full: Mapping[str, Any] = MappingProxyType({})
    shared: int = 0
    shared_hidden: int | None = None
    output: Layer | None = None
    inputs: Callable[[DTypeLike], Layer] | None = None


def decoder(
    options: Options, names: Names, dtype: DTypeLike, **arguments: Any
) -> tuple[models.LanguageModel, tuple[Any, ...]]:
    """Build a transformer decoder, for the row of a family.

    Which norms a block has follows from the names: ``mixer_norm``, ``mixer_post_norm``, or both. In
    a parallel block without ``feed_forward_norm``, both branches read one norm. In another block
    without it, the feed-forward layer normalizes its input itself.

    Args:
      options: options of ``config.json``.
      names: names of the tensors.
      dtype: dtype of activations.
      **arguments: fields of `Decoder`; and of `fnet.layers.AttentionVariant` and
        `fnet.models.LanguageModelVariant`, as far as they do not follow from these.

    Returns:
      The model, and for each block its kind: (window, whether it rotates, whether it is sparse,
      whether it is recurrent, what becomes of its keys). Where blocks depend on their number, that
      is a part of it.
    """
    own, rest = _take(Decoder, arguments)
    of_attention, of_model = _take(layers.AttentionVariant, rest)
    d = Decoder(**own)
    second_norm = "blocks/*/feed_forward_norm" in names
    reads, kinds = _kinds(options, d)
    build = functools.partial(_block, options, d, of_attention, second_norm)
    built = {kind: build(kind) for kind in dict.fromkeys(kinds)}
    post_norm = d.norm if "blocks/*/mixer_post_norm" in names else None
    if d.residual_scale != 1:
        post_norm = functools.partial(_scaled, post_norm, d.residual_scale)
    branches: Parallel = "two_norms" if second_norm else "one_norm"
    model = models.language_model(
        vocabulary=d.vocabulary,
        width=d.width,
        blocks=[built[kind]._replace(reads=j) for kind, j in zip(kinds, reads, strict=True)],
        norm=d.norm,
        positions=d.positions,
        tied=d.tied,
        dtype=dtype,
        variant=models.LanguageModelVariant(
            pre_norm="blocks/*/mixer_norm" in names,
            post_norm=post_norm,
            parallel=branches if d.parallel else None,
            block_inputs=d.inputs and d.inputs(dtype),
            **of_model,
        ),
    )
    assert model.decode is not None  # because all blocks are causal
    return model, tuple(enumerate(kinds)) if d.shared or d.inputs else kinds


def _take(cls: Any, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in arguments.items() if name in cls._fields}
    return own, {name: value for name, value in arguments.items() if name not in own}


class _Kind(NamedTuple):
    """What distinguishes the layers of blocks; see the result of `decoder`."""

    window: int | None
    rotates: bool
    sparse: bool
    recurs: bool
    keys: _Keys


def _kinds(options: Options, d: Decoder) -> tuple[list[int | None], tuple[_Kind, ...]]:
    windows = _windows(options, d)
    rotates = d.rotates
    if rotates == "sliding":
        rotates = [w is not None for w in windows]
    rotates = [d.rope is not None] * d.blocks if rotates is None else rotates
    sparse = [d.experts is not None] * d.blocks if d.sparse is None else d.sparse
    recurs = [False] * d.blocks if d.recurs is None else d.recurs
    reads, keys = _shared_keys(options, windows, d.shared)
    rows = zip(windows, map(bool, rotates), map(bool, sparse), recurs, keys, strict=True)
    return reads, tuple(_Kind(*row) for row in rows)


def _block(
    options: Options, d: Decoder, of_attention: Mapping[str, Any], second_norm: bool, kind: _Kind
) -> layers.Block:
    """Build the layers of a kind of blocks; ``of_attention`` are fields of the variant."""
    hidden = d.shared_hidden if kind.keys == "given" else None
    last = d.experts
    if not kind.sparse:
        last = layers.feed_forward(
            d.width,
            hidden or d.hidden,
            activation=d.activation,
            gated=d.gated,
            bias=d.mlp_bias,
            fused=d.fused if d.fused_gate is None else d.fused_gate,
            hidden_norm=d.hidden_norm,
        )
    if kind.recurs:
        assert d.recurrent is not None
        return layers.Block(d.recurrent, last)
    own = {"groups": d.groups, "head_dim": d.head_dim or d.width // d.heads}
    own |= d.full if kind.window is None else {}
    changed, sizes = _take(layers.AttentionVariant, own)
    variant = layers.AttentionVariant(
        qk_norm=d.norm if d.qk_norm else None, qk_norm_over=d.qk_norm or "head", keys=kind.keys
    )
    attention = layers.attention(
        d.width,
        d.heads,
        causal=True,
        window=kind.window,
        rotary=d.rope.embedding(options, sizes["head_dim"], kind.window)
        if d.rope and kind.rotates
        else None,
        bias=d.bias,
        fused=d.fused,
        variant=variant._replace(**of_attention, **changed),
        **sizes,
    )
    return layers.Block(attention, last, d.output, feed_forward_norm=second_norm)


def _shared_keys(
    options: Options, windows: Sequence[int | None], shared: int
) -> tuple[list[int | None], list[_Keys]]:
    first = len(windows) - shared
    last = {window: i for i, window in enumerate(windows[:first])}
    if missing := set(windows[first:]) - last.keys():
        raise ValueError(
            f"{options.kind}: of the layers that share keys, some have the window {missing.pop()}, "
            "and no layer before them has"
        )
    reads = [last[window] if i >= first else None for i, window in enumerate(windows)]

    def of(i: int) -> _Keys:
        return "given" if i >= first else "passed_on" if i in reads else "own"

    return reads, [of(i) for i in range(len(windows))]


def _windows(options: Options, d: Decoder) -> list[int | None]:
    sliding, full = "sliding_attention", "full_attention"
    layer_types = d.layer_types
    if layer_types is None:
        layer_types = [
            full if i < d.full_first or (d.full_every and (i + 1) % d.full_every == 0) else sliding
            for i in range(d.blocks)
        ]
    if len(layer_types) != d.blocks or set(layer_types) - {sliding, full}:
        raise ValueError(
            f"{options.kind}: layer_types must name {sliding} or {full} for each of the {d.blocks} "
            f"layers, got {layer_types}"
        )
    return [d.window if kind == sliding else None for kind in layer_types]


def _scaled(norm: Norm | None, factor: float, width: int) -> Layer:
    """Return a norm, or the identity, whose output is multiplied by a constant."""
    return scaled(norm(width) if norm else stateless(lambda x: x), factor)


def scaled(layer: Layer, factor: float) -> Layer:
    """Multiply the outputs of a layer by a constant."""

    def apply(params: Params, state: State, x: Array, **given: Any) -> tuple[Array, State]:
        y, state = layer.apply(params, state, x, **given)
        return y * jnp.asarray(factor, y.dtype), state

    def extend(*given: Any) -> tuple[Array, Any]:
        assert layer.decode is not None
        y, cache = layer.decode.extend(*given)
        return y * jnp.asarray(factor, y.dtype), cache

    return Layer(layer.init, apply, layer.decode and layer.decode._replace(extend=extend))


_EPS = Option("rms_norm_eps", 1e-6)


def rms_norm(eps: Source = _EPS, **arguments: Any) -> Source:
    """RMS norms, with an epsilon from ``config.json``."""
    return lambda options: functools.partial(layers.rms_norm, eps=options.value(eps), **arguments)


def layer_norm(eps: Source, **arguments: Any) -> Source:
    """Layer norms, with an epsilon from ``config.json``."""
    return lambda options: functools.partial(layers.layer_norm, eps=options.value(eps), **arguments)


def _gemma_activation(options: Options) -> str:
    # Configs of Gemma 1 say "gelu" and mean its approximation.
    legacy = options.get("hidden_act", "gelu_pytorch_tanh")
    name = options.get("hidden_activation", legacy)
    options.check("hidden_activation", name, ("gelu_pytorch_tanh", "gelu"))
    return "gelu"


def _gemma3_period(options: Options) -> int:
    return int(options.get("_sliding_window_pattern", options.get("sliding_window_pattern", 6)))


def _exaone_period(options: Options) -> int:
    period = options.get("sliding_window_pattern", 4)
    return len(period) if isinstance(period, str) else int(period)  # or LLLG


def _exaone_rotates(options: Options) -> str | None:
    return None if options.nullable("sliding_window", 4096) is None else "sliding"


def optional_window(options: Options) -> int | None:
    """Return the window of Qwen, or None."""
    window = options.nullable("sliding_window", 4096)
    return window if options.get("use_sliding_window", False) else None


def _smollm_rotates(options: Options) -> Sequence[int]:
    interval = options.get("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(options.get("num_hidden_layers"))]
    rotates: Sequence[int] = options.get("no_rope_layers", default)
    return rotates


def _fused_per_head(names: Names, layer: str, heads: str) -> Source:
    """Names of a model whose file has query, key and value of each head together."""

    def with_heads(options: Options) -> Names:
        path = "blocks/*/mixer/query_key_value"
        return names | {path: (layer, "", None, (0, options.get(heads), 3))}

    return with_heads


def _text_part(options: Options) -> Options:
    options.ignore(
        *("vision_config", "audio_config", "*_token_index", "*_token_id", "mm_tokens_per_image"),
        *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        "vision_feature_layer",
    )
    text = dict(options.get("text_config"))
    if (tied := options.get("tie_word_embeddings", None)) is not None:
        text["tie_word_embeddings"] = tied
    return options.of(text)


_IMAGE_PART = re.compile(
    r"(^|\.)(vision_tower|vision_model|vision_embedder|multi_modal_projector|visual|embed_vision"
    r"|audio_tower|embed_audio)\.|^mtp\."
)


def within_image_model(family: Family, *, outer: bool = False) -> dict[str, Any]:
    """Changes of the row of a language model for a model that also sees images.

    With ``outer``, files without ``model.language_model`` have ``language_model.model``.
    """
    others = _IMAGE_PART
    if family.others:
        others = re.compile(f"{family.others.pattern}|{others.pattern}")
    return {
        "names": _text_names(family.names, outer),
        "prefix": None,
        "part": _text_part,
        "others": others,
    }


def _text_names(names: Source, outer: bool) -> Source:
    """Names of the language model in a model that also sees images, of both ages."""

    def within(options: Options) -> Names:
        is_inner = not outer or options.starts("model.language_model.")

        def renamed(name: str) -> str:
            if is_inner:
                return name.replace("model.", "model.language_model.", 1)
            return f"language_model.{name}"

        return {
            path: renamed(name) if isinstance(name, str) else (renamed(name[0]), *name[1:])
            for path, name in options.value(names).items()
        }

    return within


def _stablelm_names(options: Options) -> Names:
    names = LLAMA_NAMES | BEFORE
    if options.get("use_parallel_residual", False):
        del names["blocks/*/feed_forward_norm"]
    return names


def _hyperclova_names(options: Options) -> Names:
    after = norms(mixer_post="post_norm1", feed_forward_post="post_norm2")
    return LLAMA_NAMES | BEFORE | (after if options.get("use_post_norm", True) else {})


def _ministral3_rope(options: Options) -> dict[str, Any]:
    # Mistral Small 3 has the same architecture as a whole, with Mistral's text model.
    return {} if options.get("model_type") == "mistral" else _MINISTRAL3_ROPE


def _ministral3_eps(options: Options) -> float:
    default = 1e-6 if options.get("model_type") == "mistral" else 1e-5
    return float(options.get("rms_norm_eps", default))


def _position_scale(options: Options) -> Callable[[Array], Array] | None:
    """Factors of queries far from the start, as in Llama 4."""
    rope = options.get("rope_parameters", None) or options.get("rope_scaling", None)
    rope = rope or _ministral3_rope(options)
    if (beta := rope.get("llama_4_scaling_beta")) is None:
        return None
    original = rope["original_max_position_embeddings"]
    return lambda at: 1 + beta * jnp.log1p(jnp.floor(at / original))


def _xielu() -> Layer:
    beta, eps = 0.5, float(jnp.bfloat16(-1e-6))  # transformers rounds it so

    def apply(params: Params, x: Array) -> Array:
        z = upcast(x)
        positive, negative = (jax.nn.softplus(upcast(params[f"alpha_{sign}"])) for sign in "pn")
        positive, negative = (expand_like(a, z) for a in (positive, beta + negative))
        curved = jnp.expm1(jnp.minimum(z, eps)) - z
        y = jnp.where(z > 0, positive * jnp.square(z), negative * curved) + beta * z
        return y.astype(x.dtype)

    def init(key: Array) -> Params:
        del key
        initial = {"alpha_p": 0.8, "alpha_n": 0.8 - beta}
        return {name: jnp.full(1, math.log(math.expm1(v))) for name, v in initial.items()}

    return from_function(init, apply)


_SLIDING = {
    "window": Option("sliding_window", 4096, nullable=True),
    "layer_types": Option("layer_types", None),
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

_LLAMA = Family(
    "llama",
    ("LlamaForCausalLM",),
    decoder,
    {
        "width": Option("hidden_size"),
        "blocks": Option("num_hidden_layers"),
        "heads": Option("num_attention_heads"),
        "groups": Option("num_key_value_heads", None),
        "head_dim": Option("head_dim", None),
        "hidden": Option("intermediate_size"),
        "vocabulary": Option("vocab_size"),
        "norm": rms_norm(),
        "activation": activation("hidden_act", "silu"),
        "bias": Option("attention_bias", False),
        "mlp_bias": Option("mlp_bias", False),
        "tied": Option("tie_word_embeddings", False),
        "rope": Rope(),
    },
    LLAMA_NAMES | BEFORE,
)
_GEMMA = _LLAMA.like(
    "gemma",
    "GemmaForCausalLM",
    head_dim=Option("head_dim", 256),
    norm=rms_norm(offset=1.0),
    activation=_gemma_activation,
    embed_scale=lambda options: math.sqrt(options.get("hidden_size")),
    tied=Option("tie_word_embeddings", True),
    supported={"use_bidirectional_attention": (False,)},
)
_GEMMA2 = _GEMMA.like(
    "gemma2",
    "Gemma2ForCausalLM",
    names=LLAMA_NAMES | AROUND,
    scale=lambda options: options.get("query_pre_attn_scalar", 256) ** -0.5,
    soft_cap=Option("attn_logit_softcapping", 50.0, nullable=True),
    logit_soft_cap=Option("final_logit_softcapping", 30.0, nullable=True),
    **_SLIDING,
    full_every=Option("_sliding_window_pattern", 2),
)
_GEMMA3 = _GEMMA2.like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    heads=Option("num_attention_heads", 8),
    groups=Option("num_key_value_heads", 4),
    vocabulary=Option("vocab_size", 262_208),
    qk_norm="head",
    soft_cap=Option("attn_logit_softcapping", None),
    logit_soft_cap=Option("final_logit_softcapping", None),
    full_every=_gemma3_period,
    rope=Rope(1_000_000.0, local_theta=Option("rope_local_base_freq", 10_000.0)),
)
_QWEN3 = _LLAMA.like(
    "qwen3",
    "Qwen3ForCausalLM",
    head_dim=Option("head_dim", 128),
    qk_norm="head",
    **_SLIDING | {"window": optional_window},
    full_first=Option("max_window_layers", 28),
)

_OLMO2 = _LLAMA.like(
    "olmo2",
    "Olmo2ForCausalLM",
    names=LLAMA_NAMES | AFTER,
    norm=rms_norm(Option("rms_norm_eps", 1e-5)),
    qk_norm="heads",
)

_GLM = _LLAMA.like(
    "glm",
    "GlmForCausalLM",
    head_dim=Option("head_dim", 128),
    norm=rms_norm(Option("rms_norm_eps", 1.5625e-7)),
    bias=Option("attention_bias", True),
    output_bias=False,
    mlp_bias=False,
    fused_gate=True,
    rope=Rope(partial=0.5, interleaved=True),
)

_LAYER_NORM = Option("layer_norm_eps", 1e-5)

_MINISTRAL3 = _LLAMA.like(
    "ministral3",
    "Ministral3ForCausalLM",
    head_dim=Option("head_dim", 128),
    norm=rms_norm(_ministral3_eps),
    **_SLIDING | {"window": Option("sliding_window", None)},
    query_scale=_position_scale,
    rope=Rope(
        default=_ministral3_rope, ignored=("llama_4_scaling_beta", "max_position_embeddings")
    ),
    supported={"model_type": ("ministral3", "mistral", "mistral3")},
)

_COHERE = _LLAMA.like(
    "cohere",
    "CohereForCausalLM",
    names={p: n for p, n in (LLAMA_NAMES | BEFORE).items() if p != "blocks/*/feed_forward_norm"},
    norm=layer_norm(_LAYER_NORM, bias=False),
    parallel=True,
    mlp_bias=False,
    logit_scale=Option("logit_scale", 0.0625),
    tied=Option("tie_word_embeddings", True),
    rope=Rope(500_000.0, interleaved=True),
    supported={"use_qk_norm": (False,)},
)

_PLAIN = _LLAMA.like(
    "arcee",
    "ArceeForCausalLM",
    names=_PLAIN_NAMES,
    norm=rms_norm(Option("rms_norm_eps", 1e-5)),
    activation=activation("hidden_act", "relu2"),
    gated=False,
)

_GRANITE = _LLAMA.like(
    "granite",
    "GraniteForCausalLM",
    scale=Option("attention_multiplier", 1.0),
    embed_scale=Option("embedding_multiplier", 1.0),
    residual_scale=Option("residual_multiplier", 1.0),
    logit_scale=lambda options: 1 / options.get("logits_scaling", 1.0),
)

_GPT2 = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    decoder,
    {
        "width": Option("n_embd"),
        "blocks": Option("n_layer"),
        "heads": Option("n_head"),
        "hidden": lambda options: options.get("n_inner", 4 * options.get("n_embd")),
        "vocabulary": Option("vocab_size"),
        "positions": Option("n_positions", 1024),
        "norm": layer_norm(Option("layer_norm_epsilon", 1e-5)),
        "activation": activation("activation_function", "gelu_new"),
        "gated": False,
        "fused": True,
        "bias": True,
        "mlp_bias": True,
        "tied": Option("tie_word_embeddings", True),
    },
    _GPT2_NAMES,
    prefix="transformer.",
    ignored=("n_ctx", "reorder_and_upcast_attn", "summary_*"),
    supported={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)

register(
    _LLAMA,
    _LLAMA.like("mistral", "MistralForCausalLM", **_SLIDING),
    _LLAMA.like("ministral", "MinistralForCausalLM", **_SLIDING),
    _MINISTRAL3,
    _MINISTRAL3.like(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        **within_image_model(_MINISTRAL3, outer=True),
    ),
    _LLAMA.like(
        "cwm",
        "CwmForCausalLM",
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        window=Option("sliding_window", 8192),
        layer_types=lambda options: (
            options.get("layer_types", None)
            or [
                "sliding_attention" if i % 4 else "full_attention"
                for i in range(options.get("num_hidden_layers"))
            ]
        ),
        rope=Rope(1_000_000.0, default=_LLAMA3_ROPE | {"factor": 16.0}),
    ),
    _COHERE,
    _COHERE.like(
        "cohere2",
        "Cohere2ForCausalLM",
        **_SLIDING,
        full_every=Option("sliding_window_pattern", 4),
        rotates="sliding",
        rope=Rope(interleaved=True),
        supported={"use_qk_norm": (False,)},
    ),
    _PLAIN,
    _PLAIN.like(
        "jais2",
        "Jais2ForCausalLM",
        norm=layer_norm(_LAYER_NORM),
        bias=Option("attention_bias", True),
        mlp_bias=Option("mlp_bias", True),
    ),
    _PLAIN.like(
        "nemotron",
        "NemotronForCausalLM",
        norm=layer_norm(Option("norm_eps", 1e-5), offset=1.0),
        rope=Rope(partial=0.5),
        ignored=("hidden_dropout",),
    ),
    _PLAIN.like(
        "apertus",
        "ApertusForCausalLM",
        names=_APERTUS_NAMES,
        activation=lambda options: "identity" * bool(options.require("hidden_act", "xielu")),
        hidden_norm=lambda options: _xielu(),
        mlp_bias=False,
        qk_norm="head",
        rope=Rope(12_000_000.0, default=_LLAMA3_ROPE | {"factor": 8.0}),
        supported={"post_norm": (False,), "qk_norm": (True,)},
        others=re.compile(r"\.act_fn\.(beta|eps)$"),
    ),
    _PLAIN.like(
        "nanochat",
        "NanoChatForCausalLM",
        names=_PLAIN_NAMES | mlp("fc1", "fc2"),
        norm=rms_norm(scale=False),
        mlp_bias=False,
        qk_norm="head",
        embed_norm=rms_norm(scale=False),
        logit_soft_cap=Option("final_logit_softcapping", 15.0, nullable=True),
        rope=Rope(backwards=True),
    ),
    _PLAIN.like(
        "persimmon",
        "PersimmonForCausalLM",
        names=_fused_per_head(
            _PERSIMMON_NAMES | mlp("dense_h_to_4h", "dense_4h_to_h"),
            "model.layers.*.self_attn.query_key_value",
            "num_attention_heads",
        ),
        groups=None,
        norm=layer_norm(_LAYER_NORM),
        bias=True,
        mlp_bias=True,
        fused=True,
        qk_norm="head",
        rope=Rope(partial=0.5),
        ignored=("hidden_dropout",),
        supported={"qk_layernorm": (True,)},
    ),
    _LLAMA.like(
        "phi",
        "PhiForCausalLM",
        names=_DENSE_NAMES | norms(mixer="input_layernorm") | mlp("fc1", "fc2"),
        norm=layer_norm(_LAYER_NORM),
        activation=activation("hidden_act", "gelu_new"),
        gated=False,
        parallel=True,
        bias=True,
        mlp_bias=True,
        head_bias=True,
        rope=Rope(partial=0.5),
        supported={"qk_layernorm": (False,)},
    ),
    _LLAMA.like(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        names=_fused_per_head(
            _NEOX_NAMES, "gpt_neox.layers.*.attention.query_key_value", "num_attention_heads"
        ),
        prefix="gpt_neox.",
        groups=None,
        norm=layer_norm(_LAYER_NORM),
        activation=activation("hidden_act", "gelu"),
        gated=False,
        parallel=Option("use_parallel_residual", True),
        bias=Option("attention_bias", True),
        mlp_bias=True,
        fused=True,
        rope=Rope(Option("rotary_emb_base", 10_000.0), partial=Option("rotary_pct", 0.25)),
        ignored=("classifier_dropout", "hidden_dropout"),
    ),
    _GPT2,
    _GPT2.like(
        "gptj",
        "GPTJForCausalLM",
        names=_GPTJ_NAMES,
        positions=None,
        fused=False,
        parallel=True,
        bias=False,
        head_bias=True,
        tied=Option("tie_word_embeddings", False),
        rope=Rope(
            partial=lambda options: (
                options.get("rotary_dim", 64) / (options.get("n_embd") // options.get("n_head"))
            ),
            interleaved=True,
        ),
        ignored=("n_positions", *_GPT2.ignored),
        supported={"scale_attn_weights": (True,)},
    ),
    _GPT2.like(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        names=_BIGCODE_NAMES,
        groups=1,
        activation=activation("activation_function", "gelu_pytorch_tanh"),
        ignored=(
            *_GPT2.ignored,
            *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"),
            *("max_*sequence_length", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache"),
            *("attention_head_type", "validate_runner_input", "num_key_value_heads"),
        ),
        supported={**_GPT2.supported, "multi_query": (True,)},
    ),
    _LLAMA.like(
        "falcon",
        "FalconForCausalLM",
        names=_FALCON_NAMES,
        prefix="transformer.",
        groups=1,
        hidden=lambda options: options.get("ffn_hidden_size", 4 * options.get("hidden_size")),
        norm=layer_norm(Option("layer_norm_epsilon", 1e-5)),
        activation=activation("activation", "gelu"),
        gated=False,
        parallel=True,
        bias=Option("bias", False),
        mlp_bias=Option("bias", False),
        fused=True,
        tied=Option("tie_word_embeddings", True),
        ignored=(
            "hidden_dropout",
            "apply_residual_connection_post_layernorm",
            "num_ln_in_parallel_attn",
            "num_kv_heads",
        ),
        supported={
            "multi_query": (True,),
            "parallel_attn": (True,),
            "alibi": (False,),
            "new_decoder_architecture": (False,),
        },
    ),
    _LLAMA.like(
        "olmo",
        "OlmoForCausalLM",
        norm=lambda options: functools.partial(
            layers.layer_norm, scale=False, bias=False, eps=1e-5
        ),
        mlp_bias=False,
        clip=Option("clip_qkv", None),
    ),
    _LLAMA.like(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        names=LLAMA_NAMES | BEFORE | qk_norms("query_layernorm", "key_layernorm"),
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        mlp_bias=False,
        qk_norm="head",
        norm_rotated=True,
        ignored=(
            "eod_token_id",
            "im_*_id",
            "image_token_id",
            "text_*_id",
            "mask_init_id",
            "org_vocab_size",
            "sep_token_id",
            "attention_head_dim",
        ),
        supported={"use_qk_norm": (True,), "use_cla": (False,), "use_rotary_pos_emb": (True,)},
    ),
    _GRANITE,
    _GRANITE.like(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        names=_hyperclova_names,
        scale=Option("attention_multiplier", None),
        logit_scale=Option("logits_scaling", 1.0),
    ),
    _QWEN3,
    _QWEN3.like(
        "qwen2",
        "Qwen2ForCausalLM",
        head_dim=Option("head_dim", None),
        qk_norm=None,
        bias=True,
        output_bias=False,
    ),
    _QWEN3.like(
        "smollm3",
        "SmolLM3ForCausalLM",
        head_dim=Option("head_dim", None),
        qk_norm=None,
        tied=Option("tie_word_embeddings", True),
        rope=Rope(2_000_000.0),
        rotates=_smollm_rotates,
    ),
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    _GEMMA3.like(
        "gemma3", "Gemma3ForConditionalGeneration", **within_image_model(_GEMMA3, outer=True)
    ),
    _GEMMA2.like(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        names=LLAMA_NAMES | {path: name for path, name in AROUND.items() if path not in AFTER},
    ),
    _OLMO2,
    _OLMO2.like(
        "olmo3",
        "Olmo3ForCausalLM",
        **_SLIDING,
        full_every=4,
        rope=Rope(500_000.0, local_theta=500_000.0),
    ),
    _LLAMA.like(
        "exaone4",
        "Exaone4ForCausalLM",
        names=LLAMA_NAMES | AFTER,
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        qk_norm="head",
        **_SLIDING,
        full_every=_exaone_period,
        rotates=_exaone_rotates,
    ),
    _LLAMA.like(
        "helium",
        "HeliumForCausalLM",
        head_dim=Option("head_dim", 128),
        norm=rms_norm(Option("rms_norm_eps", 1e-8)),
        output_bias=False,
        rope=Rope(100_000.0, interleaved=True),
    ),
    _LLAMA.like(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        head_dim=Option("head_dim", 128),
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        bias=Option("use_bias", False),
        mlp_bias=Option("use_bias", False),
        tied=Option("tie_word_embeddings", True),
        rope=Rope(500_000.0, interleaved=True),
    ),
    _GLM,
    _GLM.like("glm4", "Glm4ForCausalLM", names=LLAMA_NAMES | BEFORE | _GLM4_NORMS),
    _LLAMA.like(
        "seed_oss",
        "SeedOssForCausalLM",
        head_dim=Option("head_dim", 128),
        bias=Option("attention_bias", True),
        output_bias=Option("attention_out_bias", False),
        ignored=("residual_dropout",),
    ),
    _LLAMA.like(
        "stablelm",
        "StableLmForCausalLM",
        names=_stablelm_names,
        norm=layer_norm(Option("layer_norm_eps", 1e-5)),
        bias=Option("use_qkv_bias", False),
        output_bias=False,
        parallel=Option("use_parallel_residual", False),
        rope=Rope(partial=0.25),
        ignored=("hidden_dropout",),
        supported={"qk_layernorm": (False,)},
    ),
    _LLAMA.like(
        "starcoder2",
        "Starcoder2ForCausalLM",
        names=LLAMA_NAMES | BEFORE | mlp("c_fc", "c_proj"),
        norm=layer_norm(Option("norm_epsilon", 1e-5)),
        activation=activation("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        bias=Option("use_bias", True),
        mlp_bias=Option("use_bias", True),
        window=Option("sliding_window", None),
        tied=Option("tie_word_embeddings", True),
        ignored=("residual_dropout", "embedding_dropout"),
    ),
    _LLAMA.like(
        "phi3",
        "Phi3ForCausalLM",
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        fused=True,
        **_SLIDING | {"window": Option("sliding_window", None)},
        rope=Rope(partial=1.0, original=4096),
        ignored=("full_attn_mod", "interpolate_factor"),
        supported={"lm_head_bias": (False,)},
    ),
)
