"""Numbers of another width than their arrays: sums in float32 or wider, indices in 32 bits."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int


def wide(*of: Array | DTypeLike) -> jnp.dtype:
    """The dtype of sums over such arrays, or over arrays of such dtypes: float32 or wider."""
    return jnp.promote_types(jnp.result_type(*of), jnp.float32)


def widened(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """``a`` in `wide`."""
    return a.astype(wide(a))


def add(x: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """``x + b``, rounded once, to the dtype of ``x``; b may be 1 long where x is not.

    The gradient of b is then a sum in `wide`. XLA on CPU sums bfloat16 as it is, where
    256 + 1 = 256: of 131,072 cotangents near 1 it had found 2,048.
    """
    return (widened(x) + b.astype(wide(x))).astype(x.dtype)


def broadcast_like(v: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``v`` at every place of ``x`` and in its dtype; its gradient is summed as in `add`.

    In one broadcast: the gradient of one from [1, 1, C] to [B, T, C] is a sum over T alone where
    B is 1, which XLA on CPU does not vectorise; it takes 15 times as long.
    """
    return jnp.broadcast_to(v.astype(wide(x)), x.shape).astype(x.dtype)


@jax.custom_jvp
def multiply(x: Float[Array, "..."], v: Float[Array, "..."]) -> Float[Array, "..."]:
    """``x * v``, in the dtype of ``x``; ``v`` may be 1 long where x is not.

    The gradient of ``v`` is summed as in `add`, and for that of ``x`` it is kept as it is: times
    `broadcast_like` each place of ``x`` keeps one of its own.
    """
    return x * v.astype(x.dtype)


@multiply.defjvp
def _multiply_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, v), (dx, dv) = primals, tangents
    return multiply(x, v), multiply(dx, v) + x * broadcast_like(dv, x)


def as_int32(indices: Int[Array, "..."]) -> Int[Array, "..."]:
    """``indices`` as JAX indexes with them; one that int32 does not hold, as 2^32, is -1, not 0."""
    narrow = indices.astype(jnp.int32)
    if indices.dtype.itemsize <= 4:
        return narrow
    return jnp.where(narrow.astype(indices.dtype) == indices, narrow, -1)
