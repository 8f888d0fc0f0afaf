"""Recurrent networks for text: Mamba, Mamba-2, Falcon Mamba, RecurrentGemma, as rows."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fnet import layers
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.decoders import Decoder, activation
from fnet.interop.huggingface.family import register, table
from fnet.interop.huggingface.options import Option, Options, Source
from fnet.layer import Layer

_NAMES = table("""
embedding            backbone.embeddings
blocks/*/mixer_norm  backbone.layers.*.norm
blocks/*/mixer/in    backbone.layers.*.mixer.in_proj
blocks/*/mixer/conv  backbone.layers.*.mixer.conv1d   b1a
blocks/*/mixer/A_log backbone.layers.*.mixer.A_log
blocks/*/mixer/D     backbone.layers.*.mixer.D
blocks/*/mixer/out   backbone.layers.*.mixer.out_proj
norm                 backbone.norm_f
head                 lm_head
""")

_MAMBA_NAMES = table("""
blocks/*/mixer/select   backbone.layers.*.mixer.x_proj
blocks/*/mixer/dt       backbone.layers.*.mixer.dt_proj
blocks/*/mixer/dt_bias  backbone.layers.*.mixer.dt_proj.bias
""")

_MAMBA2_NAMES = table("""
blocks/*/mixer/dt_bias  backbone.layers.*.mixer.dt_bias
blocks/*/mixer/norm     backbone.layers.*.mixer.norm
""")

_RECURRENT_GEMMA_NAMES = table("""
embedding                              model.embed_tokens
blocks/*/mixer_norm                    model.layers.*.temporal_pre_norm
blocks/*/mixer/query                   model.layers.*.temporal_block.q_proj
blocks/*/mixer/key                     model.layers.*.temporal_block.k_proj
blocks/*/mixer/value                   model.layers.*.temporal_block.v_proj
blocks/*/mixer/output                  model.layers.*.temporal_block.o_proj
blocks/*/mixer/recurrent               model.layers.*.temporal_block.linear_x
blocks/*/mixer/gate                    model.layers.*.temporal_block.linear_y
blocks/*/mixer/out                     model.layers.*.temporal_block.linear_out
blocks/*/mixer/conv                    model.layers.*.temporal_block.conv_1d   b1a
blocks/*/mixer/L                       model.layers.*.temporal_block.rg_lru.recurrent_param
blocks/*/mixer/input_gate/kernel       model.layers.*.temporal_block.rg_lru.input_gate_weight
blocks/*/mixer/input_gate/bias         model.layers.*.temporal_block.rg_lru.input_gate_bias
blocks/*/mixer/recurrence_gate/kernel  model.layers.*.temporal_block.rg_lru.recurrent_gate_weight
blocks/*/mixer/recurrence_gate/bias    model.layers.*.temporal_block.rg_lru.recurrent_gate_bias
blocks/*/feed_forward_norm             model.layers.*.channel_pre_norm
blocks/*/feed_forward/gate             model.layers.*.mlp_block.gate_proj
blocks/*/feed_forward/up               model.layers.*.mlp_block.up_proj
blocks/*/feed_forward/contract         model.layers.*.mlp_block.down_proj
norm                                   model.final_norm
head                                   lm_head
""")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mamba(Decoder):
    """A stack of state-space mixers.

    Attributes:
      select_norm_eps: Epsilon of the norm of what time steps, B and C are computed from, or None.
    """

    width: Source = Option("hidden_size", 768)
    eps: Source = Option("layer_norm_epsilon", 1e-5)
    bias: Source = Option("use_bias", False)
    prefix: str | None = "backbone."
    ignored: tuple[str, ...] = (
        *("rescale_prenorm_residual", "layer_types", "intermediate_size", "time_step_[fims]*"),
        *("fused_add_norm", "pad_vocab_size_multiple", "ssm_cfg", "use_*mambapy"),
        "use_associative_scan",
    )
    select_norm_eps: Source = None

    def kinds(self, options: Options) -> tuple[Any, ...]:
        """Return one kind of all blocks."""
        return ("mamba",) * int(options.value(self.blocks))

    def block(self, options: Options, kind: Any) -> layers.Block:
        """Build a block without a feed-forward layer."""
        return layers.Block(self.mixer(options, kind))

    def residual_dtype(self, options: Options, dtype: DTypeLike) -> DTypeLike | None:
        """Return float32 for narrower activations, unless the config says otherwise."""
        wide = options.get("residual_in_fp32", True) and jnp.finfo(dtype).bits < 32
        return jnp.float32 if wide else None

    def mixer(self, options: Options, kind: Any) -> Layer:
        """Build a Mamba mixer."""
        del kind
        width, inner = self._sizes(options)
        rank = options.get("time_step_rank", "auto")
        return layers.mamba(
            width,
            expand=inner / width,
            state=options.get("state_size", 16),
            conv=options.get("conv_kernel", 4),
            dt_rank=math.ceil(width / 16) if rank == "auto" else int(rank),
            bias=options.value(self.bias),
            conv_bias=options.get("use_conv_bias", True),
            select_norm_eps=options.value(self.select_norm_eps),
        )

    def _sizes(self, options: Options) -> tuple[int, int]:
        """Width of the model and of its mixers."""
        width = options.value(self.width)
        inner = int(options.get("expand", 2) * width)
        options.require("hidden_act", "silu", "swish")
        # Converted checkpoints of the authors repeat their own names of the sizes.
        options.require("d_model", width)
        options.require("d_inner", inner)
        options.require("n_layer", options.value(self.blocks))
        options.require("rms_norm", True)
        return width, inner


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mamba2(_Mamba):
    """A stack of Mamba-2 mixers. Their norm is over each group of heads."""

    def mixer(self, options: Options, kind: Any) -> Layer:
        """Build a Mamba-2 mixer."""
        del kind
        width, inner = self._sizes(options)
        heads, head = options.get("num_heads", 128), options.get("head_dim", 64)
        if heads * head != inner:
            raise ValueError(
                f"{options.kind}: num_heads * head_dim must be expand * hidden_size = {inner}, got "
                f"{heads} * {head}"
            )
        groups = options.get("n_groups", 8)
        low, high = map(_number, options.get("time_step_limit", (0.0, math.inf)))
        return layers.mamba2(
            width,
            expand=inner / width,
            head=head,
            state=options.get("state_size", 128),
            groups=groups,
            conv=options.get("conv_kernel", 4),
            bias=options.value(self.bias),
            conv_bias=options.get("use_conv_bias", True),
            norm_groups=groups,
            norm_eps=options.value(self.eps),
            # Time steps are positive by themselves.
            step_limits=None if low <= 0 and high == math.inf else (low, high),
        )


def _number(value: float | dict[str, str]) -> float:
    """Read a number as JSON has it, or infinity as transformers 5 writes it."""
    return float(value["__float__"] if isinstance(value, dict) else value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RecurrentGemma(Decoder):
    """RecurrentGemma (Griffin): recurrent blocks and sliding attention in a repeated pattern."""

    def kinds(self, options: Options) -> tuple[Any, ...]:
        """Return the mixer of each block."""
        pattern = options.get("block_types", ("recurrent", "recurrent", "attention"))
        if not pattern or set(pattern) - {"recurrent", "attention"}:
            raise ValueError(
                f"{options.kind}: block_types must name attention or recurrent, got {pattern}"
            )
        blocks = options.value(self.blocks)
        return tuple(pattern[i % len(pattern)] for i in range(blocks))

    def mixer(self, options: Options, kind: Any) -> Layer:
        """Build attention or a recurrence."""
        if kind == "attention":
            return super().mixer(options, (options.value(self.window), True))
        width = options.value(self.width)
        return layers.rg_lru(
            width,
            expand=options.get("lru_width", width) / width,
            heads=options.value(self.heads),
            conv=options.get("conv1d_width", 4),
            scale_first=False,
        )

    def feed_forward(self, options: Options) -> Layer:
        """Build the feed-forward layer."""
        if (act := activation(options, self.activation)) != "gelu":
            raise ValueError(
                f"{options.kind}: hidden_activation must be gelu_pytorch_tanh, got {act}, which "
                "the recurrent blocks do not support"
            )
        return super().feed_forward(options)


def _recurrent_gemma_names(options: Options) -> Names:
    heads, names = options.get("num_attention_heads"), dict(_RECURRENT_GEMMA_NAMES)
    for path in ("blocks/*/mixer/input_gate/bias", "blocks/*/mixer/recurrence_gate/bias"):
        names[path] = (str(names[path]), "", heads)
    return names


def _embed_scale(options: Options) -> float:
    # transformers rounds the factor to bfloat16.
    return float(np.asarray(math.sqrt(options.get("hidden_size"))).astype(jnp.bfloat16))


_MAMBA = _Mamba(
    "mamba",
    ("MambaForCausalLM",),
    names={**_NAMES, **_MAMBA_NAMES},
    tied=Option("tie_word_embeddings", True),
)

register(
    _MAMBA,
    _MAMBA.like(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        select_norm_eps=Option("mixer_rms_eps", 1e-6),
    ),
    _Mamba2(
        "mamba2",
        ("Mamba2ForCausalLM",),
        names={**_NAMES, **_MAMBA2_NAMES},
        # transformers ignores norm_before_gate: its norm is an RMS norm of the gated output.
        ignored=(*_MAMBA.ignored, "chunk_size", "time_step_rank", "norm_before_gate"),
    ),
    _RecurrentGemma(
        "recurrent_gemma",
        ("RecurrentGemmaForCausalLM",),
        names=_recurrent_gemma_names,
        activation=Option("hidden_activation", "gelu_pytorch_tanh"),
        hidden=lambda options: options.get("intermediate_size") // 2,  # of gate and input together
        embed_scale=_embed_scale,
        norm_offset=1.0,
        output_bias=True,
        mlp_bias=True,
        partial=0.5,
        window=Option("attention_window_size", 2048),
        logit_soft_cap=Option("logits_soft_cap", 30.0),
        tied=Option("tie_word_embeddings", True),
        ignored=("w_init_variance_scale", "final_w_init_variance_scale", "_block_types"),
        supported={"embeddings_scale_by_sqrt_dim": (True,)},
    ),
)
