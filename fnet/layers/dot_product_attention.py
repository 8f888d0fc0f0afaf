"""Attention in chunks of queries: no more than a chunk's scores exist at a time."""

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from fnet.precision import widened

UNSEEN = 0.7 * float(jnp.finfo(jnp.float32).min)
"""Score of a key that is not seen: finite, so that rows of such have no NaN, nor their gradient."""


def dot_product_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Bool[Array, "#b #h #t #s"] | None = None,
    scale: ArrayLike | None = None,
    chunk: int | None = None,
) -> Float[Array, "b t h d"]:
    """``softmax(scale * q k^T) v`` in each head, without all scores at a time.

    The scores [B, H, T, S] are made for ``chunk`` queries at a time, and made again
    in the backward pass, which keeps q, k and v alone (Rabe and Staats 2021,
    "Self-attention Does Not Need O(n^2) Memory", without their chunks of keys)::

        weights = exp(scores - max(scores));  y = (weights v) / sum(weights)

    Dividing last, the derivative with respect to the sum is found from ``y``, not
    from the weights (Dao et al. 2022, "FlashAttention"). Causal attention leaves out
    most keys that come later: queries are taken in up to four bands of two chunks or
    more, each with the keys up to its end; with four, 5/8 of all scores are made.
    With a window a chunk reads the keys that its queries see and no others, so that time
    grows as T times the window. Arrays sharded over B and H stay where they are.

    A row with nothing to attend gives 0 and receives no gradient, where
    `jax.nn.dot_product_attention` gives it the mean of v over all keys.

    Where the backend has a fused kernel it is used instead: on NVIDIA GPUs from
    Ampere on, cuDNN's, for float16 and bfloat16 without a mask (if causal, with
    T = S; with a window, if causal), where cuDNN is found when the program is traced and
    takes the shapes (``jax.nn.dot_product_attention(implementation="cudnn")``). It keeps
    the output and one number a row besides q, k and v. It knows neither forward mode
    (`jax.jvp`) nor second derivatives, nor a `jax.vmap` over some of q, k, v and
    the cotangent alone. Chunks know all of these: give ``chunk``, and no other
    kernel is used.

    Args:
      q: queries [B, T, H, D]; float16, bfloat16, float32 or float64. Scores and
        softmax are computed in float32 (float64 for float64).
      k: keys [B, S, K, D], K dividing H: query heads ``[i H / K, (i + 1) H / K)``
        read head i (grouped queries, Ainslie et al. 2023; K = 1: multi-query).
      v: values [B, S, K, D].
      causal: whether query i attends to no key after the i-th, counted from the
        start of both.
      window: how many positions are seen at most, >= 1 (sliding window, Beltagy et al.
        2020, "Longformer"): with ``causal`` query i attends to keys i - window + 1 to i,
        otherwise to keys i - window + 1 to i + window - 1. None: all.
      mask: [B, H, T, S], each axis as long as that or 1; True: attend. With
        ``causal`` and ``window`` all must allow.
      scale: of the scores; 1 / sqrt(D) by default.
      chunk: at most as many queries at a time, spread evenly. By default as many as
        have 2^20 scores in all heads and examples, but at least 64; all of them if
        they have 2^21 scores at most. With a window, at most half as many as it is
        long, but at least 64. Examples that `jax.vmap` adds do not count.

    Returns:
      [B, T, H, D], in the dtype of ``q``.

    Raises:
      TypeError: if q, k and v are not floating or differ in dtype, or the mask is
        not bool.
      ValueError: if a shape does not fit; if ``chunk < 1`` or ``window < 1``.
    """
    _check(q, k, v, mask, chunk, window)
    if not q.size or not k.size:
        return jnp.zeros_like(q)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if window is not None and window >= max(q.shape[1], k.shape[1]):
        window = None

    size = _queries_at_a_time(q, k, window) if chunk is None else chunk

    def in_chunks(q: Array, k: Array, v: Array) -> Array:
        y: Array = _in_chunks(q, k, v, mask, scale, causal, window, size)
        return y

    if chunk is not None or mask is not None or (causal and q.shape[1] != k.shape[1]):
        return in_chunks(q, k, v)
    fused = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, scale=scale, implementation="cudnn"
    )
    if window is not None:
        before = window - 1
        fused = functools.partial(fused, local_window_size=(before, 0 if causal else before))
    if not isinstance(scale, int | float) or not _takes(fused, q, k, v):
        return in_chunks(q, k, v)
    y: Array = jax.lax.platform_dependent(q, k, v, cuda=fused, default=in_chunks)
    return y


# Scores at a time, and the fewest queries. Gradient for 8 heads of 64, float32, on two CPU
# cores, time against jax.nn's: 512 tokens at once 0.75, in halves 0.9 to 1.0, in quarters 0.9 to
# 1.1; 1,024 tokens in eighths, 2^20 scores each, 0.55, in quarters 0.72, at once 0.77. Causal,
# 4,096 tokens, ms: window 256 in 64s 203, in 128s 201, in 256s 231; window 64 in 64s 205, in
# 128s 284; without a window 1,334 or more.
_SCORES, _QUERIES = 2**20, 64

_BANDS = 4  # of causal attention: each is compiled, and eight would save a tenth more

# Operands are wide, so that gradients of k and v are summed over chunks in float32; their
# products are made as for bfloat16 nevertheless where the backend has such.
_PRECISION = {jnp.dtype(jnp.bfloat16): jax.lax.DotAlgorithmPreset.BF16_BF16_F32}


def _queries_at_a_time(q: Array, k: Array, window: int | None) -> int:
    examples_and_heads, (t, s) = q.shape[0] * q.shape[2], (q.shape[1], k.shape[1])
    if window is not None:  # half of it: a longer chunk makes more scores that are not seen
        a_query = examples_and_heads * min(s, 2 * window)
        return max(_QUERIES, min(_SCORES // a_query, window // 2))
    if t * s * examples_and_heads <= 2 * _SCORES:
        return t
    return max(_QUERIES, _SCORES // (s * examples_and_heads))


def _span(size: int, causal: bool, window: int | None) -> float:
    """How many keys that many neighbouring queries see."""
    if window is None:
        return math.inf
    return size + (window - 1) * (1 if causal else 2)


# Once around all, so that q, k and v are kept as they came, and once around each chunk.
@functools.partial(jax.checkpoint, static_argnums=(5, 6, 7))
def _in_chunks(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    scale: ArrayLike,
    causal: bool,
    window: int | None,
    chunk: int,
) -> Array:
    (b, t, h, d), s, groups = q.shape, k.shape[1], k.shape[2]
    n = -(-t // chunk)
    size = -(-t // n)
    padding = (0, n * size - t)  # all chunks are equally long
    q = jnp.pad(q, ((0, 0), padding, (0, 0), (0, 0)))
    # One axis at a time: a sharding is followed through no other reshape.
    q = q.reshape(b, n, size, h, d).reshape(b, n, size, groups, h // groups, d)
    q = q.transpose(1, 0, 3, 4, 2, 5)  # [n, B, K, H / K, size, D]
    k, v = (widened(jnp.moveaxis(a, 1, 2)) for a in (k, v))  # [B, K, S, D]
    mask = None if mask is None else _by_group(mask, groups, padding)
    starts = size * jnp.arange(n)

    span = _span(size, causal, window)
    bands = max(1, min(_BANDS, n // 2)) if causal and span >= s else 1
    parts = []
    for first, last in itertools.pairwise(n * i // bands for i in range(bands + 1)):
        end = min(s, last * size) if causal else s
        see = causal, window, int(min(span, end))
        attend = functools.partial(_attend, k[:, :, :end], v[:, :, :end], mask, scale, *see)
        parts.append(jax.lax.map(lambda x, f=attend: f(*x), (q[first:last], starts[first:last])))
    y = jnp.concatenate(parts).transpose(1, 0, 4, 2, 3, 5)  # [B, n, size, K, H / K, D]
    return y.reshape(b, n, size, h, d).reshape(b, n * size, h, d)[:, :t]


@functools.partial(jax.checkpoint, static_argnums=(4, 5, 6))
def _attend(
    k: Float[Array, "b k s d"],
    v: Float[Array, "b k s d"],
    mask: Bool[Array, "#b #k #g #t #s_or_more"] | None,
    scale: ArrayLike,
    causal: bool,
    window: int | None,
    span: int,
    q: Float[Array, "b k g c d"],
    start: Array,
) -> Float[Array, "b k g c d"]:
    """What the queries from ``start`` on read from the ``span`` keys that they may see."""
    size, end = q.shape[-2], k.shape[-2]
    first: ArrayLike = 0
    if span < end:
        assert window is not None
        first = jnp.clip(start - window + 1, 0, end - span)
        k, v = (jax.lax.dynamic_slice_in_dim(a, first, span, axis=2) for a in (k, v))
    product = functools.partial(jnp.einsum, precision=_PRECISION.get(q.dtype))
    scores = product("bkgtd,bksd->bkgts", widened(q), k)
    scores = scores * jnp.asarray(scale, scores.dtype)

    if causal or window is not None:
        ago = (start - first) + jnp.arange(size)[:, None] - jnp.arange(span)[None]
        seen = ago >= 0 if causal else ago > -(window or 0)
        if window is not None:
            seen &= ago < window
        scores = jnp.where(seen[None, None, None], scores, UNSEEN)
    if mask is not None:
        seen = mask
        if mask.shape[-2] > 1:
            seen = jax.lax.dynamic_slice_in_dim(seen, start, size, axis=-2)
        if mask.shape[-1] > 1:
            seen = jax.lax.dynamic_slice_in_dim(seen, first, span, axis=-1)
        scores = jnp.where(seen, scores, UNSEEN)

    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    y = product("bkgts,bksd->bkgtd", weights, v) / weights.sum(-1, keepdims=True)
    if mask is not None or window is not None:
        y = jnp.where(top <= UNSEEN, 0, y)  # not of a NaN, which is never hidden
    return y.astype(q.dtype)


def _by_group(mask: Array, groups: int, padding: tuple[int, int]) -> Array:
    """[#B, #H, #T, #S] -> [#B, #K, #H / K, #T', #S], T' being T and its padding."""
    b, h, t, s = mask.shape
    if t > 1:
        mask = jnp.pad(mask, ((0, 0), (0, 0), padding, (0, 0)))
    return mask.reshape(b, *((groups, h // groups) if h > 1 else (1, 1)), -1, s)


def _takes(fused: Callable[..., Array], q: Array, k: Array, v: Array) -> bool:
    """Whether the fused kernel is installed, and takes such arrays; JAX raises where not."""
    if q.dtype.itemsize != 2:
        return False
    try:
        jax.eval_shape(fused, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v)))
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return not _older_than_ampere()


def _older_than_ampere() -> bool:
    """Whether there is an NVIDIA GPU without cuDNN's kernel, which JAX does not ask."""
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:  # no GPU here; the program may be for one elsewhere
        return False
    return any(float(gpu.compute_capability) < 8 for gpu in gpus)


def _check(
    q: Array, k: Array, v: Array, mask: Array | None, chunk: int | None, window: int | None
) -> None:
    """Refuses arrays that do not fit each other."""
    where = "dot_product_attention"
    if not jnp.issubdtype(q.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{where}: q, k and v must have one floating dtype, "
            f"got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if q.ndim != 4 or k.ndim != 4 or q.shape[::3] != k.shape[::3] or k.shape != v.shape:
        raise ValueError(
            f"{where}: expected q [B, T, H, D], k and v [B, S, K, D], "
            f"got q {q.shape}, k {k.shape} and v {v.shape}"
        )
    (b, t, h, _), (_, s, groups, _) = q.shape, k.shape
    if not groups or h % groups:
        raise ValueError(
            f"{where}: q's heads must be a multiple of k's, got q {q.shape} and k {k.shape}"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"{where}: chunk must be at least 1, got {chunk}")
    if window is not None and window < 1:
        raise ValueError(f"{where}: window must be at least 1, got {window}; None attends to all")
    if mask is None:
        return
    if mask.dtype != bool:
        raise TypeError(f"{where}: mask must be bool, True where attended, got {mask.dtype}")
    if mask.ndim != 4 or any(
        m not in (1, n) for m, n in zip(mask.shape, (b, h, t, s), strict=True)
    ):
        raise ValueError(
            f"{where}: mask must have shape {(b, h, t, s)} = [B, H, T, S] or 1 in place of any, "
            f"got {mask.shape}"
        )
