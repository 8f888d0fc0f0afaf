"""Reversible residual networks: within a stage, nothing is kept per block."""

import functools
from collections.abc import Sequence

from fnet import layers
from fnet.layer import Layer, serial


def revnet(
    *,
    num_classes: int,
    in_channels: int = 3,
    widths: Sequence[int] = (256, 512, 1024, 2048),
    blocks: Sequence[int] = (2, 2, 3, 2),
    bottleneck: bool = True,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    small_images: bool = False,
    restore: bool = True,
) -> Layer:
    """A reversible residual network for images.

    Gomez, Ren, Urtasun, Grosse, "The Reversible Residual Network", NeurIPS 2017:
    stages of coupled pre-activation blocks on either half of the channels
    (`fnet.reversible`); between stages, what is not reversible: norm, 2x2 mean, 1x1
    convolution.

    Args:
      num_classes: length of the logits.
      in_channels: channels of the images.
      widths: channels of each stage, both halves together, even. The defaults make
        about as many parameters as a ResNet-50 has (24.7 million).
      blocks: coupled blocks of each stage; each is worth two residual blocks.
      bottleneck: True: 1x1, 3x3 and 1x1 convolutions, narrow by half between.
        False: two 3x3 convolutions.
      activation: of every norm.
      activation_param: its slope or alpha.
      small_images: True: the stem is a 3x3 convolution of stride 1, for images of
        about 32 x 32. False: 7x7 of stride 2 and a 2x2 mean.
      restore: as for `fnet.reversible`.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes].

    Raises:
      ValueError: if ``widths`` and ``blocks`` differ in length or a width is odd.
    """
    if len(widths) != len(blocks) or not widths or any(w % 2 for w in widths):
        raise ValueError(
            "revnet: needs as many even widths as stages, got "
            f"widths={tuple(widths)}, blocks={tuple(blocks)}"
        )

    abn = functools.partial(layers.abn, activation=activation, activation_param=activation_param)

    def half(channels: int) -> Layer:
        narrow = channels // 2 if bottleneck else channels
        windows = (1, 3, 1) if bottleneck else (3, 3)
        sizes = [channels, *[narrow] * (len(windows) - 1), channels]
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
    for i, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        if i:
            stages[f"down{i}"] = serial(
                abn=abn(widths[i - 1]),
                pool=layers.avg_pool(2),
                conv=layers.conv(widths[i - 1], width, 1, bias=False),
            )
        pair = (half(width // 2), half(width // 2))
        stages[f"stage{i}"] = layers.reversible([pair] * count, restore=restore)
    return serial(
        stem=stem,
        **stages,
        abn=abn(widths[-1]),
        pool=layers.global_avg_pool(),
        head=layers.dense(widths[-1], num_classes),
    )
