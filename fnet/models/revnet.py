"""Reversible residual networks: within a stage, no activations are saved per block."""

import functools
from collections.abc import Sequence

from fnet import layers
from fnet.layer import Layer, serial
from fnet.layers.reversible import reversible


def revnet(
    *,
    num_classes: int,
    in_channels: int = 3,
    widths: Sequence[int] = (256, 512, 1024, 2048),
    blocks: Sequence[int] = (2, 2, 3, 2),
    bottleneck: bool = True,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    small_images: bool = False,
    restore: bool = True,
) -> Layer:
    """Reversible residual network (RevNet) for images.

    Gomez, Ren, Urtasun, Grosse, "The Reversible Residual Network", NeurIPS 2017. Each stage couples
    pre-activation blocks on the two halves of the channels (`fnet.reversible`). The transitions
    between stages are not reversible: a norm, 2x2 average pooling and a 1x1 convolution.

    Args:
      num_classes: number of logits.
      in_channels, activation_param: as for `fnet.models.resnet.resnet`.
      widths: channels per stage, for both halves together. They must be even. The defaults give
        24.7 million parameters, about as many as a ResNet-50.
      blocks: coupled blocks per stage. Each corresponds to two residual blocks.
      bottleneck: True: 1x1, 3x3 and 1x1 convolutions with half the channels in between.
        False: two 3x3 convolutions.
      activation: activation after each norm.
      small_images: True: the stem is a 3x3 convolution with stride 1, for images of
        about 32 x 32. False: a 7x7 convolution with stride 2 and 2x2 average pooling.
      restore: as for `fnet.reversible`.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes].

    Raises:
      ValueError: if ``widths`` and ``blocks`` differ in length, or a width is odd.
    """
    if len(widths) != len(blocks) or not widths or any(w % 2 for w in widths):
        raise ValueError(
            "revnet: widths and blocks need one entry per stage, and widths must be even, got "
            f"widths={tuple(widths)}, blocks={tuple(blocks)}"
        )

    abn = functools.partial(layers.abn, activation=activation, activation_param=activation_param)

    def half(channels: int) -> Layer:
        inner = channels // 2 if bottleneck else channels
        windows = (1, 3, 1) if bottleneck else (3, 3)
        sizes = [channels, *[inner] * (len(windows) - 1), channels]
        parts = {}
        for i, window in enumerate(windows):
            parts[f"abn{i + 1}"] = abn(sizes[i])
            parts[f"conv{i + 1}"] = layers.conv(sizes[i], sizes[i + 1], window, bias=False)
        return serial(**parts)

    if small_images:
        stem = layers.conv(in_channels, widths[0], 3, bias=False)
    else:
        stem = serial(
            conv=layers.conv(in_channels, widths[0] // 4, 7, stride=2, bias=False),
            pool=layers.avg_pool(2),
            widen=layers.conv(widths[0] // 4, widths[0], 1, bias=False),
        )
    stages: dict[str, Layer] = {}
    for i, (width, num_blocks) in enumerate(zip(widths, blocks, strict=True)):
        if i:
            stages[f"down{i}"] = serial(
                abn=abn(widths[i - 1]),
                pool=layers.avg_pool(2),
                conv=layers.conv(widths[i - 1], width, 1, bias=False),
            )
        pair = (half(width // 2), half(width // 2))
        stages[f"stage{i}"] = reversible([pair] * num_blocks, restore=restore)
    return serial(
        stem=stem,
        **stages,
        abn=abn(widths[-1]),
        pool=layers.global_avg_pool(),
        head=layers.dense(widths[-1], num_classes),
    )
