"""The self-attention layer, for whole sequences and for decoding with a key-value cache."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, Int

from fnet import checks, chunks
from fnet.backward_pass import save
from fnet.layer import Children, Decode, Layer, Params, State, composite, init_children
from fnet.layers.dense import dense
from fnet.layers.dot_product_attention import (
    MASKED_SCORE,
    cap,
    dot_product_attention,
    join_chunks,
    query_chunks,
)
from fnet.layers.rotary import rotary as apply_rotary
from fnet.layers.segments import positions_in_segments
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype

Cache = dict[str, Array]
"""Keys and values of past positions: ``{"key", "value"}``."""


def attention(
    width: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    causal: bool = False,
    window: int | None = None,
    rotary: float | Sequence[float] | Callable[[int], Sequence[float]] | None = None,
    rotary_scale: float = 1.0,
    rotary_interleaved: bool = False,
    bias: bool = True,
    output_bias: bool | None = None,
    fused: bool = True,
    qk_norm: Callable[[int], Layer] | None = None,
    qk_norm_over: Literal["head", "heads"] = "head",
    norm_rotated: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    clip: float | None = None,
    sinks: bool = False,
    query_scale: Callable[[Array], Array] | None = None,
    output_gate: bool = False,
    chunk: int | None = None,
) -> Layer:
    """Multi-head self-attention: ``y = softmax(scale q k^T) v W + b``.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, computed by
    `fnet.dot_product_attention`. Under `fnet.recompute` the output of the attention is saved.

    Causal attention supports decoding with a key-value cache. The cache is
    ``{"key", "value"}``, each [B, length, groups, head_dim], with keys after rotation.
    With a window it holds the last min(length, window) positions, so the cost of a token
    does not depend on the number of positions before it. If the cache is donated, a token is
    written in place. On CPU at most a few positions of the cache are copied at a time,
    except in 16 bits, which XLA converts to float32 there.

    Args:
      width: D, size of the last axis of input and output.
      heads: query heads.
      groups: key and value heads, each read by heads / groups query heads (grouped-query
        attention, Ainslie et al. 2023); divides ``heads``. None: ``heads``.
      head_dim: features per head. None: width / heads.
      causal: whether each position attends only to itself and earlier positions.
      window: sliding window, as for `fnet.dot_product_attention`.
      rotary: base of the rotary position embedding, 10000.0 in the paper, or its frequencies, as
        for `fnet.layers.rotary`; None: no position embedding. If they depend on the length: a
        function that returns the frequencies for a number of positions, T of a sequence or
        the positions that a cache can hold.
      rotary_scale, rotary_interleaved: factor of rotated features, and which of them form pairs,
        as for `fnet.layers.rotary`.
      bias: whether the dense layers of queries, keys and values have biases.
      output_bias: whether the output's dense layer has a bias. None: as ``bias``.
      fused: whether one dense layer computes queries, keys and values. Otherwise there are three.
      qk_norm: norm of queries and keys, ``size -> layer`` (Henry et al. 2020,
        "Query-Key Normalization for Transformers"); None: no norm.
      qk_norm_over: whether ``qk_norm`` is over the features of each ``head``, with parameters
        that heads share, or over all ``heads`` together.
      norm_rotated: whether ``qk_norm`` comes after the rotation.
      scale: factor of the scores. None: 1 / sqrt(head_dim).
      soft_cap: as for `fnet.dot_product_attention`.
      clip: limit of the absolute values of queries, keys and values before the rotation, > 0; None:
        no limit.
      sinks: whether each head has a sink, as for `fnet.dot_product_attention`.
      query_scale: factors of the rotated queries for positions [B, T] or [1, T], as in
        Llama 4; None: 1.
      output_gate: whether the output of each head is multiplied by the sigmoid of a gate (Qiu et
        al. 2025, "Gated Attention for Large Language Models"). The dense layer of queries then has
        2 head_dim features for each head, first its query and then its gate.
      chunk: as for `fnet.dot_product_attention`.

    Returns:
      A layer, [B, T, D] -> [B, T, D], without state. Its params are ``query_key_value``, whose
      kernel is [D, (heads + 2 groups) head_dim] in this order, or ``query``, ``key`` and
      ``value``; ``output``; with ``qk_norm`` ``query_norm`` and ``key_norm``; and with ``sinks``
      an array of that name, [heads]. Dense layers have ``{"kernel", "bias"}``. ``apply`` also takes
      ``mask`` [B, T] bool, True for real tokens;
      others are not attended to. Causal attention ignores it, so padding must be at the end.
      ``segments`` [B, T], integers, numbers the documents of a row; positions attend only within
      their document. Causal attention has `fnet.layer.Decode`. Its ``init_cache`` raises
      ValueError for ``length < 1``, and ``extend`` for more positions than fit into a cache
      without a window.

    Raises:
      ValueError: if ``heads`` does not divide ``width`` and there is no ``head_dim``, ``groups``
        does not divide ``heads``, ``window``, ``head_dim`` or ``chunk`` is below 1, ``rotary`` is
        not above 0, or the features of a head are odd with ``rotary``; when applied, if ``x``,
        ``mask`` or ``segments`` has another shape, or ``mask`` is not bool.
      TypeError: when applied, if ``x`` is not floating, or ``segments`` are not integers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import layers
      >>> layer = layers.attention(8, heads=2, causal=True, rotary=10000.0)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> apply = jax.jit(layer.apply, static_argnames="train")
      >>> y, _ = apply(params, state, jnp.ones((2, 5, 8)), train=True)
      >>> y.shape
      (2, 5, 8)
    """
    groups = heads if groups is None else groups
    _check(width, heads, groups, head_dim, window, rotary, chunk)
    checks.numbers("attention", "> 0", clip=clip)
    head_dim = width // heads if head_dim is None else head_dim
    sizes = {"query": heads * head_dim, "key": groups * head_dim, "value": groups * head_dim}
    outputs = sizes | {"query": sizes["query"] * (1 + output_gate)}
    projections = {"query_key_value": sum(outputs.values())} if fused else outputs
    children = {name: dense(width, n, bias=bias) for name, n in projections.items()}
    output_bias = bias if output_bias is None else output_bias
    children["output"] = dense(sizes["query"], width, bias=output_bias)
    if qk_norm is not None:
        for name in ("query", "key"):
            children[f"{name}_norm"] = qk_norm(head_dim if qk_norm_over == "head" else sizes[name])

    def project(
        child: Children,
        x: Array,
        first: Array | int,
        length: int,
        segments: Array | None = None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """Compute queries, keys, values and gates, each [B, T, heads or groups, head_dim]."""
        if x.ndim != 3:
            raise ValueError(f"attention: expected [B, T, {width}], got {x.shape}")

        def split_heads(x: Array) -> Array:
            return x.reshape(*x.shape[:2], -1, head_dim)

        def normalize(name: str, x: Array) -> Array:
            if qk_norm is None:
                return x
            if qk_norm_over == "head":
                return child(f"{name}_norm", x)
            return split_heads(child(f"{name}_norm", merge_heads(x)))

        if fused:
            qkv = split_heads(child("query_key_value", x))
            own = heads * (1 + output_gate)
            q, k, v = jnp.split(qkv, (own, own + groups), axis=2)
        else:
            q, k, v = (split_heads(child(name, x)) for name in sizes)
        gate = None
        if output_gate:
            q, gate = jnp.unstack(q.reshape(*q.shape[:2], heads, 2, head_dim), axis=3)
        if not norm_rotated:
            q, k = normalize("query", q), normalize("key", k)
        if clip is not None:
            q, k, v = (jnp.clip(a, -clip, clip) for a in (q, k, v))
        positions = first + jnp.arange(x.shape[1])
        if rotary is not None:
            base = rotary(length) if callable(rotary) else rotary
            q, k = (
                apply_rotary(a, positions, base, rotary_scale, rotary_interleaved) for a in (q, k)
            )
        if norm_rotated:
            q, k = normalize("query", q), normalize("key", k)
        if query_scale is not None:
            at = positions[None] if segments is None else positions_in_segments(segments)
            q = q * query_scale(at)[..., None, None].astype(q.dtype)
        return q, k, v, gate

    def merge_heads(y: Array) -> Array:
        return y.reshape(*y.shape[:2], -1)

    def write(child: Children, y: Array, gate: Array | None) -> Array:
        y = y if gate is None else y * jax.nn.sigmoid(gate)
        return child("output", merge_heads(y))

    def apply(
        child: Children,
        x: Float[Array, "b t d"],
        *,
        mask: Bool[Array, "b t"] | None = None,
        segments: Int[Array, "b t"] | None = None,
    ) -> Float[Array, "b t d"]:
        q, k, v, gate = project(child, x, 0, x.shape[1], segments)
        y = dot_product_attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            mask=_key_mask(mask, x, causal),
            segments=segments,
            scale=scale,
            soft_cap=soft_cap,
            sinks=child.params.get("sinks"),
            chunk=chunk,
        )
        return write(child, save(y), gate)

    def init_cache(batch: int, length: int, dtype: DTypeLike) -> Cache:
        return empty_cache(batch, length, groups, head_dim, dtype, window)

    def extend(
        params: Params, state: State, cache: Any, x: Float[Array, "b t d"], position: Int[Array, ""]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        child = Children(children, params, state, None, False)
        q, k, v, gate = project(child, x, position, cache["key"].shape[1])
        y, cache = extend_cache_and_attend(
            cache,
            q,
            k,
            v,
            position,
            window=window,
            scale=scale,
            soft_cap=soft_cap,
            sinks=params.get("sinks"),
        )
        return write(child, y, gate), cache

    def init(key: Array) -> tuple[Params, State]:
        params, state = init_children(children, key)
        return params | ({"sinks": jnp.zeros(heads, jnp.float32)} if sinks else {}), state

    decode = Decode(init_cache, extend) if causal else None
    return composite(children, apply, init=init, random=False)._replace(decode=decode)


def _key_mask(mask: Array | None, x: Array, causal: bool) -> Array | None:
    """[B, T] -> [B, 1, 1, T]; None for causal attention, which never attends to later padding."""
    if mask is None:
        return None
    checks.mask("attention", mask, x.shape[:2])
    return None if causal else mask[:, None, None]


def _check(
    width: int,
    heads: int,
    groups: int,
    head_dim: int | None,
    window: int | None,
    rotary: float | Sequence[float] | Callable[[int], Sequence[float]] | None,
    chunk: int | None,
) -> None:
    if heads < 1 or (head_dim is None and width % heads):
        raise ValueError(
            f"attention: heads must divide width, got heads={heads}, width={width}; "
            "or give head_dim"
        )
    if groups < 1 or heads % groups:
        raise ValueError(f"attention: groups must divide heads, got groups={groups}, heads={heads}")
    checks.sizes("attention", head_dim=head_dim, window=window, chunk=chunk)
    if rotary is None:
        return
    if not isinstance(rotary, Sequence) and not callable(rotary) and not rotary > 0:
        raise ValueError(
            f"attention: rotary is a base and must be > 0, got {rotary}; None disables it"
        )
    features = width // heads if head_dim is None else head_dim
    if features % 2:
        raise ValueError(
            f"attention: rotary rotates pairs of features, got {features} per head; choose an even "
            "head_dim, or heads so that width / heads is even"
        )


def empty_cache(
    batch: int, length: int, groups: int, head_dim: int, dtype: DTypeLike, window: int | None
) -> Cache:
    """Build a cache of zeros for ``length`` positions, or for the last ``window`` of them."""
    if length < 1:
        raise ValueError(f"attention: a cache needs a length of at least 1, got {length}")
    slots = length if window is None else min(length, window)
    return {name: jnp.zeros((batch, slots, groups, head_dim), dtype) for name in ("key", "value")}


def extend_cache_and_attend(
    cache: Cache,
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    position: Int[Array, ""],
    *,
    window: int | None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
) -> tuple[Float[Array, "b t h d"], Cache]:
    """Write new positions to the cache, and attend from them to the past and to each other.

    Position i is stored in slot i modulo the number of slots. So the cache of a window is a
    ring buffer: a position overwrites, in place, the one that just left the window.

    It is not checked that ``position + t`` exceeds the slots; the output of the last positions is
    then wrong.
    """
    t, slots = q.shape[1], cache["key"].shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sinks is not None:
        sinks = sinks.astype(sum_dtype(q)).reshape(1, k.shape[2], -1, 1, 1)
    scores = _Scores(scale, soft_cap, sinks)
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
        return _attend_from(scores, q, cache["key"], cache["value"], at, 0, slots), cache
    # Sort the ring buffer by position, append the new positions, and keep the last ones.
    both = {
        name: jnp.concatenate([jnp.roll(cache[name], -position % slots, axis=1), new[name]], axis=1)
        for name in cache
    }
    cache = {name: jnp.roll(a[:, t:], (position + t) % slots, axis=1) for name, a in both.items()}
    first = jnp.maximum(slots - position, 0)
    span = min(window, slots + t)
    return _attend_from(scores, q, both["key"], both["value"], slots, first, span), cache


# Chunk sizes. On CPU a loop over chunks of keys copies only a few positions of the cache, and
# stops at the last key that is needed. Accelerators multiply by the whole cache in place.
_QUERIES, _KEYS_ON_CPU = 128, 64


class _Scores(NamedTuple):
    """How scores are computed: ``cap(scale q k^T)``, and the sinks [1, K, G, 1, 1]."""

    scale: float
    soft_cap: float | None
    sinks: Array | None


def _attend_from(
    scores: _Scores,
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    at: ArrayLike,
    first: ArrayLike,
    window: int,
) -> Float[Array, "b t h d"]:
    """Attend from query i to keys at + i - window + 1 to at + i, from ``first`` on."""
    t, groups = q.shape[1], k.shape[2]
    n, size = chunks.even(t, _QUERIES)

    def attend(q: Array, start: Array, keys: int) -> Array:
        return _online_softmax(scores, q, k, v, start + at, first, window, keys)

    def chunk(x: tuple[Array, Array]) -> Array:
        y: Array = jax.lax.platform_dependent(
            *x,
            cpu=functools.partial(attend, keys=min(_KEYS_ON_CPU, k.shape[1])),
            default=functools.partial(attend, keys=k.shape[1]),
        )
        return y

    y: Array = jax.lax.map(chunk, (query_chunks(q, groups, n, size), size * jnp.arange(n)))
    return join_chunks(y, t)


def _online_softmax(
    how: _Scores,
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
    dtype = sum_dtype(q)
    scaled = q.astype(dtype) * jnp.asarray(how.scale, dtype)
    query_positions = at + jnp.arange(queries)

    def read_chunk(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, y = carry
        start = jnp.minimum(i * size, s - size)  # the last chunk overlaps the one before
        keys, values = (
            jnp.moveaxis(jax.lax.dynamic_slice_in_dim(a, start, size, axis=1), 1, 2).astype(dtype)
            for a in (k, v)
        )  # [B, K, size, D]
        j = (start + jnp.arange(size))[None]
        position = query_positions[:, None]
        allowed = (j <= position) & (j > position - window) & (j >= jnp.maximum(first, i * size))
        scores = cap(jnp.einsum("bksd,bkgtd->bkgts", keys, scaled), how.soft_cap)
        scores = jnp.where(allowed[None, None, None], scores, MASKED_SCORE)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        shrink = jnp.exp(top - new_top)
        # Select again: if all keys of a chunk are masked, every score equals the maximum.
        weights = jnp.where(allowed[None, None, None], jnp.exp(scores - new_top), 0)
        total = total * shrink + weights.sum(-1, keepdims=True)
        y = y * shrink + jnp.einsum("bkgts,bksd->bkgtd", weights, values)
        return new_top, total, y

    rows = (*q.shape[:-1], 1)
    carry = jnp.full(rows, MASKED_SCORE, dtype), jnp.zeros(rows, dtype), jnp.zeros(q.shape, dtype)
    if how.sinks is not None:  # as a first key with value 0
        carry = jnp.broadcast_to(how.sinks, rows), jnp.ones(rows, dtype), carry[2]
    # In `jax.shard_map` the carry of a loop must vary over the same mesh axes throughout.
    carry = equally_varying((carry, q, k, v))[0]
    lowest = jnp.maximum(jnp.maximum(at - window + 1, first), 0) // size
    highest = jnp.minimum(at + queries - 1, s - 1) // size + 1
    total: Array
    y: Array
    _, total, y = jax.lax.fori_loop(lowest, highest, read_chunk, carry)
    return (y / jnp.where(total > 0, total, 1)).astype(q.dtype)
