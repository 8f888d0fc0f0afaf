"""ResNet-9: a shallow, wide ResNet that learns small images in few epochs."""

from fnet import layers
from fnet.layer import Layer, residual, serial, stateless
from fnet.layers.kernel_init import cosine_patches, partly_identity
from fnet.layers.pooling import global_max_pool
from fnet.models.blocks import NormActivation, resolve_norm

_LOGIT_SCALE = 0.125
_WINDOW = 2


def resnet9(
    *,
    num_classes: int,
    in_channels: int = 3,
    widths: tuple[int, int, int] = (128, 256, 512),
    norm: str | NormActivation = "abn",
    activation: str = "leaky_relu",
    activation_param: float | None = None,
) -> Layer:
    """ResNet-9: eight convolutions and a classifier, with in-place activated batch norm.

    Page, "How to Train Your ResNet", parts 4 and 8 (2018, 2019). A stem whitens patches. Each of
    the three stages is a convolution, 2x2 max pooling and a norm. A residual block of two
    convolutions follows the first and the last stage. The head is global max pooling and a dense
    layer whose logits are multiplied by 1/8. As in part 8, the pooling precedes the norm, so the
    norm sees a quarter of the values.

    There are two differences. `cosine_patches` and a norm whiten 2x2 patches, where
    Page computes a kernel from the data. The convolutions between stages are initialized by
    `partly_identity` (Jordan 2024).

    Args:
      num_classes: number of logits.
      in_channels, norm, activation_param: as for `fnet.models.resnet.resnet`.
      widths: channels per stage.
      activation: activation after each norm; see `fnet.abn`.

    Returns:
      A layer on NHWC images of at least 9 x 9: [N, H, W, in_channels] -> [N, num_classes].

    Raises:
      ValueError: for an unknown norm, a wrong number of widths, or (when applied) a smaller image.
    """
    if len(widths) != 3:
        raise ValueError(f"resnet9: widths must have 3 numbers, one per stage, got {tuple(widths)}")
    abn = resolve_norm("resnet9", norm, activation, activation_param)

    def block(n_in: int, n_out: int) -> Layer:
        return serial(conv=layers.conv(n_in, n_out, 3, bias=False), abn=abn(n_out))

    def stage(n_in: int, n_out: int) -> Layer:
        return serial(
            conv=layers.conv(n_in, n_out, 3, bias=False, kernel_init=partly_identity),
            pool=layers.max_pool(2),
            abn=abn(n_out),
        )

    def with_residual_block(first: Layer, n: int) -> Layer:
        return serial(reduce=first, residual=residual(serial(conv1=block(n, n), conv2=block(n, n))))

    patches = 2 * in_channels * _WINDOW**2
    stem = layers.conv(
        in_channels, patches, _WINDOW, bias=False, padding="VALID", kernel_init=cosine_patches
    )
    return serial(
        stem=serial(conv=stem, abn=abn(patches)),
        stage0=with_residual_block(stage(patches, widths[0]), widths[0]),
        stage1=stage(widths[0], widths[1]),
        stage2=with_residual_block(stage(widths[1], widths[2]), widths[2]),
        pool=global_max_pool(),
        head=layers.dense(widths[2], num_classes, bias=False),
        scale=stateless(lambda logits: _LOGIT_SCALE * logits),
    )
