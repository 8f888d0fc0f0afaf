"""Transformers for text: Llama, Mistral, Qwen, Gemma, GPT-2, OLMo 2, Phi-3, SmolLM, as rows."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet import layers, models
from fnet.interop.huggingface.checkpoint import Names, Tensor
from fnet.interop.huggingface.family import ACTIVATIONS, Family, register, table
from fnet.interop.huggingface.options import Option, Options, Source
from fnet.interop.huggingface.rotary import Rotary, rope_parameters, rotary_embedding
from fnet.layer import Layer, Params, State, stateless

Norm = Callable[[int], Layer]
"""A norm as a function of the width."""

LLAMA_NAMES = table("""
embedding                       model.embed_tokens
blocks/*/mixer/query            model.layers.*.self_attn.q_proj
blocks/*/mixer/key              model.layers.*.self_attn.k_proj
blocks/*/mixer/value            model.layers.*.self_attn.v_proj
blocks/*/mixer/query_key_value  model.layers.*.self_attn.qkv_proj
blocks/*/mixer/query_norm       model.layers.*.self_attn.q_norm
blocks/*/mixer/key_norm         model.layers.*.self_attn.k_norm
blocks/*/mixer/output           model.layers.*.self_attn.o_proj
blocks/*/feed_forward/gate      model.layers.*.mlp.gate_proj
blocks/*/feed_forward/up        model.layers.*.mlp.up_proj
blocks/*/feed_forward/expand    model.layers.*.mlp.gate_up_proj
blocks/*/feed_forward/contract  model.layers.*.mlp.down_proj
norm                            model.norm
head                            lm_head
""")
"""Names of Llama, fused or not, but for the norms of blocks."""

BEFORE = table("""
blocks/*/mixer_norm         model.layers.*.input_layernorm
blocks/*/feed_forward_norm  model.layers.*.post_attention_layernorm
""")
"""Norms before mixer and feed-forward layer."""

AFTER = table("""
blocks/*/mixer_post_norm         model.layers.*.post_attention_layernorm
blocks/*/feed_forward_post_norm  model.layers.*.post_feedforward_layernorm
""")
"""Norms after mixer and feed-forward layer."""

AROUND = AFTER | table("""
blocks/*/mixer_norm         model.layers.*.input_layernorm
blocks/*/feed_forward_norm  model.layers.*.pre_feedforward_layernorm
""")
"""Norms before and after both."""

_GPT2_NAMES = table("""
embedding                       transformer.wte
pos_embedding                   transformer.wpe.weight
blocks/*/mixer_norm             transformer.h.*.ln_1
blocks/*/mixer/query_key_value  transformer.h.*.attn.c_attn  ab
blocks/*/mixer/output           transformer.h.*.attn.c_proj  ab
blocks/*/feed_forward_norm      transformer.h.*.ln_2
blocks/*/feed_forward/expand    transformer.h.*.mlp.c_fc     ab
blocks/*/feed_forward/contract  transformer.h.*.mlp.c_proj   ab
norm                            transformer.ln_f
head                            lm_head
""")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder(Family):
    """A transformer decoder that differs from Llama in its fields.

    A new family is a row with another ``model_type``, which `register` adds. Which norms a block
    has follows from the names: ``mixer_norm``, ``mixer_post_norm``, or both.

    Attributes:
      width, blocks, heads, hidden, vocabulary: Sizes.
      groups: Key and value heads; None: as many as heads.
      head_dim: Features of a head; None: ``width / heads``.
      positions: Number of learned positions, or None.
      norm: ``rms`` or ``layer``.
      eps: Added to the mean square or the variance.
      norm_offset: Added to the scales of RMS norms.
      norm_bias: Whether layer norms have biases.
      activation: Name of the activation in transformers.
      gated: Whether feed-forward layers multiply by a gate.
      fused: Whether query, key and value are one array, and gate and up another.
      bias, output_bias, mlp_bias: Whether dense layers have biases: of query, key and value; of the
        output of attention, None: as ``bias``; of feed-forward layers.
      qk_norm: Norm of queries and keys per ``head``, or over all ``heads``; None: no norm.
      scale: Factor of attention's scores; None: ``1 / sqrt(head_dim)``.
      embed_scale, residual_scale, logit_scale: Factors of embeddings, of each branch, and of
        logits; None: 1.
      soft_cap, logit_soft_cap: Soft caps of scores and logits, or None.
      tied: Whether the head is the embedding.
      window: Sliding window; None: no block has one.
      full_every, full_first: Blocks with full attention: each n-th, and the first ones.
        ``layer_types`` in the config decides over them.
      rotary: Whether attention rotates queries and keys.
      rotates: Blocks that do: ``sliding`` for those with a window, one bool per block, or None for
        all.
      theta, partial, original: Defaults of the base of rotary frequencies, of the rotated share of
        a head, and of the original context.
      local_theta: Base of blocks with a window; None: the same frequencies as others.
    """

    names: Source = dataclasses.field(default_factory=lambda: {**LLAMA_NAMES, **BEFORE})
    width: Source = Option("hidden_size")
    blocks: Source = Option("num_hidden_layers")
    heads: Source = Option("num_attention_heads")
    groups: Source = Option("num_key_value_heads", None)
    head_dim: Source = Option("head_dim", None)
    hidden: Source = Option("intermediate_size")
    vocabulary: Source = Option("vocab_size")
    positions: Source = None
    norm: Source = "rms"
    eps: Source = Option("rms_norm_eps", 1e-6)
    norm_offset: float = 0.0
    norm_bias: Source = True
    activation: Source = Option("hidden_act", "silu")
    gated: bool = True
    fused: bool = False
    bias: Source = Option("attention_bias", False)
    output_bias: Source = None
    mlp_bias: Source = Option("mlp_bias", False)
    qk_norm: Source = None
    scale: Source = None
    embed_scale: Source = None
    residual_scale: Source = None
    logit_scale: Source = None
    soft_cap: Source = None
    logit_soft_cap: Source = None
    tied: Source = Option("tie_word_embeddings", False)
    window: Source = None
    full_every: Source = None
    full_first: Source = 0
    rotary: bool = True
    rotates: Source = None
    theta: float = 10_000.0
    partial: float = 1.0
    original: int | None = None
    local_theta: Source = None

    def network(
        self, options: Options, dtype: DTypeLike, *, interpolate: bool
    ) -> models.LanguageModel:
        """Build the network."""
        del interpolate
        width, kinds = options.value(self.width), self.kinds(options)
        blocks = {kind: self.block(options, kind) for kind in dict.fromkeys(kinds)}
        norm = self.make_norm(options)
        return models.language_model(
            vocabulary=options.value(self.vocabulary),
            width=width,
            blocks=[blocks[kind] for kind in kinds],
            norm=norm,
            pre_norm="blocks/*/mixer_norm" in options.value(self.names),
            post_norm=self._post_norm(options, norm),
            positions=options.value(self.positions),
            embed_scale=options.value(self.embed_scale),
            logit_scale=options.value(self.logit_scale),
            tied=options.value(self.tied),
            soft_cap=options.value(self.logit_soft_cap),
            dtype=dtype,
            residual_dtype=self.residual_dtype(options, dtype),
        )

    def residual_dtype(self, options: Options, dtype: DTypeLike) -> DTypeLike | None:
        """Dtype of the sum of the branches, or None for that of activations."""
        del options, dtype
        return None

    def make_norm(self, options: Options) -> Norm:
        """Return the norm as a function of the width."""
        eps = options.value(self.eps)
        if self.norm == "rms":
            return functools.partial(layers.rms_norm, eps=eps, offset=self.norm_offset)
        return functools.partial(layers.layer_norm, eps=eps, bias=options.value(self.norm_bias))

    def _post_norm(self, options: Options, norm: Norm) -> Norm | None:
        """Return what each branch passes before it is added: a norm, a constant scale, or None."""
        factor = options.value(self.residual_scale)
        after = "blocks/*/mixer_post_norm" in options.value(self.names)
        if factor in (None, 1.0):
            return norm if after else None
        return lambda width: _scaled(norm(width) if after else stateless(lambda x: x), factor)

    def kinds(self, options: Options) -> tuple[Any, ...]:
        """Return (window, whether it rotates) of each block."""
        n = options.value(self.blocks)
        windows = self._windows(options, n)
        rotates = options.value(self.rotates)
        if rotates is None:
            rotates = [True] * n
        elif rotates == "sliding":
            rotates = [window is not None for window in windows]
        return tuple(zip(windows, map(bool, rotates), strict=True))

    def _windows(self, options: Options, n: int) -> list[int | None]:
        if self.window is None:
            return [None] * n
        window, every = options.value(self.window), options.value(self.full_every)
        first = options.value(self.full_first)
        default = [
            "sliding_attention"
            if window and i >= first and not (every and (i + 1) % every == 0)
            else "full_attention"
            for i in range(n)
        ]
        kinds = options.get("layer_types", default)
        if len(kinds) != n or set(kinds) - {"sliding_attention", "full_attention"}:
            raise ValueError(
                f"{options.kind}: layer_types must name sliding_attention or full_attention for "
                f"each of the {n} layers, got {kinds}"
            )
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def block(self, options: Options, kind: Any) -> layers.Block:
        """Build a block of a kind."""
        return layers.Block(self.mixer(options, kind), self.feed_forward(options))

    def mixer(self, options: Options, kind: Any) -> Layer:
        """Build the attention of a block of a kind."""
        window, rotates = kind
        width, heads = options.value(self.width), options.value(self.heads)
        head_dim = options.value(self.head_dim) or width // heads
        rotary = self._rotary(options, head_dim, window)
        qk_norm = options.value(self.qk_norm)
        return layers.attention(
            width,
            heads,
            groups=options.value(self.groups),
            head_dim=head_dim,
            causal=True,
            window=window,
            rotary=rotary.frequencies if rotary is not None and rotates else None,
            rotary_scale=1.0 if rotary is None else rotary.scale,
            bias=options.value(self.bias),
            output_bias=options.value(self.output_bias),
            fused=self.fused,
            qk_norm=self.make_norm(options) if qk_norm else None,
            qk_norm_over=qk_norm or "head",
            scale=options.value(self.scale),
            soft_cap=options.value(self.soft_cap),
        )

    def _rotary(self, options: Options, head_dim: int, window: int | None) -> Rotary | None:
        if not self.rotary:
            return None
        parameters = rope_parameters(options, self.theta, self.partial, self.original)
        local_theta = options.value(self.local_theta)
        if local_theta is not None and window is not None:
            local = options.get("rope_parameters", {}).get("sliding_attention") or {}
            parameters = {"rope_theta": local_theta} | local
        positions = options.get("max_position_embeddings", 0)
        rotary = rotary_embedding(options.kind, head_dim, parameters, positions)
        # Frequencies depend on the length, but a window's cache does not show it.
        frequencies = rotary.frequencies
        if window and callable(frequencies) and frequencies(window) != frequencies(2**31):
            raise ValueError(
                f"{options.kind}: longrope with sliding_window {window}, within the original "
                "context, is not supported"
            )
        return rotary

    def feed_forward(self, options: Options) -> Layer:
        """Build the feed-forward layer of a block."""
        return layers.feed_forward(
            options.value(self.width),
            options.value(self.hidden),
            activation=activation(options, self.activation),
            gated=self.gated,
            bias=options.value(self.mlp_bias),
            fused=self.fused,
        )

    def tensors(self, shapes: Params, names: Names) -> tuple[Tensor, ...]:
        """Return the tensors of the network. A tied head may be in the file, too."""
        tensors = super().tensors(shapes, names)
        if "head" in shapes:
            return tensors
        table = next(t for t in tensors if t.path == "embedding/embedding")
        return (*tensors, table._replace(name=f"{names['head']}.weight", optional=True))


def activation(options: Options, source: Source) -> str:
    """Read the name of an activation in transformers or timm, and return fnet's."""
    name = options.value(source)
    option = source.name if isinstance(source, Option) else "activation"
    return ACTIVATIONS[options.check(option, name, tuple(ACTIVATIONS))]


def _scaled(layer: Layer, factor: float) -> Layer:
    """Multiply the output of a layer by a constant."""

    def apply(params: Params, state: State, x: Array, **given: Any) -> tuple[Array, State]:
        y, state = layer.apply(params, state, x, **given)
        return y * jnp.asarray(factor, y.dtype), state

    return Layer(layer.init, apply)


def _sqrt_width(options: Options) -> float:
    return math.sqrt(options.get("hidden_size"))


def _gemma_activation(options: Options) -> str:
    # Configs of Gemma 1 say "gelu" and mean its approximation.
    legacy = options.get("hidden_act", "gelu_pytorch_tanh")
    name = options.get("hidden_activation", legacy)
    options.check("hidden_activation", name, ("gelu_pytorch_tanh", "gelu"))
    return "gelu_pytorch_tanh"


def _gemma3_period(options: Options) -> int:
    return int(options.get("_sliding_window_pattern", options.get("sliding_window_pattern", 6)))


def _optional_window(options: Options) -> int | None:
    window = options.nullable("sliding_window", 4096)
    return window if options.get("use_sliding_window", False) else None


def _smollm_rotates(options: Options) -> Sequence[int]:
    interval = options.get("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(options.get("num_hidden_layers"))]
    rotates: Sequence[int] = options.get("no_rope_layers", default)
    return rotates


_LLAMA = Decoder("llama", ("LlamaForCausalLM",))

_GEMMA = _LLAMA.like(
    "gemma",
    "GemmaForCausalLM",
    head_dim=Option("head_dim", 256),
    norm_offset=1.0,
    activation=_gemma_activation,
    embed_scale=_sqrt_width,
    tied=Option("tie_word_embeddings", True),
    supported={"use_bidirectional_attention": (False,)},
)
_GEMMA2 = _GEMMA.like(
    "gemma2",
    "Gemma2ForCausalLM",
    names={**LLAMA_NAMES, **AROUND},
    scale=lambda options: options.get("query_pre_attn_scalar", 256) ** -0.5,
    soft_cap=Option("attn_logit_softcapping", 50.0, nullable=True),
    logit_soft_cap=Option("final_logit_softcapping", 30.0, nullable=True),
    window=Option("sliding_window", 4096, nullable=True),
    full_every=2,
)
_QWEN3 = _LLAMA.like(
    "qwen3",
    "Qwen3ForCausalLM",
    head_dim=Option("head_dim", 128),
    qk_norm="head",
    window=_optional_window,
    full_first=Option("max_window_layers", 28),
)

register(
    _LLAMA,
    _LLAMA.like(
        "mistral",
        "MistralForCausalLM",
        window=Option("sliding_window", 4096, nullable=True),
    ),
    _QWEN3.like(
        "qwen2",
        "Qwen2ForCausalLM",
        head_dim=Option("head_dim", None),
        qk_norm=None,
        bias=True,
        output_bias=False,
    ),
    _QWEN3,
    _QWEN3.like(
        "smollm3",
        "SmolLM3ForCausalLM",
        head_dim=Option("head_dim", None),
        qk_norm=None,
        tied=Option("tie_word_embeddings", True),
        rotates=_smollm_rotates,
        theta=2_000_000.0,
    ),
    _GEMMA,
    _GEMMA2,
    _GEMMA2.like(
        "gemma3_text",
        "Gemma3ForCausalLM",
        qk_norm="head",
        soft_cap=Option("attn_logit_softcapping", None),
        logit_soft_cap=Option("final_logit_softcapping", None),
        full_every=_gemma3_period,
        theta=1_000_000.0,
        local_theta=Option("rope_local_base_freq", 10_000.0),
    ),
    _LLAMA.like(
        "olmo2",
        "Olmo2ForCausalLM",
        names={**LLAMA_NAMES, **AFTER},
        eps=Option("rms_norm_eps", 1e-5),
        qk_norm="heads",
    ),
    _LLAMA.like(
        "phi3",
        "Phi3ForCausalLM",
        eps=Option("rms_norm_eps", 1e-5),
        fused=True,
        window=Option("sliding_window", None),
        original=4096,
        ignored=("full_attn_mod", "interpolate_factor"),
        supported={"lm_head_bias": (False,)},
    ),
    Decoder(
        "gpt2",
        ("GPT2LMHeadModel",),
        prefix="transformer.",
        names=_GPT2_NAMES,
        width=Option("n_embd"),
        blocks=Option("n_layer"),
        heads=Option("n_head"),
        groups=None,
        head_dim=None,
        hidden=lambda options: options.get("n_inner", 4 * options.get("n_embd")),
        positions=Option("n_positions", 1024),
        norm="layer",
        eps=Option("layer_norm_epsilon", 1e-5),
        activation=Option("activation_function", "gelu_new"),
        gated=False,
        fused=True,
        bias=True,
        mlp_bias=True,
        tied=Option("tie_word_embeddings", True),
        rotary=False,
        ignored=("n_ctx", "reorder_and_upcast_attn", "summary_*"),
        supported={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
)
