"""Residual networks with in-place activated batch norm, or with group norm."""

from fnet import layers
from fnet.layer import Layer, residual, serial

DEPTHS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
"""Kind of block and blocks a stage, by depth (He et al. 2015, table 1)."""


def resnet(
    depth: int,
    *,
    num_classes: int,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    norm: str = "abn",
    small_images: bool = False,
) -> Layer:
    """A residual network for images.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
    in the layout of mapillary/inplace_abn: a block's last norm has no activation,
    which follows the sum. The stride is on the 3x3 convolution of a bottleneck.

    Args:
      depth: 18, 34, 50, 101 or 152.
      num_classes: length of the logits.
      in_channels: channels of the images.
      activation: after every norm but a block's last, and after every sum.
      activation_param: its slope or alpha.
      norm: ``"abn"``: `fnet.abn`. ``"group"``: group norm with 32 groups and then the
        activation, as Wu and He 2018; no example depends on another.
      small_images: True: the stem is a 3x3 convolution of stride 1, for images of
        about 32 x 32. False: 7x7 of stride 2 and a 3x3 maximum of stride 2.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes]. Names
      follow torchvision's: ``conv1``, ``bn1``, ``layer1`` to ``layer4``, ``fc``.

    Raises:
      ValueError: for another depth or norm.
    """
    if depth not in DEPTHS:
        raise ValueError(f"resnet: depth must be one of {sorted(DEPTHS)}, got {depth}")
    if norm not in ("abn", "group"):
        raise ValueError(f'resnet: norm must be "abn" or "group", got {norm!r}')
    kind, blocks = DEPTHS[depth]
    expansion = 4 if kind == "bottleneck" else 1

    def normalized(name: str, channels: int, act: str) -> dict[str, Layer]:
        """The norm of that name and the activation behind it, in one layer or in two."""
        if norm == "abn":
            return {name: layers.abn(channels, activation=act, activation_param=activation_param)}
        layer = {name: layers.group_norm(channels)}
        if act != "identity":
            layer[f"{name}_act"] = layers.activation(act, activation_param)
        return layer

    def convolution(n_in: int, n_out: int, window: int, stride: int = 1) -> Layer:
        pad = [(window // 2, window // 2)] * 2
        return layers.conv(n_in, n_out, window, stride=stride, padding=pad, bias=False)

    def block(n_in: int, width: int, stride: int) -> Layer:
        n_out = width * expansion
        # (window, output channels, stride) of each convolution.
        plan = [(3, width, stride), (3, width, 1)]
        if kind == "bottleneck":
            plan = [(1, width, 1), (3, width, stride), (1, n_out, 1)]
        body, channels = {}, n_in
        for i, (window, out, step) in enumerate(plan, start=1):
            body[f"conv{i}"] = convolution(channels, out, window, step)
            body |= normalized(f"bn{i}", out, "identity" if i == len(plan) else activation)
            channels = out
        shortcut = None
        if (n_in, stride) != (n_out, 1):
            shortcut = serial(
                convolution(n_in, n_out, 1, stride),
                *normalized("bn", n_out, "identity").values(),
            )
        return serial(
            sum=residual(serial(**body), shortcut),
            act=layers.activation(activation, activation_param),
        )

    stem = {
        "conv1": convolution(in_channels, 64, 3 if small_images else 7, 1 if small_images else 2)
    }
    stem |= normalized("bn1", 64, activation)
    if not small_images:
        stem["maxpool"] = layers.max_pool(3, stride=2, padding=1)
    stages, n_in = {}, 64
    for i, count in enumerate(blocks):
        width, stage = 64 * 2**i, []
        for j in range(count):
            stage.append(block(n_in, width, 2 if i > 0 and j == 0 else 1))
            n_in = width * expansion
        stages[f"layer{i + 1}"] = serial(*stage)
    return serial(
        **stem, **stages, avgpool=layers.global_avg_pool(), fc=layers.dense(n_in, num_classes)
    )
