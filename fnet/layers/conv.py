"""2-D convolution of NHWC images."""

import functools
from collections.abc import Sequence

import jax
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.backward_pass import params_first
from fnet.layer import Layer, Params, from_function
from fnet.layers.dense import HE_NORMAL, add_bias, init_linear

Padding = str | Sequence[tuple[int, int]]


def _pair(n: int | tuple[int, int]) -> tuple[int, int]:
    return (n, n) if isinstance(n, int) else n


def conv(
    n_in: int,
    n_out: int,
    window: int | tuple[int, int] = 3,
    *,
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    padding: Padding = "SAME",
    bias: bool = True,
    kernel_init: jax.nn.initializers.Initializer = HE_NORMAL,
) -> Layer:
    """2-D convolution of NHWC images.

    Args:
      n_in: input channels.
      n_out: output channels.
      window: kernel size, height and width.
      stride: distance between outputs, in pixels of the input.
      dilation: distance between kernel elements, in pixels of the input.
      groups: number of channel groups that are convolved separately; divides ``n_in`` and
        ``n_out``.
      padding: ``"SAME"``, ``"VALID"``, or (low, high) per spatial axis.
      bias: whether to add a bias. It is usually left out before a norm.
      kernel_init: initializer of the kernel; He et al. 2015 by default.

    Returns:
      A layer, x [N, H, W, n_in] -> [N, H', W', n_out] in the dtype of x, without state. Its
      params are ``kernel`` [kh, kw, n_in / groups, n_out] and ``bias`` [n_out], float32. The
      kernel is cast to the dtype of x; the bias is added in float32 or wider.

    Raises:
      ValueError: for a size below 1, or if ``groups`` does not divide both channel
        counts; when applied, if the input is not [N, H, W, n_in].
      TypeError: when applied, if the input is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.conv(3, 8, stride=2)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 6, 6, 3)), train=True)[0].shape
      (2, 3, 3, 8)
    """
    sides = {"window": _pair(window), "stride": _pair(stride), "dilation": _pair(dilation)}
    smallest = {name: min(pair) for name, pair in sides.items()}
    checks.sizes("conv", n_in=n_in, n_out=n_out, **smallest)
    if groups < 1 or n_in % groups or n_out % groups:
        raise ValueError(
            f"conv: groups must divide both channel counts, got groups={groups}, "
            f"n_in={n_in}, n_out={n_out}"
        )
    shape = (*sides["window"], n_in // groups, n_out)

    def apply(params: Params, x: Float[Array, "n h w c"]) -> Float[Array, "n h w d"]:
        checks.image("conv", x, n_in)
        checks.floating("conv", x=x)
        x, params = params_first(x, params)
        y = jax.lax.conv_general_dilated(
            x,
            params["kernel"].astype(x.dtype),
            window_strides=sides["stride"],
            padding=padding,
            rhs_dilation=sides["dilation"],
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return add_bias(y, params)

    return from_function(functools.partial(init_linear, shape, bias, kernel_init), apply)
