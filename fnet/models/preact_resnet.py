"""Pre-activation residual networks for small images."""

from collections.abc import Sequence

from fnet import layers
from fnet.layer import Layer, residual, serial
from fnet.models.blocks import NormActivation, resolve_norm, stage


def preact_resnet(
    *,
    num_classes: int,
    in_channels: int = 3,
    widths: Sequence[int] = (16, 32, 64),
    blocks_per_stage: int = 2,
    stem_width: int | None = None,
    first_stride: int = 1,
    norm: str | NormActivation = "abn",
    activation: str = "leaky_relu",
    activation_param: float | None = None,
) -> Layer:
    """Pre-activation ResNet for small images, with in-place activated batch norm.

    He, Zhang, Ren, Sun, "Identity Mappings in Deep Residual Networks", ECCV
    2016. Every block is ``x + conv(abn(conv(abn(x))))``. The sum is not activated, so the only
    residual of each ABN is its output. The first block of every stage but the first halves
    height and width.

    Args:
      num_classes: number of logits.
      in_channels, norm, activation_param: as for `fnet.models.resnet.resnet`.
      widths: channels per stage.
      blocks_per_stage: residual blocks per stage.
      stem_width: channels of the first convolution. None: as many as the first stage has.
      first_stride: stride of the first stage. With 2 the network is several times cheaper for
        its width.
      activation: activation after each norm; see `fnet.abn`.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes].

    Raises:
      ValueError: for an unknown norm, or if there is no stage or no block.
    """
    if not widths or blocks_per_stage < 1:
        raise ValueError(
            "preact_resnet: needs at least one stage and one block per stage, got "
            f"widths={tuple(widths)}, blocks_per_stage={blocks_per_stage}"
        )

    abn = resolve_norm("preact_resnet", norm, activation, activation_param)

    def block(n_in: int, channels: tuple[int], stride: int = 1) -> Layer:
        (n_out,) = channels
        body = serial(
            abn1=abn(n_in),
            conv1=layers.conv(n_in, n_out, 3, stride=stride, bias=False),
            abn2=abn(n_out),
            conv2=layers.conv(n_out, n_out, 3, bias=False),
        )
        if (n_in, stride) == (n_out, 1):
            return residual(body)
        return residual(body, layers.conv(n_in, n_out, 1, stride=stride, bias=False))

    stages: dict[str, Layer] = {}
    n_in = widths[0] if stem_width is None else stem_width
    stem = layers.conv(in_channels, n_in, 3, bias=False)
    for i, width in enumerate(widths):
        first = {"stride": 2 if i else first_stride}
        stages[f"stage{i}"] = stage(n_in, (width,), blocks_per_stage, block, first, start=0)
        n_in = width
    return serial(
        stem=stem,
        **stages,
        abn=abn(n_in),
        pool=layers.global_avg_pool(),
        head=layers.dense(n_in, num_classes),
    )
