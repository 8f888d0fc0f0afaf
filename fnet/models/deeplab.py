"""DeepLabV3: semantic segmentation from the features of a dilated network."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import checks, layers
from fnet.layer import Children, Layer, composite, serial, stateless
from fnet.models.blocks import NormActivation, convolution, resolve_norm
from fnet.precision import add, upcast

_DROPOUT = 0.5


def deeplab(
    body: Layer,
    n_in: int,
    *,
    num_classes: int,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    norm: str | NormActivation = "abn",
    hidden: int = 256,
    dilations: Sequence[int] = (12, 24, 36),
    pooling_size: tuple[int, int] | None = None,
    head: str = "sum",
    interpolate: bool = True,
) -> Layer:
    """DeepLabV3 segmentation network: a backbone, an ASPP head and a 1x1 convolution to logits.

    Chen, Papandreou, Schroff, Adam, "Rethinking Atrous Convolution for Semantic Image
    Segmentation", 2017, in the layout of mapillary/inplace_abn.

    Args:
      body: backbone that maps images to features, or to a tuple of features, of which the last
        are used. Build one with ``num_classes=None``, as in `fnet.models.resnet.resnet`.
      n_in: channels of the features.
      num_classes: number of classes per pixel.
      activation, activation_param, norm: as for `fnet.models.resnet.resnet`.
      hidden: channels of each branch of the head and of its output.
      dilations: dilations of the head's 3x3 convolutions.
      pooling_size: height and width of the head's pooling in evaluation, in features; None: global
        (`aspp`).
      head: ``"sum"``: `aspp`. ``"concat"``: `concat_aspp`, as in torchvision.
      interpolate: whether to upsample the logits to the size of the images, bilinearly. Without
        upsampling, pass the logits to `fnet.losses.pixel_cross_entropy` or
        `fnet.losses.pixel_predictions`, which upsample a few rows at a time.

    Returns:
      A layer on NHWC images: [N, H, W, C] -> logits [N, H, W, num_classes], or
      [N, h, w, num_classes] without upsampling. Its children are ``body``, ``head`` and ``cls``.

    Raises:
      ValueError: for an unknown norm or head, or a pooling size with the head ``"concat"``.

    Example:
      >>> import fnet, jax
      >>> body = fnet.models.get("resnet18", num_classes=None, dilation=(1, 1, 2, 4))
      >>> model = fnet.models.deeplab(body, 512, num_classes=21, interpolate=False)
      >>> def logits(key, images):
      ...     return model.apply(*model.init(key), images, train=False)[0]
      >>> images = jax.ShapeDtypeStruct((2, 64, 64, 3), "float32")
      >>> jax.eval_shape(logits, jax.random.key(0), images).shape  # output stride 8
      (2, 8, 8, 21)
    """
    norm = resolve_norm("deeplab", norm, activation, activation_param)
    checks.choice("deeplab", tuple(HEADS), head=head)
    if head == "concat" and pooling_size is not None:
        raise ValueError(
            f"deeplab: pooling_size must be None with head 'concat', got {pooling_size}"
        )
    children = {
        "body": body,
        "head": HEADS[head](n_in, hidden, norm, dilations, pooling_size),
        "cls": layers.conv(hidden, num_classes, 1),
    }

    def apply(child: Children, x: Array) -> Array:
        y = child("body", x)
        y = child.in_order(("head", "cls"), y[-1] if isinstance(y, tuple) else y)
        if not interpolate:
            return y
        shape = (*x.shape[:3], num_classes)
        resized: Array = jax.image.resize(y, shape, "bilinear", antialias=False)
        return resized

    return composite(children, apply)


def aspp(
    n_in: int,
    hidden: int,
    norm: NormActivation,
    dilations: Sequence[int],
    pooling_size: tuple[int, int] | None,
) -> Layer:
    """Atrous spatial pyramid pooling: parallel convolutions plus a pooled branch, summed.

    One 1x1 convolution is added to the 3x3 convolutions with ``dilations``. A norm follows the
    branches, the pooled branch and their sum. In evaluation, average pooling has a window of
    ``pooling_size`` features. Set it to the size of the features in training if you evaluate on
    larger images. None: global average pooling. [N, H, W, n_in] -> [N, H, W, hidden].
    """
    branches = [convolution(n_in, hidden, 1)]
    branches += [convolution(n_in, hidden, 3, dilation=rate) for rate in dilations]
    children = {
        "map_convs": _concatenated(branches),
        "map_bn": norm(hidden * len(branches)),
        "global_pooling_conv": convolution(n_in, hidden, 1),
        "global_pooling_bn": norm(hidden),
        "red_conv": convolution(hidden * len(branches), hidden, 1),
        "pool_red_conv": convolution(hidden, hidden, 1),
        "red_bn": norm(hidden),
    }

    def apply(child: Children, x: Array) -> Array:
        pooled = x.mean((1, 2), keepdims=True)
        if not child.train and pooling_size is not None:
            pooled = _sliding_mean(x, pooling_size)
        y = child.in_order(("map_convs", "map_bn", "red_conv"), x)
        pooled = child.in_order(
            ("global_pooling_conv", "global_pooling_bn", "pool_red_conv"), pooled
        )
        return child("red_bn", add(y, pooled))

    return composite(children, apply)


def concat_aspp(
    n_in: int, hidden: int, norm: NormActivation, dilations: Sequence[int], _: None
) -> Layer:
    """Atrous spatial pyramid pooling as in torchvision: the branches are concatenated.

    A norm follows each branch. A 1x1 convolution, a norm and dropout with rate 0.5 follow the
    concatenation, then a 3x3 convolution and a norm. Parameter names are torchvision's. One 1x1
    convolution is added to the 3x3 convolutions with ``dilations``.
    [N, H, W, n_in] -> [N, H, W, hidden]. Training needs a key.
    """
    branches = [serial(convolution(n_in, hidden, 1), norm(hidden))]
    branches += [
        serial(convolution(n_in, hidden, 3, dilation=rate), norm(hidden)) for rate in dilations
    ]
    pool = stateless(lambda x: x.mean((1, 2), keepdims=True))
    branches.append(serial(pool, convolution(n_in, hidden, 1), norm(hidden)))
    project = convolution(hidden * len(branches), hidden, 1)
    joined = serial(
        convs=_concatenated(branches),
        project=serial(project, norm(hidden), layers.dropout(_DROPOUT)),
    )
    return serial(joined, convolution(hidden, hidden, 3), norm(hidden))


HEADS: dict[str, Callable[..., Layer]] = {"sum": aspp, "concat": concat_aspp}
"""Heads by name: of mapillary/inplace_abn, and of torchvision."""


def _concatenated(branches: Sequence[Layer]) -> Layer:
    """Apply each branch to the same input and concatenate the outputs over channels.

    A pooled output [N, 1, 1, C] is repeated over height and width.
    """
    children = {str(i): branch for i, branch in enumerate(branches)}

    def apply(child: Children, x: Array) -> Array:
        outputs = (child(name, x) for name in children)
        repeated = [jnp.broadcast_to(y, (*x.shape[:3], y.shape[-1])) for y in outputs]
        return jnp.concatenate(repeated, -1)

    return composite(children, apply)


def _sliding_mean(x: Array, size: tuple[int, int]) -> Array:
    """Average over a window around each position, with edge padding after the pooling."""
    window = tuple(min(w, n) for w, n in zip(size, x.shape[1:3], strict=True))
    sums = upcast(x)
    # Summing rows and then columns takes fewer additions than summing the whole window.
    for dimensions in ((1, window[0], 1, 1), (1, 1, window[1], 1)):
        sums = jax.lax.reduce_window(sums, 0.0, jax.lax.add, dimensions, (1, 1, 1, 1), "VALID")
    mean = (sums / (window[0] * window[1])).astype(x.dtype)
    rows, columns = (
        (np.arange(n) - (w - 1) // 2).clip(0, n - w)
        for n, w in zip(x.shape[1:3], window, strict=True)
    )
    return mean[:, rows][:, :, columns]
