"""Self-attention as a layer: whole sequences, and step by step with a cache."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from fnet.backward_pass import keep
from fnet.layer import Decode, Layer, Params, State, apply_child, init_children
from fnet.layers.attention import dot_product_attention
from fnet.layers.key_value_cache import Cache, attend_and_remember, empty_cache
from fnet.layers.linear import dense
from fnet.layers.rotary import rotary as turned


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
        return combine(params, keep(y), train), state

    def start(batch: int, length: int, dtype: DTypeLike) -> Cache:
        return empty_cache(batch, length, groups, head_dim, dtype, window)

    def extend(
        params: Params, state: State, cache: Any, x: Float[Array, "b t d"], position: Int[Array, ""]
    ) -> tuple[Float[Array, "b t d"], Cache]:
        del state
        q, k, v = project(params, x, position, False)
        y, cache = attend_and_remember(cache, q, k, v, position, window=window)
        return combine(params, y, False), cache

    decode = Decode(start, extend) if causal else None
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
