"""Pooling of NHWC images."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.layer import Layer, stateless
from fnet.precision import upcast


def max_pool(window: int = 2, *, stride: int | None = None, padding: int = 0) -> Layer:
    """Max pooling that saves the index of each maximum.

    x [N, H, W, C] -> [N, H', W', C] with ``H' = (H + 2 padding - window) // stride + 1``.
    The backward pass gives ``dy`` to the first maximum of each patch, as torch does. It
    saves one index per output, a uint8 for patches of at most 256 elements. A windowed
    reduction of XLA would save input and output instead.

    Args:
      window: height and width of a patch. A pass has ``window ** 2`` operations.
      stride: distance between patches; ``window`` by default.
      padding: rows and columns of -inf on each side; less than ``window``.

    Returns:
      A layer without params or state.

    Raises:
      ValueError: for a window or stride below 1, or an invalid padding; when applied, if the
        input is not [N, H, W, C], or the padded image is smaller than the window.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> y, _ = fnet.layers.max_pool(2).apply({}, {}, x, train=True)
      >>> y.ravel().tolist()
      [5.0, 7.0, 13.0, 15.0]
    """
    step = window if stride is None else stride
    checks.sizes("max_pool", window=window, stride=step)
    if not 0 <= padding < window:
        raise ValueError(
            f"max_pool: padding must be at least 0 and less than window={window}, "
            f"got {padding}; otherwise a patch holds only padding"
        )

    def pool(x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c"]:
        h, w = (size + 2 * padding for size in x.shape[1:3])
        if h < window or w < window:
            raise ValueError(f"max_pool: window {window} is larger than the image {h} x {w}")
        return _maximum(x, window, step, padding)

    return _image_layer("max_pool", pool)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _maximum(x: Array, window: int, step: int, padding: int) -> Array:
    return functools.reduce(jnp.maximum, _shifted(x, window, step, padding, _lowest(x)))


@_maximum.defjvp
def _maximum_jvp(
    window: int, step: int, padding: int, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    y_and_dy: tuple[Array, Array] = jax.lax.platform_dependent(
        *(*primals, *tangents),
        # On TPU a windowed reduction and its gradient are single instructions, and strided
        # slices are copies.
        tpu=functools.partial(_jvp_by_reduction, window, step, padding),
        default=functools.partial(_jvp_by_index, window, step, padding),
    )
    return y_and_dy


def _jvp_by_index(window: int, step: int, padding: int, x: Array, dx: Array) -> tuple[Array, Array]:
    candidates = _shifted(x, window, step, padding, _lowest(x))
    largest = candidates[0]
    index = jnp.zeros(largest.shape, jnp.uint8 if window**2 <= 256 else jnp.int32)
    for i, candidate in enumerate(candidates[1:], 1):
        greater = (candidate > largest) | (candidate != candidate)  # NaN wins, as in jnp.maximum
        largest = jnp.where(greater, candidate, largest)
        index = jnp.where(greater, jnp.asarray(i, index.dtype), index)
    # Without the barrier XLA may recompute the index in the backward pass and save the input
    # for that. The output is selected by the index, so that the index exists in the forward pass.
    index = jax.lax.optimization_barrier(index).astype(jnp.int32)
    tangents = _shifted(dx, window, step, padding, 0)
    return jax.lax.select_n(index, *candidates), jax.lax.select_n(index, *tangents)


def _jvp_by_reduction(
    window: int, step: int, padding: int, x: Array, dx: Array
) -> tuple[Array, Array]:
    sides = (padding, padding)

    def reduced(x: Array) -> Array:
        y: Array = jax.lax.reduce_window(
            *(x, np.asarray(_lowest(x), x.dtype), jax.lax.max),
            window_dimensions=(1, window, window, 1),
            window_strides=(1, step, step, 1),
            padding=((0, 0), sides, sides, (0, 0)),
        )
        return y

    y_and_dy: tuple[Array, Array] = jax.jvp(reduced, (x,), (dx,))
    return y_and_dy


def _shifted(x: Array, window: int, step: int, padding: int, fill: float) -> list[Array]:
    """Slice out each element of the patches, row by row: a list of [N, H', W', C]."""
    sides = (padding, padding)
    x = jnp.pad(x, ((0, 0), sides, sides, (0, 0)), constant_values=fill) if padding else x
    h, w = ((size - window) // step * step + 1 for size in x.shape[1:3])
    # Rows first: then the gradients within a row are added first, and XLA fuses them.
    rows = [x[:, i : i + h : step] for i in range(window)]
    return [row[:, :, j : j + w : step] for row in rows for j in range(window)]


def _lowest(x: Array) -> float:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return -jnp.inf if floating else int(jnp.iinfo(x.dtype).min)


def avg_pool(window: int = 2, *, partial: bool = False) -> Layer:
    """Average pooling over non-overlapping patches.

    x [N, H, W, C] -> [N, H // window, W // window, C]. Rows and columns beyond the last
    whole patch are ignored, as in torch's ``AvgPool2d``.

    Args:
      window: height and width of a patch, and the distance between patches.
      partial: whether to average the patches at the border that are not whole, too, as torch does
        with ``ceil_mode=True, count_include_pad=False``. Then sizes are rounded up.

    Returns:
      A layer without params or state.

    Raises:
      ValueError: for a window below 1; when applied, if the input is not [N, H, W, C], or
        the image is smaller than the window.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
      >>> y, _ = fnet.layers.avg_pool(2).apply({}, {}, x, train=True)
      >>> y.ravel().tolist()
      [2.5, 4.5, 10.5, 12.5]
      >>> y, _ = fnet.layers.avg_pool(3, partial=True).apply({}, {}, x, train=True)
      >>> y.ravel().tolist()
      [5.0, 7.0, 13.0, 15.0]
    """
    checks.sizes("avg_pool", window=window)

    def pool(x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 c"]:
        h, w = x.shape[1:3]
        if partial and (h % window or w % window):
            sides = [(0, -size % window) for size in (h, w)]
            y = pool_whole(jnp.pad(x, [(0, 0), *sides, (0, 0)]))
            return y * _inverse_counts(h, w, window).astype(y.dtype)
        if h < window or w < window:
            raise ValueError(f"avg_pool: window {window} is larger than the image {h} x {w}")
        return pool_whole(x[:, : h - h % window, : w - w % window])

    def pool_whole(x: Array) -> Array:
        n, h, w, c = x.shape
        # One axis at a time: shardings propagate only through such reshapes.
        x = x.reshape(n, h // window, window, w, c)
        return x.reshape(n, h // window, window, w // window, window, c).mean((2, 4))

    return _image_layer("avg_pool", pool)


def _inverse_counts(h: int, w: int, window: int) -> np.ndarray:
    """Elements of a whole patch over those that each patch has, [1, H', W', 1]."""
    rows, columns = (
        window / np.minimum(size - np.arange(0, size, window), window) for size in (h, w)
    )
    return (rows[:, None] * columns[None])[None, ..., None].astype(np.float32)


def global_avg_pool() -> Layer:
    """Average over height and width: x [N, H, W, C] -> [N, C].

    Raises:
      ValueError: when applied, if the input is not [N, H, W, C].

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> x = jnp.ones((2, 4, 4, 3))
      >>> fnet.layers.global_avg_pool().apply({}, {}, x, train=True)[0].shape
      (2, 3)
    """
    return _image_layer("global_avg_pool", lambda x: x.mean((1, 2)))


def global_max_pool() -> Layer:
    """Maximum over height and width: x [N, H, W, C] -> [N, C]."""
    return _image_layer("global_max_pool", lambda x: upcast(x).max((1, 2)).astype(x.dtype))


def _image_layer(name: str, f: Callable[[Array], Array]) -> Layer:
    def checked(x: Array) -> Array:
        checks.image(name, x)
        return f(x)

    return stateless(checked)
