"""Residual networks with in-place activated batch norm, or another norm."""

from collections.abc import Sequence

from fnet import layers
from fnet.layer import Layer, serial
from fnet.models import norm_activation
from fnet.models.backbone import backbone, input_stem, stage_blocks, stage_dilations
from fnet.models.norm_activation import NormActivation
from fnet.models.residual_blocks import post_activation

DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks a stage, by depth (He et al. 2015, table 1): bottlenecks from 50 on."""


def resnet(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    norm: str | NormActivation = "abn",
    stem: str = "7x7",
    dilation: Sequence[int] = (1, 1, 1, 1),
) -> Layer:
    """A residual network for images.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
    in the layout of mapillary/inplace_abn: a block's last norm has no activation,
    which follows the sum. The stride is on the 3x3 convolution of a bottleneck.

    Args:
      depth: 18, 34, 50, 101 or 152.
      num_classes: length of the logits; None: the four stages' outputs instead.
      in_channels: channels of the images.
      activation: after every norm but a block's last, and after every sum.
      activation_param: its slope or alpha.
      norm: ``"abn"``: `fnet.abn`; ``"batch"``: plain batch norm; ``"group"``: group norm
        with at most 32 groups; or what makes a norm and activation, see `norm_activation.find`.
      stem: ``"7x7"``, ``"3x3"`` (three of them) or ``"small"`` (one, for images of about
        32 x 32, which leaves their size).
      dilation: of the 3x3 convolutions of each stage; a stage that is dilated has no
        stride (and the first one no maximum before it).

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      four features. Names follow torchvision's: ``conv1``, ``bn1``, ``layer1`` to
      ``layer4``, ``fc``.

    Raises:
      ValueError: for another depth, norm, stem or number of dilations, or an activation that
        is unknown or that the norm does not take.
    """
    counts = stage_blocks("resnet", DEPTHS, depth)
    dilations = stage_dilations("resnet", dilation, 4)
    normed = norm_activation.find("resnet", norm, activation, activation_param)
    act = layers.activation(activation, activation_param)
    children = input_stem(stem, in_channels, 64, normed, last_norm=True)
    if dilations[0] > 1:
        children.pop("pool", None)
    n_in = 64
    for i, (count, spread) in enumerate(zip(counts, dilations, strict=True)):
        width, blocks = 64 * 2**i, []
        channels = (width, width) if depth < 50 else (width, width, 4 * width)
        for j in range(count):
            stride = 2 if i and not j and spread == 1 else 1
            blocks.append(
                post_activation(n_in, channels, normed, act, stride=stride, dilation=spread)
            )
            n_in = channels[-1]
        children[f"layer{i + 1}"] = serial(*blocks)
    head = None
    if num_classes is not None:
        head = {"avgpool": layers.global_avg_pool(), "fc": layers.dense(n_in, num_classes)}
    return backbone(children, [f"layer{i}" for i in range(1, 5)], head)
