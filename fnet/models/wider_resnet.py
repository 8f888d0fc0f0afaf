"""Wider ResNets: few, wide pre-activation blocks, used as backbones for segmentation."""

import functools

from fnet import layers
from fnet.layer import Layer, serial
from fnet.models import blocks as parts

VARIANTS = {
    f"wider_resnet{depth}{suffix}": {"depth": depth} | options
    for depth in parts.STAGES["wider_resnet"]
    for suffix, options in (("", {}), ("_a2", {"a2": True}))
}
"""Options of the networks that `fnet.models.get` knows, by name."""
CHANNELS = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))
"""Output channels of the convolutions of a block, per stage."""


def wider_resnet(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    norm: str | parts.NormActivation = "abn",
    a2: bool = False,
    dilated: bool = False,
) -> Layer:
    """Wider ResNet for images.

    Wu, Shen, van den Hengel, "Wider or Deeper: Revisiting the ResNet Model for Visual
    Recognition", Pattern Recognition 2019 (arXiv 2016), in the layout of mapillary/inplace_abn.

    Args:
      depth: 16, 20 or 38.
      num_classes: as for `fnet.models.resnet.resnet`; the last features have a norm.
      in_channels, activation, activation_param, norm: as for `fnet.models.resnet.resnet`.
      a2: whether to build the paper's variant A2. It has max pooling before the first two stages
        and strides in the next three, and its last two stages have dropout with rates 0.3 and
        0.5. Otherwise max pooling precedes each of the first five stages.
      dilated: whether the last three stages are dilated by 2, 4 and 4 in place of strides, so
        that the output stride is 8 and not 32. Requires ``a2``.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      six features. Parameter names follow mapillary/inplace_abn: ``mod1`` to ``mod7``,
      ``bn_out``, ``classifier``. With ``a2``, training needs a key.

    Raises:
      ValueError: for an unknown depth, norm or activation, ``dilated`` without ``a2``, or an
        activation that the norm does not support.
    """
    blocks_per_stage = parts.stage_blocks("wider_resnet", depth)
    if dilated and not a2:
        raise ValueError("wider_resnet: dilated=True needs a2=True, got a2=False")
    norm = parts.resolve_norm("wider_resnet", norm, activation, activation_param)
    dilations = (1, 1, 1, 2, 4, 4) if dilated else (1,) * 6
    dropout = (0, 0, 0, 0, 0.3, 0.5) if a2 else (0,) * 6
    pooled = range(2) if a2 else range(5)
    strided = range(2, 3 if dilated else 5) if a2 else ()

    children = {"mod1": serial(conv1=parts.convolution(in_channels, 64, 3))}
    n_in = 64
    for i, (num_blocks, channels) in enumerate(zip(blocks_per_stage, CHANNELS, strict=True)):
        if i in pooled:
            children[f"pool{i + 2}"] = layers.max_pool(3, stride=2, padding=1)
        block = functools.partial(
            parts.pre_activation, norm=norm, dilation=dilations[i], dropout=dropout[i]
        )
        first = {"stride": 2 if i in strided else 1}
        children[f"mod{i + 2}"] = parts.stage(n_in, channels, num_blocks, block, first)
        n_in = channels[-1]
    return parts.pre_activation_network(children, n_in, norm, num_classes)
