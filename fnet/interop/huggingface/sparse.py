"""Mixtures of experts for text: Mixtral, Qwen, OLMoE, Granite, gpt-oss, GLM, ERNIE, as rows."""

from collections.abc import Callable, Sequence

from fnet import layers
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.decoders import optional_window, rms_norm
from fnet.interop.huggingface.family import ACTIVATIONS, FAMILIES, register
from fnet.interop.huggingface.names import AFTER, BEFORE, LLAMA_NAMES, gated, qk_norms, table
from fnet.interop.huggingface.options import Option, Options, Source
from fnet.interop.huggingface.rotary import Rope
from fnet.layer import Layer
from fnet.layers.experts import Router

_ROUTER = "blocks/*/feed_forward/router"

EXPERT_NAMES = gated("/experts", "mlp.experts.*") | {_ROUTER: "model.layers.*.mlp.gate"}
"""Names of experts."""

_EXPERTS = LLAMA_NAMES | BEFORE | EXPERT_NAMES

SHARED_EXPERT_NAMES = gated("/shared", "mlp.shared_expert") | {
    "blocks/*/feed_forward/shared_gate": "model.layers.*.mlp.shared_expert_gate"
}
"""Names of the shared expert of Qwen."""

_SHARED_EXPERTS = gated("/shared", "mlp.shared_experts") | {
    f"{_ROUTER}/choice_bias": "model.layers.*.mlp.gate.e_score_correction_bias"
}

_ERNIE_NAMES = _SHARED_EXPERTS | {
    f"{_ROUTER}/choice_bias": ("model.layers.*.mlp.moe_statics.e_score_correction_bias", "1a")
}

_HUNYUAN_NAMES = qk_norms("query_layernorm", "key_layernorm") | gated("/shared", "mlp.shared_mlp")

_MIXTRAL_EXPERTS = gated("/experts", "block_sparse_moe.experts.*", "w1", "w3", "w2")
_MIXTRAL_NAMES = (LLAMA_NAMES | BEFORE | _MIXTRAL_EXPERTS) | {
    _ROUTER: "model.layers.*.block_sparse_moe.gate",
    f"{_ROUTER}/choice_bias": "model.layers.*.block_sparse_moe.e_score_correction_bias",
}

_GRANITE_NAMES = (
    LLAMA_NAMES
    | BEFORE
    | table("""
blocks/*/feed_forward/router            model.layers.*.block_sparse_moe.router.layer
blocks/*/feed_forward/experts/expand    model.layers.*.block_sparse_moe.input_linear   acb
blocks/*/feed_forward/experts/contract  model.layers.*.block_sparse_moe.output_linear  acb
blocks/*/feed_forward/shared/expand     model.layers.*.shared_mlp.input_linear
blocks/*/feed_forward/shared/contract   model.layers.*.shared_mlp.output_linear
""")
)


def _gpt_oss_names(options: Options) -> Names:
    experts, hidden = "blocks/*/feed_forward/experts", options.get("intermediate_size")
    return LLAMA_NAMES | BEFORE | table(f"""
        blocks/*/mixer/sinks         model.layers.*.self_attn.sinks
        blocks/*/feed_forward/router model.layers.*.mlp.router
        {experts}/contract/kernel    model.layers.*.mlp.experts.down_proj
        {experts}/contract/bias      model.layers.*.mlp.experts.down_proj_bias
    """) | {  # gates and what they multiply alternate
        f"{experts}/expand/{part}": (f"model.layers.*.mlp.experts.{name}", "", None, grouped)
        for part, name, grouped in (
            ("kernel", "gate_up_proj", (2, hidden, 2)),
            ("bias", "gate_up_proj_bias", (1, hidden, 2)),
        )
    }  # fmt: skip


def expert_layers(
    count: Source,
    chosen: Source,
    hidden: Source,
    *,
    router: Router | Callable[[Options], Router],
    shared: Source = None,
    shared_bias: Source = False,
    shared_fused: bool | None = None,
    **arguments: Source,
) -> Source:
    """Layers of experts, from options; see `fnet.layers.experts`.

    ``shared`` is the hidden size of the shared expert, or 0. ``shared_bias`` and ``shared_fused``
    are as for its feed-forward layer; None: as for the experts.
    """

    def build(options: Options) -> Layer:
        width = options.get("hidden_size")
        name = ACTIVATIONS[options.require("hidden_act", "silu", *ACTIVATIONS)]
        own = {"activation": name} | {k: options.value(v) for k, v in arguments.items()}
        fused = own.get("fused", False) if shared_fused is None else shared_fused
        size = options.value(shared)
        layer = None
        if size:
            bias = options.value(shared_bias)
            layer = layers.feed_forward(width, size, activation=name, fused=fused, bias=bias)
        return layers.experts(
            width,
            options.value(hidden),
            options.value(count),
            options.value(chosen),
            router=router(options) if callable(router) else router,
            shared=layer,
            **own,
        )

    return build


def _softmax(options: Options) -> Router:
    return Router(normalize=options.get("norm_topk_prob", False))


def _sigmoid(options: Options) -> Router:
    options.require("scoring_func", "sigmoid")
    options.require("topk_method", "noaux_tc")
    return Router(
        "sigmoid",
        normalize=options.get("norm_topk_prob", True),
        scale=options.get("routed_scaling_factor", 1.0),
        choice_bias=True,
    )


def _number_of_experts(options: Options) -> int:
    # transformers 5 writes another name than versions before.
    return int(options.get("num_experts", None) or options.get("num_local_experts"))


def _qwen_sparse(options: Options) -> Sequence[int]:
    dense, step = options.get("mlp_only_layers", []), options.get("decoder_sparse_step", 1)
    blocks = options.get("num_hidden_layers")
    return [i not in dense and (i + 1) % step == 0 for i in range(blocks)]


def _dense_first(options: Options) -> Sequence[int]:
    first = options.get("first_k_dense_replace", 1)
    return [i >= first for i in range(options.get("num_hidden_layers"))]


def _ernie_sparse(options: Options) -> Sequence[int]:
    blocks, step = options.get("num_hidden_layers"), options.get("moe_layer_interval", 1)
    first, last = options.get("moe_layer_start_index", 1), options.get("moe_layer_end_index", -1)
    last = blocks - 1 if last == -1 else last
    return [first <= i <= last and (i + 1) % step == 0 for i in range(blocks)]


def _qwen2_layer_types(options: Options) -> list[str]:
    first, blocks = options.get("max_window_layers", 28), options.get("num_hidden_layers")
    default = [
        "full_attention" if i % 2 or i >= first else "sliding_attention" for i in range(blocks)
    ]
    return list(options.get("layer_types", default))


def _shared_size(options: Options) -> int:
    count = options.get("n_shared_experts", 1)
    return int(count * options.get("moe_intermediate_size"))


def _rotary_share(options: Options) -> float:
    head_dim = options.get("head_dim", 128)
    return float(options.get("rotary_dim", head_dim) / head_dim)


_IGNORED = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
_COUNT = Option("num_local_experts")
_CHOSEN = Option("num_experts_per_tok")

_LLAMA = FAMILIES["llama"]
_MIXTRAL = _LLAMA.like(
    "mixtral",
    "MixtralForCausalLM",
    names=_MIXTRAL_NAMES,
    norm=rms_norm(Option("rms_norm_eps", 1e-5)),
    window=Option("sliding_window", None),
    experts=expert_layers(
        _COUNT,
        Option("num_experts_per_tok", 2),
        Option("intermediate_size"),
        router=Router(normalize=True),
    ),
    rope=Rope(1_000_000.0),
    ignored=_IGNORED,
)
_QWEN3 = FAMILIES["qwen3"].like(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    names=_EXPERTS,
    mlp_bias=False,
    layer_types=None,
    full_first=0,
    window=optional_window,
    sparse=_qwen_sparse,
    experts=expert_layers(
        _number_of_experts, _CHOSEN, Option("moe_intermediate_size"), router=_softmax
    ),
    ignored=(*_IGNORED, "max_window_layers"),
)
_OLMOE = _LLAMA.like(
    "olmoe",
    "OlmoeForCausalLM",
    names=_EXPERTS,
    norm=rms_norm(Option("rms_norm_eps", 1e-5)),
    mlp_bias=False,
    qk_norm="heads",
    clip=Option("clip_qkv", None),
    experts=expert_layers(
        _number_of_experts, _CHOSEN, Option("intermediate_size"), router=_softmax
    ),
    ignored=_IGNORED,
)
_GRANITE = FAMILIES["granite"].like(
    "granitemoe",
    "GraniteMoeForCausalLM",
    names=_GRANITE_NAMES,
    mlp_bias=False,
    experts=expert_layers(
        _COUNT,
        Option("num_experts_per_tok", 2),
        Option("intermediate_size"),
        router=Router("softmax_of_chosen"),
        shared=Option("shared_intermediate_size", 0),
        fused=True,
    ),
    ignored=_IGNORED,
)
_GLM = _LLAMA.like(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    names=_EXPERTS | _SHARED_EXPERTS,
    norm=rms_norm(Option("rms_norm_eps", 1e-5)),
    bias=Option("attention_bias", False),
    output_bias=False,
    mlp_bias=False,
    qk_norm=lambda options: "head" if options.get("use_qk_norm", False) else None,
    sparse=_dense_first,
    experts=expert_layers(
        Option("n_routed_experts"),
        _CHOSEN,
        Option("moe_intermediate_size"),
        router=_sigmoid,
        shared=_shared_size,
    ),
    rope=Rope(partial=0.5),
    ignored=(*_IGNORED, "num_nextn_predict_layers", "num_mtp_layers"),
    supported={"n_group": (1,), "topk_group": (1,)},
)

register(
    _MIXTRAL,
    _MIXTRAL.like(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        head_dim=Option("head_dim", 128),
        norm=rms_norm(),
        qk_norm="heads",
        window=None,
        experts=expert_layers(
            _COUNT,
            _CHOSEN,
            Option("intermediate_size"),
            router=Router("sigmoid", normalize=True, choice_bias=True),
        ),
        rope=Rope(5_000_000.0, partial=_rotary_share),
        ignored=(*_IGNORED, "attn_type_list", "num_mtp_modules", "mtp_transformer_layers"),
        supported={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "use_mtp": (True, False),
            "shared_intermediate_size": (0,),
        },
    ),
    _QWEN3,
    _QWEN3.like(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        names=_EXPERTS | SHARED_EXPERT_NAMES,
        head_dim=Option("head_dim", None),
        qk_norm=None,
        bias=Option("qkv_bias", True),
        output_bias=False,
        layer_types=_qwen2_layer_types,
        experts=expert_layers(
            _number_of_experts,
            _CHOSEN,
            Option("moe_intermediate_size"),
            router=_softmax,
            shared=Option("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
        ignored=_IGNORED,
    ),
    _OLMOE,
    _OLMOE.like(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        names={p: n for p, n in _EXPERTS.items() if p not in BEFORE} | AFTER,
        norm=rms_norm(),
        clip=None,
        rope=Rope(500_000.0),
    ),
    _GRANITE,
    _GRANITE.like("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    _GLM,
    _GLM.like(
        "dots1",
        "Dots1ForCausalLM",
        norm=rms_norm(),
        output_bias=None,
        qk_norm="head",
        sparse=_dense_first,
        window=Option("sliding_window", None),
        layer_types=Option("layer_types", None),
        full_first=Option("max_window_layers", 62),
        rope=Rope(),
    ),
    _LLAMA.like(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        names=_EXPERTS | _ERNIE_NAMES,
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        bias=Option("use_bias", False),
        mlp_bias=Option("use_bias", False),
        head_bias=Option("use_bias", False),
        tied=Option("tie_word_embeddings", True),
        sparse=_ernie_sparse,
        experts=expert_layers(
            Option("moe_num_experts"),
            Option("moe_k", 6),
            Option("moe_intermediate_size"),
            router=Router(normalize=True, choice_bias=True),
            shared=lambda options: (
                options.get("moe_num_shared_experts", 2) * options.get("moe_intermediate_size")
            ),
            shared_bias=Option("use_bias", False),
        ),
        rope=Rope(500_000.0, interleaved=True),
        ignored=(*_IGNORED, "moe_norm_min", "moe_capacity", "moe_aux_loss_lambda", "num_nextn*"),
        supported={"moe_use_aux_free": (True,), "moe_gate": ("topk",)},
    ),
    _LLAMA.like(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        names=_EXPERTS | _HUNYUAN_NAMES | {_ROUTER: "model.layers.*.mlp.gate.wg"},
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        mlp_bias=False,
        qk_norm="head",
        norm_rotated=True,
        experts=expert_layers(
            _number_of_experts,
            Option("moe_topk", 1),
            Option("intermediate_size"),
            router=Router(normalize=True),
            shared=Option("intermediate_size"),
        ),
        ignored=FAMILIES["hunyuan_v1_dense"].ignored,
        supported=FAMILIES["hunyuan_v1_dense"].supported,
    ),
    _LLAMA.like(
        "gpt_oss",
        "GptOssForCausalLM",
        names=_gpt_oss_names,
        head_dim=Option("head_dim", 64),
        norm=rms_norm(Option("rms_norm_eps", 1e-5)),
        bias=Option("attention_bias", True),
        mlp_bias=False,
        sinks=True,
        window=Option("sliding_window", 128),
        layer_types=Option("layer_types", None),
        full_every=2,
        experts=expert_layers(
            _COUNT,
            Option("num_experts_per_tok", 4),
            Option("intermediate_size"),
            router=Router("softmax_of_chosen", bias=True),
            fused=True,
            bias=True,
            activation="quick_gelu",
            clamp=7.0,
            up_offset=1.0,
        ),
        rope=Rope(
            150_000.0,
            default={
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        ignored=(*_IGNORED, "initial_context_length", "experts_per_token"),
        supported={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    ),
)
