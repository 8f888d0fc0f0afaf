"""Networks for images: ViT, DeiT, DINOv2, image towers of CLIP and SigLIP, ConvNeXt, as rows."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import Array
from jax.typing import DTypeLike

from fnet import checks, layers, models
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.family import Family, activation, register
from fnet.interop.huggingface.names import mlp, table
from fnet.interop.huggingface.options import Option, Options
from fnet.layer import Layer, serial
from fnet.layers.layer_scale import layer_scale
from fnet.models.vit import Pooling, attention_pooling, distilled_head, image_transformer


class Head(NamedTuple):
    """Layers after the blocks of an image transformer; see `fnet.models.image_transformer`.

    Attributes:
      pooling: Which tokens become features.
      layer: Head on the features, or None.
      fused: With the pooling ``map``, whether one array holds query, key and value.
    """

    pooling: Pooling
    layer: Layer | None = None
    fused: bool = True


def transformer(
    options: Options,
    names: Names,
    dtype: DTypeLike,
    *,
    size: int | Sequence[int],
    channels: int,
    patch: int | Sequence[int],
    width: int,
    blocks: int,
    heads: int,
    hidden: int,
    head: Head,
    activation: str,
    eps: float,
    bias: bool = True,
    fused: bool = False,
    gated: bool = False,
    scale: float | None = None,
    **others: Any,
) -> tuple[Layer, tuple[Any, ...]]:
    """Build an image transformer, for the row of a family.

    ``size`` and ``patch`` are sides. ``fused`` says whether query, key and value, with ``bias`` or
    without, are one array. ``scale`` is the initial value of layer scales, or None. ``others`` are
    further arguments of `fnet.models.image_transformer`.
    """
    del options, names
    norm = functools.partial(layers.layer_norm, eps=eps)
    feed_forward = functools.partial(
        layers.feed_forward, width, hidden, activation=activation, bias=True
    )
    variant = layers.AttentionVariant(output_bias=True)
    attention = layers.attention(width, heads, bias=bias, fused=fused, variant=variant)
    pooling = None
    if head.pooling == "map":
        plain = feed_forward(gated=False)
        pooling = attention_pooling(width, heads, plain, norm=norm, fused=head.fused)
    layer = image_transformer(
        image_shape=(*_sides(size), channels),
        patch=_sides(patch),
        width=width,
        blocks=[layers.Block(attention, feed_forward(gated=gated))] * blocks,
        norm=norm,
        post_norm=None if scale is None else functools.partial(layer_scale, initial=scale),
        pooling=head.pooling,
        map_pooling=pooling,
        head=head.layer,
        **others,
    )
    return _of_floating_images(layer, dtype), ()


def convnext(
    options: Options, names: Names, dtype: DTypeLike, **arguments: Any
) -> tuple[Layer, tuple[Any, ...]]:
    """Build a ConvNeXt, for the row of a family."""
    del options, names
    return _of_floating_images(models.get("convnext", **arguments), dtype), ()


def _of_floating_images(layer: Layer, dtype: DTypeLike) -> Layer:

    def apply(params: Any, state: Any, x: Array, **given: Any) -> tuple[Array, Any]:
        checks.floating("images", x=x)  # integers are pixels that nobody normalized
        return layer.apply(params, state, x.astype(dtype), **given)

    return Layer(layer.init, apply)


def _sides(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _image_tower(options: Options) -> Options:
    options.ignore("text_config*", "logit_scale_init_value", "initializer_factor")
    vision = options.get("vision_config", {}) | options.get("vision_config_dict", {})
    size = options.get("projection_dim", 512)
    architectures = ["CLIPVisionModelWithProjection"]
    return options.of(vision | {"projection_dim": size, "architectures": architectures})


_TEXT_TOWER = re.compile(r"^(text_model\.|text_projection\.|logit_scale$|logit_bias$)")


def num_labels(options: Options) -> int:
    """Number of classes, from ``id2label`` or ``num_labels``."""
    labels: Mapping[str, str] = options.get("id2label", {})
    return int(options.get("num_labels", len(labels) or 2))


def _is(options: Options, suffix: str, default: bool = False) -> bool:
    """Whether the architecture ends so, or the default if config.json has none."""
    names = options.get("architectures", None)
    return str(names[0]).endswith(suffix) if names else default


def _classifies(options: Options, default: bool) -> bool:
    """Whether there is a classifier, by the tensors or else by the architecture."""
    return options.has("classifier.weight", _is(options, "ForImageClassification", default))


def _vit_head(options: Options) -> Head:
    """Two classifiers, one, a pooler, or none."""
    width = options.get("hidden_size", 768)
    size, act = options.get("pooler_output_size", width), options.get("pooler_act", "tanh")
    if options.has("cls_classifier.weight", _is(options, "WithTeacher")):
        return Head("tokens", distilled_head(width, num_labels(options)))
    if _classifies(options, default=True):
        return Head("token", layers.dense(width, num_labels(options)))
    if options.has("pooler.dense.weight", _is(options, "TModel")):  # ViTModel, DeiTModel
        pooler = serial(dense=layers.dense(width, size), act=layers.activation(act))
        return Head("token", pooler)
    return Head("token")


def _dinov2_head(options: Options) -> Head:
    if not _classifies(options, default=False):
        return Head("token")
    width = 2 * options.get("hidden_size", 768)
    return Head("token_and_mean", layers.dense(width, num_labels(options)))


def _dinov2_hidden(options: Options) -> int:
    hidden = int(options.get("hidden_size", 768) * options.get("mlp_ratio", 4))
    if not options.get("use_swiglu_ffn", False):
        return hidden
    return (int(hidden * 2 / 3) + 7) // 8 * 8  # two thirds, rounded up to a multiple of 8


def _dinov2_activation(options: Options) -> str:
    name = str(options.value(activation("hidden_act", "gelu")))
    return "silu" if options.get("use_swiglu_ffn", False) else name


def _clip_head(options: Options) -> Head:
    width, size = options.get("hidden_size", 768), options.get("projection_dim", 512)
    projects = _is(options, "CLIPVisionModelWithProjection")
    if not options.has("visual_projection.weight", projects):
        return Head("token")
    return Head("token", layers.dense(width, size, bias=False))


_VIT_NAMES = table("""
class_token                     ROOT.embeddings.cls_token                      11a
distillation_token              ROOT.embeddings.distillation_token             11a
mask_token                      ROOT.embeddings.mask_token                     11a
register_tokens                 ROOT.embeddings.register_tokens                1ab
pos_embedding                   ROOT.embeddings.position_embeddings            1ab
patches                         ROOT.embeddings.patch_embeddings.projection
blocks/*/mixer_norm             ROOT.encoder.layer.*.layernorm_before
blocks/*/mixer/query            ROOT.encoder.layer.*.attention.attention.query
blocks/*/mixer/key              ROOT.encoder.layer.*.attention.attention.key
blocks/*/mixer/value            ROOT.encoder.layer.*.attention.attention.value
blocks/*/mixer/output           ROOT.encoder.layer.*.attention.output.dense
blocks/*/feed_forward_norm      ROOT.encoder.layer.*.layernorm_after
blocks/*/feed_forward/expand    ROOT.encoder.layer.*.intermediate.dense
blocks/*/feed_forward/contract  ROOT.encoder.layer.*.output.dense
norm                            ROOT.layernorm
head                            classifier
head/class                      cls_classifier
head/distillation               distillation_classifier
head/dense                      ROOT.pooler.dense
""")

_DINOV2_NAMES = _VIT_NAMES | table("""
mask_token                            ROOT.embeddings.mask_token              1a
blocks/*/mixer_norm                   ROOT.encoder.layer.*.norm1
blocks/*/mixer_post_norm/scale        ROOT.encoder.layer.*.layer_scale1.lambda1
blocks/*/feed_forward_norm            ROOT.encoder.layer.*.norm2
blocks/*/feed_forward/expand          ROOT.encoder.layer.*.mlp.fc1
blocks/*/feed_forward/contract        ROOT.encoder.layer.*.mlp.fc2
blocks/*/feed_forward_post_norm/scale ROOT.encoder.layer.*.layer_scale2.lambda1
""")

_SWIGLU_NAMES = mlp("weights_in", "weights_out", "ROOT.encoder.layer.*.mlp")

_TOWER_NAMES = table("""
class_token                      vision_model.embeddings.class_embedding
pos_embedding                    vision_model.embeddings.position_embedding.weight
patches                          vision_model.embeddings.patch_embedding
input_norm                       vision_model.pre_layrnorm
blocks/*/mixer_norm              vision_model.encoder.layers.*.layer_norm1
blocks/*/mixer/query             vision_model.encoder.layers.*.self_attn.q_proj
blocks/*/mixer/key               vision_model.encoder.layers.*.self_attn.k_proj
blocks/*/mixer/value             vision_model.encoder.layers.*.self_attn.v_proj
blocks/*/mixer/output            vision_model.encoder.layers.*.self_attn.out_proj
blocks/*/feed_forward_norm       vision_model.encoder.layers.*.layer_norm2
blocks/*/feed_forward/expand     vision_model.encoder.layers.*.mlp.fc1
blocks/*/feed_forward/contract   vision_model.encoder.layers.*.mlp.fc2
norm                             vision_model.post_layernorm
pooling/probe                    vision_model.head.probe                     11a
pooling/query_key_value/kernel   vision_model.head.attention.in_proj_weight  ba
pooling/query_key_value/bias     vision_model.head.attention.in_proj_bias
pooling/output                   vision_model.head.attention.out_proj
pooling/norm                     vision_model.head.layernorm
pooling/feed_forward/expand      vision_model.head.mlp.fc1
pooling/feed_forward/contract    vision_model.head.mlp.fc2
head                             visual_projection
""")

_CONVNEXT_NAMES = table("""
stem/conv                                  ROOT.embeddings.patch_embeddings
stem/norm                                  ROOT.embeddings.layernorm
stage*/downsample/norm                     ROOT.encoder.stages.*.downsampling_layer.0
stage*/downsample/conv                     ROOT.encoder.stages.*.downsampling_layer.1
stage*/block*/body/conv                    ROOT.encoder.stages.*.layers.*.dwconv
stage*/block*/body/norm                    ROOT.encoder.stages.*.layers.*.layernorm
stage*/block*/body/feed_forward/expand     ROOT.encoder.stages.*.layers.*.pwconv1
stage*/block*/body/feed_forward/hidden_norm ROOT.encoder.stages.*.layers.*.grn  111a
stage*/block*/body/feed_forward/contract   ROOT.encoder.stages.*.layers.*.pwconv2
stage*/block*/body/scale/scale             ROOT.encoder.stages.*.layers.*.layer_scale_parameter
norm                                       ROOT.layernorm
head                                       classifier
""")


def _dinov2_names(options: Options) -> Names:
    swiglu = options.get("use_swiglu_ffn", False)
    return {**_DINOV2_NAMES, **(_SWIGLU_NAMES if swiglu else {})}


_VIT = Family(
    "vit",
    ("ViTForImageClassification", "ViTModel"),
    transformer,
    {
        "size": Option("image_size", 224),
        "channels": Option("num_channels", 3),
        "patch": Option("patch_size", 16),
        "width": Option("hidden_size", 768),
        "blocks": Option("num_hidden_layers", 12),
        "heads": Option("num_attention_heads", 12),
        "hidden": Option("intermediate_size", 3072),
        "head": _vit_head,
        "activation": activation("hidden_act", "gelu"),
        "eps": Option("layer_norm_eps", 1e-12),
        "bias": Option("qkv_bias", True),
        "mask_token": lambda options: options.has("embeddings.mask_token", False),
    },
    _VIT_NAMES,
    prefix="vit.",
    ignored=("encoder_stride",),
    interpolation="bicubic",
)
_DINOV2 = _VIT.like(
    "dinov2",
    "Dinov2Model",
    "Dinov2ForImageClassification",
    prefix="dinov2.",
    names=_dinov2_names,
    patch=Option("patch_size", 14),
    hidden=_dinov2_hidden,
    activation=_dinov2_activation,
    gated=Option("use_swiglu_ffn", False),
    eps=Option("layer_norm_eps", 1e-6),
    scale=Option("layerscale_value", 1.0),
    mask_token=lambda options: options.has(
        "embeddings.mask_token", options.get("use_mask_token", True)
    ),
    head=_dinov2_head,
    ignored=("apply_layernorm", "out_*", "reshape_hidden_states", "stage_names"),
)
_CLIP = _VIT.like(
    "clip_vision_model",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    prefix="vision_model.",
    names=_TOWER_NAMES,
    patch=Option("patch_size", 32),
    activation=activation("hidden_act", "quick_gelu"),
    eps=Option("layer_norm_eps", 1e-5),
    bias=True,
    patch_bias=False,
    input_norm=True,
    mask_token=False,
    head=_clip_head,
    ignored=(),
)
_SIGLIP = _CLIP.like(
    "siglip_vision_model",
    "SiglipVisionModel",
    patch=Option("patch_size", 16),
    activation=activation("hidden_act", "gelu_pytorch_tanh"),
    eps=Option("layer_norm_eps", 1e-6),
    patch_bias=True,
    class_token=False,
    input_norm=False,
    head=lambda options: Head("map" if options.get("vision_use_head", True) else "none"),
    ignored=("projection_dim",),
)
_CONVNEXT = Family(
    "convnext",
    ("ConvNextForImageClassification", "ConvNextModel"),
    convnext,
    {
        "num_classes": lambda o: num_labels(o) if _classifies(o, default=True) else None,
        "in_channels": Option("num_channels", 3),
        "blocks": Option("depths", (3, 3, 9, 3)),
        "widths": Option("hidden_sizes", (96, 192, 384, 768)),
        "patch": Option("patch_size", 4),
        "layer_scale": lambda options: options.nullable("layer_scale_init_value", 1e-6) or None,
        "activation": activation("hidden_act", "gelu"),
        "final_eps": Option("layer_norm_eps", 1e-12),
    },
    _CONVNEXT_NAMES,
    prefix="convnext.",
    ignored=("image_size", "num_stages", "out_features", "out_indices", "stage_names"),
)

register(
    _VIT,
    _VIT.like(
        "deit",
        "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
        "DeiTModel",
        prefix="deit.",
        distillation_token=True,
    ),
    _DINOV2,
    _DINOV2.like(
        "dinov2_with_registers",
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersForImageClassification",
        prefix="dinov2_with_registers.",
        patch=Option("patch_size", 16),
        registers=Option("num_register_tokens", 4),
        mask_token=lambda options: options.has("embeddings.mask_token", True),
        interpolation="bicubic_antialiased",
    ),
    _CLIP,
    _CLIP.like("clip", "CLIPModel", prefix=None, others=_TEXT_TOWER, part=_image_tower),
    _SIGLIP,
    _SIGLIP.like("siglip", "SiglipModel", prefix=None, others=_TEXT_TOWER, part=_image_tower),
    _CONVNEXT,
    _CONVNEXT.like(
        "convnextv2",
        "ConvNextV2ForImageClassification",
        "ConvNextV2Model",
        prefix="convnextv2.",
        layer_scale=None,
        response_norm=True,
    ),
)
