"""Networks for images: ViT, DeiT, DINOv2, image towers of CLIP and SigLIP, ConvNeXt."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from fnet import layers, models
from fnet.interop.huggingface.checkpoint import PretrainedModel, Tensor
from fnet.interop.huggingface.decoders import activation, dense_tensors, norm_tensors
from fnet.interop.huggingface.options import Options
from fnet.layer import Layer, check_floating, serial
from fnet.models.vit import attention_pooling, distilled_head, image_transformer

CONV = (2, 3, 1, 0)
"""From torch's [out, in, height, width] to [height, width, in, out]."""


def vit(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """ViT and DeiT."""
    kind, width = options.kind, options.get("hidden_size", 768)
    norm = functools.partial(layers.layer_norm, eps=options.get("layer_norm_eps", 1e-12))
    options.ignore("encoder_stride")
    mask_token = options.has("embeddings.mask_token", False)
    pooling, head, tensors = _vit_head(options, width)
    blocks = options.get("num_hidden_layers", 12)
    block = layers.Block(
        _attention(options, width),
        layers.feed_forward(
            width,
            options.get("intermediate_size", 3072),
            activation=activation(options, "hidden_act", "gelu"),
            gated=False,
            bias=True,
        ),
    )
    model = image_transformer(
        **_image(options),
        width=width,
        blocks=[block] * blocks,
        norm=norm,
        distillation_token=kind == "deit",
        mask_token=mask_token,
        interpolate=options.interpolation("bicubic"),
        pooling=pooling,
        head=head,
    )
    tensors = _embeddings(kind, mask_axes=(0, 1) if mask_token else None) + tensors
    if kind == "deit":
        tensors.append(
            Tensor(f"{kind}.embeddings.distillation_token", "distillation_token", unit_axis=(0, 1))
        )
    for i in range(blocks):
        name, path = f"{kind}.encoder.layer.{i}", f"blocks/{i}"
        tensors += _separate_attention(name, path, bias=options.get("qkv_bias", True))
        tensors += norm_tensors(f"{name}.layernorm_before", f"{path}/mixer_norm", bias=True)
        tensors += norm_tensors(f"{name}.layernorm_after", f"{path}/feed_forward_norm", bias=True)
        for theirs, ours in (("intermediate.dense", "expand"), ("output.dense", "contract")):
            tensors += dense_tensors(f"{name}.{theirs}", f"{path}/feed_forward/{ours}", bias=True)
    tensors += norm_tensors(f"{kind}.layernorm", "norm", bias=True)
    return as_pretrained(model, dtype, tensors)


def _vit_head(options: Options, width: int) -> tuple[Any, Layer | None, list[Tensor]]:
    """Pooling, head, and tensors of the head, by the tensors or else by the architecture."""
    kind = options.kind
    names = options.get("architectures", None) or ["ViTForImageClassification"]
    teacher = names[0] == "DeiTForImageClassificationWithTeacher"
    classifies = names[0].endswith("ForImageClassification")
    pooler = options.get("pooler_output_size", width), options.get("pooler_act", "tanh")
    if kind == "deit" and options.has("cls_classifier.weight", teacher):
        heads = {"class": "cls_classifier", "distillation": "distillation_classifier"}
        tensors = [
            t
            for ours, theirs in heads.items()
            for t in dense_tensors(theirs, f"head/{ours}", bias=True)
        ]
        return "tokens", distilled_head(width, num_labels(options)), tensors
    if options.has("classifier.weight", classifies):
        head = layers.dense(width, num_labels(options))
        return "token", head, dense_tensors("classifier", "head", bias=True)
    if options.has("pooler.dense.weight", names[0] in ("ViTModel", "DeiTModel")):
        head = serial(dense=layers.dense(width, pooler[0]), act=layers.activation(pooler[1]))
        return "token", head, dense_tensors(f"{kind}.pooler.dense", "head/dense", bias=True)
    return "token", None, []


def dinov2(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """DINOv2, with and without registers."""
    kind, width = options.kind, options.get("hidden_size", 768)
    with_registers = kind == "dinov2_with_registers"
    registers = options.get("num_register_tokens", 4) if with_registers else 0
    mask_token = with_registers or options.get("use_mask_token", True)
    mask_token = options.has("embeddings.mask_token", mask_token)
    norm = functools.partial(layers.layer_norm, eps=options.get("layer_norm_eps", 1e-6))
    scale = functools.partial(layers.layer_scale, initial=options.get("layerscale_value", 1.0))
    backbone = ("apply_layernorm", "out_features", "out_indices", "reshape_hidden_states")
    options.ignore(*backbone, "stage_names")

    hidden = int(width * options.get("mlp_ratio", 4))
    gated = options.get("use_swiglu_ffn", False)
    act = activation(options, "hidden_act", "gelu")
    if gated:  # two thirds, rounded up to a multiple of 8
        act, hidden = "silu", (int(hidden * 2 / 3) + 7) // 8 * 8
    feed_forward = layers.feed_forward(width, hidden, activation=act, gated=gated, bias=True)
    blocks = options.get("num_hidden_layers", 12)
    block = layers.Block(_attention(options, width), feed_forward)

    architectures = options.get("architectures", None) or [""]
    classifies = architectures[0].endswith("ForImageClassification")
    classifies = options.has("classifier.weight", classifies)
    model = image_transformer(
        **_image(options, patch=16 if with_registers else 14),
        width=width,
        blocks=[block] * blocks,
        norm=norm,
        post_norm=scale,
        registers=registers,
        mask_token=mask_token,
        interpolate=options.interpolation("bicubic_antialiased" if with_registers else "bicubic"),
        pooling="token_and_mean" if classifies else "token",
        head=layers.dense(2 * width, num_labels(options)) if classifies else None,
    )
    tensors = _embeddings(kind, mask_axes=(0,) if mask_token else None)
    if registers:
        name = f"{kind}.embeddings.register_tokens"
        tensors.append(Tensor(name, "register_tokens", unit_axis=0))
    mlp = ("weights_in", "weights_out") if gated else ("fc1", "fc2")
    for i in range(blocks):
        name, path = f"{kind}.encoder.layer.{i}", f"blocks/{i}"
        tensors += _separate_attention(name, path, bias=options.get("qkv_bias", True))
        for j, branch in enumerate(("mixer", "feed_forward"), start=1):
            tensors += norm_tensors(f"{name}.norm{j}", f"{path}/{branch}_norm", bias=True)
            scale_name = f"{name}.layer_scale{j}.lambda1"
            tensors.append(Tensor(scale_name, f"{path}/{branch}_post_norm/scale"))
        for theirs, ours in zip(mlp, ("expand", "contract"), strict=True):
            tensors += dense_tensors(
                f"{name}.mlp.{theirs}", f"{path}/feed_forward/{ours}", bias=True
            )
    tensors += norm_tensors(f"{kind}.layernorm", "norm", bias=True)
    if classifies:
        tensors += dense_tensors("classifier", "head", bias=True)
    return as_pretrained(model, dtype, tensors)


def image_tower(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """Image towers of CLIP and SigLIP, alone or from a checkpoint of both towers."""
    siglip = options.kind.startswith("siglip")
    projected = None
    if options.kind in ("clip", "siglip"):
        both, towers = options, ("text_config", "text_config_dict", "vision_config_dict")
        both.ignore(*towers, "logit_scale_init_value", "projection_dim", "initializer_factor")
        vision = dict(both.get("vision_config", {}))
        vision |= both.get("vision_config_dict", {})
        if not siglip and both.has("visual_projection.weight", True):
            projected = both.get("projection_dim", 512)
        options = both.of(vision)
    result = _tower(options, dtype, siglip, projected)
    options.reject_unread()
    return result


def _tower(
    options: Options, dtype: DTypeLike, siglip: bool, projected: int | None
) -> PretrainedModel:
    width, heads = options.get("hidden_size", 768), options.get("num_attention_heads", 12)
    eps = options.get("layer_norm_eps", 1e-6 if siglip else 1e-5)
    norm = functools.partial(layers.layer_norm, eps=eps)
    act = activation(options, "hidden_act", "gelu_pytorch_tanh" if siglip else "quick_gelu")
    feed_forward = layers.feed_forward(
        width, options.get("intermediate_size", 3072), activation=act, gated=False, bias=True
    )
    blocks = options.get("num_hidden_layers", 12)
    options.ignore("projection_dim")
    pooling: Any = "token"
    map_pooling, head = None, None
    if siglip:
        pooled = options.get("vision_use_head", True)
        pooling = "map" if pooled else "none"
        map_pooling = attention_pooling(width, heads, feed_forward, norm=norm) if pooled else None
    else:
        architectures = options.get("architectures", None) or [""]
        with_projection = architectures[0] == "CLIPVisionModelWithProjection"
        if projected is None:
            size = options.get("projection_dim", 512)
            projected = size if options.has("visual_projection.weight", with_projection) else None
        head = None if projected is None else layers.dense(width, projected, bias=False)

    model = image_transformer(
        **_image(options, patch=16 if siglip else 32),
        width=width,
        blocks=[layers.Block(layers.attention(width, heads, fused=False), feed_forward)] * blocks,
        norm=norm,
        class_token=not siglip,
        patch_bias=siglip,
        input_norm=not siglip,
        interpolate=options.interpolation("bicubic"),
        pooling=pooling,
        map_pooling=map_pooling,
        head=head,
    )
    root = "vision_model"
    tensors = [
        Tensor(f"{root}.embeddings.patch_embedding.weight", "patches/kernel", CONV),
        Tensor(f"{root}.embeddings.position_embedding.weight", "pos_embedding"),
    ]
    if siglip:
        tensors.append(Tensor(f"{root}.embeddings.patch_embedding.bias", "patches/bias"))
    else:
        tensors.append(Tensor(f"{root}.embeddings.class_embedding", "class_token"))
        tensors += norm_tensors(f"{root}.pre_layrnorm", "input_norm", bias=True)
    for i in range(blocks):
        name, path = f"{root}.encoder.layers.{i}", f"blocks/{i}"
        for j, branch in enumerate(("mixer", "feed_forward"), start=1):
            tensors += norm_tensors(f"{name}.layer_norm{j}", f"{path}/{branch}_norm", bias=True)
        for theirs, ours in {
            "self_attn.q_proj": "mixer/query",
            "self_attn.k_proj": "mixer/key",
            "self_attn.v_proj": "mixer/value",
            "self_attn.out_proj": "mixer/output",
            "mlp.fc1": "feed_forward/expand",
            "mlp.fc2": "feed_forward/contract",
        }.items():
            tensors += dense_tensors(f"{name}.{theirs}", f"{path}/{ours}", bias=True)
    tensors += norm_tensors(f"{root}.post_layernorm", "norm", bias=True)
    if map_pooling is not None:
        tensors += [
            Tensor(f"{root}.head.probe", "pooling/probe", unit_axis=(0, 1)),
            Tensor(
                f"{root}.head.attention.in_proj_weight",
                "pooling/query_key_value/kernel",
                (1, 0),
            ),
            Tensor(f"{root}.head.attention.in_proj_bias", "pooling/query_key_value/bias"),
        ]
        tensors += norm_tensors(f"{root}.head.layernorm", "pooling/norm", bias=True)
        for theirs, ours in {
            "attention.out_proj": "output",
            "mlp.fc1": "feed_forward/expand",
            "mlp.fc2": "feed_forward/contract",
        }.items():
            tensors += dense_tensors(f"{root}.head.{theirs}", f"pooling/{ours}", bias=True)
    if head is not None:
        tensors += dense_tensors("visual_projection", "head", bias=False)
    return as_pretrained(model, dtype, tensors)


def convnext(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """ConvNeXt, the first and the second version."""
    kind = options.kind
    v2 = kind == "convnextv2"
    blocks = options.get("depths", (3, 3, 9, 3))
    options.require("num_stages", len(blocks))
    options.ignore("image_size", "out_features", "out_indices", "stage_names")
    scale = None if v2 else options.nullable("layer_scale_init_value", 1e-6)
    names = options.get("architectures", None) or ["ForImageClassification"]
    classifies = names[0].endswith("ForImageClassification")
    classifies = options.has("classifier.weight", classifies)
    model = models.convnext(
        num_classes=num_labels(options) if classifies else None,
        in_channels=options.get("num_channels", 3),
        blocks=blocks,
        widths=options.get("hidden_sizes", (96, 192, 384, 768)),
        patch=options.get("patch_size", 4),
        response_norm=v2,
        layer_scale=scale or None,
        activation=activation(options, "hidden_act", "gelu"),
        final_eps=options.get("layer_norm_eps", 1e-12),
    )
    root = f"{kind}.embeddings"
    tensors = conv_tensors(f"{root}.patch_embeddings", "stem/conv")
    tensors += norm_tensors(f"{root}.layernorm", "stem/norm", bias=True)
    for i, depth in enumerate(blocks):
        stage = f"{kind}.encoder.stages.{i}"
        if i:
            name, path = f"{stage}.downsampling_layer", f"stage{i}/downsample"
            tensors += norm_tensors(f"{name}.0", f"{path}/norm", bias=True)
            tensors += conv_tensors(f"{name}.1", f"{path}/conv")
        for j in range(depth):
            name, path = f"{stage}.layers.{j}", f"stage{i}/block{j}/body"
            tensors += conv_tensors(f"{name}.dwconv", f"{path}/conv")
            tensors += norm_tensors(f"{name}.layernorm", f"{path}/norm", bias=True)
            for theirs, ours in (("pwconv1", "expand"), ("pwconv2", "contract")):
                where = f"{path}/feed_forward/{ours}"
                tensors += dense_tensors(f"{name}.{theirs}", where, bias=True)
            if v2:
                where = f"{path}/feed_forward/hidden_norm"
                tensors += [
                    t._replace(unit_axis=(0, 1, 2))
                    for t in norm_tensors(f"{name}.grn", where, bias=True)
                ]
            if scale:
                tensors.append(Tensor(f"{name}.layer_scale_parameter", f"{path}/scale/scale"))
    tensors += norm_tensors(f"{kind}.layernorm", "norm", bias=True)
    tensors += dense_tensors("classifier", "head", bias=True) if classifies else []
    return as_pretrained(model, dtype, tensors)


def conv_tensors(name: str, path: str) -> list[Tensor]:
    """Tensors of a convolution with a bias."""
    return [
        Tensor(f"{name}.weight", f"{path}/kernel", CONV),
        Tensor(f"{name}.bias", f"{path}/bias"),
    ]


def as_pretrained(model: Layer, dtype: DTypeLike, tensors: Sequence[Tensor]) -> PretrainedModel:
    """Attach the names of tensors to a network on images, which computes in ``dtype``."""

    def apply(params: Any, state: Any, x: Array, **options: Any) -> tuple[Array, Any]:
        check_floating("images", x=x)  # integers are pixels that nobody normalized
        return model.apply(params, state, x.astype(dtype), **options)

    return PretrainedModel(model.init, apply, None, None, tuple(tensors))


def num_labels(options: Options) -> int:
    """Number of classes, from ``id2label`` or ``num_labels``."""
    labels: Mapping[str, str] = options.get("id2label", {})
    return int(options.get("num_labels", len(labels) or 2))


def _image(options: Options, *, patch: int = 16) -> dict[str, Any]:
    """Sizes of image and patch, as arguments of `image_transformer`."""
    size, patch = (options.get(*o) for o in (("image_size", 224), ("patch_size", patch)))
    height, width = (size, size) if isinstance(size, int) else size
    sides = (patch, patch) if isinstance(patch, int) else tuple(patch)
    return {"image_shape": (height, width, options.get("num_channels", 3)), "patch": sides}


def _attention(options: Options, width: int) -> Layer:
    return layers.attention(
        width,
        options.get("num_attention_heads", 12),
        bias=options.get("qkv_bias", True),
        output_bias=True,
        fused=False,
    )


def _separate_attention(name: str, path: str, *, bias: bool) -> list[Tensor]:
    tensors = dense_tensors(f"{name}.attention.output.dense", f"{path}/mixer/output", bias=True)
    for part in ("query", "key", "value"):
        theirs = f"{name}.attention.attention.{part}"
        tensors += dense_tensors(theirs, f"{path}/mixer/{part}", bias=bias)
    return tensors


def _embeddings(root: str, *, mask_axes: tuple[int, ...] | None) -> list[Tensor]:
    """Tensors of ViT's embeddings; those of a mask token have axes of length 1."""
    name = f"{root}.embeddings"
    tensors = [
        Tensor(f"{name}.patch_embeddings.projection.weight", "patches/kernel", CONV),
        Tensor(f"{name}.patch_embeddings.projection.bias", "patches/bias"),
        Tensor(f"{name}.cls_token", "class_token", unit_axis=(0, 1)),
        Tensor(f"{name}.position_embeddings", "pos_embedding", unit_axis=0),
    ]
    if mask_axes is not None:
        tensors.append(Tensor(f"{name}.mask_token", "mask_token", unit_axis=mask_axes))
    return tensors
