"""Convolution and pooling on NHWC images."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.backward_pass import params_first
from fnet.layer import Layer, Params, State, check_sizes, stateless
from fnet.layers.linear import HE_NORMAL, add_bias, check_floating

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
        check_floating("conv", x)
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


def max_pool(window: int = 2, *, stride: int | None = None, padding: int = 0) -> Layer:
    """Maximum over ``window`` x ``window`` patches.

    ``x`` [N, H, W, C] -> [N, H', W', C] with ``H' = (H + 2 padding - window) // stride + 1``.
    Patches that do not overlap are the maximum of shifted slices: on CPU the
    gradient of a windowed reduction costs several times more.

    Args:
      window: height and width of a patch.
      stride: steps between patches; ``window`` by default.
      padding: rows and columns of minus infinity on each side; fewer than ``window``.

    Raises:
      ValueError: for a window or stride below 1, or another padding; when applied, if the
        input is not [N, H, W, C], or the image, padded, is smaller than one patch.
    """
    step = window if stride is None else stride
    check_sizes("max_pool", window=window, stride=step)
    if not 0 <= padding < window:
        raise ValueError(
            f"max_pool: padding must be at least 0 and less than window={window}, which would "
            f"else see nothing but padding, got {padding}"
        )

    def pool(x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c"]:
        h, w = (size + 2 * padding for size in x.shape[1:3])
        if h < window or w < window:
            raise ValueError(f"max_pool: window {window} is larger than the image {h} x {w}")
        if step == window and not padding:
            x = x[:, : h - h % window, : w - w % window]
            shifts = [x[:, i::window, j::window] for i in range(window) for j in range(window)]
            return functools.reduce(jnp.maximum, shifts)
        spread = (1, window, window, 1)
        pads = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
        y: Array = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, spread, (1, step, step, 1), pads)
        return y

    return _of_images("max_pool", pool)


def avg_pool(window: int = 2) -> Layer:
    """Mean over non-overlapping ``window`` x ``window`` patches; what is left over is not seen.

    ``x`` [N, H, W, C] -> [N, H // window, W // window, C], as torch's ``AvgPool2d``.

    Raises:
      ValueError: for a window below 1; when applied, if the input is not [N, H, W, C], or
        ``window`` is larger than the image.
    """
    check_sizes("avg_pool", window=window)

    def pool(x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c"]:
        n, h, w, c = x.shape
        if h < window or w < window:
            raise ValueError(f"avg_pool: window {window} is larger than the image {h} x {w}")
        x = x[:, : h - h % window, : w - w % window]
        # One axis at a time: a sharding is followed through no other reshape.
        x = x.reshape(n, h // window, window, x.shape[2], c)
        return x.reshape(n, h // window, window, w // window, window, c).mean((2, 4))

    return _of_images("avg_pool", pool)


def global_avg_pool() -> Layer:
    """Mean over height and width: ``x`` [N, H, W, C] -> [N, C].

    Raises:
      ValueError: when applied, if the input is not [N, H, W, C].
    """
    return _of_images("global_avg_pool", lambda x: x.mean((1, 2)))


def global_max_pool() -> Layer:
    """Maximum over height and width: ``x`` [N, H, W, C] -> [N, C].

    Raises:
      ValueError: when applied, if the input is not [N, H, W, C].
    """
    return _of_images("global_max_pool", lambda x: x.max((1, 2)))


def _of_images(name: str, f: Callable[[Array], Array]) -> Layer:
    def checked(x: Array) -> Array:
        # Without the axis of examples, width and channels would be pooled in silence.
        if x.ndim != 4:
            raise ValueError(f"{name}: expected [N, H, W, C], got {x.shape}")
        return f(x)

    return stateless(checked)
