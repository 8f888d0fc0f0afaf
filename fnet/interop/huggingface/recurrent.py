"""Recurrent networks for text: Mamba, Mamba-2, Falcon Mamba, RecurrentGemma."""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fnet import layers, models
from fnet.interop.huggingface.checkpoint import PretrainedModel, Tensor
from fnet.interop.huggingface.decoders import (
    activation,
    as_pretrained,
    dense_tensors,
    head_tensors,
    norm_tensors,
    rope_parameters,
    rotary_embedding,
)
from fnet.interop.huggingface.options import Options
from fnet.layer import Layer


def mamba(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """Mamba, and Falcon Mamba, which normalizes what the time steps, B and C are computed from."""
    falcon = options.kind == "falcon_mamba"
    width, inner = _sizes(options)
    rank = options.get("time_step_rank", "auto")
    bias, conv_bias = options.get("use_bias", False), options.get("use_conv_bias", True)
    mixer = layers.mamba(
        width,
        expand=inner / width,
        state=options.get("state_size", 16),
        conv=options.get("conv_kernel", 4),
        dt_rank=math.ceil(width / 16) if rank == "auto" else int(rank),
        bias=bias,
        conv_bias=conv_bias,
        select_norm_eps=options.get("mixer_rms_eps", 1e-6) if falcon else None,
    )
    options.ignore("use_falcon_mambapy", "use_mambapy", "use_associative_scan")

    def mixer_tensors(name: str, path: str) -> list[Tensor]:
        return [
            *_common_tensors(name, path, bias=bias, conv_bias=conv_bias),
            *dense_tensors(f"{name}.x_proj", f"{path}/select", bias=False),
            *dense_tensors(f"{name}.dt_proj", f"{path}/dt", bias=False),
            Tensor(f"{name}.dt_proj.bias", f"{path}/dt_bias"),
        ]

    return _language_model(options, dtype, mixer, mixer_tensors, tied=True)


def mamba2(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """Mamba-2. Its norm is over each group of heads."""
    width, inner = _sizes(options)
    heads, head = options.get("num_heads", 128), options.get("head_dim", 64)
    if heads * head != inner:
        raise ValueError(
            f"{options.kind}: num_heads * head_dim must be expand * hidden_size = {inner}, got "
            f"{heads} * {head}"
        )
    groups = options.get("n_groups", 8)
    bias, conv_bias = options.get("use_bias", False), options.get("use_conv_bias", True)
    low, high = (float(limit) for limit in options.get("time_step_limit", (0.0, math.inf)))
    # Time steps are positive by themselves.
    limits = None if low <= 0 and high == math.inf else (low, high)
    mixer = layers.mamba2(
        width,
        expand=inner / width,
        head=head,
        state=options.get("state_size", 128),
        groups=groups,
        conv=options.get("conv_kernel", 4),
        bias=bias,
        conv_bias=conv_bias,
        norm_groups=groups,
        norm_eps=options.get("layer_norm_epsilon", 1e-5),
        step_limits=limits,
    )
    # transformers ignores the last one: its norm is an RMS norm of the gated output.
    options.ignore("chunk_size", "time_step_rank", "norm_before_gate")

    def mixer_tensors(name: str, path: str) -> list[Tensor]:
        return [
            *_common_tensors(name, path, bias=bias, conv_bias=conv_bias),
            Tensor(f"{name}.dt_bias", f"{path}/dt_bias"),
            *norm_tensors(f"{name}.norm", f"{path}/norm"),
        ]

    return _language_model(options, dtype, mixer, mixer_tensors, tied=False)


def recurrent_gemma(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """RecurrentGemma (Griffin): recurrent blocks and sliding attention in a repeated pattern."""
    width, blocks = options.get("hidden_size"), options.get("num_hidden_layers")
    heads = options.get("num_attention_heads")
    inner = options.get("lru_width", width)
    head_dim = options.get("head_dim", width // heads)
    bias = options.get("attention_bias", False)
    tied = options.get("tie_word_embeddings", True)
    options.require("embeddings_scale_by_sqrt_dim", True)
    options.ignore("w_init_variance_scale", "final_w_init_variance_scale", "_block_types")
    act = activation(options, "hidden_activation", "gelu_pytorch_tanh")
    if act != "gelu":
        raise ValueError(
            f"{options.kind}: hidden_activation must be gelu_pytorch_tanh, got {act}, which the "
            "recurrent blocks do not support"
        )

    rotary = rotary_embedding(options.kind, head_dim, rope_parameters(options, partial=0.5), 0)
    attention = layers.attention(
        width,
        heads,
        groups=options.get("num_key_value_heads", heads),
        head_dim=head_dim,
        causal=True,
        window=options.get("attention_window_size", 2048),
        rotary=rotary.frequencies,
        rotary_scale=rotary.scale,
        bias=bias,
        output_bias=True,
        fused=False,
    )
    recurrent = layers.rg_lru(
        width,
        expand=inner / width,
        heads=heads,
        conv=options.get("conv1d_width", 4),
        scale_first=False,
    )
    feed_forward = layers.feed_forward(
        width, options.get("intermediate_size") // 2, activation=act, bias=True, fused=False
    )
    pattern = options.get("block_types", ("recurrent", "recurrent", "attention"))
    mixers = {"attention": attention, "recurrent": recurrent}
    if not pattern or set(pattern) - set(mixers):
        raise ValueError(
            f"{options.kind}: block_types must name attention or recurrent, got {pattern}"
        )
    kinds = [pattern[i % len(pattern)] for i in range(blocks)]
    model = models.language_model(
        vocabulary=options.get("vocab_size"),
        width=width,
        blocks=[layers.Block(mixers[k], feed_forward) for k in kinds],
        norm=functools.partial(layers.rms_norm, eps=options.get("rms_norm_eps", 1e-6), offset=1.0),
        # transformers rounds the factor to bfloat16.
        embed_scale=float(np.asarray(math.sqrt(width)).astype(jnp.bfloat16)),
        tied=tied,
        soft_cap=options.get("logits_soft_cap", 30.0),
        dtype=dtype,
    )

    tensors = [Tensor("model.embed_tokens.weight", "embedding/embedding")]
    for i, kind in enumerate(kinds):
        name, path = f"model.layers.{i}", f"blocks/{i}"
        tensors += norm_tensors(f"{name}.temporal_pre_norm", f"{path}/mixer_norm")
        tensors += norm_tensors(f"{name}.channel_pre_norm", f"{path}/feed_forward_norm")
        tensors += _temporal_tensors(kind, f"{name}.temporal_block", f"{path}/mixer", heads, bias)
        for theirs, ours in {"gate": "gate", "up": "up", "down": "contract"}.items():
            tensors += dense_tensors(
                f"{name}.mlp_block.{theirs}_proj", f"{path}/feed_forward/{ours}", bias=True
            )
    tensors += norm_tensors("model.final_norm", "norm") + head_tensors(tied)
    return as_pretrained(model, tensors)


def _temporal_tensors(kind: str, name: str, path: str, heads: int, bias: bool) -> list[Tensor]:
    """Tensors of a mixer of RecurrentGemma."""
    tensors = []
    if kind == "attention":
        for theirs, ours in {"q": "query", "k": "key", "v": "value"}.items():
            tensors += dense_tensors(f"{name}.{theirs}_proj", f"{path}/{ours}", bias=bias)
        return tensors + dense_tensors(f"{name}.o_proj", f"{path}/output", bias=True)
    for theirs, ours in {"x": "recurrent", "y": "gate", "out": "out"}.items():
        tensors += dense_tensors(f"{name}.linear_{theirs}", f"{path}/{ours}", bias=True)
    tensors += _conv_tensors(f"{name}.conv_1d", f"{path}/conv", bias=True)
    tensors.append(Tensor(f"{name}.rg_lru.recurrent_param", f"{path}/L"))
    for theirs, ours in {"input": "input_gate", "recurrent": "recurrence_gate"}.items():
        gate = f"{name}.rg_lru.{theirs}_gate"
        tensors.append(Tensor(f"{gate}_weight", f"{path}/{ours}/kernel"))
        tensors.append(Tensor(f"{gate}_bias", f"{path}/{ours}/bias", by_head=heads))
    return tensors


def _sizes(options: Options) -> tuple[int, int]:
    """Width of a Mamba and of its mixers; reads options of its initialization, too."""
    width = options.get("hidden_size", 768)
    options.require("hidden_act", "silu", "swish")
    options.ignore("rescale_prenorm_residual", "layer_types", "intermediate_size")
    steps = ("floor", "init_scheme", "max", "min", "scale")
    options.ignore(*(f"time_step_{name}" for name in steps))
    inner = int(options.get("expand", 2) * width)
    # Converted checkpoints of the authors repeat their own names of the sizes.
    options.require("d_model", width)
    options.require("d_inner", inner)
    options.require("n_layer", options.get("num_hidden_layers"))
    options.require("rms_norm", True)
    options.ignore("fused_add_norm", "pad_vocab_size_multiple", "ssm_cfg")
    return width, inner


def _conv_tensors(name: str, path: str, *, bias: bool) -> list[Tensor]:
    """Tensors of a causal convolution, [channels, 1, width] in the file."""
    tensors = [Tensor(f"{name}.weight", f"{path}/kernel", axes=(1, 0), unit_axis=1)]
    return tensors + ([Tensor(f"{name}.bias", f"{path}/bias")] if bias else [])


def _common_tensors(name: str, path: str, *, bias: bool, conv_bias: bool) -> list[Tensor]:
    """Tensors that the mixers of Mamba and Mamba-2 share."""
    return [
        Tensor(f"{name}.A_log", f"{path}/A_log"),
        Tensor(f"{name}.D", f"{path}/D"),
        *dense_tensors(f"{name}.in_proj", f"{path}/in", bias=bias),
        *_conv_tensors(f"{name}.conv1d", f"{path}/conv", bias=conv_bias),
        *dense_tensors(f"{name}.out_proj", f"{path}/out", bias=bias),
    ]


def _language_model(
    options: Options,
    dtype: DTypeLike,
    mixer: Layer,
    mixer_tensors: Callable[[str, str], list[Tensor]],
    *,
    tied: bool,
) -> PretrainedModel:
    """A stack of equal mixers without feed-forward layers.

    Args:
      options: options of the config.
      dtype: dtype of activations.
      mixer: the layer of each block.
      mixer_tensors: ``(name, path) -> tensors`` of the mixer of a block.
      tied: default of ``tie_word_embeddings``.
    """
    blocks = options.get("num_hidden_layers")
    tied = options.get("tie_word_embeddings", tied)
    residual_in_fp32 = options.get("residual_in_fp32", True)
    eps = options.get("layer_norm_epsilon", 1e-5)
    model = models.language_model(
        vocabulary=options.get("vocab_size"),
        width=options.get("hidden_size", 768),
        blocks=[layers.Block(mixer)] * blocks,
        norm=functools.partial(layers.rms_norm, eps=eps),
        tied=tied,
        dtype=dtype,
        residual_dtype=jnp.float32 if residual_in_fp32 and jnp.finfo(dtype).bits < 32 else None,
    )
    tensors = [Tensor("backbone.embeddings.weight", "embedding/embedding")]
    for i in range(blocks):
        name, path = f"backbone.layers.{i}", f"blocks/{i}"
        tensors += norm_tensors(f"{name}.norm", f"{path}/mixer_norm")
        tensors += mixer_tensors(f"{name}.mixer", f"{path}/mixer")
    tensors += norm_tensors("backbone.norm_f", "norm") + head_tensors(tied)
    return as_pretrained(model, tensors)
