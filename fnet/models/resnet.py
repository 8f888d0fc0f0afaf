"""ResNets with in-place activated batch norm, plain batch norm or group norm."""

from collections.abc import Sequence
from typing import Any

from fnet import checks, layers
from fnet.layer import Layer
from fnet.models import blocks as parts

BASIC = (10, 18, 34)
"""Depths whose blocks have two convolutions. The others are bottlenecks."""
_DEEP = {"stem": "deep", "shortcut": "pool"}
_GROUPS = ((50, 32, 4), (101, 32, 4), (101, 32, 8), (101, 32, 16), (101, 32, 32), (101, 64, 4))
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"resnet{depth}": {"depth": depth} for depth in parts.STAGES["resnet"]},
    **{f"resnet{n}d": {"depth": n, **_DEEP} for n in (18, 26, 34, 50, 101, 152, 200)},
    **{f"resnet{n}t": {"depth": n, **_DEEP, "stem": "tiered"} for n in (10, 14, 26, 50)},
    **{f"resnet{n}c": {"depth": n, "stem": "deep"} for n in (50, 101, 152)},
    **{f"resnet{n}s": {"depth": n, "stem": "wide"} for n in (50, 101, 152)},
    **{f"wide_resnet{n}_2": {"depth": n, "group_width": 128} for n in (50, 101)},
    **{f"resnext{n}_{g}x{w}d": {"depth": n, "groups": g, "group_width": w} for n, g, w in _GROUPS},
    "resnext50d_32x4d": {"depth": 50, **_DEEP, "groups": 32, "group_width": 4},
}
"""Options of torchvision's and timm's ResNets by their names there."""


def resnet(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    norm: str | parts.NormActivation = "abn",
    stem: str = "7x7",
    dilation: Sequence[int] = (1, 1, 1, 1),
    dilate_first: bool = True,
    shortcut: str = "conv",
    groups: int = 1,
    group_width: int = 64,
) -> Layer:
    """ResNet for images, with post-activation blocks.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
    in the layout of mapillary/inplace_abn: the last norm of a block has no activation,
    because the activation follows the sum. The 3x3 convolution of a bottleneck has the stride.

    Args:
      depth: 10, 14, 18, 26, 34, 50, 101, 152 or 200.
      num_classes: number of logits. None returns the features of the four stages instead.
      in_channels: image channels.
      activation: activation after each sum and after each norm but a block's last.
      activation_param: negative slope of ``leaky_relu`` (default 0.01) or alpha of ``elu``
        (default 1).
      norm: ``"abn"``: in-place activated batch norm (`fnet.abn`). ``"batch"``: plain batch norm.
        ``"group"``: group norm with at most 32 groups. Or a callable ``(channels, *, activation,
        activation_param) -> Layer``.
      stem: ``"7x7"``, ``"3x3"`` (three convolutions), ``"deep"``, ``"tiered"`` and ``"wide"`` (the
        same with the channels of timm's suffixes d, t and s), or ``"small"`` (one convolution and
        no downsampling, for images of about 32 x 32).
      dilation: dilation of the 3x3 convolutions, per stage. A dilated stage has no stride, and
        with a dilated first stage the stem has no pooling.
      dilate_first: whether the first 3x3 convolution of a stage has the stage's dilation.
        False: it has the dilation of the stage before, as in torchvision and timm.
      shortcut: ``"conv"``: a 1x1 convolution has the stride of the shortcut. ``"pool"``: average
        pooling has it, as in timm's networks with the suffixes d and t.
      groups: groups of the 3x3 convolutions of bottlenecks (ResNeXt).
      group_width: channels of each group in the first stage. They double in each later stage.
        Wide ResNets have 128.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      four features. Parameter names follow torchvision: ``conv1``, ``bn1``, ``layer1`` to
      ``layer4``, ``fc``.

    Raises:
      ValueError: for an unknown depth, norm, stem or activation, a wrong number of dilations, or
        an activation that the norm does not support; for an unknown shortcut, or groups without
        bottlenecks.
    """
    blocks_per_stage = parts.stage_blocks("resnet", depth)
    dilations = parts.stage_dilations("resnet", dilation, 4)
    norm = parts.resolve_norm("resnet", norm, activation, activation_param)
    act = layers.activation(activation, activation_param)
    checks.choice("resnet", ("conv", "pool"), shortcut=shortcut)
    if depth in BASIC and (groups, group_width) != (1, 64):
        raise ValueError(
            f"resnet: depth {depth} has no bottlenecks, which groups={groups} and "
            f"group_width={group_width} need; give groups=1 and group_width=64"
        )
    children, n_in = parts.input_stem(stem, in_channels, 64, norm, last_norm=True)
    if dilations[0] > 1:
        children.pop("pool", None)
    for i, (num_blocks, rate) in enumerate(zip(blocks_per_stage, dilations, strict=True)):
        width, inner = 64 * 2**i, groups * group_width * 2**i
        channels = (width, width) if depth in BASIC else (inner, inner, 4 * width)
        options: dict[str, Any] = {"norm": norm, "activation": act, "dilation": rate}
        options |= {"groups": groups, "shortcut": shortcut}
        first = {
            "stride": 2 if i and rate == 1 else 1,
            "first_dilation": rate if dilate_first else dilations[max(i - 1, 0)],
        }
        children[f"layer{i + 1}"] = parts.stage(
            n_in, channels, num_blocks, parts.post_activation, first, "{}", 0, **options
        )
        n_in = channels[-1]
    return parts.classifier(children, n_in, num_classes)
