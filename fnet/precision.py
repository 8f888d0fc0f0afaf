"""Mixed precision: bfloat16 and float16 values are summed in float32, and indices have 32 bits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int


def sum_dtype(*operands: Array | DTypeLike) -> jnp.dtype:
    """Return the dtype in which to sum these arrays or dtypes: float32 or wider."""
    return jnp.promote_types(jnp.result_type(*operands), jnp.float32)


def upcast(a: Float[Array, "..."]) -> Float[Array, "..."]:
    """Cast an array to the dtype in which to sum it, float32 or wider."""
    return a.astype(sum_dtype(a))


def cast_kernels(params: Any, dtype: DTypeLike) -> Any:
    """Cast kernels and embeddings, which are almost all parameters, to another dtype.

    Biases, scales of norms and parameters of recurrences keep their dtype. They are few, and some
    need float32.
    """

    def cast(path: Any, a: Array) -> Array:
        name = str(getattr(path[-1], "key", "")) if path else ""
        return a.astype(dtype) if name.endswith(("kernel", "embedding")) else a

    return jax.tree_util.tree_map_with_path(cast, params)


def add(x: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Add a bias to ``x`` in float32 or wider, and round once to the dtype of ``x``.

    ``b`` may have axes of length 1. Its gradient is then summed in float32 or wider. XLA on
    CPU would sum bfloat16 in bfloat16, where 256 + 1 = 256.
    """
    return (upcast(x) + b.astype(sum_dtype(x))).astype(x.dtype)


def broadcast_like(v: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Broadcast ``v`` to the shape and dtype of ``x``; its gradient is summed as in `add`.

    Broadcast [C] to [B, T, C] in one step. The gradient of a broadcast from [1, 1, C] is a sum
    over T alone if B is 1. XLA on CPU does not vectorize it and takes 15 times as long.
    """
    return jnp.broadcast_to(v.astype(sum_dtype(x)), x.shape).astype(x.dtype)


@jax.custom_jvp
def multiply(x: Float[Array, "..."], v: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply ``x`` by a scale ``v`` in the dtype of ``x``; ``v`` may have axes of length 1.

    The gradient of ``v`` is summed as in `add`. The backward pass saves ``v`` itself, where
    ``x * broadcast_like(v, x)`` would save the broadcast array.
    """
    return x * v.astype(x.dtype)


@multiply.defjvp
def _multiply_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (x, v), (dx, dv) = primals, tangents
    return multiply(x, v), multiply(dx, v) + x * broadcast_like(dv, x)


def as_int32(indices: Int[Array, "..."]) -> Int[Array, "..."]:
    """Cast indices to int32, with -1 for indices that int32 cannot represent."""
    narrow = indices.astype(jnp.int32)
    if indices.dtype.itemsize <= 4:
        return narrow
    return jnp.where(narrow.astype(indices.dtype) == indices, narrow, -1)
