"""Gemma 4: inputs of each block, keys and values that blocks share, other heads in full attention.

With experts, a block adds them to its feed-forward layer, and both have norms of their own.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet import layers
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.decoders import rms_norm, scaled, within_image_model
from fnet.interop.huggingface.family import FAMILIES, register
from fnet.interop.huggingface.names import AROUND, LLAMA_NAMES, gated, table
from fnet.interop.huggingface.options import Option, Options
from fnet.interop.huggingface.rotary import Rope
from fnet.layer import Children, Layer, Params, State, composite, init_children, serial
from fnet.layers.experts import Router

_NAMES = (
    LLAMA_NAMES
    | AROUND
    | table("""
block_inputs/embedding    model.embed_tokens_per_layer
block_inputs/project      model.per_layer_model_projection
block_inputs/norm         model.per_layer_projection_norm
blocks/*/output/gate      model.layers.*.per_layer_input_gate
blocks/*/output/project   model.layers.*.per_layer_projection
blocks/*/output/norm      model.layers.*.post_per_layer_input_norm
blocks/*/output/factor    model.layers.*.layer_scalar
""")
)

_EXPERT_NAMES = table("""
blocks/*/feed_forward/norm                        model.layers.*.pre_feedforward_layernorm_2
blocks/*/feed_forward/post_norm                   model.layers.*.post_feedforward_layernorm_2
blocks/*/feed_forward/router_norm/scale           model.layers.*.router.scale
blocks/*/feed_forward/router                      model.layers.*.router.proj
blocks/*/feed_forward/router/expert_scale         model.layers.*.router.per_expert_scale
blocks/*/feed_forward/experts/expand/kernel       model.layers.*.experts.gate_up_proj  acb
blocks/*/feed_forward/experts/contract/kernel     model.layers.*.experts.down_proj     acb
blocks/*/feed_forward/shared/norm                 model.layers.*.pre_feedforward_layernorm
blocks/*/feed_forward/shared/post_norm            model.layers.*.post_feedforward_layernorm_1
""")

# Layers that read the keys of another have some in published files, too.
_UNUSED = re.compile(r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight$")
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


def _names(options: Options) -> Names:
    if not options.get("enable_moe_block", False):
        return _NAMES
    names = _NAMES | _EXPERT_NAMES | gated("/shared/feed_forward", "mlp")
    del names["blocks/*/feed_forward_norm"]
    return names


def _experts(options: Options) -> Layer | None:
    """A feed-forward layer and experts, which read the same input through norms of their own."""
    if not options.get("enable_moe_block", False):
        return None
    options.require("use_double_wide_mlp", False)
    width, norm = options.get("hidden_size"), options.value(rms_norm())
    activation = options.value(_ACTIVATION)
    hidden = options.get("intermediate_size")
    return layers.experts(
        width,
        options.get("moe_intermediate_size"),
        options.get("num_experts"),
        options.get("top_k_experts"),
        router=Router(normalize=True, epsilon=0.0, expert_scale=True),
        activation=activation,
        fused=True,
        shared=serial(
            norm=norm(width),
            feed_forward=layers.feed_forward(width, hidden, activation=activation, fused=False),
            post_norm=norm(width),
        ),
        norm=norm(width),
        router_norm=scaled(norm(width), width**-0.5),
        post_norm=norm(width),
    )


def _inputs_size(options: Options) -> int:
    return options.nullable("hidden_size_per_layer_input", 256) or 0


def _output(options: Options, size: int | None = None) -> Layer:
    """Add a gated input of the block to its output, and multiply by a constant of the block."""
    width, size = options.get("hidden_size"), _inputs_size(options) if size is None else size
    children: dict[str, Layer] = {}
    if size:
        children["gate"] = layers.dense(width, size, bias=False)
        children["project"] = layers.dense(size, width, bias=False)
        children["norm"] = options.value(rms_norm())(width)

    def init(key: Array) -> tuple[Params, State]:
        params, state = init_children(children, key)
        return params | {"factor": jnp.ones(1, jnp.float32)}, state

    def apply(child: Children, x: Array, given: Array | None = None) -> Array:
        if given is not None:
            x = x + child("norm", child("project", jax.nn.gelu(child("gate", x)) * given))
        # A buffer in transformers, so nothing that is trained.
        y: Array = x * jax.lax.stop_gradient(child.params["factor"][0]).astype(x.dtype)
        return y

    return composite(children, apply, init=init, random=False)


def _block_inputs(options: Options) -> Callable[[DTypeLike], Layer] | None:
    """Inputs of all blocks: an embedding of the token, and a projection of the first input."""
    width, size = options.get("hidden_size"), _inputs_size(options)
    blocks = options.get("num_hidden_layers")
    vocabulary = options.get("vocab_size_per_layer_input", 262_144)
    norm = options.value(rms_norm())
    if not size:
        return None

    def build(dtype: DTypeLike) -> Layer:
        children = {
            "embedding": layers.embedding(vocabulary, blocks * size, dtype=dtype),
            "project": layers.dense(width, blocks * size, bias=False),
            "norm": norm(size),
        }

        def apply(child: Children, x: Array, *, tokens: Array) -> Array:
            own = child("embedding", tokens) * jnp.asarray(math.sqrt(size), x.dtype)
            projected = child("project", x) * jnp.asarray(width**-0.5, x.dtype)
            shape = (*x.shape[:2], blocks, size)
            y: Array = child("norm", projected.reshape(shape)) + own.reshape(shape)
            return y * jnp.asarray(math.sqrt(0.5), x.dtype)

        return composite(children, apply, random=False)

    return build


def _full_attention(options: Options) -> dict[str, Any]:
    keys_are_values = options.get("attention_k_eq_v", False)
    head_dim = options.get("global_head_dim", 512)
    groups = options.get("num_global_key_value_heads", None)
    full = [i for i, kind in enumerate(_layer_types(options)) if kind == "full_attention"]
    for i in full if keys_are_values else ():
        if i < options.get("num_hidden_layers") - options.get("num_kv_shared_layers", 0) and (
            options.has(f"layers.{i}.self_attn.v_proj.weight", False)
        ):
            raise ValueError(
                f"{options.kind}: attention_k_eq_v, but the file has layers.{i}.self_attn.v_proj"
            )
    own: dict[str, Any] = {"head_dim": head_dim}
    if keys_are_values and groups is not None:
        own["num_key_value_heads"] = groups
    by_layer = options.get("per_layer_config", None)
    if by_layer is not None:  # as transformers 5.24 writes it
        own = next(iter(by_layer.values()), {})
        names = {"head_dim", "num_key_value_heads"}
        if by_layer != {str(i): own for i in full} or own.keys() - names:
            raise ValueError(
                f"{options.kind}: per_layer_config must give all layers of full_attention the same "
                f"head_dim and num_key_value_heads, and no others, got {by_layer}"
            )
    return {
        "head_dim": own.get("head_dim", options.get("head_dim", 256)),
        "groups": own.get("num_key_value_heads", options.get("num_key_value_heads", 4)),
        "values": "keys" if keys_are_values else "own",
    }


def _layer_types(options: Options) -> list[str]:
    """Five windows, then full attention; the last layer always has full attention."""
    blocks = options.get("num_hidden_layers", 30)
    types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(blocks)]
    given: list[str] = options.get("layer_types", types)
    return [*given[:-1], "full_attention"]


def _shared_hidden(options: Options) -> int | None:
    wide = options.get("use_double_wide_mlp", False)
    return 2 * int(options.get("intermediate_size", 9216)) if wide else None


_GEMMA3 = FAMILIES["gemma3_text"]
_ACTIVATION = _GEMMA3.arguments["activation"]
_GEMMA4 = _GEMMA3.like(
    "gemma4_text",
    "Gemma4ForCausalLM",
    names=_names,
    others=_UNUSED,
    norm=rms_norm(),
    value_norm=lambda options: options.value(rms_norm(scale=False)),
    scale=1.0,
    soft_cap=None,
    vocabulary=Option("vocab_size", 262_144),
    window=Option("sliding_window", 512),
    layer_types=_layer_types,
    rope=Rope(default=_ROPE, local_theta=10_000.0),
    full=_full_attention,
    shared=Option("num_kv_shared_layers", 0),
    shared_hidden=_shared_hidden,
    output=_output,
    inputs=_block_inputs,
    experts=_experts,
    supported={"use_bidirectional_attention": ("vision", None)},
    ignored=("num_experts", "top_k_experts", "moe_intermediate_size"),
)

_UNIFIED = _GEMMA4.like(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    window=Option("sliding_window", 1024),
    output=functools.partial(_output, size=0),
    inputs=None,
)

register(
    _GEMMA4,
    _GEMMA4.like("gemma4", "Gemma4ForConditionalGeneration", **within_image_model(_GEMMA4)),
    _UNIFIED,
    _UNIFIED.like(
        "gemma4_unified", "Gemma4UnifiedForConditionalGeneration", **within_image_model(_UNIFIED)
    ),
)
