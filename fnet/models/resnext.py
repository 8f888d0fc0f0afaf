"""ResNeXt: ResNets with grouped convolutions and pre-activation blocks."""

import functools
from collections.abc import Sequence

from fnet.layer import Layer, serial
from fnet.models import blocks as parts

VARIANTS = {f"resnext{depth}": {"depth": depth} for depth in parts.STAGES["resnext"]}
"""Options of the networks that `fnet.models.get` knows, by name."""


def resnext(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    norm: str | parts.NormActivation = "abn",
    stem: str = "7x7",
    dilation: Sequence[int] = (1, 1, 1, 1),
    groups: int = 64,
    base_channels: Sequence[int] = (128, 128, 256),
) -> Layer:
    """ResNeXt for images, with pre-activation. `fnet.models.resnet.resnet` has post-activation.

    Xie, Girshick, Dollar, Tu, He, "Aggregated Residual Transformations for Deep Neural
    Networks", CVPR 2017, with the pre-activation blocks of mapillary/inplace_abn.

    Args:
      depth: 50, 101 or 152.
      num_classes: as for `fnet.models.resnet.resnet`; the last features have a norm.
      in_channels, activation, activation_param, norm, stem: as for `fnet.models.resnet.resnet`.
      dilation: dilation of the 3x3 convolutions, per stage. A dilated stage has no stride. The
        stem's pooling stays.
      groups: groups of each 3x3 convolution.
      base_channels: output channels of the three convolutions of a block in the first stage.
        They double in each later stage.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      four features. Parameter names follow mapillary/inplace_abn: ``mod1`` to ``mod5``,
      ``bn_out``, ``classifier``.

    Raises:
      ValueError: for an unknown depth, norm, stem or activation, a wrong number of dilations,
        groups that do not divide the channels, or an activation that the norm does not support.
    """
    blocks_per_stage = parts.stage_blocks("resnext", depth)
    dilations = parts.stage_dilations("resnext", dilation, 4)
    norm = parts.resolve_norm("resnext", norm, activation, activation_param)
    stem_layers, n_in = parts.input_stem(stem, in_channels, 64, norm, last_norm=False)
    children = {"mod1": serial(**stem_layers)}
    for i, (num_blocks, rate) in enumerate(zip(blocks_per_stage, dilations, strict=True)):
        channels = [c * 2**i for c in base_channels]
        block = functools.partial(parts.pre_activation, norm=norm, dilation=rate, groups=groups)
        first = {"stride": 2 if i and rate == 1 else 1}
        children[f"mod{i + 2}"] = parts.stage(n_in, channels, num_blocks, block, first)
        n_in = channels[-1]
    return parts.pre_activation_network(children, n_in, norm, num_classes)
