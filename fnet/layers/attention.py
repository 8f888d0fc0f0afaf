"""Self-attention as a layer: whole sequences, and step by step with a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, Int

from fnet.backward_pass import save
from fnet.layer import Decode, Layer, Params, State, apply_child, init_children
from fnet.layers.dense import dense
from fnet.layers.dot_product_attention import UNSEEN, dot_product_attention
from fnet.layers.rotary import rotary as turned
from fnet.mesh import equally_varying
from fnet.precision import wide

Cache = dict[str, Array]


def attention(
    width: int,
    heads: int,
    *,
    groups: int | None = None,
    causal: bool = False,
    window: int | None = None,
    rotary: float | None = None,
    bias: bool = True,
    chunk: int | None = None,
) -> Layer:
    """``softmax(q k^T / sqrt(width / heads)) v`` in each head, and a dense layer after it.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, computed by
    `fnet.dot_product_attention`. Under `fnet.recompute` its output is kept.

    Causal attention also goes on from where it stopped. Its cache is
    ``{"key", "value"}``, each [B, length, groups, width / heads], keys as they are after
    rotation; with a window the last min(length, window) positions, so that a further token
    costs the same however many came before. A token is written in place where the cache is
    donated; on CPU no more than a few positions of it are copied at a time, except in 16
    bits, which XLA widens there.

    Args:
      width: D, the size of the input's and the output's last axis.
      heads: of queries; divides ``width``.
      groups: heads of keys and values, each read by heads / groups heads of queries
        (grouped queries, Ainslie et al. 2023); divides ``heads``. None: ``heads``.
      causal: whether a position sees only itself and those before it.
      window: how many positions are seen at most, as for `fnet.dot_product_attention`.
      rotary: base of the wavelengths of `fnet.layers.rotary.rotary`, by which queries and
        keys are turned, 10000.0 in the paper; None: no positions.
      bias: whether both dense layers have one.
      chunk: as for `fnet.dot_product_attention`.

    Returns:
      A layer, [B, T, D] -> [B, T, D], with params ``query_key_value``, whose kernel is
      [D, (heads + 2 groups) width / heads] in this order, and ``output``, each
      ``{"kernel", "bias"}``; no state. ``apply`` also takes ``mask``, [B, T] bool, True for
      a real token: others are not attended. Causal attention does not look at it, so there
      padding belongs at the end of a sequence. ``decode`` is None unless causal; then
      ``start(batch, length, dtype)`` raises ValueError for ``length < 1``, and ``extend``
      for more positions at once than a cache without a window has room for.

    Raises:
      ValueError: if ``heads`` does not divide ``width`` or ``groups`` not ``heads``, if
        ``window`` or ``chunk`` is below 1, ``rotary`` not above 0, or width / heads odd
        with ``rotary``; when applied, if ``x`` or ``mask`` has another shape.
      TypeError: when applied, if ``x`` is not floating or ``mask`` not bool.
    """
    groups = heads if groups is None else groups
    _check(width, heads, groups, window, rotary, chunk)
    head_dim = width // heads
    children = {
        "query_key_value": dense(width, (heads + 2 * groups) * head_dim, bias=bias),
        "output": dense(width, width, bias=bias),
    }

    def project(
        params: Params, x: Array, first: Array | int, train: bool
    ) -> tuple[Array, Array, Array]:
        """Queries [B, T, heads, head_dim], keys and values [B, T, groups, head_dim]."""
        if x.ndim != 3:
            raise ValueError(f"attention: expected [B, T, {width}], got {x.shape}")
        qkv, _ = apply_child(children, "query_key_value", params, {}, x, key=None, train=train)
        qkv = qkv.reshape(*x.shape[:2], heads + 2 * groups, head_dim)
        q, k, v = jnp.split(qkv, (heads, heads + groups), axis=2)
        if rotary is not None:
            turn = functools.partial(turned, positions=first + jnp.arange(x.shape[1]), base=rotary)
            q, k = turn(q), turn(k)
        return q, k, v

    def combine(params: Params, y: Array, train: bool) -> Array:
        y = y.reshape(*y.shape[:2], width)
        return apply_child(children, "output", params, {}, y, key=None, train=train)[0]

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "b t d"],
        *,
        key: Array | None = None,
        train: bool,
        mask: Bool[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], State]:
        del key
        q, k, v = project(params, x, 0, train)
        y = dot_product_attention(
            q, k, v, causal=causal, window=window, mask=_of_keys(mask, x, causal), chunk=chunk
        )
        return combine(params, save(y), train), state

    def init_cache(batch: int, length: int, dtype: DTypeLike) -> Cache:
        return empty_cache(batch, length, groups, head_dim, dtype, window)

    def extend(
        params: Params, state: State, cache: Any, x: Float[Array, "b t d"], position: Int[Array, ""]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        del state
        q, k, v = project(params, x, position, False)
        y, cache = attend_and_remember(cache, q, k, v, position, window=window)
        return combine(params, y, False), cache

    decode = Decode(init_cache, extend) if causal else None
    return Layer(lambda key: init_children(children, key), apply, decode)


def _of_keys(mask: Array | None, x: Array, causal: bool) -> Array | None:
    """[B, T] -> [B, 1, 1, T]; None for causal attention, which sees no padding at the end."""
    if mask is None:
        return None
    if mask.dtype != bool:
        raise TypeError(f"attention: mask must be bool, True for a real token, got {mask.dtype}")
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention: mask must have shape {x.shape[:2]}, [B, T] of x {x.shape}, "
            f"got {mask.shape}"
        )
    return None if causal else mask[:, None, None]


def _check(
    width: int,
    heads: int,
    groups: int,
    window: int | None,
    rotary: float | None,
    chunk: int | None,
) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"attention: heads must divide width, got heads={heads}, width={width}")
    if groups < 1 or heads % groups:
        raise ValueError(f"attention: groups must divide heads, got groups={groups}, heads={heads}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be at least 1, got {window}; None attends to all")
    if chunk is not None and chunk < 1:
        raise ValueError(f"attention: chunk must be at least 1, got {chunk}")
    if rotary is None:
        return
    if not rotary > 0:
        raise ValueError(f"attention: rotary, a base, must be > 0, got {rotary}; None: no rotation")
    if width // heads % 2:
        raise ValueError(
            f"attention: rotary turns pairs of features, got width {width} / heads {heads} = "
            f"{width // heads} a head; choose heads with an even width"
        )


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
