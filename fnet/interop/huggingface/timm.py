"""Networks for images in the names of timm: ViT, DeiT, DINOv2, CLIP, SigLIP, ConvNeXt."""

import re
from collections.abc import Mapping
from typing import Any

from fnet import layers
from fnet.interop.huggingface.checkpoint import Names
from fnet.interop.huggingface.family import FAMILIES, Family, activation
from fnet.interop.huggingface.names import table
from fnet.interop.huggingface.options import Option, Options
from fnet.interop.huggingface.vision import Head, convnext, transformer
from fnet.models.convnext import SIZES
from fnet.models.vit import distilled_head

_VIT_NAME = re.compile(
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
_CONVNEXT_NAME = re.compile(r"convnext(v2)?_([a-z]+)(_mlp)?")
# Numbers that a model of timm has by its code and not by its name.
_SIGLIP_TANH = {("base", 32), ("so400m", 16), ("giantopt", 16)}


def _arguments(name: str) -> dict[str, Any] | None:
    if convnext := _CONVNEXT_NAME.fullmatch(name):
        return _convnext_arguments(*convnext.groups())
    match = _VIT_NAME.fullmatch(name)
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


def family_of(config: Mapping[str, Any]) -> Family:
    """Look up the family of a ``config.json``, of transformers or of timm, or raise ValueError."""
    kind = config.get("model_type")
    if kind is not None or "architecture" not in config:
        if kind not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(
                f"huggingface: model_type {kind!r} is not supported, only {known}; register your "
                "own with fnet.interop.huggingface.register, for the program in a file of "
                "FNET_PLUGINS (docs/how_to/add_a_family.md)"
            )
        return FAMILIES[kind]
    architecture = str(config["architecture"])
    if _arguments(architecture) is None:
        raise ValueError(
            f"timm: architecture {architecture!r} is not supported, only vit_*, deit_*, deit3_* "
            "with the suffixes dinov2, clip, siglip and gap, convnext_* and convnextv2_*"
        )
    return _CONVNEXT if architecture.startswith("convnext") else _VIT


def _part(options: Options) -> Options:
    """Return the arguments of timm's constructor: by the name, or in ``model_args``."""
    options.ignore("architecture", "num_features", "global_pool", "label_names")
    options.ignore("label_descriptions")
    pretrained: Mapping[str, Any] = options.get("pretrained_cfg", {})
    channels, *size = pretrained.get("input_size", (3, 224, 224))
    args = _arguments(options.kind) or {}
    args |= {"in_chans": channels, "img_size": size}
    args |= {"global_pool": pretrained["global_pool"]} if "global_pool" in pretrained else {}
    args["num_classes"] = options.get("num_classes", pretrained.get("num_classes", 1000))
    return options.of(args | options.get("model_args", {}))


def _hidden(options: Options) -> int:
    hidden = int(options.get("embed_dim") * options.get("mlp_ratio"))
    # Packed, a gated layer has half the hidden width.
    return hidden // 2 if options.get("gated", False) else hidden


def _norm_after(options: Options) -> bool:
    pool = options.get("global_pool", "token")
    after = bool(options.get("fc_norm", pool == "avg"))
    if after and pool == "map":
        raise ValueError(f"{options.kind}: fc_norm with global_pool 'map' is not supported")
    return after


def _head(options: Options) -> Head:
    width, classes = options.get("embed_dim"), options.get("num_classes")
    if options.get("distilled", False):
        if not classes:
            raise ValueError(
                f"{options.kind}: num_classes 0 is not supported for a distilled model"
            )
        return Head("tokens", distilled_head(width, classes))
    mean = "mean" if _norm_after(options) else "mean_of_norm"
    poolings: Any = {"token": "token", "avg": mean, "map": "map", "": "none"}
    pooling = poolings[options.require("global_pool", "token", "avg", "map", "")]
    return Head(pooling, layers.dense(width, classes) if classes else None, fused=False)


_VIT_NAMES = table("""
class_token                            cls_token            11a
distillation_token                     dist_token           11a
register_tokens                        reg_token            1ab
pos_embedding                          pos_embed            1ab
patches                                patch_embed.proj
input_norm                             norm_pre
blocks/*/mixer_norm                    blocks.*.norm1
blocks/*/mixer/query_key_value         blocks.*.attn.qkv
blocks/*/mixer/output                  blocks.*.attn.proj
blocks/*/mixer_post_norm/scale         blocks.*.ls1.gamma
blocks/*/feed_forward_norm             blocks.*.norm2
blocks/*/feed_forward/expand           blocks.*.mlp.fc1
blocks/*/feed_forward/contract         blocks.*.mlp.fc2
blocks/*/feed_forward_post_norm/scale  blocks.*.ls2.gamma
norm                                   norm
pooling/probe                          attn_pool.latent     11a
pooling/query                          attn_pool.q
pooling/key_value                      attn_pool.kv
pooling/output                         attn_pool.proj
pooling/norm                           attn_pool.norm
pooling/feed_forward/expand            attn_pool.mlp.fc1
pooling/feed_forward/contract          attn_pool.mlp.fc2
head                                   head
head/class                             head
head/distillation                      head_dist
""")

_CONVNEXT_NAMES = table("""
stem/conv                                    stem.0
stem/norm                                    stem.1
stage*/downsample/norm                       stages.*.downsample.0
stage*/downsample/conv                       stages.*.downsample.1
stage*/block*/body/conv                      stages.*.blocks.*.conv_dw
stage*/block*/body/norm                      stages.*.blocks.*.norm
stage*/block*/body/scale/scale               stages.*.blocks.*.gamma
stage*/block*/body/feed_forward/expand       stages.*.blocks.*.mlp.fc1
stage*/block*/body/feed_forward/hidden_norm  stages.*.blocks.*.mlp.grn
stage*/block*/body/feed_forward/contract     stages.*.blocks.*.mlp.fc2
norm                                         head.norm
hidden/dense                                 head.pre_logits.fc
head                                         head.fc
""")

_CONV_MLP_NAMES = table("""
stage*/block*/body/feed_forward/expand       stages.*.blocks.*.mlp.fc1  ba11
stage*/block*/body/feed_forward/contract     stages.*.blocks.*.mlp.fc2  ba11
""")


def _vit_names(options: Options) -> Names:
    return {**_VIT_NAMES, "norm": "fc_norm" if _norm_after(options) else "norm"}


def _convnext_names(options: Options) -> Names:
    # A 1x1 convolution is a dense layer.
    convs = options.get("conv_mlp", False)
    return {**_CONVNEXT_NAMES, **(_CONV_MLP_NAMES if convs else {})}


_VIT = Family(
    "vit",
    (),
    transformer,
    {
        "size": Option("img_size"),
        "channels": Option("in_chans", 3),
        "patch": Option("patch_size", 16),
        "width": Option("embed_dim"),
        "blocks": Option("depth"),
        "heads": Option("num_heads"),
        "hidden": _hidden,
        "head": _head,
        "activation": activation("act_layer", "gelu"),
        "eps": Option("norm_eps", 1e-6),
        "bias": Option("qkv_bias", True),
        "fused": True,
        "gated": Option("gated", False),
        "patch_bias": lambda options: not options.get("pre_norm", False),
        "scale": Option("init_values", None),
        "class_token": Option("class_token", True),
        "distillation_token": Option("distilled", False),
        "registers": Option("reg_tokens", 0),
        "positions": lambda o: "patches" if o.get("no_embed_class", False) else "all",
        "input_norm": Option("pre_norm", False),
        "final_norm": Option("final_norm", True),
    },
    _vit_names,
    prefix=None,
    part=_part,
    ignored=("*drop_rate", "weight_init", "fix_init", "dynamic_img_size", "global_pool"),
    supported={"pos_embed": ("learn",), "qk_norm": (False,), "pool_include_prefix": (False,)},
    interpolation="bicubic_antialiased",
)

_CONVNEXT = Family(
    "convnext",
    (),
    convnext,
    {
        "num_classes": lambda options: options.get("num_classes") or None,
        "in_channels": Option("in_chans"),
        "blocks": Option("depths"),
        "widths": Option("dims"),
        "layer_scale": Option("ls_init_value", 1e-6, nullable=True),
        "response_norm": Option("use_grn", False),
        "activation": activation("act_layer", "gelu"),
        "eps": Option("norm_eps", 1e-6),
        "head_hidden": Option("head_hidden_size", None),
    },
    _convnext_names,
    prefix=None,
    part=_part,
    ignored=("img_size", "*drop_rate", "head_init_scale"),
    supported={
        "patch_size": (4,),
        "global_pool": ("avg",),
        "stem_type": ("patch",),
        "output_stride": (32,),
        "kernel_sizes": (7,),
        "conv_bias": (True,),
        "head_norm_first": (False,),
    },
)
