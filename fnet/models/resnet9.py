"""ResNet-9: a shallow, wide residual network that learns small images in few epochs."""

from fnet import layers
from fnet.layer import Layer, residual, serial, stateless
from fnet.models import norm_activation
from fnet.models.norm_activation import NormActivation

_LOGIT_SCALE = 0.125


def resnet9(
    *,
    num_classes: int,
    in_channels: int = 3,
    widths: tuple[int, int, int, int] = (64, 128, 256, 512),
    norm: str | NormActivation = "abn",
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
) -> Layer:
    """Eight convolutions of 3x3 and a classifier, with in-place activated batch norm.

    Page, "How to Train Your ResNet", parts 4 and 8 (2018, 2019): a stem; three stages, each a
    convolution, a maximum over 2x2 and the norm, the first and the last with a residual block
    of two convolutions behind it; the maximum over what is left, and logits times 1/8. As in
    part 8 the maximum comes before the norm, which then sees a quarter of the values.

    Args:
      num_classes: length of the logits.
      in_channels: channels of the images.
      widths: channels of the stem and of each stage.
      norm: as for `fnet.models.resnet`.
      activation: of every norm; see `fnet.abn`.
      activation_param: its slope or alpha.

    Returns:
      A layer on NHWC images of 8 x 8 and more: [N, H, W, in_channels] -> [N, num_classes].

    Raises:
      ValueError: for another number of widths, or (when applied) a smaller image.
    """
    if len(widths) != 4:
        raise ValueError(f"resnet9: needs widths of the stem and 3 stages, got {tuple(widths)}")
    abn = norm_activation.find("resnet9", norm, activation, activation_param)

    def block(n_in: int, n_out: int) -> Layer:
        return serial(conv=layers.conv(n_in, n_out, 3, bias=False), abn=abn(n_out))

    def stage(n_in: int, n_out: int) -> Layer:
        return serial(
            conv=layers.conv(n_in, n_out, 3, bias=False), pool=layers.max_pool(2), abn=abn(n_out)
        )

    def and_residual(first: Layer, n: int) -> Layer:
        return serial(reduce=first, residual=residual(serial(conv1=block(n, n), conv2=block(n, n))))

    stem, *stages = widths
    return serial(
        stem=block(in_channels, stem),
        stage0=and_residual(stage(stem, stages[0]), stages[0]),
        stage1=stage(stages[0], stages[1]),
        stage2=and_residual(stage(stages[1], stages[2]), stages[2]),
        pool=layers.global_max_pool(),
        head=layers.dense(stages[2], num_classes),
        scale=stateless(lambda logits: _LOGIT_SCALE * logits),
    )
