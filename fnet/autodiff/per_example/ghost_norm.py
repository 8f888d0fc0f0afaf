"""Sums of outer products, one an example: their norms and weighted sums without making them.

Example b has the matrices G_gb = sum_t u_gbt v_gbt^T [rows, cols], one a group g. A
group is a layer of a scanned stack or a head; t counts tokens, or pixels, or uses.
A factor of integers [groups, batch, time] stands for one-hot vectors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fnet.precision import wide, widened

_EXTRA = 4  # intermediates may take this part of what the factors take
_PARTS = 32  # in which data are cleared where they must be
_ALWAYS = 2**20  # bytes that intermediates may take in any case
_FAR = 1e38  # to which cotangents' dtype must reach to be scaled as they are


def squared_norms(u: Array, v: Array) -> Array:
    """``sum_g |G_gb|^2`` [batch].

    For one t that is |u|^2 |v|^2. Otherwise it is taken from whichever is less work:
    the products ``<u_t, u_s> <v_t, v_s>`` over all pairs (Gram matrices), or the
    matrices themselves, made for a few examples at a time.

    Args:
      u: [groups, batch, time, rows], or indices.
      v: [groups, batch, time, cols], or indices.
    """
    groups, _, time = u.shape[:3]
    if time == 1:
        return (
            _squared_lengths(u) * _squared_lengths(v)
            if groups == 1
            else jax.vmap(lambda u, v: squared_norms(u[None], v[None]))(u, v).sum(0)
        )
    if _is_index(u) or _is_index(v):
        return at_least_0(inner_products(u, v, u, v))
    rows, cols = u.shape[-1], v.shape[-1]
    if time * (rows + cols) < rows * cols:

        def of(u: Array, v: Array) -> Array:
            return at_least_0((_gram(u, u) * _gram(v, v)).sum((0, 2, 3)))

        size = 2 * groups * time * time
    else:

        def of(u: Array, v: Array) -> Array:
            return _squared(per_example(u, v), (0, 2, 3))

        size = groups * rows * cols
    return by_examples(of, (u, v), 4 * size)


def at_least_0(squares: Array) -> Array:
    """Squared norms that are sums of products, which rounding may take below 0; nan stays."""
    return jax.lax.max(squares, jnp.zeros_like(squares))


def inner_products(u: Array, v: Array, other_u: Array, other_v: Array) -> Array:
    """``sum_g <G_gb, G'_gb>`` [batch] of two such sums of the same rows and columns."""

    def of(u: Array, v: Array, other_u: Array, other_v: Array) -> Array:
        return (_gram(u, other_u) * _gram(v, other_v)).sum((0, 2, 3))

    size = 2 * u.shape[0] * u.shape[2] * other_u.shape[2]
    return by_examples(of, (u, v, other_u, other_v), 4 * size)


def per_example(u: Array, v: Array) -> Array:
    """G itself, [groups, batch, rows, cols]."""
    return jnp.einsum("gbtr,gbtc->gbrc", u, v, preferred_element_type=wide(u, v))


def total(u: Array, v: Array, scales: Array) -> Array:
    """``sum_b scales_b G_gb`` [groups, rows, cols], without examples that are scaled by 0.

    Args:
      u: [groups, batch, time, rows].
      v: [groups, batch, time, cols].
      scales: [batch].
    """
    if u.shape[0] == 1:  # a plain product is faster than a batch of one
        return _total(u[0], v[0], scales)[None]
    return jax.vmap(_total, (0, 0, None))(u, v, scales)


def _total(u: Array, v: Array, scales: Array) -> Array:
    v, real = scaled(v, scales)
    u = jax.lax.collapse(u, 0, 2)

    def product(u: Array) -> Array:
        return jnp.einsum("nr,nc->rc", u, v, preferred_element_type=wide(u, v))

    rows = u.shape[-1]
    parts = next(n for n in range(min(_PARTS, rows), rows + 1) if rows % n == 0)
    size = rows // parts

    def again(i: Array, sums: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(u, i * size, size, axis=1)
        clean = product(jnp.where(real[:, None], part, 0))
        return jax.lax.dynamic_update_slice_in_dim(sums, clean, i * size, axis=0)

    # 0 times anything is not always 0. Where an example is left out the product is made
    # again, in place and some rows at a time: a clean copy of all would be as large as the data.
    sums: Array = jax.lax.fori_loop(0, jnp.where(real.all(), 0, parts), again, product(u))
    return sums


def scaled(v: Array, scales: Array) -> tuple[Array, Array]:
    """[batch, time, cols] scaled, as [batch * time, cols]; and which rows are not left out.

    All that read one array of cotangents do it in this shape: a compiler then keeps one.
    """
    rows = jnp.broadcast_to(scales[:, None], v.shape[:2]).ravel()
    v = jax.lax.collapse(v, 0, 2)
    real = rows != 0
    # Scales go beyond float16 both ways, and what they leave below; bfloat16 reaches far enough.
    v = v if float(jnp.finfo(v.dtype).max) > _FAR else widened(v)
    return jnp.where(real[:, None], v * rows[:, None].astype(v.dtype), 0), real


def in_parts(f: Callable[..., Array], arrays: Sequence[Array], bytes_each: int) -> Array:
    """``f(*arrays)``, a few examples at a time if its intermediates would be large.

    Args:
      f: from arrays [batch, ...] to [batch, ...].
      arrays: what it takes.
      bytes_each: of its intermediates for an example.
    """
    batch = arrays[0].shape[0]
    allowed = max(_ALWAYS, sum(a.nbytes for a in arrays) // _EXTRA)
    parts = next(
        (n for n in range(1, batch + 1) if batch % n == 0 and batch // n * bytes_each <= allowed),
        max(batch, 1),
    )
    if parts == 1:
        return f(*arrays)

    # Every n-th example: of a sharded batch each device then has its share of every part.
    def part(a: Array) -> Array:
        return jnp.moveaxis(a.reshape(batch // parts, parts, *a.shape[1:]), 1, 0)

    found: Any = jax.lax.map(lambda arrays: f(*arrays), tuple(map(part, arrays)))
    return jnp.moveaxis(found, 0, 1).reshape(batch, *found.shape[2:])


def by_examples(f: Callable[..., Array], arrays: Sequence[Array], bytes_each: int) -> Array:
    """`in_parts` for arrays [groups, batch, ...]."""
    swapped = [jnp.swapaxes(a, 0, 1) for a in arrays]
    return in_parts(lambda *a: f(*(jnp.swapaxes(b, 0, 1) for b in a)), swapped, bytes_each)


def _gram(u: Array, other: Array) -> Array:
    """``<u_t, other_s>`` [groups, batch, t, s]."""
    if _is_index(u) and _is_index(other):
        return (u[..., :, None] == other[..., None, :]).astype(jnp.float32)
    if _is_index(u):
        return jnp.swapaxes(_gram(other, u), 2, 3)
    if _is_index(other):
        at = jnp.broadcast_to(other[:, :, None], (*u.shape[:3], other.shape[-1]))
        return jnp.take_along_axis(u, at, -1)
    return jnp.einsum(
        "gbtr,gbsr->gbts",
        u,
        other,
        precision=jax.lax.Precision.HIGHEST,  # of terms that cancel a norm has half the digits
        preferred_element_type=wide(u, other),
    )


def _squared(a: Array, axes: tuple[int, ...]) -> Array:
    return jnp.square(widened(a)).sum(axes)


def _squared_lengths(a: Array) -> Array:
    """Of factors [1, batch, 1, n], or of one-hot vectors [1, batch, 1]: [batch]."""
    if _is_index(a):
        return jnp.ones(a.shape[1], jnp.float32)
    return _squared(a.reshape(a.shape[1], -1), (1,))


def _is_index(a: Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.integer)
