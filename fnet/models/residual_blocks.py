"""The two residual blocks: activated behind the sum, and before each convolution."""

from collections.abc import Sequence
from typing import Any

from jax import Array

from fnet import layers
from fnet.layer import Layer, Params, State, apply_child, init_children, serial
from fnet.models.norm_activation import NormActivation


def convolution(
    n_in: int, n_out: int, window: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> Layer:
    """A convolution without bias, padded as torch's are: by half of the window on each side."""
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
) -> Layer:
    """``act(shortcut(x) + body(x))``, the body's last norm without activation.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016. The
    stride is on the first 3x3 convolution. Names are torchvision's.

    Args:
      n_in: channels of the input.
      channels: of the convolutions: two, 3x3 both, or three, 1x1, 3x3 and 1x1.
      norm: of each convolution's output.
      activation: behind the sum.
      stride: of the block; with it, or where channels change, the shortcut is a 1x1
        convolution and a norm.
      dilation: of the 3x3 convolutions.
    """
    windows = (3, 3) if len(channels) == 2 else (1, 3, 1)
    striding = windows.index(3)
    body: dict[str, Layer] = {}
    sizes = [n_in, *channels]
    for i, window in enumerate(windows):
        step = stride if i == striding else 1
        spread = dilation if window == 3 else 1
        last = i == len(windows) - 1
        body[f"conv{i + 1}"] = convolution(
            sizes[i], sizes[i + 1], window, stride=step, dilation=spread
        )
        body[f"bn{i + 1}"] = norm(sizes[i + 1], **({"activation": "identity"} if last else {}))
    children = dict(body)
    if (n_in, stride) != (channels[-1], 1):
        children["downsample"] = serial(
            convolution(n_in, channels[-1], 1, stride=stride),
            norm(channels[-1], activation="identity"),
        )

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
    """``shortcut + body(a)`` with ``a = norm(x)``: x is summed as it is, or projected from a.

    He, Zhang, Ren, Sun, "Identity Mappings in Deep Residual Networks", ECCV 2016, as
    mapillary/inplace_abn lays it out: the stride is on the first convolution, and where
    size or channels change, the shortcut is a 1x1 convolution of the activated input.
    Names are that library's.

    Args:
      n_in: channels of the input.
      channels: of the convolutions: two, 3x3 both, or three, 1x1, 3x3 and 1x1.
      norm: of each convolution's input.
      stride: of the block.
      dilation: of the 3x3 convolutions.
      groups: of the 3x3 convolution of three.
      dropout: share of channels dropped before the last convolution, in training.

    Raises:
      ValueError: if groups do not divide the channels.
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
