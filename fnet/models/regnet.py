"""RegNet: ResNets with grouped convolutions whose widths and depths follow one rule."""

from collections.abc import Sequence
from typing import Any

from fnet import layers
from fnet.layer import Layer, serial
from fnet.models import blocks as parts

# Name in torchvision, or else in timm; other names; blocks and widths per stage; group width. Names
# with a y have squeeze and excitation.
_ROWS = """
regnet_x_400mf   regnetx_004_tv  1,2,7,12  32,64,160,400     16
regnet_x_800mf   regnetx_008     1,3,7,5   64,128,288,672    16
regnet_x_1_6gf   regnetx_016     2,4,10,2  72,168,408,912    24
regnet_x_3_2gf   regnetx_032     2,6,15,2  96,192,432,1008   48
regnet_x_8gf     regnetx_080     2,5,15,1  80,240,720,1920   120
regnet_x_16gf    regnetx_160     2,6,13,1  256,512,896,2048  128
regnet_x_32gf    regnetx_320     2,7,13,1  336,672,1344,2520 168
regnetx_002      -               1,1,4,7   24,56,152,368     8
regnetx_004      -               1,2,7,12  32,64,160,384     16
regnetx_006      -               1,3,5,7   48,96,240,528     24
regnetx_040      -               2,5,14,2  80,240,560,1360   40
regnetx_064      -               2,4,10,1  168,392,784,1624  56
regnetx_120      -               2,5,11,1  224,448,896,2240  112
regnet_y_400mf   regnety_004     1,3,6,6   48,104,208,440    8
regnet_y_800mf   regnety_008_tv  1,3,8,2   64,144,320,784    16
regnet_y_1_6gf   regnety_016     2,6,17,2  48,120,336,888    24
regnet_y_3_2gf   regnety_032     2,5,13,1  72,216,576,1512   24
regnet_y_8gf     regnety_080_tv  2,4,10,1  224,448,896,2016  56
regnet_y_16gf    regnety_160     2,4,11,1  224,448,1232,3024 112
regnet_y_32gf    regnety_320     2,5,12,1  232,696,1392,3712 232
regnet_y_128gf   regnety_1280    2,7,17,1  528,1056,2904,7392 264
regnety_002      -               1,1,4,7   24,56,152,368     8
regnety_006      -               1,3,7,4   48,112,256,608    16
regnety_008      -               1,3,8,2   64,128,320,768    16
regnety_040      -               2,6,12,2  128,192,512,1088  64
regnety_064      -               2,7,14,2  144,288,576,1296  72
regnety_080      -               2,4,10,1  168,448,896,2016  56
regnety_120      -               2,5,11,1  224,448,896,2240  112
regnety_640      -               2,5,12,1  328,984,1968,4920 328
"""


def _read_rows() -> dict[str, dict[str, Any]]:
    variants: dict[str, dict[str, Any]] = {}
    for row in _ROWS.split("\n")[1:-1]:
        *names, blocks, widths, group_width = row.split()
        options: dict[str, Any] = {
            "blocks": tuple(map(int, blocks.split(","))),
            "widths": tuple(map(int, widths.split(","))),
            "group_width": int(group_width),
            "squeeze": names[0].startswith(("regnet_y", "regnety")),
        }
        variants |= {name: options for name in names if name != "-"}
    return variants


VARIANTS = _read_rows()
"""Options of the published networks, by their names in torchvision and timm."""


def regnet(
    *,
    num_classes: int | None,
    in_channels: int = 3,
    blocks: Sequence[int] = (1, 3, 6, 6),
    widths: Sequence[int] = (48, 104, 208, 440),
    group_width: int = 8,
    squeeze: bool = True,
    stem: int = 32,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    norm: str | parts.NormActivation = "abn",
) -> Layer:
    """RegNetX, or RegNetY with squeeze and excitation.

    Radosavovic, Kosaraju, Girshick, He, Dollar, "Designing Network Design Spaces", CVPR 2020.
    Blocks are those of a ResNet, with as many channels inside as outside. The default is RegNetY
    with 400 million multiplications; `VARIANTS` has the others.

    Args:
      num_classes: number of logits. None returns the features of the stages instead.
      in_channels, activation, activation_param, norm: as for `fnet.models.resnet.resnet`.
      blocks: number of blocks of each stage.
      widths: channels of each stage. Each stage halves the resolution.
      group_width: channels of each group of the 3x3 convolutions, at most the width of the stage.
      squeeze: whether channels are scaled before the last convolution of a block (Hu, Shen, Sun
        2018, "Squeeze-and-Excitation Networks").
      stem: channels of the first convolution.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of features.

    Raises:
      ValueError: unless there is a width for each number of blocks; for a group width that does not
        divide a width; for an unknown norm or activation.
    """
    parts.check_stages("regnet", blocks, widths)
    norm = parts.resolve_norm("regnet", norm, activation, activation_param)
    act = layers.activation(activation, activation_param)
    conv = parts.convolution(in_channels, stem, 3, stride=2)
    children = {"stem": serial(conv=conv, bn=norm(stem))}
    n_in = stem
    for i, (depth, width) in enumerate(zip(blocks, widths, strict=True), start=1):
        options: dict[str, Any] = {"norm": norm, "activation": act, "squeeze": squeeze}
        options |= {"groups": width // min(group_width, width)}
        children[f"layer{i}"] = parts.stage(
            n_in, (width,) * 3, depth, parts.post_activation, {"stride": 2}, "{}", 0, **options
        )
        n_in = width
    return parts.classifier(children, n_in, num_classes)
