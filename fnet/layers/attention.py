"""The self-attention layer, for whole sequences and for decoding with a key-value cache."""

import functools
from collections.abc import Callable
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
from fnet.layers.rotary import Rotary
from fnet.layers.rotary import rotary as apply_rotary
from fnet.layers.segments import positions_in_segments
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype

Cache = dict[str, Array]
"""Keys and values of past positions: ``{"key", "value"}``."""


class Past(NamedTuple):
    """Keys and values [B, S, groups, head_dim] that t new positions may attend to.

    Attributes:
      key, value: Keys after rotation, and values, also of the new positions.
      at: Index of the first new position.
      first: Index of the first position; those before it hold nothing.
      window: How many positions each of the new ones sees, with itself.
    """

    key: Array
    value: Array
    at: ArrayLike
    first: ArrayLike
    window: int


class AttentionVariant(NamedTuple):
    """What published models change in `attention`. The defaults are the plain layer.

    Attributes:
      output_bias: whether the output's dense layer has a bias. None: as ``bias``.
      qk_norm: norm of queries and keys, ``size -> layer`` (Henry et al. 2020,
        "Query-Key Normalization for Transformers"); None: no norm.
      qk_norm_over: whether ``qk_norm`` is over the features of each ``head``, with parameters
        that heads share, or over all ``heads`` together.
      norm_rotated: whether ``qk_norm`` comes after the rotation.
      value_norm: norm of the values of a head, ``size -> layer``; None: no norm.
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
      values: whether values have a dense layer of their ``own``, or are the ``keys`` before norm
        and rotation. Then ``fused`` must be False.
      keys: whether keys and values are the layer's ``own``; its own and ``passed_on`` to later
        blocks of a stack; or ``given`` by an earlier block (Gemma 4), so that there is
        nothing but queries and output. See ``reads`` of `fnet.layers.Block`.

    Example:
      >>> from fnet import layers
      >>> gemma2 = layers.AttentionVariant(scale=256**-0.5, soft_cap=50.0)
      >>> layer = layers.attention(8, heads=2, causal=True, variant=gemma2)
    """

    output_bias: bool | None = None
    qk_norm: Callable[[int], Layer] | None = None
    qk_norm_over: Literal["head", "heads"] = "head"
    norm_rotated: bool = False
    value_norm: Callable[[int], Layer] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    clip: float | None = None
    sinks: bool = False
    query_scale: Callable[[Array], Array] | None = None
    output_gate: bool = False
    values: Literal["own", "keys"] = "own"
    keys: Literal["own", "passed_on", "given"] = "own"


def attention(
    width: int,
    heads: int,
    *,
    groups: int | None = None,
    head_dim: int | None = None,
    causal: bool = False,
    window: int | None = None,
    rotary: float | Rotary | None = None,
    bias: bool = True,
    fused: bool = True,
    variant: AttentionVariant | None = None,
    chunk: int | None = None,
) -> Layer:
    """Multi-head self-attention: ``y = softmax(scale q k^T) v W + b``.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017, computed by
    `fnet.dot_product_attention`. Under `fnet.recompute` the output of the attention is saved.

    Causal attention supports decoding with a key-value cache. The cache is ``{"key", "value"}``,
    each [B, length, groups, head_dim], with keys after rotation. With a window it holds the last
    min(length, window) positions, so the cost of a token does not depend on the number of positions
    before it. If the cache is donated, a token is written in place. On CPU at most a few positions
    of the cache are copied at a time, except in 16 bits, which XLA converts to float32 there.

    Args:
      width: D, size of the last axis of input and output.
      heads: query heads.
      groups: key and value heads, each read by heads / groups query heads (grouped-query
        attention, Ainslie et al. 2023); divides ``heads``. None: ``heads``.
      head_dim: features per head. None: width / heads.
      causal: whether each position attends only to itself and earlier positions.
      window: sliding window, as for `fnet.dot_product_attention`.
      rotary: base of the rotary position embedding, 10000.0 in the paper, or a
        `fnet.layers.Rotary`; None: no position embedding.
      bias: whether the dense layers have biases.
      fused: whether one dense layer computes queries, keys and values. Otherwise there are three.
      variant: what published models change; None: nothing.
      chunk: as for `fnet.dot_product_attention`.

    Returns:
      A layer, [B, T, D] -> [B, T, D], without state. Its params are ``query_key_value``, whose
      kernel is [D, (heads + 2 groups) head_dim] in this order, or ``query``, ``key`` and ``value``,
      as far as it has them; ``output``; with ``qk_norm`` ``query_norm`` and ``key_norm``; and with
      ``sinks`` an array of that name, [heads]. Dense layers have ``{"kernel", "bias"}``. ``apply``
      also takes ``mask`` [B, T] bool, True for real tokens; others are not attended to. Causal
      attention ignores it, so padding must be at the end. ``segments`` [B, T], integers, numbers
      the documents of a row; positions attend only within their document. Causal attention has
      `fnet.layer.Decode`. Its ``init_cache`` raises ValueError for ``length < 1``, and ``extend``
      for more positions than fit into a cache without a window.

    Raises:
      ValueError: if ``heads`` does not divide ``width`` and there is no ``head_dim``, ``groups``
        does not divide ``heads``, a fused layer lacks keys or values, ``window``, ``head_dim`` or
        ``chunk`` is below 1, ``rotary`` is not above 0, or the features of a head are odd with
        ``rotary``; when applied, if ``x``, ``mask`` or ``segments`` has another shape, or ``mask``
        is not bool.
      TypeError: when applied, if ``x`` is not floating, or ``segments`` are not integers.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.attention(8, heads=2, causal=True, rotary=10000.0)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 5, 8)), train=True)[0].shape
      (2, 5, 8)
    """
    groups = heads if groups is None else groups
    variant = AttentionVariant() if variant is None else variant
    rotary = rotary if rotary is None or isinstance(rotary, Rotary) else Rotary(rotary)
    checks.sizes("attention", head_dim=head_dim, window=window, chunk=chunk)
    checks.numbers("attention", "> 0", clip=variant.clip)
    if heads < 1 or (head_dim is None and width % heads):
        raise ValueError(
            f"attention: heads must divide width, got heads={heads}, width={width}; "
            "or give head_dim"
        )
    if groups < 1 or heads % groups:
        raise ValueError(f"attention: groups must divide heads, got groups={groups}, heads={heads}")
    head_dim = width // heads if head_dim is None else head_dim
    if rotary is not None and isinstance(rotary.base, int | float) and not rotary.base > 0:
        raise ValueError(
            f"attention: rotary is a base and must be > 0, got {rotary.base}; None disables it"
        )
    if rotary is not None and head_dim % 2:
        raise ValueError(
            f"attention: rotary rotates pairs of features, got {head_dim} per head; choose an even "
            "head_dim, or heads so that width / heads is even"
        )
    sizes = {"query": heads * head_dim, "key": groups * head_dim, "value": groups * head_dim}
    if variant.values == "keys":
        del sizes["value"]
    if variant.keys == "given":
        sizes = {"query": sizes["query"]}
    if fused and len(sizes) < 3:
        raise ValueError(
            f"attention: with values={variant.values!r}, keys={variant.keys!r} give fused=False"
        )
    children = _children(width, head_dim, sizes, bias, fused, variant)
    net = _Attention(
        children, width, heads, groups, head_dim, causal, window, rotary, chunk, variant
    )
    layer = composite(children, net.apply, init=net.init, random=False)
    restarts = () if rotary is None else rotary.restart_lengths
    decode = Decode(net.init_cache, net.extend, restarts) if causal else None
    return layer._replace(decode=decode)


def _children(
    width: int,
    head_dim: int,
    sizes: dict[str, int],
    bias: bool,
    fused: bool,
    variant: AttentionVariant,
) -> dict[str, Layer]:
    """Build the layers; ``sizes`` are the features of the layer's own queries, keys and values."""
    outputs = sizes | {"query": sizes["query"] * (1 + variant.output_gate)}
    projections = {"query_key_value": sum(outputs.values())} if fused else outputs
    children = {name: dense(width, n, bias=bias) for name, n in projections.items()}
    output_bias = bias if variant.output_bias is None else variant.output_bias
    children["output"] = dense(sizes["query"], width, bias=output_bias)
    if variant.qk_norm is not None:
        for name in [name for name in ("query", "key") if name in sizes]:
            over = head_dim if variant.qk_norm_over == "head" else sizes[name]
            children[f"{name}_norm"] = variant.qk_norm(over)
    if variant.value_norm is not None and variant.keys != "given":
        children["value_norm"] = variant.value_norm(head_dim)
    return children


class _Attention(NamedTuple):
    layers: dict[str, Layer]
    width: int
    heads: int
    groups: int
    head_dim: int
    causal: bool
    window: int | None
    rotary: Rotary | None
    chunk: int | None
    variant: AttentionVariant

    def init(self, key: Array) -> tuple[Params, State]:
        params, state = init_children(self.layers, key)
        sinks = {"sinks": jnp.zeros(self.heads, jnp.float32)} if self.variant.sinks else {}
        return params | sinks, state

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        """Build a cache of zeros for ``length`` positions, or for the last ``window`` of them."""
        if self.variant.keys == "given":
            return {}
        if length < 1:
            raise ValueError(f"attention: a cache needs a length of at least 1, got {length}")
        slots = length if self.window is None else min(length, self.window)
        shape = batch, slots, self.groups, self.head_dim
        return {name: jnp.zeros(shape, dtype) for name in ("key", "value")}

    def apply(
        self,
        child: Children,
        x: Float[Array, "b t d"],
        *,
        mask: Bool[Array, "b t"] | None = None,
        segments: Int[Array, "b t"] | None = None,
        given: tuple[Array, Array] | None = None,
    ) -> Float[Array, "b t d"]:
        q, own, gate = self.project(child, x, 0, x.shape[1], segments)
        k, v = self.checked(given) if own is None else own
        if self.variant.keys == "passed_on":
            child.state = child.state | {"passed_on": (k, v)}
        y = dot_product_attention(
            q,
            k,
            v,
            causal=self.causal,
            window=self.window,
            mask=_key_mask(mask, x, self.causal),
            segments=segments,
            scale=self.variant.scale,
            soft_cap=self.variant.soft_cap,
            sinks=child.params.get("sinks"),
            chunk=self.chunk,
        )
        return _write(child, save(y), gate)

    def extend(
        self,
        params: Params,
        state: State,
        cache: Any,
        x: Float[Array, "b t d"],
        position: Int[Array, ""],
        given: Past | None = None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        child = Children(self.layers, params, state, None, False)
        past = self.checked(given)
        length = (cache["key"] if past is None else past.key).shape[1]
        q, own, gate = self.project(child, x, position, length)
        if own is not None:
            cache, past = extend_cache(cache, *own, position, window=self.window)
        scale, sinks = self.variant.scale, child.params.get("sinks")
        if sinks is not None:
            sinks = sinks.astype(sum_dtype(q)).reshape(1, self.groups, -1, 1, 1)
        scores = _Scores(
            self.head_dim**-0.5 if scale is None else scale, self.variant.soft_cap, sinks
        )
        y = _attend_from(scores, q, *past)
        if self.variant.keys == "passed_on":
            cache = cache | {"passed_on": past}
        return _write(child, y, gate), cache

    def project(
        self,
        child: Children,
        x: Array,
        first: Array | int,
        length: int,
        segments: Array | None = None,
    ) -> tuple[Array, tuple[Array, Array] | None, Array | None]:
        if x.ndim != 3:
            raise ValueError(f"attention: expected [B, T, {self.width}], got {x.shape}")
        parts, gate = self.split(child, x)
        v = self.variant
        if v.values == "keys" and "key" in parts:
            parts["value"] = parts["key"]
        rotated = [name for name in ("query", "key") if name in parts]
        if not v.norm_rotated:
            parts |= {name: self.normalize(child, name, parts[name]) for name in rotated}
        if "value_norm" in child:
            parts["value"] = child("value_norm", parts["value"])
        if v.clip is not None:
            parts = {name: jnp.clip(a, -v.clip, v.clip) for name, a in parts.items()}
        positions = first + jnp.arange(x.shape[1])
        if self.rotary is not None:
            base, scale, interleaved, _ = self.rotary
            options = positions, base(length) if callable(base) else base, scale, interleaved
            parts |= {name: apply_rotary(parts[name], *options) for name in rotated}
        if v.norm_rotated:
            parts |= {name: self.normalize(child, name, parts[name]) for name in rotated}
        q = parts["query"]
        if v.query_scale is not None:
            at = positions[None] if segments is None else positions_in_segments(segments)
            q = q * v.query_scale(at)[..., None, None].astype(q.dtype)
        return q, None if v.keys == "given" else (parts["key"], parts["value"]), gate

    def split(self, child: Children, x: Array) -> tuple[dict[str, Array], Array | None]:
        """Project to heads [B, T, heads, head_dim] by name, and gates."""
        names = ("query", "key", "value")
        if "query_key_value" in child:
            qkv = self.split_heads(child("query_key_value", x))
            own = self.heads * (1 + self.variant.output_gate)
            arrays = jnp.split(qkv, (own, own + self.groups), axis=2)
            parts = dict(zip(names, arrays, strict=True))
        else:
            parts = {n: self.split_heads(child(n, x)) for n in names if n in child}
        if not self.variant.output_gate:
            return parts, None
        q = parts["query"].reshape(*x.shape[:2], self.heads, 2, self.head_dim)
        parts["query"], gate = jnp.unstack(q, axis=3)
        return parts, gate

    def split_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def normalize(self, child: Children, name: str, x: Array) -> Array:
        if self.variant.qk_norm is None:
            return x
        if self.variant.qk_norm_over == "head":
            return child(f"{name}_norm", x)
        return self.split_heads(child(f"{name}_norm", x.reshape(*x.shape[:2], -1)))

    def checked(self, given: Any) -> Any:
        if (given is None) == (self.variant.keys == "given"):
            raise ValueError(
                f"attention: built with keys={self.variant.keys!r}, got keys of "
                f"{'no' if given is None else 'an'} earlier block; see reads of fnet.layers.Block"
            )
        return given


def _write(child: Children, y: Array, gate: Array | None) -> Array:
    y = y if gate is None else y * jax.nn.sigmoid(gate)
    return child("output", y.reshape(*y.shape[:2], -1))


def _key_mask(mask: Array | None, x: Array, causal: bool) -> Array | None:
    """[B, T] -> [B, 1, 1, T]; None for causal attention, which never attends to later padding."""
    if mask is None:
        return None
    checks.mask("attention", mask, x.shape[:2])
    return None if causal else mask[:, None, None]


def extend_cache(
    cache: Cache,
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    position: Int[Array, ""],
    *,
    window: int | None,
) -> tuple[Cache, Past]:
    """Write new positions to the cache; return what they may attend to, too.

    Position i is stored in slot i modulo the number of slots. So the cache of a window is a ring
    buffer: a position overwrites, in place, the one that just left the window. If ``position + t``
    exceeds the slots, the output of the last positions is wrong, which is not checked.
    """
    t, slots = k.shape[1], cache["key"].shape[1]
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
        return cache, Past(**cache, at=at, first=0, window=slots)
    # Sort the ring buffer by position, append the new positions, and keep the last ones.
    both = {
        name: jnp.concatenate([jnp.roll(cache[name], -position % slots, axis=1), new[name]], axis=1)
        for name in cache
    }
    cache = {name: jnp.roll(a[:, t:], (position + t) % slots, axis=1) for name, a in both.items()}
    first = jnp.maximum(slots - position, 0)
    return cache, Past(**both, at=slots, first=first, window=min(window, slots + t))


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
