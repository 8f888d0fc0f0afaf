"""Recurrent networks for text: Mamba, Mamba-2, Falcon Mamba, RecurrentGemma, as rows."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fnet import layers, models
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.decoders import decoder, rms_norm
from fnet.interop.huggingface.family import FAMILIES, Family, activation, register
from fnet.interop.huggingface.names import gated, state_space, table
from fnet.interop.huggingface.options import Option, Options
from fnet.interop.huggingface.rotary import Rope
from fnet.layer import Layer

_NAMES = state_space("backbone.layers.*.mixer") | table("""
embedding            backbone.embeddings
blocks/*/mixer_norm  backbone.layers.*.norm
norm                 backbone.norm_f
head                 lm_head
""")

_MAMBA_NAMES = table("""
blocks/*/mixer/select   backbone.layers.*.mixer.x_proj
blocks/*/mixer/dt       backbone.layers.*.mixer.dt_proj
blocks/*/mixer/dt_bias  backbone.layers.*.mixer.dt_proj.bias
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
norm                                   model.final_norm
head                                   lm_head
""")


def _stack(
    options: Options,
    names: Names,
    dtype: DTypeLike,
    *,
    mixer: Callable[..., Layer],
    tied: bool,
    **mixer_options: Any,
) -> tuple[models.LanguageModel, tuple[Any, ...]]:
    del names
    width, blocks = options.get("hidden_size", 768), options.get("num_hidden_layers")
    inner, eps = _inner(options), options.get("layer_norm_epsilon", 1e-5)
    options.require("hidden_act", "silu", "swish")
    # Converted checkpoints of the authors repeat their own names of the sizes.
    for name, size in (("d_model", width), ("d_inner", inner), ("n_layer", blocks)):
        options.require(name, size)
    block = layers.Block(mixer(width, expand=inner / width, **mixer_options))
    wide = options.get("residual_in_fp32", True) and jnp.finfo(dtype).bits < 32
    model = models.language_model(
        vocabulary=options.get("vocab_size"),
        width=width,
        blocks=[block] * blocks,
        norm=functools.partial(layers.rms_norm, eps=eps),
        tied=tied,
        dtype=dtype,
        residual_dtype=jnp.float32 if wide else None,
    )
    return model, ("mixer",) * blocks


def _inner(options: Options) -> int:
    return int(options.get("expand", 2) * options.get("hidden_size", 768))


def _rank(options: Options) -> int:
    rank = options.get("time_step_rank", "auto")
    return math.ceil(options.get("hidden_size", 768) / 16) if rank == "auto" else int(rank)


def _head(options: Options) -> int:
    heads, head = options.get("num_heads", 128), options.get("head_dim", 64)
    if heads * head != (inner := _inner(options)):
        raise ValueError(
            f"{options.kind}: num_heads * head_dim must be expand * hidden_size = {inner}, got "
            f"{heads} * {head}"
        )
    return int(head)


def step_limits(options: Options) -> tuple[float, float] | None:
    """Limits of the time steps of Mamba-2, or None."""
    low, high = (
        float(v["__float__"] if isinstance(v, dict) else v)  # as transformers 5 writes infinity
        for v in options.get("time_step_limit", (0.0, math.inf))
    )
    # Time steps are positive by themselves.
    return None if low <= 0 and high == math.inf else (low, high)


def _recurrent_gemma(
    options: Options,
    names: Names,
    dtype: DTypeLike,
    *,
    block_types: Sequence[str],
    window: int,
    recurrent_width: int | None,
    conv: int,
    **arguments: Any,
) -> tuple[models.LanguageModel, tuple[Any, ...]]:
    """Stack recurrent blocks and blocks of sliding attention in a repeated pattern (Griffin)."""
    if not block_types or set(block_types) - {"recurrent", "attention"}:
        raise ValueError(
            f"{options.kind}: block_types must name attention or recurrent, got {block_types}"
        )
    if arguments["activation"] != "gelu":
        raise ValueError(
            f"{options.kind}: hidden_activation must be gelu_pytorch_tanh, got "
            f"{arguments['activation']}, which the recurrent blocks do not support"
        )
    width, heads, blocks = (arguments[name] for name in ("width", "heads", "blocks"))
    kinds = [block_types[i % len(block_types)] for i in range(blocks)]
    expand = (recurrent_width or width) / width
    recurrent = layers.rg_lru(width, expand=expand, heads=heads, conv=conv, scale_first=False)
    recurs = [kind == "recurrent" for kind in kinds]
    return decoder(
        options, names, dtype, window=window, recurrent=recurrent, recurs=recurs, **arguments
    )


def _recurrent_gemma_names(options: Options) -> Names:
    heads = options.get("num_attention_heads")
    names = _RECURRENT_GEMMA_NAMES | gated("", "mlp_block")
    for path in ("blocks/*/mixer/input_gate/bias", "blocks/*/mixer/recurrence_gate/bias"):
        names[path] = (str(names[path]), "", heads)
    return names


def _embed_scale(options: Options) -> float:
    # transformers rounds the factor to bfloat16.
    return float(np.asarray(math.sqrt(options.get("hidden_size"))).astype(jnp.bfloat16))


_MAMBA = Family(
    "mamba",
    ("MambaForCausalLM",),
    _stack,
    {
        "mixer": lambda options: layers.mamba,
        "state": Option("state_size", 16),
        "conv": Option("conv_kernel", 4),
        "dt_rank": _rank,
        "bias": Option("use_bias", False),
        "conv_bias": Option("use_conv_bias", True),
        "tied": Option("tie_word_embeddings", True),
    },
    _NAMES | _MAMBA_NAMES,
    prefix="backbone.",
    ignored=(
        *("rescale_prenorm_residual", "layer_types", "intermediate_size", "time_step_[fims]*"),
        *("fused_add_norm", "pad_vocab_size_multiple", "ssm_cfg", "use_*mambapy"),
        "use_associative_scan",
    ),
    supported={"rms_norm": (True,)},
)
_MAMBA2_ARGUMENTS = {
    **{name: source for name, source in _MAMBA.arguments.items() if name != "dt_rank"},
    "mixer": lambda options: layers.mamba2,
    "head": _head,
    "state": Option("state_size", 128),
    "groups": Option("n_groups", 8),
    "norm_groups": Option("n_groups", 8),
    "norm_eps": Option("layer_norm_epsilon", 1e-5),
    "step_limits": step_limits,
    "tied": Option("tie_word_embeddings", False),
}

register(
    _MAMBA,
    _MAMBA.like(
        "falcon_mamba", "FalconMambaForCausalLM", select_norm_eps=Option("mixer_rms_eps", 1e-6)
    ),
    _MAMBA.like(
        "mamba2",
        "Mamba2ForCausalLM",
        arguments=_MAMBA2_ARGUMENTS,
        names=_NAMES,
        # transformers ignores norm_before_gate: its norm is an RMS norm of the gated output.
        ignored=(*_MAMBA.ignored, "chunk_size", "time_step_rank", "norm_before_gate"),
    ),
    FAMILIES["llama"].like(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        network=_recurrent_gemma,
        names=_recurrent_gemma_names,
        block_types=Option("block_types", ("recurrent", "recurrent", "attention")),
        window=Option("attention_window_size", 2048),
        recurrent_width=Option("lru_width", None),
        conv=Option("conv1d_width", 4),
        hidden=lambda options: options.get("intermediate_size") // 2,  # of gate and input together
        activation=activation("hidden_activation", "gelu_pytorch_tanh"),
        norm=rms_norm(offset=1.0),
        output_bias=True,
        mlp_bias=True,
        embed_scale=_embed_scale,
        logit_soft_cap=Option("logits_soft_cap", 30.0),
        tied=Option("tie_word_embeddings", True),
        rope=Rope(partial=0.5),
        ignored=("w_init_variance_scale", "final_w_init_variance_scale", "_block_types"),
        supported={"embeddings_scale_by_sqrt_dim": (True,)},
    ),
)
