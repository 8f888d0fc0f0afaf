"""Decoders with attention and another mixer, as rows: Qwen3.5, LFM2, Granite 4, Falcon-H1."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from fnet import layers
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.decoders import rms_norm, scaled, within_image_model
from fnet.interop.huggingface.family import FAMILIES, activation, register
from fnet.interop.huggingface.names import (
    BEFORE,
    LLAMA_NAMES,
    gated,
    mlp,
    norms,
    qk_norms,
    state_space,
    table,
)
from fnet.interop.huggingface.options import Option, Options
from fnet.interop.huggingface.recurrent import step_limits
from fnet.interop.huggingface.rotary import Rope
from fnet.interop.huggingface.sparse import EXPERT_NAMES, SHARED_EXPERT_NAMES, expert_layers
from fnet.layer import Children, Decode, Layer, Params, State, composite
from fnet.layers.experts import Router
from fnet.precision import add

_QWEN_NAMES = (
    LLAMA_NAMES
    | BEFORE
    | state_space("model.layers.*.linear_attn")
    | table("""
blocks/*/mixer/query_key_value  model.layers.*.linear_attn.in_proj_qkv
blocks/*/mixer/gate             model.layers.*.linear_attn.in_proj_z
blocks/*/mixer/beta             model.layers.*.linear_attn.in_proj_b
blocks/*/mixer/decay            model.layers.*.linear_attn.in_proj_a
""")
)

_FUSED_EXPERTS = table("""
blocks/*/feed_forward/experts/expand/kernel    model.layers.*.mlp.experts.gate_up_proj  acb
blocks/*/feed_forward/experts/contract/kernel  model.layers.*.mlp.experts.down_proj     acb
""")

_ATTENTION = ("full_attention", "attention")

_MAMBA2_NAMES = state_space("model.layers.*.mamba")

_LFM2_NAMES = {
    **LLAMA_NAMES,
    **norms(mixer="operator_norm", feed_forward="ffn_norm"),
    **qk_norms("q_layernorm", "k_layernorm"),
    **gated("", "feed_forward", "w1", "w3", "w2"),
    **gated("/experts", "feed_forward.experts.*", "w1", "w3", "w2"),
    **table("""
blocks/*/mixer/in                         model.layers.*.conv.in_proj
blocks/*/mixer/conv                       model.layers.*.conv.conv   b1a
blocks/*/mixer/out                        model.layers.*.conv.out_proj
blocks/*/mixer/output                     model.layers.*.self_attn.out_proj
blocks/*/feed_forward/router              model.layers.*.feed_forward.gate
blocks/*/feed_forward/router/choice_bias  model.layers.*.feed_forward.expert_bias
norm                                      model.embedding_norm
"""),
}

_BAMBA_NAMES = {
    **(LLAMA_NAMES | _MAMBA2_NAMES | gated("", "feed_forward")),
    **norms(mixer="input_layernorm", feed_forward="pre_ff_layernorm"),
    "norm": "model.final_layernorm",
}

_FALCON_H1_NAMES = {
    path.replace("mixer/", f"mixer/{part}/"): name
    for part, names in (("attention", LLAMA_NAMES), ("mamba", _BAMBA_NAMES))
    for path, name in names.items()
}


def _recurs(
    others: Sequence[str], default: Callable[[Options], Sequence[str]]
) -> Callable[[Options], list[bool]]:
    def read(options: Options) -> list[bool]:
        blocks, types = options.get("num_hidden_layers"), options.get("layer_types", None)
        types = default(options) if types is None else types
        if len(types) != blocks or set(types) - {*_ATTENTION, *others}:
            names = " or ".join((*_ATTENTION, *others))
            raise ValueError(
                f"{options.kind}: layer_types must name {names} for each of the {blocks} layers, "
                f"got {types}"
            )
        return [kind in others for kind in types]

    return read


def _mamba2(options: Options, *, eps: float, ssm: int | None = None, **arguments: Any) -> Layer:
    width, heads = options.get("hidden_size"), options.get("mamba_n_heads", 128)
    expanded = int(options.get("mamba_expand", 2) * width)
    inner = expanded if ssm is None else ssm
    head = options.get("mamba_d_head", "auto")
    head = inner // heads if head == "auto" else head
    if heads * head != inner:
        raise ValueError(
            f"{options.kind}: mamba_n_heads * mamba_d_head must be the inner width {inner}, got "
            f"{heads} * {head}"
        )
    options.require("hidden_act", "silu", "swish")
    groups = options.get("mamba_n_groups", 1)
    return layers.mamba2(
        width,
        expand=inner / width,
        head=head,
        state=options.get("mamba_d_state", 256),
        groups=groups,
        conv=options.get("mamba_d_conv", 4),
        bias=options.get("mamba_proj_bias", False),
        conv_bias=options.get("mamba_conv_bias", True),
        norm_groups=groups,
        norm_eps=options.get("rms_norm_eps", eps),
        step_limits=step_limits(options),
        **arguments,
    )


def _delta_net(options: Options) -> Layer:
    options.require("hidden_act", "silu", "swish")
    return layers.gated_delta_net(
        options.get("hidden_size"),
        heads=options.get("linear_num_value_heads", 32),
        head_dim=options.get("linear_value_head_dim", 128),
        groups=options.get("linear_num_key_heads", 16),
        key_dim=options.get("linear_key_head_dim", 128),
        conv=options.get("linear_conv_kernel_dim", 4),
        norm_eps=options.get("rms_norm_eps", 1e-6),
    )


def _qwen_types(options: Options) -> list[str]:
    every = options.get("full_attention_interval", 4)
    blocks = range(options.get("num_hidden_layers"))
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in blocks]


def _has_fused_experts(options: Options) -> bool:
    return options.has("mlp.experts.gate_up_proj", False)


def _qwen_expert_names(options: Options) -> Names:
    names = _QWEN_NAMES | EXPERT_NAMES | SHARED_EXPERT_NAMES
    return names | _FUSED_EXPERTS if _has_fused_experts(options) else names


def _bamba_recurs(options: Options) -> list[bool]:
    attends = options.get("attn_layer_indices", [])
    return [i not in attends for i in range(options.get("num_hidden_layers"))]


def _all_recur(options: Options) -> list[str]:
    return ["mamba"] * options.get("num_hidden_layers")


def _falcon_h1_mixer(options: Options) -> Layer:
    """Mamba-2 and attention side by side, with factors of inputs, keys and outputs (muP)."""
    width, heads = options.get("hidden_size"), options.get("num_attention_heads")
    factors = {
        name: options.get(f"{name}_multiplier", 1.0)
        for name in ("ssm_in", "ssm_out", "attention_in", "attention_out", "key")
    }
    with_norm = options.get("mamba_rms_norm", False)
    before_gate = options.get("mamba_norm_before_gate", True)
    if with_norm:
        options.check("mamba_norm_before_gate", before_gate, (False,))
    mamba = _mamba2(
        options,
        eps=1e-5,
        ssm=options.nullable("mamba_d_ssm", 1024),
        norm=with_norm,
        part_scales=[f * factors["ssm_in"] for f in options.get("ssm_multipliers", [1.0] * 5)],
    )
    head_dim = options.get("head_dim", width // heads)
    rotary = Rope().embedding(options, head_dim, None)
    if rotary.restart_lengths:
        raise ValueError(f"{options.kind}: longrope is not supported")
    attention = layers.attention(
        width,
        heads,
        groups=options.get("num_key_value_heads", 8),
        head_dim=head_dim,
        causal=True,
        bias=False,
        fused=False,
        rotary=rotary,
        variant=layers.AttentionVariant(
            # Without biases, factors of queries and keys are one of the scores.
            scale=head_dim**-0.5 * factors["attention_in"] ** 2 * factors["key"]
        ),
    )
    return _sum(
        mamba=scaled(mamba, factors["ssm_out"]),
        attention=scaled(attention, factors["attention_in"] * factors["attention_out"]),
    )


def _falcon_h1_feed_forward(options: Options) -> Layer:
    options.require("mlp_bias", False)
    gate, output = options.get("mlp_multipliers", [1.0, 1.0])
    layer = layers.feed_forward(
        options.get("hidden_size"),
        options.get("intermediate_size"),
        activation=options.value(activation("hidden_act", "silu")),
        fused=False,
        gate_scale=gate,
    )
    return scaled(layer, output)


def _sum(**parts: Layer) -> Layer:
    """Add the outputs of layers over the sequence that read the same input."""
    decodes = {name: part.decode for name, part in parts.items() if part.decode is not None}

    def apply(child: Children, x: Array, **given: Any) -> Array:
        return functools.reduce(add, [child(name, x, **given) for name in parts])

    def init_cache(batch: int, length: int, dtype: DTypeLike) -> Any:
        return {name: d.init_cache(batch, length, dtype) for name, d in decodes.items()}

    def extend(
        params: Params, state: State, cache: Any, x: Array, position: Array
    ) -> tuple[Array, Any]:
        done = {
            name: d.extend(params[name], state.get(name, {}), cache[name], x, position)
            for name, d in decodes.items()
        }
        y = functools.reduce(add, [y for y, _ in done.values()])
        return y, {name: cache for name, (_, cache) in done.items()}

    return composite(parts, apply)._replace(decode=Decode(init_cache, extend))


def _lfm2_types(options: Options) -> list[str]:
    blocks = range(options.get("num_hidden_layers"))
    attends = options.get("full_attn_idxs", list(blocks))
    return ["full_attention" if i in attends else "conv" for i in blocks]


def _short_conv(options: Options) -> Layer:
    return layers.short_conv(
        options.get("hidden_size"),
        conv=options.get("conv_L_cache", 3),
        bias=options.get("conv_bias", False),
    )


def _lfm2_hidden(options: Options) -> int:
    hidden = options.get("block_ff_dim", options.get("intermediate_size", None))
    if hidden is None:
        raise ValueError(f"{options.kind}: config.json has no intermediate_size")
    factor = options.get("block_ffn_dim_multiplier", 1.0)
    multiple = options.get("block_multiple_of", 256)
    if not options.get("block_auto_adjust_ff_dim", True):
        return int(hidden)
    return int(multiple * -(-int(factor * int(2 * hidden / 3)) // multiple))


def _tied(options: Options) -> bool:
    return bool(options.get("tie_embedding", options.get("tie_word_embeddings", True)))


def _granite_rope(options: Options) -> Rope | None:
    if options.require("position_embedding_type", None, "nope", "rope") == "rope":
        return Rope()
    options.ignore("rope_*")
    return None


def _granite_experts(options: Options) -> Layer | None:
    if not options.get("num_local_experts", 8):
        options.ignore("num_experts_per_tok", "intermediate_size")
        return None
    experts: Layer = FAMILIES["granitemoe"].arguments["experts"](options)
    return experts


def _granite_names(options: Options) -> Any:
    names = FAMILIES["granitemoe"].names | _MAMBA2_NAMES
    dense = mlp("input_linear", "output_linear", "model.layers.*.shared_mlp")
    return names if options.get("num_local_experts", 8) else names | dense


def _lfm2_router(options: Options) -> Router:
    return Router(
        "sigmoid",
        normalize=options.get("norm_topk_prob", True),
        scale=options.get("routed_scaling_factor", 1.0),
        choice_bias=options.get("use_expert_bias", True),
        epsilon=1e-6,
    )


_LFM2 = FAMILIES["llama"].like(
    "lfm2",
    "Lfm2ForCausalLM",
    names=_LFM2_NAMES,
    norm=rms_norm(Option("norm_eps", 1e-5)),
    qk_norm="head",
    groups=Option("num_key_value_heads", 8),
    bias=False,
    mlp_bias=False,
    activation="silu",
    hidden=_lfm2_hidden,
    tied=_tied,
    recurrent=_short_conv,
    recurs=_recurs(("conv",), _lfm2_types),
    rope=Rope(1_000_000.0),
    ignored=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init"),
        *("full_attn_idxs", "num_heads"),
    ),
    supported={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
)
_BAMBA = FAMILIES["llama"].like(
    "bamba",
    "BambaForCausalLM",
    names=_BAMBA_NAMES,
    groups=Option("num_key_value_heads", 8),
    norm=rms_norm(Option("rms_norm_eps", 1e-5)),
    recurrent=functools.partial(_mamba2, eps=1e-5),
    recurs=_bamba_recurs,
    rope=Rope(partial=0.5),
    ignored=(
        *("attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "time_step_[fm]*"),
        "z_loss_coefficient",
    ),
)
_QWEN = FAMILIES["qwen3"].like(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    names=_QWEN_NAMES,
    head_dim=Option("head_dim", 256),
    norm=rms_norm(offset=1.0),
    mlp_bias=False,
    output_gate=True,
    window=None,
    layer_types=None,
    recurrent=_delta_net,
    recurs=_recurs(("linear_attention",), _qwen_types),
    # All rows of positions are the same without images.
    rope=Rope(partial=0.25, ignored=("mrope_interleaved", "mrope_section")),
    others=re.compile(r"^mtp\."),
    ignored=("full_attention_interval", "mamba_ssm_dtype", "mlp_only_layers", "mtp_*"),
    supported={"attn_output_gate": (True,)},
)
_QWEN_MOE = _QWEN.like(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    names=_qwen_expert_names,
    hidden=Option("moe_intermediate_size", 512),
    experts=expert_layers(
        Option("num_experts", 256),
        Option("num_experts_per_tok", 8),
        Option("moe_intermediate_size", 512),
        router=Router(normalize=True),
        shared=Option("shared_expert_intermediate_size", 512),
        shared_gate=True,
        shared_fused=False,
        fused=_has_fused_experts,
    ),
    ignored=(*_QWEN.ignored, "intermediate_size", "output_router_logits", "router_aux_loss_coef"),
)
register(
    _QWEN,
    _QWEN.like("qwen3_5", "Qwen3_5ForConditionalGeneration", **within_image_model(_QWEN)),
    _QWEN_MOE,
    _QWEN_MOE.like(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", **within_image_model(_QWEN_MOE)
    ),
    _LFM2,
    _LFM2.like(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        hidden=Option("intermediate_size"),
        experts=expert_layers(
            Option("num_experts", 32),
            Option("num_experts_per_tok", 4),
            Option("moe_intermediate_size"),
            router=_lfm2_router,
        ),
        sparse=lambda options: [
            i >= options.get("num_dense_layers", 2) for i in range(options.get("num_hidden_layers"))
        ],
        ignored=("output_router_logits",),
        supported={"use_pos_enc": (True,)},
    ),
    FAMILIES["granitemoe"].like(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        names=_granite_names,
        fused_gate=True,
        hidden=Option("shared_intermediate_size", 1024),
        experts=_granite_experts,
        recurrent=functools.partial(_mamba2, eps=1e-6),
        recurs=_recurs(("mamba", "linear_attention"), _all_recur),
        rope=_granite_rope,
        ignored=(*FAMILIES["granitemoe"].ignored, "init_method", "mamba_chunk_size"),
        supported={"normalization_function": ("rmsnorm",)},
    ),
    _BAMBA,
    _BAMBA.like(
        "falcon_h1",
        "FalconH1ForCausalLM",
        names=_FALCON_H1_NAMES,
        experts=_falcon_h1_feed_forward,  # of all blocks
        recurrent=_falcon_h1_mixer,
        recurs=lambda options: [True] * options.get("num_hidden_layers"),
        rope=None,
        embed_scale=Option("embedding_multiplier", 1.0),
        logit_scale=Option("lm_head_multiplier", 1.0),
        ignored=(*_BAMBA.ignored, "mlp_expansion_factor"),
        supported={
            "attention_bias": (False,),
            "mamba_proj_bias": (False,),
            "projectors_bias": (False,),
            "mamba_use_mlp": (True,),
        },
    ),
)
