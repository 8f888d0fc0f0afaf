"""DeepLabV3: a label for every pixel, from the features of a dilated network."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from fnet import layers
from fnet.layer import Layer, Params, State, apply_child, init_children
from fnet.models import norm_activation
from fnet.models.norm_activation import NormActivation
from fnet.models.residual_blocks import convolution
from fnet.precision import add, widened


def deeplab(
    body: Layer,
    n_in: int,
    *,
    num_classes: int,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    norm: str | NormActivation = "abn",
    hidden: int = 256,
    dilations: Sequence[int] = (12, 24, 36),
    pooling_size: tuple[int, int] | None = None,
    interpolate: bool = True,
) -> Layer:
    """A segmentation network: a body, the DeepLabV3 head, a 1x1 convolution to logits.

    Chen, Papandreou, Schroff, Adam, "Rethinking Atrous Convolution for Semantic Image
    Segmentation", 2017, as mapillary/inplace_abn has it.

    Args:
      body: images -> features, or a tuple of them, of which the last is taken; see
        ``num_classes=None`` of the networks of this room.
      n_in: channels of those features.
      num_classes: how many labels.
      activation, activation_param, norm: as for `fnet.models.resnet`.
      hidden, dilations, pooling_size: as for `head`.
      interpolate: whether logits are interpolated linearly to the size of the images. Without
        it they stay as large as the features, for `fnet.losses.pixel_cross_entropy` and
        `fnet.losses.pixel_predictions`, which interpolate a few rows at a time.

    Returns:
      A layer on NHWC images: [N, H, W, C] -> logits [N, H, W, num_classes], or
      [N, h, w, num_classes] in the size of the features. Its parts are ``body``, ``head``,
      ``cls``.

    Raises:
      ValueError: for an unknown norm.
    """
    normed = norm_activation.find("deeplab", norm, activation, activation_param)
    children = {
        "body": body,
        "head": head(n_in, hidden, normed, dilations=dilations, pooling_size=pooling_size),
        "cls": layers.conv(hidden, num_classes, 1),
    }

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        y = x
        for name in children:
            y, state = apply_child(children, name, params, state, y, key=key, train=train)
            y = y[-1] if isinstance(y, tuple) else y
        if not interpolate:
            return y, state
        shape = (*x.shape[:3], num_classes)
        return jax.image.resize(y, shape, "bilinear", antialias=False), state

    return Layer(lambda key: init_children(children, key), apply)


def head(
    n_in: int,
    hidden: int,
    norm: NormActivation,
    *,
    dilations: Sequence[int] = (12, 24, 36),
    pooling_size: tuple[int, int] | None = None,
) -> Layer:
    """Atrous spatial pyramid pooling: four convolutions and the image's mean, summed.

    Args:
      n_in: channels of the features.
      hidden: of each branch and of the output.
      norm: of the branches, of the mean, and of their sum.
      dilations: of the three 3x3 convolutions; the fourth is 1x1.
      pooling_size: height and width, in features, of the mean in evaluation, so that it is
        taken over about as much of a large image as in training; None: over all of it.

    Returns:
      A layer [N, H, W, n_in] -> [N, H, W, hidden].
    """
    branches = [convolution(n_in, hidden, 1)]
    branches += [convolution(n_in, hidden, 3, dilation=spread) for spread in dilations]
    children = {
        "map_convs": _beside(branches),
        "map_bn": norm(hidden * len(branches)),
        "global_pooling_conv": convolution(n_in, hidden, 1),
        "global_pooling_bn": norm(hidden),
        "red_conv": convolution(hidden * len(branches), hidden, 1),
        "pool_red_conv": convolution(hidden, hidden, 1),
        "red_bn": norm(hidden),
    }

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        def of(name: str, x: Array, state: State) -> tuple[Array, State]:
            return apply_child(children, name, params, state, x, key=key, train=train)

        y, pooled = x, x.mean((1, 2), keepdims=True)
        if not train and pooling_size is not None:
            pooled = _mean_around(x, pooling_size)
        for name in ("map_convs", "map_bn", "red_conv"):
            y, state = of(name, y, state)
        for name in ("global_pooling_conv", "global_pooling_bn", "pool_red_conv"):
            pooled, state = of(name, pooled, state)
        return of("red_bn", add(y, pooled), state)

    return Layer(lambda key: init_children(children, key), apply)


def _beside(branches: Sequence[Layer]) -> Layer:
    """What each of several layers makes of the same input, channels after channels."""
    children = {str(i): branch for i, branch in enumerate(branches)}

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        made = []
        for name in children:
            y, state = apply_child(children, name, params, state, x, key=key, train=train)
            made.append(y)
        return jnp.concatenate(made, -1), state

    return Layer(lambda key: init_children(children, key), apply)


def _mean_around(x: Array, size: tuple[int, int]) -> Array:
    """The mean of ``size`` around each position; at a border, that of the nearest whole window."""
    window = tuple(min(w, n) for w, n in zip(size, x.shape[1:3], strict=True))
    sums = widened(x)
    for along in ((1, window[0], 1, 1), (1, 1, window[1], 1)):  # rows, then columns: fewer sums
        sums = jax.lax.reduce_window(sums, 0.0, jax.lax.add, along, (1, 1, 1, 1), "VALID")
    mean = (sums / (window[0] * window[1])).astype(x.dtype)
    before = [(w - 1) // 2 for w in window]
    pads = [(b, w - 1 - b) for b, w in zip(before, window, strict=True)]
    return jnp.pad(mean, [(0, 0), *pads, (0, 0)], mode="edge")
