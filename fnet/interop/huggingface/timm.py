"""Networks for images in the names of timm: ViT, DeiT, DINOv2, CLIP, SigLIP, ConvNeXt."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from jax.typing import DTypeLike

from fnet import layers, models
from fnet.interop.huggingface.checkpoint import PretrainedModel, Tensor
from fnet.interop.huggingface.decoders import dense_tensors, norm_tensors
from fnet.interop.huggingface.options import Options
from fnet.interop.huggingface.vision import CONV, as_pretrained, conv_tensors
from fnet.layer import Layer
from fnet.models.convnext import SIZES
from fnet.models.vit import Pooling, attention_pooling, distilled_head, image_transformer

ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "quickgelu": "quick_gelu",
    "silu": "silu",
}
"""Activations by their names in timm."""

_VIT = re.compile(
    r"(?P<family>vit|deit|deit3)_(?P<size>[a-z0-9]+)(?P<distilled>_distilled)?"
    r"_patch(?P<patch>\d+)(?P<plus>_plus)?(_reg(?P<registers>\d))?"
    r"(?P<variant>_clip_quickgelu|_clip|_dinov2|_siglip_gap|_siglip|_gap)?(_(?P<image>\d+))?"
)
_SIZES = {  # width, depth, heads, width of the feed-forward layer divided by the width
    "tiny": (192, 12, 3, 4.0),
    "small": (384, 12, 6, 4.0),
    "medium": (512, 12, 8, 4.0),
    "base": (768, 12, 12, 4.0),
    "large": (1024, 24, 16, 4.0),
    "huge": (1280, 32, 16, 4.0),
    "so400m": (1152, 27, 16, 3.7362),
    "giant": (1408, 40, 16, 48 / 11),
    "giantopt": (1536, 40, 16, 4.0),
    "gigantic": (1664, 48, 16, 64 / 13),
}
_CONVNEXT = re.compile(r"convnext(v2)?_([a-z]+)(_mlp)?")
# Numbers that a model of timm has by its code and not by its name.
_SIGLIP_TANH = {("base", 32), ("so400m", 16), ("giantopt", 16)}


def build(options: Options, dtype: DTypeLike) -> PretrainedModel:
    """Build the network of an ``architecture`` of timm, with the ``model_args`` of its config."""
    args = _arguments(options.kind)
    if args is None:
        raise ValueError(
            f"timm: architecture {options.kind!r} is not supported, only vit_*, deit_*, deit3_* "
            "with the suffixes dinov2, clip, siglip and gap, convnext_* and convnextv2_*"
        )
    options.ignore("architecture", "num_features", "global_pool")
    options.ignore("label_names", "label_descriptions")
    pretrained: Mapping[str, Any] = options.get("pretrained_cfg", {})
    channels, *size = pretrained.get("input_size", (3, 224, 224))
    args |= {"in_chans": channels, "img_size": size}
    args |= {"num_classes": pretrained.get("num_classes", 1000)}
    args |= {"global_pool": pretrained["global_pool"]} if "global_pool" in pretrained else {}
    args |= {"num_classes": options.get("num_classes", args["num_classes"])}
    args |= options.get("model_args", {})
    part = options.of(args, kind=options.kind)
    model = (_convnext if options.kind.startswith("convnext") else _vit)(part, dtype)
    part.reject_unread()
    return model


def _arguments(name: str) -> dict[str, Any] | None:
    """Arguments of timm's constructor for a name, or None if the name is not known."""
    if convnext := _CONVNEXT.fullmatch(name):
        return _convnext_arguments(*convnext.groups())
    match = _VIT.fullmatch(name)
    if match is None or match["size"] not in _SIZES:
        return None
    if match["size"] == "medium" and match["family"] != "deit3":
        return None
    family, size, variant = match["family"], match["size"], match["variant"] or ""
    width, depth, heads, ratio = _SIZES[size]
    args: dict[str, Any] = {"patch_size": int(match["patch"])}
    if match["plus"]:
        width, heads = 896, 14
        if not variant:
            args["init_values"] = 1e-5
    if family == "deit3":
        args |= {"no_embed_class": True, "init_values": 1e-6}
    if variant.startswith("_clip"):
        args |= {"pre_norm": True, "norm_eps": 1e-5}
        args |= {"act_layer": "quick_gelu"} if variant.endswith("quickgelu") else {}
    if variant == "_dinov2":
        args["init_values"] = 1e-5
        if size == "giant":
            width, heads, ratio = 1536, 24, 2.66667 * 2
            args |= {"gated": True, "act_layer": "silu"}
    if variant in ("_siglip", "_siglip_gap", "_gap"):
        args["class_token"] = False
        pooling = {"global_pool": "avg", "fc_norm": False}
        args |= {"global_pool": "map"} if variant == "_siglip" else pooling
    if variant.startswith("_siglip"):
        large_512 = (size, match["image"]) == ("large", "512")
        tanh = (size, args["patch_size"]) in _SIGLIP_TANH or large_512
        args |= {"act_layer": "gelu_tanh"} if tanh else {}
    if variant == "_gap" and size == "base":
        heads = 16 if match["registers"] is None else heads
    if match["registers"] is not None:
        args |= {"reg_tokens": int(match["registers"]), "no_embed_class": True}
        args.pop("fc_norm", None)
    args |= {"distilled": True} if match["distilled"] else {}
    return args | {"embed_dim": width, "depth": depth, "num_heads": heads, "mlp_ratio": ratio}


def _convnext_arguments(v2: str | None, size: str, mlp: str | None) -> dict[str, Any] | None:
    if size == "xxlarge" and not v2:
        args: dict[str, Any] = {"depths": (3, 4, 30, 3), "dims": (384, 768, 1536, 3072)}
        args["norm_eps"] = 1e-5
    elif size in SIZES and (mlp is None or (size, v2) == ("large", None)):
        args = dict(zip(("depths", "dims"), SIZES[size], strict=True))
    else:
        return None
    args |= {"conv_mlp": True} if size in ("atto", "femto", "pico", "nano") else {}
    args |= {"use_grn": True, "ls_init_value": None} if v2 else {}
    return args | ({"head_hidden_size": args["dims"][-1]} if mlp else {})


def _convnext(options: Options, dtype: DTypeLike) -> PretrainedModel:
    blocks, classes = options.get("depths"), options.get("num_classes")
    response_norm, conv_mlp = options.get("use_grn", False), options.get("conv_mlp", False)
    scale, hidden = options.nullable("ls_init_value", 1e-6), options.get("head_hidden_size", None)
    options.ignore("img_size", "drop_rate", "head_init_scale")
    options.require("global_pool", "avg")
    options.require("stem_type", "patch")
    options.require("output_stride", 32)
    options.require("kernel_sizes", 7)
    options.require("conv_bias", True)
    options.require("head_norm_first", False)
    model = models.convnext(
        num_classes=classes or None,
        in_channels=options.get("in_chans"),
        blocks=blocks,
        widths=options.get("dims"),
        patch=options.require("patch_size", 4),
        response_norm=response_norm,
        layer_scale=scale,
        activation=ACTIVATIONS[options.require("act_layer", "gelu", *ACTIVATIONS)],
        eps=options.get("norm_eps", 1e-6),
        head_hidden=hidden,
    )
    tensors = conv_tensors("stem.0", "stem/conv") + norm_tensors("stem.1", "stem/norm", bias=True)
    for i, depth in enumerate(blocks):
        if i:
            name, path = f"stages.{i}.downsample", f"stage{i}/downsample"
            tensors += norm_tensors(f"{name}.0", f"{path}/norm", bias=True)
            tensors += conv_tensors(f"{name}.1", f"{path}/conv")
        for j in range(depth):
            name, path = f"stages.{i}.blocks.{j}", f"stage{i}/block{j}/body"
            tensors += conv_tensors(f"{name}.conv_dw", f"{path}/conv")
            tensors += norm_tensors(f"{name}.norm", f"{path}/norm", bias=True)
            if scale is not None:
                tensors.append(Tensor(f"{name}.gamma", f"{path}/scale/scale"))
            for theirs, ours in (("fc1", "expand"), ("fc2", "contract")):
                kernel, bias = dense_tensors(
                    f"{name}.mlp.{theirs}", f"{path}/feed_forward/{ours}", bias=True
                )
                # A 1x1 convolution is a dense layer.
                tensors += [kernel._replace(unit_axis=(2, 3)) if conv_mlp else kernel, bias]
            if response_norm:
                where = f"{path}/feed_forward/hidden_norm"
                tensors += norm_tensors(f"{name}.mlp.grn", where, bias=True)
    tensors += norm_tensors("head.norm", "norm", bias=True)
    tensors += dense_tensors("head.pre_logits.fc", "hidden/dense", bias=True) if hidden else []
    tensors += dense_tensors("head.fc", "head", bias=True) if classes else []
    return as_pretrained(model, dtype, tensors)


def _vit(options: Options, dtype: DTypeLike) -> PretrainedModel:
    width, heads = options.get("embed_dim"), options.get("num_heads")
    hidden = int(width * options.get("mlp_ratio"))
    act = ACTIVATIONS[options.require("act_layer", "gelu", *ACTIVATIONS)]
    norm = functools.partial(layers.layer_norm, eps=options.get("norm_eps", 1e-6))
    gated, bias = options.get("gated", False), options.get("qkv_bias", True)
    scale = options.get("init_values", None)
    classes, class_token = options.get("num_classes"), options.get("class_token", True)
    registers, distilled = options.get("reg_tokens", 0), options.get("distilled", False)
    pool = options.require("global_pool", "token", "avg", "map", "")
    pre_norm, final_norm = options.get("pre_norm", False), options.get("final_norm", True)
    norm_after = options.get("fc_norm", pool == "avg")
    options.require("pos_embed", "learn")
    options.require("qk_norm", False)
    options.require("pool_include_prefix", False)
    options.ignore("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate")
    options.ignore("attn_drop_rate", "weight_init", "fix_init", "dynamic_img_size")
    if norm_after and pool == "map":
        raise ValueError(f"{options.kind}: fc_norm with global_pool 'map' is not supported")

    # Packed, a gated layer has half the hidden width.
    feed_forward = layers.feed_forward(
        width, hidden // 2 if gated else hidden, activation=act, gated=gated, bias=True
    )
    attention = layers.attention(width, heads, bias=bias, output_bias=True)
    blocks = options.get("depth")
    pooling: Pooling
    if distilled:
        pooling = "tokens"
    elif pool == "avg":
        pooling = "mean" if norm_after else "mean_of_norm"
    else:
        pooling = {"token": "token", "map": "map", "": "none"}[pool]  # type: ignore[assignment]
    head: Layer | None = None
    if classes:
        head = (distilled_head if distilled else layers.dense)(width, classes)
    elif distilled:
        raise ValueError(f"{options.kind}: num_classes 0 is not supported for a distilled model")
    pool_mlp = layers.feed_forward(width, hidden, activation=act, gated=False, bias=True)
    size, patch = options.get("img_size"), options.get("patch_size")
    height_width = (size, size) if isinstance(size, int) else tuple(size)
    model = image_transformer(
        image_shape=(*height_width, options.get("in_chans", 3)),
        patch=patch if isinstance(patch, int) else tuple(patch),
        width=width,
        blocks=[layers.Block(attention, feed_forward)] * blocks,
        class_token=class_token,
        distillation_token=distilled,
        registers=registers,
        positions="patches" if options.get("no_embed_class", False) else "all",
        interpolate=options.interpolation("bicubic_antialiased"),
        patch_bias=not pre_norm,
        norm=norm,
        input_norm=pre_norm,
        final_norm=final_norm,
        post_norm=None if scale is None else functools.partial(layers.layer_scale, initial=scale),
        pooling=pooling,
        map_pooling=(
            attention_pooling(width, heads, pool_mlp, norm=norm, fused=False)
            if pool == "map"
            else None
        ),
        head=head,
    )

    tensors = [
        Tensor("patch_embed.proj.weight", "patches/kernel", CONV),
        Tensor("pos_embed", "pos_embedding", unit_axis=0),
    ]
    tensors += [] if pre_norm else [Tensor("patch_embed.proj.bias", "patches/bias")]
    tensors += [Tensor("cls_token", "class_token", unit_axis=(0, 1))] if class_token else []
    tensors += [Tensor("dist_token", "distillation_token", unit_axis=(0, 1))] if distilled else []
    tensors += [Tensor("reg_token", "register_tokens", unit_axis=0)] if registers else []
    tensors += norm_tensors("norm_pre", "input_norm", bias=True) if pre_norm else []
    for i in range(blocks):
        name, path = f"blocks.{i}", f"blocks/{i}"
        for j, branch in enumerate(("mixer", "feed_forward"), start=1):
            tensors += norm_tensors(f"{name}.norm{j}", f"{path}/{branch}_norm", bias=True)
            if scale is not None:
                tensors.append(Tensor(f"{name}.ls{j}.gamma", f"{path}/{branch}_post_norm/scale"))
        tensors += dense_tensors(f"{name}.attn.qkv", f"{path}/mixer/query_key_value", bias=bias)
        tensors += dense_tensors(f"{name}.attn.proj", f"{path}/mixer/output", bias=True)
        tensors += dense_tensors(f"{name}.mlp.fc1", f"{path}/feed_forward/expand", bias=True)
        tensors += dense_tensors(f"{name}.mlp.fc2", f"{path}/feed_forward/contract", bias=True)
    if final_norm:
        tensors += norm_tensors("fc_norm" if norm_after else "norm", "norm", bias=True)
    if pool == "map":
        tensors.append(Tensor("attn_pool.latent", "pooling/probe", unit_axis=(0, 1)))
        for theirs, ours in {
            "q": "query",
            "kv": "key_value",
            "proj": "output",
            "mlp.fc1": "feed_forward/expand",
            "mlp.fc2": "feed_forward/contract",
        }.items():
            tensors += dense_tensors(f"attn_pool.{theirs}", f"pooling/{ours}", bias=True)
        tensors += norm_tensors("attn_pool.norm", "pooling/norm", bias=True)
    if classes:
        tensors += dense_tensors("head", "head/class" if distilled else "head", bias=True)
    if distilled:
        tensors += dense_tensors("head_dist", "head/distillation", bias=True)
    return as_pretrained(model, dtype, tensors)
