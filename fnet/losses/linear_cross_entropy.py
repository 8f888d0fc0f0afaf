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
from fnet.chunks import Start, even, fori_chunks
from fnet.cpu.tracing import is_for_cpu, keeps_examples_apart
from fnet.mesh import equally_varying
from fnet.precision import as_int32, sum_dtype, upcast

_CHUNK = 1024
"""Default chunk of the vocabulary. Of 256 to 4,096 it is the fastest on CPU, or within 5% of the
fastest, for batches of 64 to 4,096 tokens."""
_TOKENS = 2048
"""Most tokens whose logits exist at once where the gradient is computed in the forward pass."""


def linear_cross_entropy(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d v"],
    labels: Int[Array, "..."],
    *,
    bias: Float[Array, " v"] | None = None,
    mask: Bool[Array, "..."] | None = None,
    weights: Float[Array, "..."] | None = None,
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

    Differentiated for a single GPU or TPU, the forward pass computes the gradient at once, from
    the logits of a quarter of the tokens or of 2,048, which are rounded to the dtype of ``x`` as
    those of ``x @ kernel``. It takes the usual three products, and skips tokens that do not count.
    The kernel's gradient is then known up to the cotangent of the losses. If this is not equal for
    all tokens that count, the backward pass computes it again, with two more products. So pass the
    ``weights`` of a mean over examples of several lengths. ``chunk``, several devices and second
    derivatives take chunks of the vocabulary, per-example gradients on an accelerator all logits.

    For 1,024 tokens of 256 features and V = 32,768 in float32, the value and the gradients with
    respect to x and kernel have 6.3 MB of temporaries on a CPU, and 42 MB compiled for an H100.
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
      weights: [...], floating: what the losses are multiplied by, or None for 1. A token of weight
        0 is as one that the mask leaves out; its weight has no gradient.
      smoothing: label smoothing in [0, 1): probability mass spread evenly over the vocabulary
        (Szegedy et al. 2016).
      z_loss: weight of logsumexp^2, >= 0, which keeps logits from drifting (Chowdhery et al. 2022,
        "PaLM": 1e-4).
      soft_cap: bound on the magnitude of the logits, > 0 (Gemma Team 2024, "Gemma 2": 30), or
        None for no bound.
      vocab_axis: axis of the vocabulary in ``kernel``. Use 0 for an embedding table [V, D], because
        its ``.T`` would be a copy.
      chunk: vocabulary entries per chunk, >= 1; None: 1,024, or all, see above. Under ``jax.vmap``
        each example has a chunk of logits of its own.

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
    where = "linear_cross_entropy"
    _check_arrays(where, x, kernel, labels, bias, mask, weights, vocab_axis)
    checks.numbers(where, "in [0, 1)", smoothing=smoothing)
    checks.numbers(where, ">= 0", z_loss=z_loss)
    checks.numbers(where, "> 0", soft_cap=soft_cap)
    if chunk is not None and not (isinstance(chunk, numbers.Integral) and chunk >= 1):
        raise ValueError(f"{where}: chunk must be an integer >= 1, or None, got {chunk}")
    one_pass = chunk is None and _is_in_one_pass(x)
    spec = _Spec(
        min(chunk or _CHUNK, kernel.shape[vocab_axis]), vocab_axis, soft_cap, smoothing, z_loss
    )
    tokens, labels = labels.shape, as_int32(labels)
    if weights is not None:
        weights = weights.astype(sum_dtype(x))
        mask = (weights != 0) if mask is None else mask & (weights != 0)
    if not _is_sharded(x):
        x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
        mask, weights = (None if a is None else a.reshape(-1) for a in (mask, weights))
    if mask is not None:
        x, labels = jnp.where(mask[..., None], x, 0), jnp.where(mask, labels, 0)

    if one_pass:
        one = jnp.ones_like(labels, sum_dtype(x)) if weights is None else weights
        weights = one if mask is None else jnp.where(mask, one, 0)
        spec = spec._replace(every_token=mask is None)
        return _in_one_pass(spec, _Arguments(x, kernel, bias, labels, weights)).reshape(tokens)
    in_chunks = chunk is not None or is_for_cpu() or not keeps_examples_apart()
    losses_of = _in_chunks if in_chunks else _with_logits
    losses = losses_of(spec, *equally_varying((x, kernel, bias, labels)))
    losses = losses if weights is None else weights * losses
    return (losses if mask is None else jnp.where(mask, losses, 0)).reshape(tokens)


def _is_in_one_pass(x: Array) -> bool:
    """Whether the gradient is computed in the forward pass, which needs all tokens in one place."""
    is_alone = jax.typeof(x).sharding.mesh.empty and jax.device_count() == 1
    return x.size > 0 and is_alone and not is_for_cpu() and not keeps_examples_apart()


def _check_arrays(
    where: str,
    x: Array,
    kernel: Array,
    labels: Array,
    bias: Array | None,
    mask: Array | None,
    weights: Array | None,
    vocab_axis: int,
) -> None:
    checks.floating(where, x=x, kernel=kernel, bias=bias, weights=weights)
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
    checks.shapes(where, f"labels {labels.shape}", weights=(weights, labels.shape))
    checks.shapes(where, f"kernel {kernel.shape}", bias=(bias, (vocabulary,)))
    checks.mask(where, mask, labels.shape)
    for name, a, axis in (("kernel", kernel, vocab_axis), ("bias", bias, 0)):
        if a is not None and (devices := jax.typeof(a).sharding.spec[axis]) is not None:
            raise ValueError(
                f"{where}: {name} must not be sharded over the vocabulary, got {devices!r} on axis "
                f"{axis} of {a.shape}; use jax.sharding.reshard"
            )


class _Statistics(NamedTuple):
    """Reductions of the logits [..., V]. A label out of range has the logit 0."""

    logsumexp: Array
    label_logit: Array
    mean: Array | None


class _Spec(NamedTuple):
    chunk: int
    vocab_axis: int
    soft_cap: float | None
    smoothing: float
    z_loss: float
    every_token: bool = True  # counts; asked where the gradient is computed in one pass

    def slice_kernel(self, kernel: Array, start: Start, size: int, dtype: DTypeLike) -> Array:
        kernel = jax.lax.dynamic_slice_in_dim(kernel, start, size, self.vocab_axis)
        return kernel.astype(dtype)

    def losses(self, of_logits: "_Statistics", labels: Array, vocabulary: int) -> Array:
        """The losses [...]; NaN for a label out of range."""
        logsumexp, label_logit, mean = of_logits
        losses = logsumexp - (1 - self.smoothing) * label_logit
        if mean is not None:
            losses -= self.smoothing * mean
        if self.z_loss:
            losses += self.z_loss * jnp.square(logsumexp)
        return jnp.where((labels >= 0) & (labels < vocabulary), losses, jnp.nan)

    def of_logits(self, z: Array, labels: Array) -> tuple[Array, Array, Array]:
        """The losses [...] of all logits [..., V], their logsumexp, and which are of labels."""
        is_label = labels[..., None] == jnp.expand_dims(jnp.arange(z.shape[-1]), range(labels.ndim))
        logsumexp, label_logit = jax.nn.logsumexp(z, -1), jnp.where(is_label, z, 0).sum(-1)
        statistics = _Statistics(logsumexp, label_logit, z.mean(-1) if self.smoothing else None)
        return self.losses(statistics, labels, z.shape[-1]), logsumexp, is_label

    def logits(
        self,
        x: Array,
        kernel: Array,
        bias: Array | None,
        start: Start,
        dtype: DTypeLike | None = None,
    ) -> tuple[Array, Array | None]:
        """Logits [..., C] of one chunk, and the derivative of the soft cap."""
        z = _contract(x, kernel, (x.ndim - 1,), (1 - self.vocab_axis,), dtype=dtype)
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
        return new_top, total, label_logit, logit_sum + z.sum(-1) if spec.smoothing else None

    zero = jnp.zeros_like(x[..., 0], sum_dtype(x))
    # Finite, because a first chunk with a bias of -inf would give inf - inf.
    lowest = jnp.full_like(zero, jnp.finfo(zero.dtype).min)
    carry = (lowest, zero, zero, zero if spec.smoothing else None)
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


def _in_chunks(spec: _Spec, x: Array, kernel: Array, bias: Array | None, labels: Array) -> Array:
    """Losses [...] from chunks of the vocabulary."""
    statistics = _compiled_statistics(spec, x, kernel, bias, labels)
    return spec.losses(statistics, labels, kernel.shape[spec.vocab_axis])


def _with_logits(spec: _Spec, x: Array, kernel: Array, bias: Array | None, labels: Array) -> Array:
    """Losses [...] from all logits: a product whose gradient has known factors for each example."""
    logits, _ = spec.logits(x, kernel.astype(x.dtype), bias, 0)
    return spec.of_logits(upcast(logits), labels)[0]


class _Gradients(NamedTuple):
    """Gradients of a weighted sum of losses, like the arguments.

    Before the cotangents of a mean scale it, a kernel's gradient may exceed float16. Such a kernel
    has one of float32.
    """

    x: Array
    kernel: Array
    bias: Array | None


class _Arguments(NamedTuple):
    x: Array
    kernel: Array
    bias: Array | None
    labels: Any  # None among cotangents
    weights: Array

    def weigh(self, losses: Array) -> Array:
        """Multiply by the weights; a token of weight 0 has the loss 0, whatever it is."""
        return jnp.where(self.weights != 0, self.weights * losses, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_one_pass(spec: _Spec, arguments: _Arguments) -> Array:
    """Weighted losses [tokens] of x [tokens, D], whose forward pass computes the gradient."""
    return arguments.weigh(_in_chunks(spec, *arguments[:4]))


def _in_one_pass_fwd(spec: _Spec, arguments: _Arguments) -> tuple[Array, tuple[Any, ...]]:
    losses, gradients = _with_gradients(spec, arguments)
    return arguments.weigh(losses), (arguments, losses, gradients)


def _in_one_pass_bwd(spec: _Spec, residuals: tuple[Any, ...], ct: Array) -> tuple[_Arguments]:
    arguments, losses, gradients = residuals
    counts = arguments.weights != 0
    least = jnp.where(counts, ct, jnp.inf).min()
    most = jnp.where(counts, ct, -jnp.inf).max()
    # A mean over rows that are weighted by their tokens rounds each cotangent.
    rounding = 4 * jnp.finfo(ct.dtype).eps * jnp.abs(most)
    are_equal = (least <= most) & (most - least <= rounding)
    ct = jnp.where(counts, ct, 0)

    def scaled(gradients: _Gradients) -> Any:
        return jax.tree.map(lambda g: (most * g).astype(g.dtype), gradients[1:])

    def again(_: _Gradients) -> Any:
        weighted = arguments._replace(weights=arguments.weights * ct)
        return _with_gradients(spec, weighted)[1][1:]

    dkernel, dbias = jax.lax.cond(are_equal, scaled, again, gradients)
    dx = (ct[:, None] * gradients.x).astype(gradients.x.dtype)
    dkernel = dkernel.astype(arguments.kernel.dtype)
    return (_Arguments(dx, dkernel, dbias, None, jnp.where(counts, losses * ct, 0)),)


_in_one_pass.defvjp(_in_one_pass_fwd, _in_one_pass_bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_gradients(spec: _Spec, arguments: _Arguments) -> tuple[Array, _Gradients]:
    """Losses [tokens], 0 where the weight is, and the gradients of their weighted sum."""
    x, kernel, bias, labels, weights = arguments
    tokens, vocabulary = len(x), kernel.shape[spec.vocab_axis]
    _, size = even(tokens, min(_TOKENS, -(-tokens // 4)))
    order = jnp.arange(tokens)
    counted: Array | int = tokens
    if not spec.every_token:
        # Tokens that count come first, and the loop ends behind them.
        order, counted = jnp.argsort(weights == 0, stable=True), (weights != 0).sum()
    narrow = kernel.astype(x.dtype)

    def body(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        losses, dx, dkernel, dbias = carry
        position = i * size + jnp.arange(size)
        # Behind the last token that counts, none is read or written. Indices stay unique.
        known = order[jnp.minimum(position, tokens - 1)]
        rows = jnp.where(position < counted, known, tokens + position)
        own, label, weight = (
            a.at[rows].get(mode="fill", fill_value=0) for a in (x, labels, weights)
        )
        z, slope = spec.logits(own, narrow, bias, 0, x.dtype)
        z = upcast(z)
        loss, logsumexp, is_label = spec.of_logits(z, label)

        dz = jnp.exp(z - logsumexp[:, None]) * (1 + 2 * spec.z_loss * logsumexp[:, None])
        dz -= jnp.where(is_label, 1 - spec.smoothing, 0) + spec.smoothing / vocabulary
        dz *= jnp.where((label >= 0) & (label < vocabulary), weight, 0)[:, None]
        dz = dz if slope is None else dz * slope
        dbias = None if dbias is None else dbias + dz.sum(0)
        dz = dz.astype(x.dtype)
        own_dx = _contract(dz, narrow, (1,), (spec.vocab_axis,), dtype=x.dtype)
        a, b = (own, dz) if spec.vocab_axis else (dz, own)
        dkernel += _contract(a, b, (0,), (0,))
        put = {"mode": "drop", "unique_indices": True}
        return losses.at[rows].set(loss, **put), dx.at[rows].set(own_dx, **put), dkernel, dbias

    zeros = functools.partial(jnp.zeros_like, dtype=sum_dtype(x))
    carry = zeros(labels), jnp.zeros_like(x), zeros(kernel), None if bias is None else zeros(bias)
    losses, dx, dkernel, dbias = jax.lax.fori_loop(0, -(-counted // size), body, carry)
    dbias = None if bias is None else dbias.astype(bias.dtype)
    return losses, _Gradients(dx, dkernel.astype(_wide(kernel)), dbias)


@_with_gradients.defjvp
def _(spec: _Spec, primals: Any, tangents: Any) -> Any:
    """Second derivatives are those of the chunks."""

    def in_chunks(arguments: _Arguments) -> tuple[Array, _Gradients]:
        def total(x: Array, kernel: Array, bias: Array | None) -> tuple[Array, Array]:
            losses = _in_chunks(spec, x, kernel, bias, arguments.labels)
            losses = jnp.where(arguments.weights != 0, losses, 0)
            return arguments.weigh(losses).sum(), losses

        gradients, losses = jax.grad(total, (0, 1, 2), has_aux=True)(*arguments[:3])
        dx, dkernel, dbias = gradients
        return losses, _Gradients(dx, dkernel.astype(_wide(arguments.kernel)), dbias)

    return jax.jvp(in_chunks, primals, tangents)


def _wide(kernel: Array) -> jnp.dtype:
    return jnp.promote_types(kernel.dtype, jnp.bfloat16)


def _contract(
    a: Array,
    b: Array,
    a_axes: tuple[int, ...],
    b_axes: tuple[int, ...],
    *,
    like: Array | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """Contract the given axes in float32 or wider; the result has the sharding of ``like``."""
    return jax.lax.dot_general(
        a,
        b,
        ((a_axes, b_axes), ((), ())),
        preferred_element_type=dtype or sum_dtype(a),
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
