"""Convolution of NHWC images."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.backward_pass import params_first
from fnet.layer import Layer, Params, State, check_floating, check_sizes
from fnet.layers.dense import HE_NORMAL, add_bias

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
    """Two-dimensional convolution, as the field calls cross-correlation.

    Args:
      n_in: input channels.
      n_out: output channels.
      window: kernel height and width.
      stride: steps between outputs.
      dilation: steps between kernel elements.
      groups: channel groups convolved apart; divides ``n_in`` and ``n_out``.
      padding: ``"SAME"``, ``"VALID"``, or (low, high) per spatial axis.
      bias: whether a bias is added; without it, normalisation usually follows.
      kernel_init: initial kernel; He et al. 2015 by default.

    Returns:
      A layer with params ``kernel`` [kh, kw, n_in / groups, n_out] and ``bias``
      [n_out] (float32; when applied, the kernel is cast to the input's dtype and the bias
      added in float32 or wider), no state; ``x`` [N, H, W, n_in] -> [N, H', W', n_out],
      in the input's dtype.

    Raises:
      ValueError: for a size below 1, or if ``groups`` does not divide both channel
        counts; when applied, if the input is not [N, H, W, n_in].
      TypeError: if the input is of integers, to which the kernel would be cast.
    """
    sides = {"window": _pair(window), "stride": _pair(stride), "dilation": _pair(dilation)}
    smallest = {name: min(pair) for name, pair in sides.items()}
    check_sizes("conv", n_in=n_in, n_out=n_out, **smallest)
    if groups < 1 or n_in % groups or n_out % groups:
        raise ValueError(
            f"conv: groups must divide both channel counts, got groups={groups}, "
            f"n_in={n_in}, n_out={n_out}"
        )
    shape = (*sides["window"], n_in // groups, n_out)

    def init(key: Array) -> tuple[Params, State]:
        kernel = kernel_init(key, shape, jnp.float32)
        return {"kernel": kernel} | ({"bias": jnp.zeros(n_out, jnp.float32)} if bias else {}), {}

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "n h w c"],
        *,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "n h w d"], State]:
        del key, train
        if x.ndim != 4 or x.shape[-1] != n_in:
            raise ValueError(f"conv: expected [N, H, W, {n_in}], got {x.shape}")
        check_floating("conv", x=x)
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
        return add_bias(y, params), state

    return Layer(init, apply)
