"""ResNet-9: a shallow, wide residual network that learns small images in few epochs."""

from fnet import layers
from fnet.layer import Layer, residual, serial, stateless
from fnet.models import norm_activation
from fnet.models.norm_activation import NormActivation

_LOGIT_SCALE = 0.125
_WINDOW = 2


def resnet9(
    *,
    num_classes: int,
    in_channels: int = 3,
    widths: tuple[int, int, int] = (128, 256, 512),
    norm: str | NormActivation = "abn",
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
) -> Layer:
    """Eight convolutions and a classifier, with in-place activated batch norm.

    Page, "How to Train Your ResNet", parts 4 and 8 (2018, 2019): a stem that whitens patches;
    three stages, each a convolution, a maximum over 2x2 and the norm, the first and the last
    with a residual block of two convolutions behind it; the maximum over what is left, and logits
    times 1/8. As in part 8 the maximum comes before the norm, which then sees a quarter of the
    values. Other than there, patches of 2x2 are whitened by `fnet.layers.cosine_patches` and a
    norm, not by a kernel found from the data. The convolutions between stages begin as
    `fnet.layers.partly_identity` (Jordan 2024).

    Args:
      num_classes: length of the logits.
      in_channels: channels of the images.
      widths: channels of each stage.
      norm: as for `fnet.models.resnet`.
      activation: of every norm; see `fnet.abn`.
      activation_param: its slope or alpha.

    Returns:
      A layer on NHWC images of 9 x 9 and more: [N, H, W, in_channels] -> [N, num_classes].

    Raises:
      ValueError: for another norm or number of widths, or (when applied) a smaller image.
    """
    if len(widths) != 3:
        raise ValueError(f"resnet9: needs the widths of 3 stages, got {tuple(widths)}")
    abn = norm_activation.find("resnet9", norm, activation, activation_param)

    def block(n_in: int, n_out: int) -> Layer:
        return serial(conv=layers.conv(n_in, n_out, 3, bias=False), abn=abn(n_out))

    def stage(n_in: int, n_out: int) -> Layer:
        return serial(
            conv=layers.conv(n_in, n_out, 3, bias=False, kernel_init=layers.partly_identity),
            pool=layers.max_pool(2),
            abn=abn(n_out),
        )

    def and_residual(first: Layer, n: int) -> Layer:
        return serial(reduce=first, residual=residual(serial(conv1=block(n, n), conv2=block(n, n))))

    patches = 2 * in_channels * _WINDOW**2
    stem = layers.conv(
        in_channels,
        patches,
        _WINDOW,
        bias=False,
        padding="VALID",
        kernel_init=layers.cosine_patches,
    )
    return serial(
        stem=serial(conv=stem, abn=abn(patches)),
        stage0=and_residual(stage(patches, widths[0]), widths[0]),
        stage1=stage(widths[0], widths[1]),
        stage2=and_residual(stage(widths[1], widths[2]), widths[2]),
        pool=layers.global_max_pool(),
        head=layers.dense(widths[2], num_classes, bias=False),
        scale=stateless(lambda logits: _LOGIT_SCALE * logits),
    )
