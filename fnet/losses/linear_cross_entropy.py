"""Linear layer and cross-entropy over a large vocabulary, without materializing logits."""

import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from fnet import checks
from fnet.backward_pass import save
from fnet.chunks import Start, fori_chunks
from fnet.mesh import equally_varying
from fnet.precision import as_int32, sum_dtype

_CHUNK = 1024
"""Default chunk of the vocabulary. Of 256 to 4,096 it is the fastest on CPU, or within 5% of the
fastest, for batches of 64 to 4,096 tokens."""


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
    """Cross-entropy of ``x kernel + bias`` without materializing the logits.

    For each token, with W the kernel, y the label, a the smoothing, w the weight of the z-loss
    and c the soft cap::

        z    = x W + bias;  z = c tanh(z / c)
        loss = logsumexp(z) - (1 - a) z[y] - a mean(z) + w logsumexp(z)^2

    The forward pass computes the logsumexp over chunks of the vocabulary (Milakov,
    Gimelshein 2018, "Online normalizer calculation for softmax") and saves nothing else. The
    backward pass rematerializes the logits of one chunk at a time and writes the chunk's slice of
    the kernel's gradient in place, as the kernels of Wijmans et al. 2024, "Cut Your Losses in
    Large-Vocabulary Language Models", do. On CPU the temporaries are about ::

        (tokens + D) * chunk + tokens * D

    float32 numbers, independent of V. On a GPU they are up to 1.5 times as large. The cost is one
    more matrix product besides the usual three. It is partly offset by the memory bandwidth that
    full logits would need.

    For 1,024 tokens of 256 features and V = 32,768 in float32, the value and the gradients with
    respect to x and kernel have 6.3 MB of temporaries on a CPU, and 9.5 MB compiled for an H100.
    optax on ``x @ kernel`` has 268 MB on both, and takes as long on the CPU.

    Second derivatives are correct. Forward over reverse stays chunked; reverse over reverse
    saves the logits of every chunk.

    If tokens are sharded under ``jax.jit``, each device computes the logits of its own tokens,
    and the kernel's gradient is summed over devices chunk by chunk. Inside ``jax.shard_map``,
    with the whole kernel on each device, it is summed once. With ``check_vma=False`` this
    sum happens only if you differentiate outside of the mapped function.

    Nothing the size of the kernel is copied, with one exception: XLA's CPU compiler converts a
    whole bfloat16 kernel to float32 before slicing it. Use a float32 kernel there; ``x`` may be
    bfloat16.

    Args:
      x: [..., D], rank >= 1; float16, bfloat16, float32 or float64. Products are in this
        dtype, sums in float32 (float64 for float64).
      kernel: [D, V], any floating dtype. It is cast to the dtype of ``x`` one chunk at a time.
      labels: token indices [...], integers. A label outside [0, V) gives NaN.
      bias: [V], or None. Entries of -inf exclude a token from the vocabulary; with ``smoothing``
        they make the loss infinite.
      mask: [...], True for a real token. Padding has loss 0 and no gradient, even if its ``x`` is
        NaN or its label is -100. For the mean, divide the sum by ``mask.sum()``.
      smoothing: label smoothing in [0, 1): probability mass spread evenly over the vocabulary
        (Szegedy et al. 2016).
      z_loss: weight of logsumexp^2, >= 0, which keeps logits from drifting (Chowdhery et al. 2022,
        "PaLM": 1e-4).
      soft_cap: bound on the magnitude of the logits, > 0 (Gemma Team 2024, "Gemma 2": 30), or
        None for no bound.
      vocab_axis: axis of the vocabulary in ``kernel``. Use 0 for an embedding table [V, D], because
        its ``.T`` would be a copy.
      chunk: vocabulary entries per chunk, >= 1; None: 1,024. Under ``jax.vmap`` each example
        has a chunk of logits of its own.

    Returns:
      Losses [...] in nats, float32 (float64 for float64).

    Raises:
      TypeError: if x, kernel or bias are not floating, or labels not integers. From JAX in forward
        mode (``jax.jvp``), which is supported for the gradient but not for the loss itself.
      ValueError: for shapes that do not match, a number out of range, or a kernel or bias that
        is explicitly sharded over the vocabulary.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> x, kernel = jnp.ones((4, 16)), jnp.ones((16, 1000))
      >>> labels = jnp.array([1, 2, 3, -100])
      >>> losses = fnet.linear_cross_entropy(x, kernel, labels, mask=labels >= 0)
      >>> print(losses.round(2))  # log(1000), and 0 for padding
      [6.91 6.91 6.91 0.  ]
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

    logsumexp, label_logit, mean = _compiled_statistics(
        spec, *equally_varying((x, kernel, bias, labels))
    )
    losses = logsumexp - (1 - smoothing) * label_logit
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
    where = "linear_cross_entropy"
    checks.floating(where, x=x, kernel=kernel, bias=bias)
    checks.integers(where, labels=labels)
    checks.choice(where, (0, 1), vocab_axis=vocab_axis)
    if x.ndim < 1:
        raise ValueError(f"{where}: x must have rank >= 1, got shape {x.shape}")
    d = x.shape[-1]
    if kernel.ndim != 2 or kernel.shape[1 - vocab_axis] != d:
        expected = f"({d}, V)" if vocab_axis else f"(V, {d})"
        raise ValueError(
            f"{where}: with x {x.shape} and vocab_axis={vocab_axis}, kernel must have shape "
            f"{expected}, got {kernel.shape}"
        )
    if 0 in kernel.shape:
        raise ValueError(f"{where}: kernel must not be empty, got {kernel.shape}")
    vocabulary = kernel.shape[vocab_axis]
    checks.shapes(where, f"x {x.shape}", labels=(labels, x.shape[:-1]))
    checks.shapes(where, f"kernel {kernel.shape}", bias=(bias, (vocabulary,)))
    checks.mask(where, mask, labels.shape)
    for name, a, axis in (("kernel", kernel, vocab_axis), ("bias", bias, 0)):
        if a is not None and (devices := jax.typeof(a).sharding.spec[axis]) is not None:
            raise ValueError(
                f"{where}: {name} must not be sharded over the vocabulary, got {devices!r} on axis "
                f"{axis} of {a.shape}; use jax.sharding.reshard"
            )


def _check_numbers(
    smoothing: float, z_loss: float, soft_cap: float | None, chunk: int | None
) -> None:
    where = "linear_cross_entropy"
    checks.numbers(where, "in [0, 1)", smoothing=smoothing)
    checks.numbers(where, ">= 0", z_loss=z_loss)
    checks.numbers(where, "> 0", soft_cap=soft_cap)
    if chunk is not None and not (isinstance(chunk, numbers.Integral) and chunk >= 1):
        raise ValueError(f"{where}: chunk must be an integer >= 1, or None, got {chunk}")


class _Statistics(NamedTuple):
    """Reductions of the logits [..., V]. A label out of range has the logit 0."""

    logsumexp: Array
    label_logit: Array
    mean: Array | None


class _Spec(NamedTuple):
    chunk: int
    vocab_axis: int
    soft_cap: float | None
    with_mean: bool

    def slice_kernel(self, kernel: Array, start: Start, size: int, dtype: DTypeLike) -> Array:
        kernel = jax.lax.dynamic_slice_in_dim(kernel, start, size, self.vocab_axis)
        return kernel.astype(dtype)

    def logits(
        self, x: Array, kernel: Array, bias: Array | None, start: Start
    ) -> tuple[Array, Array | None]:
        """Logits [..., C] of one chunk, and the derivative of the soft cap."""
        z = _contract(x, kernel, (x.ndim - 1,), (1 - self.vocab_axis,))
        if bias is not None:
            bias = jax.lax.dynamic_slice_in_dim(bias, start, z.shape[-1])
            z += jnp.expand_dims(bias.astype(z.dtype), range(x.ndim - 1))
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
        top, total, label_logit, logit_sum = carry
        z, _ = spec.logits(x, spec.slice_kernel(kernel, start, size, x.dtype), bias, start)
        new_top = jnp.maximum(top, z.max(-1))
        total = total * jnp.exp(top - new_top) + jnp.exp(z - new_top[..., None]).sum(-1)
        column = jnp.clip(labels - start, 0, size - 1)
        picked = jnp.take_along_axis(z, column[..., None], -1, mode="promise_in_bounds")[..., 0]
        label_logit = jnp.where(column == labels - start, picked, label_logit)
        return new_top, total, label_logit, logit_sum + z.sum(-1) if spec.with_mean else None

    zero = jnp.zeros_like(x[..., 0], sum_dtype(x))
    # Finite, because a first chunk with a bias of -inf would give inf - inf.
    lowest = jnp.full_like(zero, jnp.finfo(zero.dtype).min)
    carry = (lowest, zero, zero, zero if spec.with_mean else None)
    top, total, label_logit, logit_sum = fori_chunks(body, carry, vocabulary, spec.chunk)
    logsumexp = save(top + jnp.log(total))
    mean = None if logit_sum is None else logit_sum / vocabulary
    return _Statistics(logsumexp, label_logit, mean), (x, kernel, bias, labels, logsumexp)


def _statistics_bwd(
    spec: _Spec, residuals: tuple[Any, ...], cotangents: _Statistics
) -> tuple[Any, ...]:
    x, kernel, bias, labels, logsumexp = residuals
    tokens = tuple(range(x.ndim - 1))
    vocabulary = kernel.shape[spec.vocab_axis]

    def body(start: Start, size: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        dx, dkernel, dbias = carry
        kernel_slice = spec.slice_kernel(kernel, start, size, x.dtype)
        z, slope = spec.logits(x, kernel_slice, bias, start)
        dz = jnp.exp(z - logsumexp[..., None]) * cotangents.logsumexp[..., None]
        columns = jnp.expand_dims(jnp.arange(size), range(labels.ndim))
        is_label = (labels - start)[..., None] == columns
        dz += jnp.where(is_label, cotangents.label_logit[..., None], 0)
        if cotangents.mean is not None:
            dz += cotangents.mean[..., None] / vocabulary
        if slope is not None:
            dz *= slope
        if dbias is not None:
            dbias_slice = dz.sum(tokens).astype(bias.dtype)
            dbias = jax.lax.dynamic_update_slice_in_dim(dbias, dbias_slice, start, 0)

        dz = dz.astype(x.dtype)
        dx += _contract(dz, kernel_slice, (x.ndim - 1,), (spec.vocab_axis,), like=x)
        a, b = (x, dz) if spec.vocab_axis else (dz, x)
        dkernel_slice = _contract(a, b, tokens, tokens, like=kernel).astype(kernel.dtype)
        dkernel = jax.lax.dynamic_update_slice_in_dim(
            dkernel, dkernel_slice, start, spec.vocab_axis
        )
        return dx, dkernel, dbias

    dbias = None if bias is None else _zeros_on_mesh_of(bias)
    carry = (jnp.zeros_like(x, sum_dtype(x)), _zeros_on_mesh_of(kernel), dbias)
    dx, dkernel, dbias = fori_chunks(body, carry, vocabulary, spec.chunk)
    return dx.astype(x.dtype), dkernel, dbias, None


_statistics.defvjp(_statistics_fwd, _statistics_bwd)

# Outside of jax.jit, a loop would be recompiled at each call.
_compiled_statistics = jax.jit(_statistics, static_argnums=0, inline=True)


def _contract(
    a: Array,
    b: Array,
    a_axes: tuple[int, ...],
    b_axes: tuple[int, ...],
    *,
    like: Array | None = None,
) -> Array:
    """Contract the given axes in float32 or wider; the result has the sharding of ``like``."""
    return jax.lax.dot_general(
        a,
        b,
        ((a_axes, b_axes), ((), ())),
        preferred_element_type=sum_dtype(a),
        out_sharding=None if like is None else jax.typeof(like).sharding,
    )


def _zeros_on_mesh_of(a: Array) -> Array:
    """Zeros on the mesh of ``a``; ``jnp.zeros_like`` of jax 0.11 has no mesh."""
    zeros = jnp.zeros_like(a)
    return zeros if jax.typeof(a).sharding.mesh.empty else jnp.where(True, zeros, a)


def _is_sharded(a: Array) -> bool:
    """Whether dimensions of ``a`` may be sharded, so that they must not be reshaped.

    Otherwise, flattening the tokens to one dimension saves XLA a transposed copy of x.
    """
    return any(t != AxisType.Manual for t in jax.typeof(a).sharding.mesh.axis_types)
