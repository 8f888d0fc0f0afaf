"""Memory-efficient attention in chunks of queries, or cuDNN's flash attention on GPUs."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from fnet import checks, chunks
from fnet.backward_pass import DEAR
from fnet.cpu.tracing import is_for_cpu
from fnet.precision import upcast

MASKED_SCORE = 0.7 * float(jnp.finfo(jnp.float32).min)
"""Score of a masked key: finite, so that fully masked rows and their gradients have no NaN."""


def dot_product_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    *,
    causal: bool = False,
    window: int | None = None,
    mask: Bool[Array, "#b #h #t #s"] | None = None,
    segments: Int[Array, "b t"] | None = None,
    scale: ArrayLike | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    chunk: int | None = None,
) -> Float[Array, "b t h d"]:
    """Multi-head attention ``y = softmax(scale * q k^T) v`` without materializing all scores.

    The scores [B, H, T, S] exist for ``chunk`` queries at a time, and are rematerialized in
    the backward pass, which saves only q, k and v (Rabe and Staats 2021, "Self-attention
    Does Not Need O(n^2) Memory", without chunks of keys)::

        weights = exp(scores - max(scores));  y = (weights v) / sum(weights)

    Since the division comes last, the derivative with respect to the sum is computed from ``y``
    (Dao et al. 2022, "FlashAttention"). Causal attention skips most later keys: the queries form up
    to four bands of at least two chunks, and each band reads the keys up to its end. With four
    bands, 5/8 of all scores are computed. With a window, a chunk reads only the keys that its
    queries attend to, so compute grows as T times the window. Shardings over B and H are preserved.

    A query without keys to attend to gives 0 and receives no gradient.
    `jax.nn.dot_product_attention` gives the mean of v over all keys instead.

    On NVIDIA GPUs from Ampere on, the fused kernel of cuDNN is used if cuDNN is found at trace time
    and supports the shapes (``jax.nn.dot_product_attention(implementation="cudnn")``). It is used
    for float16 and bfloat16 without a mask, segments, sinks or a soft cap, for even T and S. Causal
    attention also needs T = S, and a window needs causal attention. The kernel saves q, k, v, the
    output and one number per row. It supports neither forward mode (`jax.jvp`), nor second
    derivatives, nor a `jax.vmap` over only some of q, k, v and the cotangent. Chunks support all of
    these: pass ``chunk`` to use them.

    Args:
      q: queries [B, T, H, D]; float16, bfloat16, float32 or float64. Scores and
        softmax are computed in float32 (float64 for float64).
      k: keys [B, S, K, D] with K dividing H. Query heads ``[i H / K, (i + 1) H / K)`` read
        head i (grouped-query attention, Ainslie et al. 2023; multi-query for K = 1).
      v: values [B, S, K, D].
      causal: whether query i attends to keys 0 to i only.
      window: sliding window, >= 1 (Beltagy et al. 2020, "Longformer"). With ``causal``, query
        i attends to keys i - window + 1 to i; otherwise to keys i - window + 1 to
        i + window - 1. None: no window.
      mask: [B, H, T, S] bool, or 1 in place of any size. True: attend. ``causal`` and
        ``window`` apply in addition.
      segments: number of the document of each position [B, T], for several documents in a row;
        needs T = S. A query attends only to keys with its own number. This needs no array of
        the size of a mask.
      scale: factor of the scores; default 1 / sqrt(D).
      soft_cap: c, > 0: scores become ``c tanh(scores / c)`` after scaling (Gemma Team 2024,
        "Gemma 2": 50). None: no cap.
      sinks: score of each head's sink [H], which takes part in the softmax and has value 0 (OpenAI
        2025, "gpt-oss-120b & gpt-oss-20b Model Card"). It is not scaled or capped. None: no sinks.
      chunk: maximum number of queries per chunk; chunks are evenly sized. By default 2^20
        scores per chunk over all heads and examples, on accelerators 2^25, but at least 64
        queries; one chunk for up to twice as many scores. With a window, at most half the
        window, but at least 64. Axes added by `jax.vmap` do not count.

    Returns:
      [B, T, H, D], in the dtype of ``q``.

    Raises:
      TypeError: if q, k and v are not floating or differ in dtype, the mask is
        not bool, or the segments are not integers.
      ValueError: if the shapes do not match; if ``chunk < 1`` or ``window < 1``; if
        ``soft_cap`` is not above 0.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
      >>> y = fnet.dot_product_attention(q, k, v, causal=True)
      >>> y.shape, bool(jnp.allclose(y[:, 0], v[:, 0]))
      ((1, 6, 2, 4), True)
    """
    _check(q, k, v, mask, segments, chunk, window, soft_cap)
    if sinks is not None:
        checks.shapes("dot_product_attention", f"q {q.shape}", sinks=(sinks, q.shape[2:3]))
    if not q.size or not k.size:
        return jnp.zeros_like(q)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if window is not None and window >= max(q.shape[1], k.shape[1]):
        window = None

    size = _default_chunk(q, k, window) if chunk is None else chunk

    def in_chunks(q: Array, k: Array, v: Array) -> Array:
        y = _in_chunks(q, k, v, mask, segments, sinks, scale, causal, window, soft_cap, size)
        named: Array = checkpoint_name(y, DEAR)
        return named

    given = chunk, mask, segments, soft_cap, sinks
    if any(a is not None for a in given) or (causal and q.shape[1] != k.shape[1]):
        return in_chunks(q, k, v)
    fused = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, scale=scale, implementation="cudnn"
    )
    if window is not None:
        before = window - 1
        fused = functools.partial(fused, local_window_size=(before, 0 if causal else before))
    if not isinstance(scale, int | float) or not _supports(fused, q, k, v):
        return in_chunks(q, k, v)
    y: Array = jax.lax.platform_dependent(q, k, v, cuda=fused, default=in_chunks)
    return y


# Scores per chunk, and the minimum number of queries. Time of the gradient relative to jax.nn for 8
# heads of 64, float32, two CPU cores: 512 tokens in one chunk 0.75, in two 0.9 to 1.0; 1,024 in
# eight chunks of 2^20 scores 0.55, in four 0.72, in one 0.77. 4,096 tokens, in ms: window 256 with
# chunks of 64 203, of 128 201; window 64 with chunks of 64 205, of 128 284. Compiled for an
# H200, 3 blocks of 768: 16 chunks 21.1 ms, 7 of 2^25 scores 18.4, 4 of 2^26 17.8.
_SCORES, _SCORES_ON_ACCELERATORS, _QUERIES = 2**20, 2**25, 64

_BANDS = 4  # each band is compiled separately; eight would save another tenth of the compute

# Operands are float32, so that gradients of k and v are summed over chunks in float32. Their
# products still use the bfloat16 units of the backend, if it has them.
_PRECISION = {jnp.dtype(jnp.bfloat16): jax.lax.DotAlgorithmPreset.BF16_BF16_F32}


def _default_chunk(q: Array, k: Array, window: int | None) -> int:
    most = _SCORES if is_for_cpu() else _SCORES_ON_ACCELERATORS
    t, keys = q.shape[1], k.shape[1] if window is None else min(k.shape[1], 2 * window)
    scores_per_query = q.shape[0] * q.shape[2] * keys
    if window is not None:  # half of it: longer chunks compute more masked scores
        return max(_QUERIES, min(most // scores_per_query, window // 2))
    is_known = isinstance(scores_per_query, int)  # jax.export may leave the batch size open
    is_small = not is_known or t * scores_per_query <= 2 * most
    return t if is_small else max(_QUERIES, most // scores_per_query)


# Checkpointed twice: here, to save q, k and v in their own dtype, and around each chunk.
@functools.partial(jax.checkpoint, static_argnums=(7, 8, 9, 10))
def _in_chunks(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    segments: Array | None,
    sinks: Array | None,
    scale: ArrayLike,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    chunk: int,
) -> Array:
    t, s, groups = q.shape[1], k.shape[1], k.shape[2]
    n, size = chunks.even(t, chunk)
    padding = (0, n * size - t)
    q = query_chunks(q, groups, n, size)
    k, v = (upcast(jnp.moveaxis(a, 1, 2)) for a in (k, v))  # [B, K, S, D]
    mask = None if mask is None else _by_group(mask, groups, padding)
    query_segments = None
    if segments is not None:
        query_segments = jnp.pad(segments, ((0, 0), padding), constant_values=-1)
    starts = size * jnp.arange(n)
    if sinks is not None:
        sinks = upcast(sinks).reshape(1, groups, -1, 1, 1)

    # Number of keys that the queries of a chunk attend to.
    span = math.inf if window is None else size + (window - 1) * (1 if causal else 2)
    bands = max(1, min(_BANDS, n // 2)) if causal and span >= s else 1
    parts = []
    for first, last in itertools.pairwise(n * i // bands for i in range(bands + 1)):
        end = min(s, last * size) if causal else s
        static = causal, window, soft_cap, int(min(span, end))
        by_key = k[:, :, :end], v[:, :, :end], mask, (query_segments, segments)
        attend = functools.partial(_attend, *by_key, sinks, scale, *static)
        parts.append(jax.lax.map(lambda x, f=attend: f(*x), (q[first:last], starts[first:last])))
    return join_chunks(jnp.concatenate(parts), t)


def query_chunks(
    q: Float[Array, "b t h d"], groups: int, n: int, size: int
) -> Float[Array, "n b k g c d"]:
    """Split queries into ``n`` chunks, padded to equal length, with the heads by group."""
    b, t, h, d = q.shape
    q = jnp.pad(q, ((0, 0), (0, n * size - t), (0, 0), (0, 0)))
    # One axis at a time: shardings propagate only through such reshapes.
    q = q.reshape(b, n, size, h, d).reshape(b, n, size, groups, h // groups, d)
    return q.transpose(1, 0, 3, 4, 2, 5)


def join_chunks(y: Float[Array, "n b k g c d"], t: int) -> Float[Array, "b t h d"]:
    """Join the outputs of `query_chunks`, without the padding."""
    n, b, groups, per_group, size, d = y.shape
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(b, n, size, groups * per_group, d)
    return y.reshape(b, n * size, groups * per_group, d)[:, :t]


@functools.partial(jax.checkpoint, static_argnums=(6, 7, 8, 9))
def _attend(
    k: Float[Array, "b k s d"],
    v: Float[Array, "b k s d"],
    mask: Bool[Array, "#b #k #g #t #s_or_more"] | None,
    segments: tuple[Array | None, Array | None],
    sinks: Float[Array, "1 k g 1 1"] | None,
    scale: ArrayLike,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    span: int,
    q: Float[Array, "b k g c d"],
    start: Array,
) -> Float[Array, "b k g c d"]:
    """Attend from one chunk of queries, at ``start``, to the ``span`` keys in its reach."""
    size, end = q.shape[-2], k.shape[-2]
    first: ArrayLike = 0
    if span < end:
        assert window is not None
        first = jnp.clip(start - window + 1, 0, end - span)
        k, v = (jax.lax.dynamic_slice_in_dim(a, first, span, axis=2) for a in (k, v))
    product = functools.partial(jnp.einsum, precision=_PRECISION.get(q.dtype))
    scores = product("bkgtd,bksd->bkgts", upcast(q), k)
    scores = cap(scores * jnp.asarray(scale, scores.dtype), soft_cap)

    if causal or window is not None:
        distance = (start - first) + jnp.arange(size)[:, None] - jnp.arange(span)[None]
        allowed = distance >= 0 if causal else distance > -(window or 0)
        if window is not None:
            allowed &= distance < window
        scores = jnp.where(allowed[None, None, None], scores, MASKED_SCORE)
    if mask is not None:
        allowed = mask
        if mask.shape[-2] > 1:
            allowed = jax.lax.dynamic_slice_in_dim(allowed, start, size, axis=-2)
        if mask.shape[-1] > 1:
            allowed = jax.lax.dynamic_slice_in_dim(allowed, first, span, axis=-1)
        scores = jnp.where(allowed, scores, MASKED_SCORE)
    query_segments, key_segments = segments
    if query_segments is not None and key_segments is not None:
        of_queries = jax.lax.dynamic_slice_in_dim(query_segments, start, size, axis=1)
        of_keys = jax.lax.dynamic_slice_in_dim(key_segments, first, span, axis=1)
        allowed = of_queries[:, :, None] == of_keys[:, None]
        scores = jnp.where(jnp.expand_dims(allowed, (1, 2)), scores, MASKED_SCORE)

    shift = top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    if sinks is not None:
        shift = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    weights = jnp.exp(scores - shift)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    y = product("bkgts,bksd->bkgtd", weights, v) / total
    if mask is not None or window is not None or query_segments is not None:
        y = jnp.where(top <= MASKED_SCORE, 0, y)  # False for NaN, which must propagate
    return y.astype(q.dtype)


def cap(scores: Array, soft_cap: float | None) -> Array:
    """Compute ``c tanh(scores / c)``; for no cap return the scores."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _by_group(mask: Array, groups: int, padding: tuple[int, int]) -> Array:
    """[#B, #H, #T, #S] -> [#B, #K, #H / K, #T', #S], with T padded to T'."""
    b, h, t, s = mask.shape
    if t > 1:
        mask = jnp.pad(mask, ((0, 0), (0, 0), padding, (0, 0)))
    return mask.reshape(b, *((groups, h // groups) if h > 1 else (1, 1)), -1, s)


def _supports(fused: Callable[..., Array], q: Array, k: Array, v: Array) -> bool:
    """Whether the fused kernel is installed and supports these arrays; if not, JAX raises."""
    if q.dtype.itemsize != 2:
        return False

    def gradient(*args: Array) -> Any:  # has conditions of its own, such as an even length
        y, backward = jax.vjp(fused, *args)
        return backward(y)

    try:
        jax.eval_shape(gradient, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v)))
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return not _older_than_ampere()


def _older_than_ampere() -> bool:
    """Whether there is a GPU too old for the kernel of cuDNN, which JAX does not check."""
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:  # no GPU here, but the program may be compiled for one
        return False
    return any(float(gpu.compute_capability) < 8 for gpu in gpus)


def _check(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    segments: Array | None,
    chunk: int | None,
    window: int | None,
    soft_cap: float | None,
) -> None:
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
    checks.sizes(where, chunk=chunk, window=window)
    checks.numbers(where, "> 0", soft_cap=soft_cap)
    checks.integers(where, segments=segments)
    if segments is not None and (t != s or segments.shape != (b, t)):
        raise ValueError(
            f"{where}: segments must have shape {(b, t)}, [B, T] of q {q.shape}, with as many "
            f"keys as queries, got {segments.shape} and k {k.shape}"
        )
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
