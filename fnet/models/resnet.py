"""ResNets with in-place activated batch norm, plain batch norm or group norm."""

from collections.abc import Sequence

from fnet import layers
from fnet.layer import Layer, serial
from fnet.models.backbone import backbone, input_stem, stage_blocks, stage_dilations
from fnet.models.blocks import NormActivation, post_activation, resolve_norm

DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks per stage, by depth (He et al. 2015, table 1). Blocks are bottlenecks from 50 on."""


def resnet(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    norm: str | NormActivation = "abn",
    stem: str = "7x7",
    dilation: Sequence[int] = (1, 1, 1, 1),
) -> Layer:
    """ResNet for images, with post-activation blocks.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
    in the layout of mapillary/inplace_abn: the last norm of a block has no activation,
    because the activation follows the sum. The 3x3 convolution of a bottleneck has the stride.

    Args:
      depth: 18, 34, 50, 101 or 152.
      num_classes: number of logits. None returns the features of the four stages instead.
      in_channels: image channels.
      activation: activation after each sum and after each norm but a block's last.
      activation_param: negative slope of ``leaky_relu`` (default 0.01) or alpha of ``elu``
        (default 1).
      norm: ``"abn"``: in-place activated batch norm (`fnet.abn`). ``"batch"``: plain batch norm.
        ``"group"``: group norm with at most 32 groups. Or a callable ``(channels, *, activation,
        activation_param) -> Layer``.
      stem: ``"7x7"``, ``"3x3"`` (three convolutions) or ``"small"`` (one convolution and no
        downsampling, for images of about 32 x 32).
      dilation: dilation of the 3x3 convolutions, per stage. A dilated stage has no stride, and
        with a dilated first stage the stem has no pooling.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      four features. Parameter names follow torchvision: ``conv1``, ``bn1``, ``layer1`` to
      ``layer4``, ``fc``.

    Raises:
      ValueError: for an unknown depth, norm, stem or activation, a wrong number of dilations, or
        an activation that the norm does not support.

    Example:
      >>> import fnet, jax
      >>> model = fnet.models.resnet(18, num_classes=10, stem="small")
      >>> params, state = jax.eval_shape(model.init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      11173962
    """
    blocks_per_stage = stage_blocks("resnet", DEPTHS, depth)
    dilations = stage_dilations("resnet", dilation, 4)
    norm = resolve_norm("resnet", norm, activation, activation_param)
    act = layers.activation(activation, activation_param)
    children = input_stem(stem, in_channels, 64, norm, last_norm=True)
    if dilations[0] > 1:
        children.pop("pool", None)
    n_in = 64
    for i, (num_blocks, rate) in enumerate(zip(blocks_per_stage, dilations, strict=True)):
        width, blocks = 64 * 2**i, []
        channels = (width, width) if depth < 50 else (width, width, 4 * width)
        for j in range(num_blocks):
            stride = 2 if i and not j and rate == 1 else 1
            blocks.append(post_activation(n_in, channels, norm, act, stride=stride, dilation=rate))
            n_in = channels[-1]
        children[f"layer{i + 1}"] = serial(*blocks)
    head = None
    if num_classes is not None:
        head = {"avgpool": layers.global_avg_pool(), "fc": layers.dense(n_in, num_classes)}
    return backbone(children, [f"layer{i}" for i in range(1, 5)], head)
