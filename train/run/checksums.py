"""A number an array that changes with any of its bits, computed where the array lies."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def checksums(tree: Any) -> dict[str, int]:
    """``{"params.stem.kernel": 2873465, ...}`` of every array of a tree.

    The sum over all elements, modulo 2^32, of their bits and their place, mixed by a bijection
    (the last step of MurmurHash3): one changed element is always seen. No array is moved or
    copied; of one that is spread over devices each sums its own part.

    Args:
      tree: of arrays or typed keys of any dtype.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    # One after the other: on CPU each takes as much memory again as its array.
    return {dotted(path): int(_sum(leaf)) for path, leaf in leaves}


def dotted(path: Any) -> str:
    """A leaf's path, ``"opt_state.0.mu"``, the same for attributes, keys and positions."""
    parts = (getattr(p, a) for p in path for a in ("key", "name", "idx") if hasattr(p, a))
    return ".".join(str(p) for p in parts)


@jax.jit
def _sum(a: Array) -> Array:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a = jax.random.key_data(a)
    if a.dtype == bool:
        a = a.astype(np.uint8)
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        a = jnp.stack([a.real, a.imag])
    bits = min(a.dtype.itemsize * 8, 32)  # of wider ones the halves, on an axis of their own
    number = jax.lax.bitcast_convert_type(a, np.dtype(f"uint{bits}")).astype(np.uint32)
    place = jnp.zeros(number.shape, np.uint32)
    for axis in range(number.ndim):
        after = math.prod(number.shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(np.uint32, number.shape, axis) * np.uint32(after)
    return _mixed(number ^ _mixed(place)).sum(dtype=np.uint32)


def _mixed(h: Array) -> Array:
    """A bijection of 32 bits in which every bit changes half of the others."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
