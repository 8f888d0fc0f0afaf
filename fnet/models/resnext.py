"""ResNeXt: residual networks of grouped convolutions, activated before each one."""

from collections.abc import Sequence

from fnet.layer import Layer, serial
from fnet.models import norm_activation
from fnet.models.backbone import backbone, classifier, input_stem, stage_blocks, stage_dilations
from fnet.models.norm_activation import NormActivation
from fnet.models.residual_blocks import pre_activation

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks a stage, by depth."""


def resnext(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    norm: str | NormActivation = "abn",
    stem: str = "7x7",
    dilation: Sequence[int] = (1, 1, 1, 1),
    groups: int = 64,
    base_channels: Sequence[int] = (128, 128, 256),
) -> Layer:
    """A ResNeXt for images.

    Xie, Girshick, Dollar, Tu, He, "Aggregated Residual Transformations for Deep Neural
    Networks", CVPR 2017, with pre-activation blocks, as mapillary/inplace_abn has it.

    Args:
      depth: 50, 101 or 152.
      num_classes: length of the logits; None: the four stages' outputs instead, the last
        one normed and activated.
      in_channels, activation, activation_param, norm, stem: as for `fnet.models.resnet`.
      dilation: of the 3x3 convolutions of each stage; a stage that is dilated has no stride
        (the maximum before the first one stays).
      groups: of each 3x3 convolution.
      base_channels: of the three convolutions of the first stage's blocks; twice as many
        in each further stage.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      four features. Names follow mapillary/inplace_abn's: ``mod1`` to ``mod5``,
      ``bn_out``, ``classifier``.

    Raises:
      ValueError: for another depth, norm, stem or number of dilations, groups that do
        not divide the channels, or an activation that is unknown or that the norm does not take.
    """
    counts = stage_blocks("resnext", DEPTHS, depth)
    dilations = stage_dilations("resnext", dilation, 4)
    normed = norm_activation.find("resnext", norm, activation, activation_param)
    children = {"mod1": serial(**input_stem(stem, in_channels, 64, normed, last_norm=False))}
    n_in = 64
    for i, (count, spread) in enumerate(zip(counts, dilations, strict=True)):
        channels = [c * 2**i for c in base_channels]
        blocks = {}
        for j in range(count):
            stride = 2 if i and not j and spread == 1 else 1
            blocks[f"block{j + 1}"] = pre_activation(
                n_in, channels, normed, stride=stride, dilation=spread, groups=groups
            )
            n_in = channels[-1]
        children[f"mod{i + 2}"] = serial(**blocks)
    children["bn_out"] = normed(n_in)
    features = ("mod2", "mod3", "mod4", "bn_out")
    return backbone(children, features, classifier(n_in, num_classes))
