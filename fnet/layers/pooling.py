"""Pooling of NHWC images."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from fnet.layer import Layer, check_sizes, stateless


def max_pool(window: int = 2, *, stride: int | None = None, padding: int = 0) -> Layer:
    """Maximum over ``window`` x ``window`` patches, kept as where it was.

    ``x`` [N, H, W, C] -> [N, H', W', C] with ``H' = (H + 2 padding - window) // stride + 1``.
    The backward pass gives ``dy`` to the first maximum of each patch, as torch does. For it
    one index an output is kept, a byte where a patch has no more than 256 elements, and
    neither input nor output, which a windowed reduction of XLA compares once more.

    Args:
      window: height and width of a patch. The program has ``window ** 2`` operations a pass.
      stride: steps between patches; ``window`` by default.
      padding: rows and columns on each side that are never the maximum; fewer than ``window``.

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
        return _maximum(x, window, step, padding)

    return _of_images("max_pool", pool)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _maximum(x: Array, window: int, step: int, padding: int) -> Array:
    return functools.reduce(jnp.maximum, _shifted(x, window, step, padding, _lowest(x)))


@_maximum.defjvp
def _maximum_jvp(
    window: int, step: int, padding: int, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    found: tuple[Array, Array] = jax.lax.platform_dependent(
        *(*primals, *tangents),
        # What takes and gives patches is one instruction there; slices with steps are copies.
        tpu=functools.partial(_by_reduction, window, step, padding),
        default=functools.partial(_by_index, window, step, padding),
    )
    return found


def _by_index(window: int, step: int, padding: int, x: Array, dx: Array) -> tuple[Array, Array]:
    candidates = _shifted(x, window, step, padding, _lowest(x))
    largest = candidates[0]
    where = jnp.zeros(largest.shape, jnp.uint8 if window**2 <= 256 else jnp.int32)
    for i, candidate in enumerate(candidates[1:], 1):
        greater = (candidate > largest) | (candidate != candidate)  # NaN: as in `jnp.maximum`
        largest = jnp.where(greater, candidate, largest)
        where = jnp.where(greater, jnp.asarray(i, where.dtype), where)
    # Else XLA may find it once more in the backward pass, from an input it then keeps. The
    # maxima are taken by it too, for else it would be found there alone.
    where = jax.lax.optimization_barrier(where).astype(jnp.int32)
    changes = _shifted(dx, window, step, padding, 0)
    return jax.lax.select_n(where, *candidates), jax.lax.select_n(where, *changes)


def _by_reduction(window: int, step: int, padding: int, x: Array, dx: Array) -> tuple[Array, Array]:
    sides = (padding, padding)

    def reduced(x: Array) -> Array:
        y: Array = jax.lax.reduce_window(
            *(x, np.asarray(_lowest(x), x.dtype), jax.lax.max),
            window_dimensions=(1, window, window, 1),
            window_strides=(1, step, step, 1),
            padding=((0, 0), sides, sides, (0, 0)),
        )
        return y

    found: tuple[Array, Array] = jax.jvp(reduced, (x,), (dx,))
    return found


def _shifted(x: Array, window: int, step: int, padding: int, fill: float) -> list[Array]:
    """What stands at each place of a patch, row by row: [N, H', W', C] each."""
    sides = (padding, padding)
    x = jnp.pad(x, ((0, 0), sides, sides, (0, 0)), constant_values=fill) if padding else x
    h, w = ((size - window) // step * step + 1 for size in x.shape[1:3])
    # In this order the gradients of a row's patches are added first, which XLA fuses.
    rows = [x[:, i : i + h : step] for i in range(window)]
    return [row[:, :, j : j + w : step] for row in rows for j in range(window)]


def _lowest(x: Array) -> float:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return -jnp.inf if floating else int(jnp.iinfo(x.dtype).min)


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
