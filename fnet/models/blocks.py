"""Building blocks of image networks: norm and activation by name, and residual blocks."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from fnet import layers
from fnet.layer import Layer, Params, State, apply_child, init_children, serial

NormActivation = Callable[..., Layer]
"""``(channels, *, activation, activation_param) -> Layer``: a norm followed by an activation."""


def group_norm_activation(
    channels: int, *, activation: str, activation_param: float | None
) -> Layer:
    """Group norm (Wu, He 2018) with gcd(32, channels) groups, followed by the activation."""
    return serial(
        norm=layers.group_norm(channels, math.gcd(32, channels)),
        act=layers.activation(activation, activation_param),
    )


NORMS: dict[str, NormActivation] = {
    "abn": layers.abn,
    "batch": layers.batch_norm,
    "group": group_norm_activation,
}
"""Norms that image networks accept by name."""


def resolve_norm(
    network: str, norm: str | NormActivation, activation: str, activation_param: float | None
) -> NormActivation:
    """Look up a norm by name and set its default activation.

    Args:
      network: name of the network, for the error message.
      norm: ``"abn"``: in-place activated batch norm (`fnet.abn`). ``"batch"``: plain batch norm
        with gammas of any sign, as pretrained weights have. ``"group"``: group norm, whose
        statistics are per example. Or a callable ``(channels, *, activation,
        activation_param) -> Layer``.
      activation: default activation after the norm.
      activation_param: negative slope of ``leaky_relu`` (default 0.01) or alpha of ``elu``
        (default 1).

    Returns:
      ``(channels) -> Layer``. Pass ``activation="identity"`` for the norm alone.

    Raises:
      ValueError: for an unknown name.
    """
    if not callable(norm):
        if norm not in NORMS:
            raise ValueError(f"{network}: norm must be one of {sorted(NORMS)}, got {norm!r}")
        norm = NORMS[norm]
    return functools.partial(norm, activation=activation, activation_param=activation_param)


def convolution(
    n_in: int, n_out: int, window: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> Layer:
    """Convolution without bias, with torch's symmetric padding (half a window on each side)."""
    pad = [(dilation * (window // 2),) * 2] * 2
    return layers.conv(
        n_in,
        n_out,
        window,
        stride=stride,
        dilation=dilation,
        groups=groups,
        padding=pad,
        bias=False,
    )


def post_activation(
    n_in: int,
    channels: Sequence[int],
    norm: NormActivation,
    activation: Layer,
    *,
    stride: int = 1,
    dilation: int = 1,
    first_dilation: int | None = None,
    groups: int = 1,
    shortcut: str = "conv",
) -> Layer:
    """Post-activation residual block: ``act(shortcut(x) + body(x))``.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016. The last
    norm of the body has no activation. The first 3x3 convolution has the stride. Parameter
    names are torchvision's.

    Args:
      n_in: input channels.
      channels: output channels of the convolutions: two (3x3, 3x3) or three (1x1, 3x3, 1x1).
      norm: norm after each convolution.
      activation: activation after the sum.
      stride: stride of the block. If it is not 1, or if the number of channels changes, the
        shortcut is a 1x1 convolution and a norm.
      dilation: dilation of the 3x3 convolutions.
      first_dilation: dilation of the first 3x3 convolution; None: ``dilation``.
      groups: groups of the 3x3 convolution, if there are three convolutions.
      shortcut: ``"conv"``: the convolution of the shortcut has the stride. ``"pool"``: average
        pooling has it (He et al., "Bag of Tricks for Image Classification", CVPR 2019).
    """
    windows = (3, 3) if len(channels) == 2 else (1, 3, 1)
    strided = windows.index(3)
    first_dilation = first_dilation or dilation
    body: dict[str, Layer] = {}
    sizes = [n_in, *channels]
    for i, window in enumerate(windows):
        body[f"conv{i + 1}"] = convolution(
            sizes[i],
            sizes[i + 1],
            window,
            stride=stride if i == strided else 1,
            dilation=1 if window == 1 else first_dilation if i == strided else dilation,
            groups=groups if window == 3 and len(windows) == 3 else 1,
        )
        is_last = i == len(windows) - 1
        body[f"bn{i + 1}"] = norm(sizes[i + 1], **({"activation": "identity"} if is_last else {}))
    children = dict(body)
    if (n_in, stride) != (channels[-1], 1):
        pools = shortcut == "pool"
        conv = convolution(n_in, channels[-1], 1, stride=1 if pools else stride)
        parts = conv, norm(channels[-1], activation="identity")
        children["downsample"] = serial(*[layers.avg_pool(stride, partial=True)] * pools, *parts)

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        y, options = x, dict[str, Any](key=key, train=train)
        for name in body:
            y, state = apply_child(children, name, params, state, y, **options)
        if "downsample" in children:
            x, state = apply_child(children, "downsample", params, state, x, **options)
        y, _ = activation.apply({}, {}, x + y, train=train)
        return y, state

    return Layer(lambda key: init_children(children, key), apply)


def pre_activation(
    n_in: int,
    channels: Sequence[int],
    norm: NormActivation,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    dropout: float = 0.0,
) -> Layer:
    """Pre-activation residual block: ``shortcut + body(a)`` with ``a = act(norm(x))``.

    He, Zhang, Ren, Sun, "Identity Mappings in Deep Residual Networks", ECCV 2016, in the layout
    of mapillary/inplace_abn: the first convolution has the stride. The shortcut is ``x``, or a
    1x1 convolution of ``a`` if the size or the number of channels changes. Parameter names
    follow mapillary/inplace_abn.

    Args:
      n_in: input channels.
      channels: output channels of the convolutions: two (3x3, 3x3) or three (1x1, 3x3, 1x1).
      norm: norm before each convolution.
      stride: stride of the block.
      dilation: dilation of the 3x3 convolutions.
      groups: groups of the 3x3 convolution, if there are three convolutions.
      dropout: rate at which whole channels are dropped before the last convolution.

    Raises:
      ValueError: if ``groups`` does not divide the channels.
    """
    windows = (3, 3) if len(channels) == 2 else (1, 3, 1)
    sizes = [n_in, *channels]
    convs: dict[str, Layer] = {}
    for i, window in enumerate(windows):
        if i:
            convs[f"bn{i + 1}"] = norm(sizes[i])
        if dropout and i == len(windows) - 1:
            convs["dropout"] = layers.dropout(dropout, shared_axes=(1, 2))
        convs[f"conv{i + 1}"] = convolution(
            sizes[i],
            sizes[i + 1],
            window,
            stride=1 if i else stride,
            dilation=dilation if window == 3 else 1,
            groups=groups if window == 3 and len(windows) == 3 else 1,
        )
    children = {"bn1": norm(n_in), "convs": serial(**convs)}
    if (n_in, stride) != (channels[-1], 1):
        children["proj_conv"] = convolution(n_in, channels[-1], 1, stride=stride)

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        options = dict[str, Any](key=key, train=train)
        activated, state = apply_child(children, "bn1", params, state, x, **options)
        y, state = apply_child(children, "convs", params, state, activated, **options)
        if "proj_conv" in children:
            x, state = apply_child(children, "proj_conv", params, state, activated, **options)
        return x + y, state

    return Layer(lambda key: init_children(children, key), apply)
