"""Keys and values of the past, and attention to them, a few positions at a time."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from fnet.layers.attention import UNSEEN
from fnet.mesh import equally_varying
from fnet.precision import wide

Cache = dict[str, Array]


def empty_cache(
    batch: int, length: int, groups: int, head_dim: int, dtype: DTypeLike, window: int | None
) -> Cache:
    """Zeros for ``length`` positions, of which a window keeps the last ``window``.

    Returns:
      ``{"key", "value"}``, each [batch, min(length, window), groups, head_dim].

    Raises:
      ValueError: if ``length < 1``.
    """
    if length < 1:
        raise ValueError(f"attention: a cache needs a length of at least 1, got {length}")
    slots = length if window is None else min(length, window)
    return {name: jnp.zeros((batch, slots, groups, head_dim), dtype) for name in ("key", "value")}


def attend_and_remember(
    cache: Cache,
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    position: Int[Array, ""],
    *,
    window: int | None,
) -> tuple[Float[Array, "b t h d"], Cache]:
    """Causal attention of t new positions to the past and to themselves.

    Position i lies in slot i modulo the number of slots, so that a window's cache is a
    ring: one position is written in place, over the one that has just left the window.

    Args:
      cache: from `empty_cache`, renewed ``position`` times.
      q, k, v: of positions ``position`` to ``position + t - 1``.
      position: how many positions came before.
      window: as for `fnet.dot_product_attention`.

    Returns:
      ``(y, cache)``: [B, t, H, D] in the dtype of ``q``; the cache in its own dtype.

    Raises:
      ValueError: if there are more positions than the cache has room for at all. That
        ``position + t`` is too many is not seen: the last positions are then wrong.
    """
    t, slots = q.shape[1], cache["key"].shape[1]
    new = {"key": k.astype(cache["key"].dtype), "value": v.astype(cache["value"].dtype)}
    if window is None and t > slots:
        raise ValueError(f"attention: {t} positions do not fit into a cache for {slots}")
    if window is None or t == 1:
        slot = position if window is None else position % slots
        cache = {
            name: jax.lax.dynamic_update_slice_in_dim(cache[name], new[name], slot, axis=1)
            for name in cache
        }
        at = position if window is None else jnp.minimum(position, slots - 1)
        return _attend_from(q, cache["key"], cache["value"], at, 0, slots), cache
    # In the order of time: slots of the past, then the new; the last of all stay.
    seen = {
        name: jnp.concatenate([jnp.roll(cache[name], -position % slots, axis=1), new[name]], axis=1)
        for name in cache
    }
    cache = {name: jnp.roll(a[:, t:], (position + t) % slots, axis=1) for name, a in seen.items()}
    first = jnp.maximum(slots - position, 0)
    return _attend_from(q, seen["key"], seen["value"], slots, first, min(window, slots + t)), cache


# Queries and keys at a time. A loop over keys makes no copy of the cache but of a few positions,
# and ends with the last one seen. An accelerator multiplies by the whole cache as it lies there.
_QUERIES, _KEYS_ON_CPU = 128, 64


def _attend_from(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    at: ArrayLike,
    first: ArrayLike,
    window: int,
) -> Float[Array, "b t h d"]:
    """Query i attends to keys at + i - window + 1 to at + i, none before ``first``."""
    (b, t, h, d), groups = q.shape, k.shape[2]
    n = -(-t // _QUERIES)
    size = -(-t // n)
    q = jnp.pad(q, ((0, 0), (0, n * size - t), (0, 0), (0, 0)))
    q = q.reshape(b, n, size, groups, h // groups, d).transpose(1, 0, 3, 4, 2, 5)

    def some(q: Array, start: Array, keys: int) -> Array:
        return _online_softmax(q, k, v, start + at, first, window, keys)

    def chunk(x: tuple[Array, Array]) -> Array:
        y: Array = jax.lax.platform_dependent(
            *x,
            cpu=functools.partial(some, keys=min(_KEYS_ON_CPU, k.shape[1])),
            default=functools.partial(some, keys=k.shape[1]),
        )
        return y

    y: Array = jax.lax.map(chunk, (q, size * jnp.arange(n)))  # [n, B, K, H / K, size, D]
    return y.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * size, h, d)[:, :t]


def _online_softmax(
    q: Float[Array, "b k g c d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    at: Array,
    first: ArrayLike,
    window: int,
    size: int,
) -> Float[Array, "b k g c d"]:
    """Attention in one pass over chunks of ``size`` keys (Milakov and Gimelshein 2018)."""
    queries, s = q.shape[-2], k.shape[1]
    dtype = wide(q)
    scaled = q.astype(dtype) * jnp.asarray(q.shape[-1] ** -0.5, dtype)
    own = at + jnp.arange(queries)

    def read(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, y = carry
        start = jnp.minimum(i * size, s - size)  # the last chunk overlaps the one before
        keys, values = (
            jnp.moveaxis(jax.lax.dynamic_slice_in_dim(a, start, size, axis=1), 1, 2).astype(dtype)
            for a in (k, v)
        )  # [B, K, size, D]
        j = (start + jnp.arange(size))[None]
        seen = (
            (j <= own[:, None]) & (j > own[:, None] - window) & (j >= jnp.maximum(first, i * size))
        )
        scores = jnp.einsum("bksd,bkgtd->bkgts", keys, scaled)
        scores = jnp.where(seen[None, None, None], scores, UNSEEN)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        shrink = jnp.exp(top - new_top)
        # By selection: where a chunk has nothing to see, all its scores are the maximum.
        weights = jnp.where(seen[None, None, None], jnp.exp(scores - new_top), 0)
        total = total * shrink + weights.sum(-1, keepdims=True)
        y = y * shrink + jnp.einsum("bkgts,bksd->bkgtd", weights, values)
        return new_top, total, y

    rows = (*q.shape[:-1], 1)
    none = jnp.full(rows, UNSEEN, dtype), jnp.zeros(rows, dtype), jnp.zeros(q.shape, dtype)
    # Inside `jax.shard_map` what a loop carries varies from the start as in the end.
    none = equally_varying((none, q, k, v))[0]
    lowest = jnp.maximum(jnp.maximum(at - window + 1, first), 0) // size
    highest = jnp.minimum(at + queries - 1, s - 1) // size + 1
    total: Array
    y: Array
    _, total, y = jax.lax.fori_loop(lowest, highest, read, none)
    return (y / jnp.where(total > 0, total, 1)).astype(q.dtype)
