"""Cross-entropy over a large vocabulary, fused with the linear layer: logits never exist whole."""

import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from fnet.backward_pass import keep
from fnet.losses.chunks import Start, over_chunks
from fnet.mesh import equally_varying
from fnet.precision import as_int32, wide

_CHUNK = 1024
"""What ``chunk=None`` means: of 256 to 4,096 words the fastest on CPU, or within 5% of it, for 64
to 4,096 tokens."""


def linear_cross_entropy(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d v"],
    labels: Int[Array, "..."],
    *,
    bias: Float[Array, " v"] | None = None,
    mask: Bool[Array, "..."] | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    vocab_axis: int = 1,
    chunk: int | None = None,
) -> Float[Array, "..."]:
    """Cross-entropy of ``x kernel + bias`` against labels; the logits never exist whole.

    For each token, with W the kernel, V words, y the label, a the smoothing, w
    the z-loss's weight and c the soft cap::

        z    = x W + bias;  z = c tanh(z / c)
        loss = logsumexp(z) - (1 - a) z[y] - a mean(z) + w logsumexp(z)^2

    A pass over the vocabulary, chunk by chunk, finds the logsumexp (Milakov,
    Gimelshein 2018, "Online normalizer calculation for softmax"). Only that is
    kept: the backward pass makes each chunk's logits again and writes the
    chunk's part of the kernel's gradient into its place, as the kernels of
    Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models",
    do. Between arguments and results lie about ::

        (tokens + D) * chunk + tokens * D

    numbers of float32, whatever V is (on CPU; up to half as many again on a GPU).
    The price is a fourth matrix product beside three, made good in part by the way
    of the logits through memory. Value and gradients by x and kernel, 1,024 tokens,
    float32, against optax on ``x @ kernel``:

    =====  =======  =====================  =====================  =========
    D      V        temporaries, CPU       H100 (compiled for)    time, CPU
    =====  =======  =====================  =====================  =========
    256    32,768   6.3 of 268 MB: 0.023   9.5 of 268 MB: 0.035   1.0
    256    131,072  6.3 of 1,074 MB        9.5 of 1,074 MB        1.0
    768    32,768   10.5 of 268 MB: 0.039  7.4 of 268 MB: 0.027   1.2
    =====  =======  =====================  =====================  =========

    Args:
      x: [..., D], rank >= 1; float16, bfloat16, float32 or float64. Products are
        of numbers in its dtype, sums in float32 (float64 for float64).
      kernel: [D, V], any floating dtype; cast to that of ``x`` a chunk at a time.
      labels: [...], integers: each token's word. One outside [0, V) gives NaN.
      bias: [V]; None: 0. Where it is -inf, the word has no probability, and
        with ``smoothing`` a loss is infinite.
      mask: [...], True for a real token. Others have loss 0 and give no
        gradient, whatever their ``x``, NaN included, and their label, such as
        -100: divide the losses' sum by ``mask.sum()``.
      smoothing: probability mass spread evenly over all words (Szegedy et al.
        2016), in [0, 1).
      z_loss: weight of logsumexp^2, which keeps logits from drifting (Chowdhery
        et al. 2022, "PaLM": 1e-4), >= 0.
      soft_cap: bound of the logits' magnitude (Gemma Team 2024, "Gemma 2": 30),
        > 0; None: no bound.
      vocab_axis: the kernel's axis of words; 0 for an embedding's matrix [V, D],
        whose ``.T`` would be a copy.
      chunk: words at a time, >= 1; None: 1,024. Under ``jax.vmap`` each example
        has its own chunk of logits.

    Returns:
      Losses [...] in nats, float32 (float64 for float64).

    Raises:
      TypeError: if x, kernel or bias are not floating, or labels not integers;
        from JAX in forward mode (``jax.jvp``), which a gradient of this allows
        and this itself does not.
      ValueError: for shapes that do not fit, a number out of its range, or a
        kernel or bias explicitly sharded over its words.

    Guarantees:
      * Second derivatives are right. Forward over reverse stays chunked;
        reverse over reverse keeps the logits of every chunk.
      * Under ``jax.jit`` with sharded tokens each device has its own tokens'
        logits only, and the kernel's gradient is summed over devices chunk by
        chunk; inside ``jax.shard_map``, with the whole kernel on each device,
        once. With ``check_vma=False`` that sum is made where the gradient is
        taken outside of the mapped function; taken inside, it is one device's.
      * Nothing the size of the kernel is copied, with one exception: XLA's CPU
        compiler slices a bfloat16 kernel by way of a whole one in float32. Give
        it a float32 kernel there; ``x`` may be bfloat16.
    """
    _check_arrays(x, kernel, labels, bias, mask, vocab_axis)
    _check_numbers(smoothing, z_loss, soft_cap, chunk)
    vocabulary = kernel.shape[vocab_axis]
    spec = _Spec(min(chunk or _CHUNK, vocabulary), vocab_axis, soft_cap, smoothing > 0)
    tokens, labels = labels.shape, as_int32(labels)
    if not _is_sharded(x):
        x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
        mask = None if mask is None else mask.reshape(-1)
    if mask is not None:
        x, labels = jnp.where(mask[..., None], x, 0), jnp.where(mask, labels, 0)

    logsumexp, picked, mean = _compiled_statistics(
        spec, *equally_varying((x, kernel, bias, labels))
    )
    losses = logsumexp - (1 - smoothing) * picked
    if mean is not None:
        losses -= smoothing * mean
    if z_loss:
        losses += z_loss * jnp.square(logsumexp)
    losses = jnp.where((labels >= 0) & (labels < vocabulary), losses, jnp.nan)
    return (losses if mask is None else jnp.where(mask, losses, 0)).reshape(tokens)


def _check_arrays(
    x: Array,
    kernel: Array,
    labels: Array,
    bias: Array | None,
    mask: Array | None,
    vocab_axis: int,
) -> None:
    """Refuses arrays that do not fit each other."""
    where = "linear_cross_entropy"
    for name, a in (("x", x), ("kernel", kernel), ("bias", bias)):
        if a is not None and not jnp.issubdtype(a.dtype, jnp.floating):
            raise TypeError(f"{where}: {name} must be floating, got {a.dtype}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{where}: labels must be integers, indices of words, got {labels.dtype}")
    if vocab_axis not in (0, 1):
        raise ValueError(f"{where}: vocab_axis must be 0 or 1, got {vocab_axis}")
    if x.ndim < 1:
        raise ValueError(f"{where}: x must have rank >= 1, got shape {x.shape}")
    d = x.shape[-1]
    if kernel.ndim != 2 or kernel.shape[1 - vocab_axis] != d:
        wanted = f"({d}, V)" if vocab_axis else f"(V, {d})"
        raise ValueError(
            f"{where}: with x {x.shape} and vocab_axis={vocab_axis} kernel must have shape "
            f"{wanted}, got {kernel.shape}"
        )
    if 0 in kernel.shape:
        raise ValueError(f"{where}: kernel must have a word and a feature, got {kernel.shape}")
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{where}: labels must have shape {x.shape[:-1]}, that of x {x.shape} without its "
            f"last axis, got {labels.shape}"
        )
    vocabulary = kernel.shape[vocab_axis]
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(
            f"{where}: bias must have shape ({vocabulary},), the words of kernel {kernel.shape}, "
            f"got {bias.shape}"
        )
    if mask is not None and (mask.dtype != bool or mask.shape != labels.shape):
        raise ValueError(
            f"{where}: mask must be bool of shape {labels.shape}, got {mask.dtype} {mask.shape}"
        )
    for name, a, axis in (("kernel", kernel, vocab_axis), ("bias", bias, 0)):
        if a is not None and (devices := jax.typeof(a).sharding.spec[axis]) is not None:
            raise ValueError(
                f"{where}: {name} must not be sharded over its words, got {devices!r} on axis "
                f"{axis} of {a.shape}; use jax.sharding.reshard"
            )


def _check_numbers(
    smoothing: float, z_loss: float, soft_cap: float | None, chunk: int | None
) -> None:
    where = "linear_cross_entropy"
    if not 0 <= smoothing < 1:
        raise ValueError(f"{where}: smoothing must be in [0, 1), got {smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"{where}: z_loss must be >= 0, got {z_loss}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{where}: soft_cap must be > 0, or None for no cap, got {soft_cap}")
    if chunk is not None and not (isinstance(chunk, numbers.Integral) and chunk >= 1):
        raise ValueError(
            f"{where}: chunk must be an integer >= 1, words at a time, or None, got {chunk}"
        )


class _Statistics(NamedTuple):
    """Of each token's logits [..., V]; all [...].

    Attributes:
      logsumexp: over the vocabulary.
      picked: the label's logit, 0 where there is no such word.
      mean: over the vocabulary; None where nobody asked.
    """

    logsumexp: Array
    picked: Array
    mean: Array | None


class _Spec(NamedTuple):
    """What is static, and what it makes of the arrays."""

    chunk: int
    vocab_axis: int
    soft_cap: float | None
    mean: bool

    def words(self, kernel: Array, start: Start, size: int, dtype: DTypeLike) -> Array:
        """The kernel's part of one chunk."""
        part = jax.lax.dynamic_slice_in_dim(kernel, start, size, self.vocab_axis)
        return part.astype(dtype)

    def logits(
        self, x: Array, words: Array, bias: Array | None, start: Start
    ) -> tuple[Array, Array | None]:
        """One chunk's logits [..., C], and their derivative by what is below the soft cap."""
        z = _sums(x, words, (x.ndim - 1,), (1 - self.vocab_axis,))
        if bias is not None:
            part = jax.lax.dynamic_slice_in_dim(bias, start, z.shape[-1])
            z += jnp.expand_dims(part.astype(z.dtype), range(x.ndim - 1))
        if self.soft_cap is None:
            return z, None
        capped = jnp.tanh(z / self.soft_cap)
        slope = 1 - jnp.square(capped)
        return jnp.where(jnp.isneginf(z), z, self.soft_cap * capped), slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    spec: _Spec, x: Array, kernel: Array, bias: Array | None, labels: Array
) -> _Statistics:
    return _statistics_fwd(spec, x, kernel, bias, labels)[0]


def _statistics_fwd(
    spec: _Spec, x: Array, kernel: Array, bias: Array | None, labels: Array
) -> tuple[_Statistics, tuple[Any, ...]]:
    vocabulary = kernel.shape[spec.vocab_axis]

    def body(start: Start, size: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        top, total, picked, summed = carry
        z, _ = spec.logits(x, spec.words(kernel, start, size, x.dtype), bias, start)
        higher = jnp.maximum(top, z.max(-1))
        total = total * jnp.exp(top - higher) + jnp.exp(z - higher[..., None]).sum(-1)
        column = jnp.clip(labels - start, 0, size - 1)
        found = jnp.take_along_axis(z, column[..., None], -1, mode="promise_in_bounds")[..., 0]
        picked = jnp.where(column == labels - start, found, picked)
        return higher, total, picked, summed + z.sum(-1) if spec.mean else None

    zero = jnp.zeros_like(x[..., 0], wide(x))
    # A number, so that a first chunk of words at -inf leaves no inf - inf.
    lowest = jnp.full_like(zero, jnp.finfo(zero.dtype).min)
    carry = (lowest, zero, zero, zero if spec.mean else None)
    top, total, picked, summed = over_chunks(body, carry, vocabulary, spec.chunk)
    logsumexp = keep(top + jnp.log(total))
    mean = None if summed is None else summed / vocabulary
    return _Statistics(logsumexp, picked, mean), (x, kernel, bias, labels, logsumexp)


def _statistics_bwd(
    spec: _Spec, residuals: tuple[Any, ...], cotangents: _Statistics
) -> tuple[Any, ...]:
    x, kernel, bias, labels, logsumexp = residuals
    tokens = tuple(range(x.ndim - 1))
    vocabulary = kernel.shape[spec.vocab_axis]

    def body(start: Start, size: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        dx, dkernel, dbias = carry
        words = spec.words(kernel, start, size, x.dtype)
        z, slope = spec.logits(x, words, bias, start)
        dz = jnp.exp(z - logsumexp[..., None]) * cotangents.logsumexp[..., None]
        columns = jnp.expand_dims(jnp.arange(size), range(labels.ndim))
        dz += jnp.where((labels - start)[..., None] == columns, cotangents.picked[..., None], 0)
        if cotangents.mean is not None:
            dz += cotangents.mean[..., None] / vocabulary
        if slope is not None:
            dz *= slope
        if dbias is not None:
            part = dz.sum(tokens).astype(bias.dtype)
            dbias = jax.lax.dynamic_update_slice_in_dim(dbias, part, start, 0)

        dz = dz.astype(x.dtype)
        dx += _sums(dz, words, (x.ndim - 1,), (spec.vocab_axis,), like=x)
        a, b = (x, dz) if spec.vocab_axis else (dz, x)
        part = _sums(a, b, tokens, tokens, like=kernel).astype(kernel.dtype)
        dkernel = jax.lax.dynamic_update_slice_in_dim(dkernel, part, start, spec.vocab_axis)
        return dx, dkernel, dbias

    dbias = None if bias is None else _zeros_beside(bias)
    carry = (jnp.zeros_like(x, wide(x)), _zeros_beside(kernel), dbias)
    dx, dkernel, dbias = over_chunks(body, carry, vocabulary, spec.chunk)
    return dx.astype(x.dtype), dkernel, dbias, None


_statistics.defvjp(_statistics_fwd, _statistics_bwd)

# Called outside of jax.jit, a loop would be compiled anew each time.
_compiled_statistics = jax.jit(_statistics, static_argnums=0, inline=True)


def _sums(
    a: Array,
    b: Array,
    a_axes: tuple[int, ...],
    b_axes: tuple[int, ...],
    *,
    like: Array | None = None,
) -> Array:
    """Products summed over the given axes in float32 or wider; on devices, laid out as ``like``."""
    return jax.lax.dot_general(
        a,
        b,
        ((a_axes, b_axes), ((), ())),
        preferred_element_type=wide(a),
        out_sharding=None if like is None else jax.typeof(like).sharding,
    )


def _zeros_beside(a: Array) -> Array:
    """Zeros on the mesh of ``a``, where chunks of its gradient lie; jax 0.11's own are on none."""
    return jnp.where(True, jnp.zeros_like(a), a)


def _is_sharded(a: Array) -> bool:
    """Whether dimensions of ``a`` may lie on several devices, and should stay as they are.

    Where they do not, a single dimension of tokens saves XLA a transposed copy of x.
    """
    return any(t != AxisType.Manual for t in jax.typeof(a).sharding.mesh.axis_types)
