"""Families of published weights of convolutional networks: names of arrays, and what a file holds.

A network is a list of `Tensor`, the names and layouts of its arrays in a file, as for
`fnet.interop.huggingface`. `recognize` reads the network of a file from its names and shapes. Each
family is a row of `FAMILIES`.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fnet.interop.huggingface.checkpoint import KERNELS, SUFFIXES, Tensor, layer_tensor
from fnet.models import VARIANTS
from fnet.models.blocks import STAGES, STEMS
from fnet.models.efficientnet import Stage
from fnet.models.resnet import BASIC
from fnet.optim import CLASSIFIERS

NAMES = ("reference", "torchvision", "timm")
"""Naming schemes: mapillary/inplace_abn for its networks; torchvision for ResNets, DenseNets and
DeepLabV3, which timm names alike; both for EfficientNets, MobileNetV3s, RegNets and Swins."""

Shapes = Mapping[str, tuple[int, ...]]
"""``{key: shape}`` of a file, in torch's layouts."""

Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]


def _block(m: re.Match[str]) -> str:
    return f"mod{int(m[1]) + 1}.block{int(m[2]) + 1}."


# fnet's names are the reference's, with two exceptions: ResNets have torchvision's names, and each
# layer of a DenseNet contains its two convolutions, where the reference has two lists of them.
_REFERENCE: Rules = (
    (r"layer(\d)\.(\d+)\.(?=conv|bn)", lambda m: f"{_block(m)}convs."),
    (r"layer(\d)\.(\d+)\.downsample\.0\.", lambda m: f"{_block(m)}proj_conv."),
    (r"layer(\d)\.(\d+)\.downsample\.1\.", lambda m: f"{_block(m)}proj_bn."),
    (r"^(body\.)?(?=(conv|bn)\d)", r"\1mod1."),
    (r"^fc\.", "classifier.fc."),
    (r"(mod\d)\.(\d+)\.(convs[13])\.", r"\1.\3.\2."),
)
_DEEP_STEM: Rules = (
    (r"^(body\.)?conv([123])\.", lambda m: f"{m[1] or ''}conv1.{3 * int(m[2]) - 3}."),
    (r"^(body\.)?bn([12])\.", lambda m: f"{m[1] or ''}conv1.{3 * int(m[2]) - 2}."),
    (r"^(body\.)?bn3\.", r"\1bn1."),
)
_DENSENET: Rules = (
    (r"\bmod1\.(conv|bn)1\.", lambda m: f"features.{'conv' if m[1] == 'conv' else 'norm'}0."),
    (
        r"\bmod(\d)\.(\d+)\.convs([13])\.(bn|conv)\.",
        lambda m: (
            f"features.denseblock{int(m[1]) - 1}.denselayer{int(m[2]) + 1}."
            f"{'norm' if m[4] == 'bn' else 'conv'}{1 if m[3] == '1' else 2}."
        ),
    ),
    (r"\btra(\d)\.bn\.", lambda m: f"features.transition{int(m[1]) - 1}.norm."),
    (r"\btra(\d)\.conv\.", lambda m: f"features.transition{int(m[1]) - 1}.conv."),
    (r"\bbn_out\.", "features.norm5."),
    (r"\bclassifier\.fc\.", "classifier."),
)
_DEEPLAB: Rules = (
    (r"^body\.", "backbone."),
    (r"^head\.", "classifier."),
    (r"^cls\.", "classifier.4."),
)


def _table(text: str) -> dict[str, Rules]:
    """Read rules from lines with a pattern and what replaces it in torchvision and in timm."""
    patterns, *columns = zip(*(line.split() for line in text.strip().splitlines()), strict=True)
    rules = [tuple(r for r in zip(patterns, c, strict=True) if r[1] != "-") for c in columns]
    return {"torchvision": rules[0], "timm": rules[1]}


_SWIN = _table(r"""
^patches\.conv\.                            features.0.0.  patch_embed.proj.
^patches\.layer_norm\.                      features.0.2.  patch_embed.norm.
^(down\d)\.layer_norm\.                     \1.norm.       \1.norm.
\.attention\.body\.layer_norm\.             .norm1.        .norm1.
\.feed_forward\.body\.layer_norm\.          .norm2.        .norm2.
\.attention\.body\.mixer\.query_key_value\. .attn.qkv.     .attn.qkv.
\.attention\.body\.mixer\.output\.          .attn.proj.    .attn.proj.
\.attention.*_bias\.weight .attn.relative_position_bias_table .attn.relative_position_bias_table
\.feed_forward\.body\.mixer\.expand\.       .mlp.0.        .mlp.fc1.
\.feed_forward\.body\.mixer\.contract\.     .mlp.3.        .mlp.fc2.
^stage(\d+)\.                              -              layers.\1.blocks.
^down(\d+)\.                               -              layers.\1.downsample.
^head\.                                    -              head.fc.
""")
_SWIN["torchvision"] += (
    (r"^stage(\d+)\.", lambda m: f"features.{2 * int(m[1]) + 1}."),
    (r"^down(\d+)\.", lambda m: f"features.{2 * int(m[1])}."),
)
_REGNET = _table(r"""
^stem\.conv\.          stem.0.                          stem.conv.
^stem\.bn\.            stem.1.                          stem.bn.
^layer(\d)\.(\d+)\.    trunk_output.block\1.block\1-\2.  -
\.conv1\.              .f.a.0.                          .conv1.conv.
\.bn1\.                .f.a.1.                          .conv1.bn.
\.conv2\.              .f.b.0.                          .conv2.conv.
\.bn2\.                .f.b.1.                          .conv2.bn.
\.conv3\.              .f.c.0.                          .conv3.conv.
\.bn3\.                .f.c.1.                          .conv3.bn.
\.se\.reduce\.         .f.se.fc1.                       .se.fc1.
\.se\.expand\.         .f.se.fc2.                       .se.fc2.
\.downsample\.0\.      .proj.0.                         .downsample.conv.
\.downsample\.1\.      .proj.1.                         .downsample.bn.
^fc\.                  fc.                              head.fc.
""")
_REGNET["timm"] += ((r"^layer(\d)\.(\d+)\.", lambda m: f"s{m[1]}.b{int(m[2]) + 1}."),)
_EFFICIENTNET = _table(r"""
^stem\.conv\.     features.0.0.     conv_stem.
^stem\.bn\.       features.0.1.     bn1.
^last\.conv\.     features.LAST.0.  conv_head.
^last\.bn\.       features.LAST.1.  bn2.
^classifier\.     classifier.1.     -
""")
_MOBILENET = _table(r"""
^stem\.conv\.     features.0.0.     conv_stem.
^stem\.bn\.       features.0.1.     bn1.
^last\.conv\.     features.LAST.0.  blocks.LAST.0.conv.
^last\.bn\.       features.LAST.1.  blocks.LAST.0.bn1.
^classifier\.     classifier.3.     -
^hidden\.dense\.  classifier.0.     conv_head.
""")
_OLD_DENSENET = re.compile(r"(\bdenselayer\d+\.(?:norm|conv))\.([12])\.")
_MAX_PREFIXES = 100
_CLASSIFIER = re.compile(r"(fc|classifier|classifier\.fc|cls|head)\.(kernel|bias)")
_TORCH_HEAD = re.compile(r"(fc|classifier|head|cls|aux_classifier)\.")


class Weights(NamedTuple):
    """Contents of a file of weights, by its names and shapes.

    Attributes:
      title: publisher and name, such as ``"torchvision's wide_resnet50_2"``.
      model: network for `fnet.models.get` without its depth, such as ``"resnet"``.
      options: options of the network that names and shapes show.
      variant: name for `fnet.models.get`; None if there is none.
      norm, activation: norm and activation that the publisher trains with.
      classes: number of classes; None without a classifier.
    """

    title: str
    model: str
    options: Mapping[str, Any] = {}
    variant: str | None = None
    norm: str | None = None
    activation: str | None = None
    classes: int | None = None


def name_tensors(variables: Mapping[str, Any], names: str) -> tuple[Tensor, ...]:
    """Name a network's arrays, such as ``"layer1.0.bn1.gamma"``, as a file does.

    ``names`` is one of `NAMES`, or ``"fnet"`` for the names and layouts of the network itself. It
    is a ValueError if networks in this naming scheme lack an array.
    """
    if names == "fnet":
        return tuple(Tensor(name, name.replace(".", "/"), a.shape) for name, a in variables.items())
    rules = _rules(tuple(variables))
    if names not in rules:
        raise ValueError(f"to_torch: the network has no counterpart with names of {names}")
    return tuple(_tensor(name, array, rules[names]) for name, array in variables.items())


def _tensor(name: str, array: Any, rules: Rules) -> Tensor:
    module, _, last = name.rpartition(".")
    rank = len(array.shape)
    if last not in SUFFIXES:
        raise ValueError(
            f"to_torch: {name} has no name in torch; only image networks are supported, "
            f"whose arrays are called {', '.join(SUFFIXES)}"
        )
    if last == "kernel" and rank not in KERNELS:
        raise ValueError(
            f"to_torch: {name} must be a dense or 2d convolution kernel, got shape {array.shape}"
        )
    # In fnet, group norm and its activation are two layers.
    tensor = layer_tensor(module.removesuffix(".norm"), name.replace(".", "/"), array.shape)
    key = tensor.name
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    is_hidden = key == "conv_head.weight" and rank == 2  # a 1x1 convolution of pooled features
    return tensor._replace(name=key, layout="ba11" if is_hidden else tensor.layout)


class Family(NamedTuple):
    """Networks that name their arrays alike.

    Attributes:
      model: their function in `fnet.models`, whose variants they are.
      title: what they are called.
      marks: pattern of an array that these networks have, and those of later rows do not.
      rules: ``{naming: rules}`` that rename their arrays, or a function of the names.
      files: ``{publisher: (variants, weights)}``. The first pattern matches the names of the
        publisher's variants. The second one matches the weights that compute the output of a block,
        with groups for the number of the stage, of the block, and for their order in the block.
      norm, activation: what the publishers train with, as for `Weights`.
    """

    model: str
    title: str
    marks: str
    rules: Mapping[str, Rules] | Callable[[Sequence[str]], Mapping[str, Rules]]
    files: Mapping[str, tuple[str, str]] = {}
    norm: str | None = "batch"
    activation: str | None = None


def _rules(variables: Sequence[str]) -> Mapping[str, Rules]:
    family = next((f for f in FAMILIES if _has(variables, f.marks)), FAMILIES[-1])
    return family.rules(variables) if callable(family.rules) else family.rules


def _resnet_rules(variables: Sequence[str]) -> Mapping[str, Rules]:
    dense = _has(variables, r"^(body\.)?tra2\.") and _has(variables, r"^(body\.)?mod1\.bn1\.")
    has_layers = _has(variables, r"^(body\.)?layer1\.")
    other_head = _has(variables, "^head") and not _has(variables, r"^head\.0\.convs\.")
    if other_head or not (dense or has_layers):
        return {"reference": _REFERENCE}
    deep = _DEEP_STEM if _has(variables, r"^(body\.)?conv3\.") else ()
    torchvision = (deep if has_layers else _DENSENET) + _DEEPLAB
    # inplace_abn has neither the shortcut of timm, nor torchvision's stem of a DenseNet and head.
    if dense or _has(variables, r"^head|downsample\.2\."):
        return {"torchvision": torchvision}
    return {"reference": _REFERENCE, "torchvision": torchvision, "timm": torchvision}


_PARTS = ("expand", "spatial", "fused", "se", "project")


def _efficientnet_rules(names: str, variables: Sequence[str]) -> Rules:
    """Name the parts of each block by their number, which depends on the parts that there are."""
    pattern = re.compile(r"stage(\d+)\.(\d+)\.body\.(\w+)\.")
    parts: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for name in variables:
        if m := pattern.match(name):
            parts[int(m[1]), int(m[2])].add(m[3])
    numbers = {block: i for i, block in enumerate(sorted(parts))}
    is_mobile, torchvision = _has(variables, r"^hidden\."), names == "torchvision"
    last = max(stage for stage, _ in parts) + 2
    inner = {"conv": "0", "bn": "1", "reduce": "fc1", "expand": "fc2"}

    def part(m: re.Match[str]) -> str:
        block, name, layer = (int(m[1]), int(m[2])), m[3], m[4]
        own = [p for p in _PARTS if p in parts[block]]
        if torchvision:
            where = f"{numbers[block] + 1}" if is_mobile else f"{block[0] + 1}.{block[1]}"
            return f"features.{where}.block.{own.index(name)}.{inner[layer]}."
        where = f"blocks.{block[0]}.{block[1]}."
        if name == "se":
            return f"{where}se.conv_{layer}."
        convs = [p for p in own if p != "se"]
        if layer == "bn":
            return f"{where}bn{convs.index(name) + 1}."
        return (
            where
            + {
                "expand": "conv_pw.",
                "spatial": "conv_dw.",
                "fused": "conv." if len(convs) == 1 else "conv_exp.",
                "project": "conv_pw." if convs[0] == "spatial" else "conv_pwl.",
            }[name]
        )

    if is_mobile:
        last = len(numbers) + 1 if torchvision else last - 1
    others = (_MOBILENET if is_mobile else _EFFICIENTNET)[names]
    return (
        (r"^stage(\d+)\.(\d+)\.body\.(\w+)\.(\w+)\.", part),
        *((pattern, str(name).replace("LAST", str(last))) for pattern, name in others),
    )


def _has(names: Iterable[str], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in names)


FAMILIES = (
    Family(
        "efficientnet",
        "EfficientNet, EfficientNetV2, MobileNetV3",
        r"^stage0\.0\.body\.",
        lambda variables: {n: _efficientnet_rules(n, variables) for n in ("torchvision", "timm")},
        {
            "torchvision": (
                r"efficientnet_(b|v2)|mobilenet_v3",
                r"features\.(\d+)\.(?:(\d+)\.)?block\.(\d)\.0\.weight",
            ),
            "timm": (
                r"efficientnet_b|tf_|mobilenetv3",
                r"blocks\.(\d+)\.(\d+)\.(conv|conv_pwl?)\.weight",
            ),
        },
    ),
    Family(
        "regnet",
        "RegNet",
        r"^stem\.bn\.",
        _REGNET,
        {
            "torchvision": (
                "regnet_",
                r"trunk_output\.block(\d)\.block\d-(\d+)\.f\.(c)\.0\.weight",
            ),
            "timm": ("regnet[xy]_", r"s(\d)\.b(\d+)\.(conv3)\.conv\.weight"),
        },
        activation="relu",
    ),
    Family(
        "swin",
        "Swin",
        r"^patches\.conv\.",
        _SWIN,
        {
            "torchvision": ("swin_.$", r"features\.(\d)\.(\d+)\.attn\.(proj)\.weight"),
            "timm": ("swin_..", r"layers\.(\d)\.blocks\.(\d+)\.attn\.(proj)\.weight"),
        },
        norm=None,
    ),
    Family(
        "resnet",
        "ResNet, ResNeXt and Wide ResNet with the suffixes c, d, s and t, DenseNet, DeepLabV3",
        "",
        _resnet_rules,
    ),
)
"""Rows of all families; the first one whose ``marks`` fit has a network. Networks that are named by
their depth have readers of their own, because their options may be others than a variant's."""


def namings(variables: Iterable[str]) -> tuple[str, ...]:
    """Naming schemes of `NAMES` that have all of a network's arrays."""
    return tuple(_rules(tuple(variables)))


def is_head(name: str) -> bool:
    """Whether an array of a network belongs to what is new for other classes."""
    return name.split(".")[0] in CLASSIFIERS


def is_classifier(name: str) -> bool:
    """Whether an array of a network belongs to the layer that computes the logits."""
    return _CLASSIFIER.fullmatch(name) is not None


def is_torch_head(key: str) -> bool:
    """Whether an array of a file belongs to the classifier or the head of its network."""
    return _TORCH_HEAD.match(key) is not None


def current_key(key: str) -> str:
    """Rename a key of torchvision's published DenseNets, as torchvision does."""
    return _OLD_DENSENET.sub(r"\1\2.", key)


def recognize(shapes: Shapes) -> Weights | None:
    """Recognize the network of a file by the shapes of its arrays; None if it is unknown.

    Shapes are in torch's layouts, and keys may have a prefix.
    """
    for prefix in prefixes(shapes):
        part = {k.removeprefix(prefix): s for k, s in shapes.items() if k.startswith(prefix)}
        if (weights := _recognize(part)) is not None:
            if len(part) < len(shapes) and any(s.startswith("backbone.") for s in shapes):
                return weights._replace(title=f"{weights.title} in a larger network")
            return weights
    return None


def shapes_of(given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays, as `recognize` takes them."""
    return {key: tuple(a.shape) for key, a in given.items()}


def prefixes(keys: Iterable[str]) -> list[str]:
    """Return the prefixes that a wrapper or a larger network may have put before the keys."""
    parts = [key.split(".") for key in keys]
    one = {f"{p[0]}." for p in parts if len(p) > 1}
    two = {f"{p[0]}.{p[1]}." for p in parts if len(p) > 2}
    return ["", *sorted(one), *(sorted(two) if len(two) < _MAX_PREFIXES else [])]


def _recognize(shapes: Shapes) -> Weights | None:
    readers = [_read_deeplab, _read_densenet, _read_reference, _read_resnet]
    readers += [
        functools.partial(_read_variant, family, publisher)
        for family in FAMILIES
        for publisher in family.files
    ]
    return next((found for read in readers if (found := read(shapes)) is not None), None)


def _read_deeplab(shapes: Shapes) -> Weights | None:
    for prefix, head, logits, publisher in (
        ("body.", "head.map_convs.0.weight", "cls", "mapillary/inplace_abn's"),
        ("backbone.", "classifier.0.convs.0.0.weight", "classifier.4", "torchvision's"),
    ):
        if head not in shapes:
            continue
        body = _recognize(
            {k.removeprefix(prefix): s for k, s in shapes.items() if k.startswith(prefix)}
        )
        if body is not None:
            options: dict[str, Any] = {"backbone": body.variant, "head": "sum"}
            if prefix == "backbone.":
                options |= {"head": "concat", "dilate_first": False}
            return body._replace(
                title=f"{publisher} DeepLabV3 on {body.variant}",
                model="deeplab",
                options=options,
                variant=None,
                classes=_classes(shapes, logits),
            )
    return None


def _classes(shapes: Shapes, *layers: str) -> int | None:
    return next((shapes[f"{n}.weight"][0] for n in layers if f"{n}.weight" in shapes), None)


def _count(shapes: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Blocks per stage, where the pattern has a group for the stage and one for the block."""
    stages = defaultdict(set)
    for key in shapes:
        if match := re.match(pattern, key):
            stages[int(match[1])].add(match[2])
    return tuple(len(stages[stage]) for stage in sorted(stages))


def _depth(network: str, blocks: tuple[int, ...]) -> int | None:
    return next((depth for depth, counts in STAGES[network].items() if counts == blocks), None)


def _read_densenet(shapes: Shapes) -> Weights | None:
    if "features.denseblock1.denselayer1.conv1.weight" not in shapes:
        return None
    blocks = _count(shapes, r"features\.denseblock(\d)\.denselayer(\d+)\.")
    depth = _depth("densenet", blocks)
    if depth is None or "features.conv1.weight" in shapes:  # another depth, or a deep stem
        return None
    growth = shapes["features.denseblock1.denselayer1.conv2.weight"][0]
    return Weights(
        title=f"torchvision's densenet{depth}",
        model="densenet",
        options={"depth": depth, "growth": growth, "stem_norm": True, "stem": "7x7"},
        variant=f"densenet{depth}",
        norm="batch",
        activation="relu",
        classes=_classes(shapes, "classifier"),
    )


def _read_reference(shapes: Shapes) -> Weights | None:
    publisher = "mapillary/inplace_abn's"
    options: dict[str, Any]
    stem = {"stem": "3x3" if "mod1.conv3.weight" in shapes else "7x7"}
    if "tra2.conv.weight" in shapes and "mod2.convs3.0.conv.weight" in shapes:
        depth = _depth("densenet", _count(shapes, r"mod(\d)\.convs1\.(\d+)\."))
        growth = shapes["mod2.convs3.0.conv.weight"][0]
        options = {"depth": depth, "growth": growth, "stem_norm": "mod1.bn1.weight" in shapes}
        family, options = "densenet", options | stem
    elif "mod2.block1.bn1.weight" in shapes:
        blocks = _count(shapes, r"mod([2-7])\.block(\d+)\.")
        if len(blocks) == 6:
            depth, family = _depth("wider_resnet", blocks), "wider_resnet"
            options = {"depth": depth}
        else:
            depth, family = _depth("resnext", blocks), "resnext"
            outputs, inputs, *_ = shapes.get("mod2.block1.convs.conv2.weight", (0, 1))
            options = {"depth": depth, "groups": outputs // inputs} | stem
    elif "mod2.block1.convs.conv1.weight" in shapes:
        renamed = {_from_reference(key): shape for key, shape in shapes.items()}
        weights = _read_resnet(renamed)
        if weights is None:
            return None
        return weights._replace(
            title=f"{publisher} {weights.variant}",
            options=dict(weights.options) | stem,
            norm=None,
            activation=None,
        )
    else:
        return None
    if depth is None:
        return None
    variant = f"{family}{depth}"
    classes = _classes(shapes, "classifier.fc")
    return Weights(f"{publisher} {variant}", family, options, variant, classes=classes)


def _from_reference(key: str) -> str:
    key = re.sub(
        r"^mod(\d)\.block(\d+)\.(?:convs\.)?",
        lambda m: f"layer{int(m[1]) - 1}.{int(m[2]) - 1}.",
        key,
    )
    key = key.replace("proj_conv.", "downsample.0.").replace("proj_bn.", "downsample.1.")
    return key.removeprefix("mod1.").removeprefix("classifier.")


def _read_resnet(shapes: Shapes) -> Weights | None:
    if not _has(shapes, r"^layer1\.0\.conv"):
        return None
    if _has(shapes, r"^layer1\.0\.(?!(conv|bn)\d\.\w+$|downsample\.)"):  # attention in blocks
        return None
    blocks = _count(shapes, r"layer([1-4])\.(\d+)\.")
    bottleneck = "layer1.0.conv3.weight" in shapes
    of_blocks = (d for d, n in STAGES["resnet"].items() if n == blocks)
    depth = next((d for d in of_blocks if bottleneck == (d not in BASIC)), None)
    options: dict[str, Any] = {"depth": depth, "stem": _resnet_stem(shapes)}
    pooled = len(shapes.get("layer2.0.downsample.1.weight", ())) == 4
    options["shortcut"] = "pool" if pooled else "conv"
    options |= {"groups": 1, "group_width": 64}
    if bottleneck and "layer1.0.conv2.weight" in shapes:
        inner, width, *_ = shapes["layer1.0.conv2.weight"]
        options |= {"groups": inner // width, "group_width": width}
    variant = _resnet_variant(options)
    if depth is None or options["stem"] is None:  # other blocks per stage, or another stem
        return None
    has_statistics = "bn1.running_mean" in shapes
    vision = has_statistics and variant in _IN_TORCHVISION
    return Weights(
        title=f"{'torchvision' if vision else 'timm'}'s {variant or f'resnet{depth}'}",
        model="resnet",
        options=options,
        variant=variant,
        norm="batch" if has_statistics else "group",
        activation="relu",
        classes=_classes(shapes, "fc"),
    )


_IN_TORCHVISION = {
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *("wide_resnet50_2", "wide_resnet101_2"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
}
_HEADS = ("classifier.3", "classifier.1", "classifier", "fc", "head.fc", "head")


def _read_variant(family: Family, publisher: str, shapes: Shapes) -> Weights | None:
    variants, pattern = family.files[publisher]
    outputs: dict[tuple[int, int], dict[str, int]] = {}
    for key, shape in shapes.items():
        if m := re.fullmatch(pattern, key):
            outputs.setdefault((int(m[1]), int(m[2] or 0)), {})[m[3]] = shape[0]
    widths = [max(outputs[block].items())[1] for block in sorted(outputs)]
    if family.model == "efficientnet" and "conv_head.bias" in shapes:
        widths = widths[:-1]  # timm's MobileNetV3 counts the last convolution as a block
    squeezes = _has(shapes, r"\.se\.")
    table = [s for key, s in shapes.items() if key.endswith("position_bias_table")]
    names = [
        name
        for name, row in VARIANTS[family.model].items()
        if widths == _widths(row)
        and row.get("squeeze", squeezes) == squeezes
        and all(n == (2 * row.get("window", 7) - 1) ** 2 for n, _ in table)
        and re.match(variants, name)
    ]
    if not widths or not names:
        return None
    known = [variant_options(name, publisher) for name in names]
    options = {k: v for k, v in known[0].items() if all(o.get(k) == v for o in known)}
    return Weights(
        title=f"{publisher}'s {' or '.join(names)}",
        model=family.model,
        options=options,
        variant=names[0],
        norm=family.norm,
        activation=family.activation,
        classes=_classes(shapes, *_HEADS),
    )


def _widths(row: Mapping[str, Any]) -> list[int]:
    if "stages" in row:
        groups = [[s] if isinstance(s, Stage) else s for s in row["stages"]]
        return [s.channels for group in groups for s in group for _ in range(s.blocks)]
    widths = row.get("widths") or [row["width"] * 2**i for i in range(len(row["blocks"]))]
    return [w for w, depth in zip(widths, row["blocks"], strict=True) for _ in range(depth)]


def variant_options(name: str, publisher: str) -> dict[str, Any]:
    """Return the options of a published EfficientNet, MobileNetV3, RegNet or Swin.

    torchvision's and timm's of the same name have other epsilons. Returns ``variant``, for an
    EfficientNet or MobileNetV3 also ``eps`` and ``padding``; {} for other networks.
    """
    rows = [VARIANTS[f.model][name] for f in FAMILIES if f.files and name in VARIANTS[f.model]]
    if not rows:
        return {}
    if "eps" not in (row := rows[0]):
        return {"variant": name}
    of_timm = publisher == "timm" and name.startswith("efficientnet_b")
    eps = 1e-5 if of_timm else row["eps"]
    return {"variant": name, "eps": eps, "padding": row.get("padding", "half")}


def _resnet_stem(shapes: Shapes) -> str | None:
    if "conv1.weight" in shapes:
        if "conv3.weight" in shapes:
            return "3x3"
        return {7: "7x7", 3: "small"}.get(shapes["conv1.weight"][-1])
    channels = tuple(shapes.get(f"conv1.{i}.weight", (0,))[0] for i in (0, 3, 6))
    for stem in ("3x3", "deep", "tiered", "wide"):
        if channels == tuple(int(64 * share) for share in STEMS[stem][1]):
            return stem
    return None


def _resnet_variant(options: Mapping[str, Any]) -> str | None:
    plain = {"stem": "7x7", "shortcut": "conv", "groups": 1, "group_width": 64}
    changed = {k: v for k, v in options.items() if v != plain.get(k)}
    if changed.get("stem") == "3x3" and len(changed) == 2:  # of mapillary/inplace_abn
        del changed["stem"]
    return next((name for name, row in VARIANTS["resnet"].items() if row == changed), None)


def compare(theirs: Weights | None, ours: Weights | None) -> str:
    """Say what the weights are, how the network differs, and what to change."""
    if theirs is None:
        known = f", the network is {ours.title}" if ours else ""
        titles = ", ".join(family.title for family in FAMILIES)
        return (
            f"the weights are of no known network{known}; supported are {titles} of torchvision "
            "and timm; all of mapillary/inplace_abn; ViT, DeiT, DINOv2, CLIP, SigLIP and ConvNeXt "
            "as folders with config.json"
        )
    if ours is None:
        return f"these are weights of {theirs.title}, the network is another one"
    needed: dict[str, Any] = {}
    if theirs.model == ours.model:
        needed = {k: v for k, v in theirs.options.items() if ours.options.get(k, v) != v}
    elif ours.model == "deeplab":
        needed = {"backbone": theirs.variant}
    else:
        needed = {"name": theirs.model, **(theirs.options or {"variant": theirs.variant})}
    change = ", ".join(f"{name}={value!r}" for name, value in needed.items())
    what = f"these are weights of {theirs.title}, the network is {_plain(ours)}"
    return f"{what}; give {change}" if change else what


def _plain(weights: Weights) -> str:
    return weights.title.rpartition("'s ")[2]
