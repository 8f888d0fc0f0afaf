"""Ghost norms: norms and weighted sums of per-example gradients without materializing them.

A dense layer ``y = x @ w`` gets inputs ``u`` [batch, time, rows] and, in the backward pass,
cotangents ``v`` [batch, time, cols]. The gradient of example b is a sum of outer products:

    G_b = sum_t u_bt v_bt^T                                     [rows, cols]

Clipping needs two things from it, and both follow from the factors ``u`` and ``v`` alone:

    |G_b|^2       = sum_ts <u_bt, u_bs> <v_bt, v_bs>            squared norm
    sum_b s_b G_b = sum_bt u_bt (s_b v_bt)^T                    clipped sum: one matrix product

With a single time step the squared norm is ``|u_b|^2 |v_b|^2`` (Goodfellow 2015). The Gram
matrices for sequences are "ghost clipping" (Li et al. 2022); reusing the cotangents of one
backward pass for norms and sums is "book-keeping" (Bu et al. 2023).

If time steps almost cancel, both are differences of large numbers. The squared norm then rounds
to a wrong number, such as 0. `inner_products` therefore bounds the rounding error of Gram forms,
and `LinearEquation.term_norms` says how much a gradient cancels. Gradients that cancel too much
are materialized instead, see `parameter_gradients.SquaredNorms`.

The first half of this file computes these quantities from factors. The second half reads JAX
equations that are linear in a parameter (``add``, ``mul``, ``dot_general``, ``gather``,
``conv_general_dilated``) and gives the factors of each.

Shapes:
  - Factors are [groups, batch, time, n]. A group is a layer of a scanned stack or an attention
    head: it has a matrix of its own. ``time`` counts tokens, pixels, or uses of one parameter.
  - Equations get data and cotangents as [stack, batch, time, *shape], where ``shape`` is for one
    example in one iteration. ``stack`` counts the iterations of scans that slice the parameter,
    ``time`` the iterations that share it. Gradients are [stack, *parameter shape].

References:
  - Higham 2002, "Accuracy and stability of numerical algorithms", second edition.
  - Goodfellow 2015, "Efficient per-example gradient computations", arXiv:1510.01799.
  - Li et al. 2022, "Large language models can be strong differentially private learners",
    arXiv:2110.05679.
  - Bu et al. 2023, "Differentially private optimization on large model at small cost",
    arXiv:2210.00038.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from fnet.cpu.tracing import is_for_cpu
from fnet.jaxpr import aval
from fnet.jaxpr.primitives import Add, Axes, ConvGeneralDilated, DotGeneral, Gather, Mul, Reader
from fnet.mesh import argument_like, batch_devices, equally_varying
from fnet.precision import sum_dtype, upcast

_MIN_BYTES, _FILLS_A_GPU = 2**20, 2**28
"""Bytes that intermediates may take in any case, on a CPU and on an accelerator, where starts of
kernels take the time otherwise: an H200 moves 2**28 bytes in the time of 28 starts."""

_MASKED_CHUNKS = 32
"""Number of chunks in which `weighted_sum` masks examples that are left out."""

_BLOCK = 64
"""Gram matrices are sums over blocks of this many columns, which round less than one product."""

_SHORT = 2**13
"""Time steps times columns up to which blocks do not matter."""

_FULL_PRECISION = 7.0
"""Time of a float32 product in full precision, relative to the default precision of a GPU."""

_REDUCTION = 64
"""Length of the longest chain of additions in a sum over two axes by XLA, a tree of windows."""

NEGLIGIBLE = 1e-3
"""Rounding errors below this fraction of a squared norm do not count. They change the norm by
less than 5e-4."""

_WIDE = 2.0**-12
"""Bound of the error of a weighted sum of float32, per sum of the norms of its terms: 100 times the
largest error in measurements."""

_WIDE_RANGE = 1e38
"""Cotangents are scaled in their own dtype if its maximum exceeds this, otherwise in float32."""


class Estimate(NamedTuple):
    """Squared norms or inner products of per-example gradients.

    Attributes:
      values: [batch].
      errors: Bounds of their rounding errors if terms may cancel, [batch]. None if the relative
        errors are small.
    """

    values: Array
    errors: Array | None = None


def squared_norms(u: Array, v: Array) -> Estimate:
    """Squared norms ``sum_g |G_gb|^2`` of per-example gradients.

    Integers [groups, batch, time] stand for one-hot vectors. For more than one time step it uses
    whichever is cheaper: the Gram matrices ``<u_t, u_s>`` and ``<v_t, v_s>``, or gradients of a
    few examples at a time. Only the Gram form loses digits if time steps cancel. For one-hot
    vectors, cotangents of equal indices are summed, which does not.
    """
    groups, _, time = u.shape[:3]
    if time == 1:
        return Estimate((_squares(u) * _squares(v)).sum((0, 2)))
    if _is_one_hot(u) or _is_one_hot(v):
        u, v = (u, v) if _is_one_hot(u) else (v, u)
        size = time * (time if _is_one_hot(v) else 2 * v.shape[-1])
        return Estimate(map_groups_in_chunks(_one_hot_squared_norms, (u, v), 4 * groups * size))
    rows, cols = u.shape[-1], v.shape[-1]
    if time * (rows + cols) * _cost_of_gram(u, v) < rows * cols:
        norms = inner_products(u, v, u, v)
        return norms._replace(values=nonnegative(norms.values))

    def direct_norms(u: Array, v: Array) -> Array:
        return jnp.square(upcast(materialize(u, v))).sum((0, 2, 3))

    return Estimate(map_groups_in_chunks(direct_norms, (u, v), 4 * groups * rows * cols))


def _one_hot_squared_norms(indices: Array, v: Array) -> Array:
    if _is_one_hot(v):
        return (_gram(indices, indices) * _gram(v, v)).sum((0, 2, 3))
    return _squares(sum_equal_rows(indices, v)[1]).sum((0, 2))


def sum_equal_rows(indices: Array, rows: Array) -> tuple[Array, Array]:
    """Sum the rows [groups, batch, time, cols] of an example's equal indices [groups, batch, time].

    Returns arrays of these shapes, rows in float32 or wider, each index of an example once. What
    is left over at the end has the index 0 and rows of 0.
    """

    def of_example(indices: Array, rows: Array) -> tuple[Array, Array]:
        order = jnp.argsort(indices)
        own = indices[order]
        number = jnp.cumsum(jnp.diff(own, prepend=own[:1]) != 0)
        summed = jnp.zeros_like(rows).at[number].add(rows[order], indices_are_sorted=True)
        return jnp.zeros_like(own).at[number].set(own, indices_are_sorted=True), summed

    return jax.vmap(jax.vmap(of_example))(indices, upcast(rows))


def nonnegative(squares: Array) -> Array:
    """Replace negative squared norms, which rounding can cause, by 0. NaN stays NaN."""
    return jax.lax.max(squares, jnp.zeros_like(squares))


def inner_products(u: Array, v: Array, other_u: Array, other_v: Array) -> Estimate:
    """Inner products ``sum_g <G_gb, G'_gb>`` of two gradients of the same shape.

    A sum of n products in any order has a rounding error of at most ``n e sum_i |x_i y_i|``, with
    the roundoff e (Higham 2002, section 3.1). For blocks, n is the length of the longest chain of
    additions. Gram matrices A and B with errors of at most dA and dB give, to first order, the
    bound ``sum_ts dA_ts |B_ts| + |A_ts| dB_ts`` for ``sum_ts A_ts B_ts``.
    """

    def products(u: Array, v: Array, other_u: Array, other_v: Array) -> Estimate:
        a, b = _gram(u, other_u), _gram(v, other_v)
        error_of_a, error_of_b = _gram_errors(u, other_u), _gram_errors(v, other_v)
        abs_a, abs_b = jnp.abs(a), jnp.abs(b)
        error_of_sum = _REDUCTION * _roundoff(a) * abs_a * abs_b
        errors = error_of_a * abs_b + abs_a * error_of_b + error_of_sum
        return Estimate((a * b).sum((0, 2, 3)), errors.sum((0, 2, 3)))

    size = 2 * u.shape[0] * u.shape[2] * other_u.shape[2]
    if not is_for_cpu():
        width = min(max(u.shape[-1], v.shape[-1]), _BLOCK**2)
        size *= -(-width // _block_size(width, max(u.shape[2], other_u.shape[2])))
    estimate: Estimate = map_groups_in_chunks(products, (u, v, other_u, other_v), 4 * size)
    return estimate


def _squares(factor: Array) -> Array:
    """Squared lengths of the vectors of a factor, [groups, batch, time], float32 or wider."""
    if _is_one_hot(factor):
        return jnp.ones(factor.shape, jnp.float32)
    return jnp.square(upcast(factor)).sum(-1)


def _lengths(factor: Array) -> Array:
    """Lengths of the vectors of a factor, [groups, batch, time]."""
    return jnp.sqrt(_squares(factor))


def term_norms(u: Array, v: Array) -> tuple[Array, Array]:
    """Sum of the norms of all terms of each example's gradient, see `LinearEquation`."""
    widths = [1 if _is_one_hot(factor) else factor.shape[-1] for factor in (u, v)]
    return sum_term_norms(_squares(u), _squares(v), widths)


def sum_term_norms(a: Array, b: Array, widths: Sequence[int]) -> tuple[Array, Array]:
    """`term_norms`, given the squared lengths of factors and their numbers of columns."""
    # Each square may have lost this much when it was rounded to 0.
    tiny = float(jnp.finfo(a.dtype).tiny)
    upper = (squares + n * tiny for squares, n in zip((a, b), widths, strict=True))

    # Groups have no elements in common, so their sums add up like perpendicular vectors.
    def norm(a: Array, b: Array) -> Array:
        return jnp.sqrt(jnp.square((jnp.sqrt(a) * jnp.sqrt(b)).sum(2)).sum(0))

    return norm(a, b), norm(*upper)


def _rounding_of_product(dtype: jnp.dtype) -> Array | float:
    """Relative rounding errors of the factors of a product, see `LinearEquation.rounding`.

    Scaling rounds cotangents of bfloat16 by up to 2^-8 of their value. Accelerators round both
    factors of a float32 product, CUDA to TF32 and others to bfloat16, unless
    `jax.default_matmul_precision` says otherwise.
    """
    if jnp.finfo(dtype).bits < 32:
        return 2.0**-8
    if not _rounds_products(dtype):
        return 0.0
    bound: Array = jax.lax.platform_dependent(
        cpu=lambda: jnp.array(0.0),
        cuda=lambda: jnp.array(2.0**-10),
        default=lambda: jnp.array(2.0**-7),
    )
    return bound


def _rounds_products(dtype: jnp.dtype) -> bool:
    """Whether accelerators may round the factors of a product of float32 or wider."""
    config: Any = jax.config
    full = config.jax_default_matmul_precision in ("float32", "highest")
    return bool(jnp.finfo(dtype).bits == 32) and not full


def kept_dtype(param: Any) -> jnp.dtype:
    """Dtype in which an accelerator keeps gradients: bfloat16 where it rounds products, too."""
    dtype = sum_dtype(param)
    return jnp.dtype(jnp.bfloat16) if _rounds_products(dtype) else dtype


def computed_once(a: Any) -> Any:
    """Return an array that XLA computes once, for all its readers.

    XLA repeats cheap operations for each reader, and may round differently there: a product is
    fused into a sum, or a bfloat16 stays a float32. A gradient that consists of such errors, since
    its exact value is 0, would not be the one that its norm was computed of.
    """
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a
    info = jnp.finfo(a.dtype)
    a = jax.lax.optimization_barrier(jax.lax.reduce_precision(a, info.nexp, info.nmant))
    if not is_for_cpu():  # They remove the barrier after fusion.
        return a
    # XLA on CPU removes it before, but repeats no division. It cannot see that this is one by 1.
    one = np.ones((), a.dtype).view(f"u{info.bits // 8}")
    bits = jax.lax.bitcast_convert_type(a, one.dtype)
    return a / jax.lax.bitcast_convert_type((bits | one) & one, a.dtype)


def materialize(u: Array, v: Array, dtype: jnp.dtype | None = None) -> Array:
    """Per-example gradients G, [groups, batch, rows, cols]; by default float32 or wider."""
    return jnp.einsum("gbtr,gbtc->gbrc", u, v, preferred_element_type=dtype or sum_dtype(u, v))


def weighted_sum(u: Array, v: Array, scales: Array) -> Array:
    """Weighted sum ``sum_b scales_b G_gb`` [groups, rows, cols], float32 or wider.

    An example with scale 0 contributes exactly 0, even if its factors are not finite.
    """
    if u.shape[0] == 1:  # A plain matrix product is faster than a batched one with one group.
        return _weighted_sum(u[0], v[0], scales)[None]
    return jax.vmap(_weighted_sum, (0, 0, None))(u, v, scales)


def _weighted_sum(u: Array, v: Array, scales: Array) -> Array:
    v, included = scale_rows(v, scales)
    u = jax.lax.collapse(u, 0, 2)

    def product(u: Array) -> Array:
        return jnp.einsum("nr,nc->rc", u, v, preferred_element_type=sum_dtype(u, v))

    rows = u.shape[-1]
    chunks = next(n for n in range(min(_MASKED_CHUNKS, rows), rows + 1) if rows % n == 0)
    size = rows // chunks

    def replace_chunk(i: Array, sums: Array) -> Array:
        positive = {"allow_negative_indices": False}
        chunk = jax.lax.dynamic_slice_in_dim(u, i * size, size, 1, **positive)
        masked = product(jnp.where(included[:, None], chunk, 0))
        return jax.lax.dynamic_update_slice_in_dim(sums, masked, i * size, 0, **positive)

    # 0 times infinity is not 0, so ``u`` must be masked too. A masked copy would take as much
    # memory as ``u``. The product is therefore repeated in place, chunk by chunk, and only if
    # there is an example to leave out.
    repeats = jnp.where(included.all(), 0, chunks)
    sums: Array = jax.lax.fori_loop(0, repeats, replace_chunk, product(u))
    return sums


def scale_rows(v: Array, scales: Array) -> tuple[Array, Array]:
    """Scale cotangents [batch, time, cols], and tell which rows have a scale other than 0.

    All readers of one array of cotangents use the shape [batch * time, cols], so that XLA computes
    it once.
    """
    scales = jnp.broadcast_to(scales[:, None], v.shape[:2]).ravel()
    v = jax.lax.collapse(v, 0, 2)
    included = scales != 0
    scaled = (upcast(v) * scales[:, None]).astype(scaled_dtype(v.dtype))
    return jnp.where(included[:, None], scaled, 0), included


def scaled_dtype(ct: jnp.dtype) -> jnp.dtype:
    """Dtype of scaled cotangents: they may exceed the range of float16, but not of bfloat16."""
    return ct if float(jnp.finfo(ct).max) > _WIDE_RANGE else sum_dtype(ct)


def map_in_chunks(f: Callable[..., Any], arrays: Sequence[Array], example_bytes: int) -> Any:
    """Compute ``f(*arrays)`` for a few examples at a time if its intermediates are large."""
    chunks = number_of_chunks(arrays[0].shape[0], arrays, example_bytes)
    if chunks == 1:
        return f(*arrays)

    # A chunk is every n-th example, so that each device of a sharded batch has a part of it. Chunks
    # are slices, because XLA would copy arrays whose chunks are moved to their first axis.
    def compute_chunk(i: Array) -> Any:
        return f(*(every_nth(a, chunks, i) for a in arrays))

    def join(a: Array) -> Array:
        return jnp.moveaxis(a, 0, 1).reshape(a.shape[0] * a.shape[1], *a.shape[2:])

    results = jax.lax.map(compute_chunk, jnp.arange(chunks))
    return jax.tree.map(join, results)


def every_nth(a: Array, n: int, start: Array, axis: int = 0) -> Array:
    """Return ``a[start::n]`` along an axis whose length is a multiple of ``n``."""
    if n == 1:
        return a
    # The size is given, because a bias has data with an axis of length 0.
    split = a.reshape(*a.shape[:axis], a.shape[axis] // n, n, *a.shape[axis + 1 :])
    chunk: Array = jax.lax.dynamic_index_in_dim(
        split, start, axis + 1, keepdims=False, allow_negative_indices=False
    )
    return chunk


def number_of_chunks(
    batch: int, arrays: Sequence[Array], example_bytes: int, width: int | None = None
) -> int:
    """Number of equal parts of a batch whose intermediates are small compared with ``arrays``.

    Parts have at most ``width`` examples per device. Each device of the mesh in scope has a part
    of every chunk: otherwise the compiler gathers the batch to read a chunk.
    """
    devices = batch_devices() if batch % batch_devices() == 0 else 1
    local = batch // devices
    factors = sum(a.nbytes for a in arrays) // devices
    allowed = max(_MIN_BYTES if is_for_cpu() else _FILLS_A_GPU, factors // 4)
    fitting = allowed // max(example_bytes, 1)
    largest = fitting if width is None else min(fitting, width)
    divisors = (n for n in range(1, local + 1) if local % n == 0)
    return next((n for n in divisors if local // n <= largest), max(local, 1))


def map_groups_in_chunks(f: Callable[..., Any], arrays: Sequence[Array], example_bytes: int) -> Any:
    """`map_in_chunks` for functions of arrays [groups, batch, ...]."""
    swapped = [jnp.swapaxes(a, 0, 1) for a in arrays]
    return map_in_chunks(
        lambda *chunk: f(*(jnp.swapaxes(a, 0, 1) for a in chunk)), swapped, example_bytes
    )


def _gram(u: Array, other: Array) -> Array:
    """Inner products ``<u_t, other_s>`` [groups, batch, t, s]."""
    if _is_one_hot(u) and _is_one_hot(other):
        return (u[..., :, None] == other[..., None, :]).astype(jnp.float32)
    if _is_one_hot(u):
        return jnp.swapaxes(_gram(other, u), 2, 3)
    if _is_one_hot(other):
        indices = jnp.broadcast_to(other[:, :, None], (*u.shape[:3], other.shape[-1]))
        return jnp.take_along_axis(u, indices, -1)
    return _dense_gram(u, other)


def _cost_of_gram(u: Array, v: Array) -> float:
    """Time per operation of a Gram form of these factors, relative to gradients.

    GPUs and TPUs multiply float32 six or seven times as fast in their default precision as in full,
    and the blocks are sums in memory, of T^2 numbers each.
    """
    if is_for_cpu():
        return 1.0
    rounds = _rounds_products(sum_dtype(u, v)) and max(u.dtype.itemsize, v.dtype.itemsize) > 2
    return max(_FULL_PRECISION if rounds else 1.0, u.shape[2] / _BLOCK)


def _dense_gram(u: Array, other: Array) -> Array:
    width = u.shape[-1]
    size = _block_size(width, max(u.shape[2], other.shape[2]))
    if size == width:
        return jnp.einsum(
            "gbtr,gbsr->gbts",
            u,
            other,
            # Terms cancel in the norm, which would lose half of the default precision's digits.
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=sum_dtype(u, other),
        )
    if not is_for_cpu() and size == _BLOCK:  # Each iteration of a loop would start three kernels.
        padding = [(0, 0)] * 3 + [(0, -width % size)]
        blocks = (jnp.pad(a, padding).reshape(*a.shape[:3], -1, size) for a in (u, other))
        products = jax.vmap(_dense_gram, 3, 2)(*blocks)
        return products.sum(2)
    first = (width - 1) % size + 1

    def add_block(i: Array, total: Array) -> Array:
        blocks = (
            jax.lax.dynamic_slice_in_dim(a, first + i * size, size, 3, allow_negative_indices=False)
            for a in (u, other)
        )
        return total + _dense_gram(*blocks)

    total: Array = jax.lax.fori_loop(
        0, (width - first) // size, add_block, _dense_gram(u[..., :first], other[..., :first])
    )
    return total


def _block_size(width: int, time: int) -> int:
    """Length of the blocks in which to sum inner products of vectors of this length."""
    if width <= _BLOCK or width * time <= _SHORT:
        return width
    return _BLOCK if width <= _BLOCK**2 else _BLOCK**2


def _additions(width: int, time: int) -> int:
    """Length of the longest chain of additions in `_dense_gram`."""
    size = _block_size(width, time)
    return width if size == width else (width - 1) // size + _additions(size, time)


def _gram_errors(u: Array, other: Array) -> Array | float:
    """Bounds of the rounding errors of `_gram`, [groups, batch, t, s]."""
    if _is_one_hot(u) or _is_one_hot(other):
        return 0.0
    additions = _additions(u.shape[-1], max(u.shape[2], other.shape[2]))
    a, b = _lengths(u)[..., :, None], _lengths(other)[..., None, :]
    return (additions + 1) * _roundoff(a) * a * b


def _roundoff(a: Array) -> float:
    return float(jnp.finfo(a.dtype).eps) / 2


def _is_one_hot(factor: Array) -> bool:
    return jnp.issubdtype(factor.dtype, jnp.integer)


def made_alone(index: Array, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns, inside of a loop, as arrays that XLA fuses with no reader.

    Two loops, for norms and for sums, then read equal numbers: see `computed_once`.

    Args:
      index: The number of the iteration.
      make: Returns a tree of arrays.
    """
    shapes = jax.eval_shape(make)
    zeros = jax.tree.map(lambda a: equally_varying((jnp.zeros(a.shape, a.dtype), a))[0], shapes)
    # XLA does not know that this loop has one iteration.
    return jax.lax.fori_loop(0, jnp.minimum(index, 0) + 1, lambda *_: make(), zeros)


class LinearEquation(Protocol):
    """An equation ``out = f(data, parameter)`` that is linear in the parameter.

    ``x`` and ``ct`` are data and cotangents of the result, [stack, batch, time, *shape].

    Attributes:
      data: Index of the operand that the gradient depends on, or None.
      requires_unique_elements: Whether the norm is wrong if the equation reads an element of the
        parameter twice.
      width: Largest number of examples at a time, or None.
      sums_terms: Whether terms are summed for norms and sums alike, so that both are of the same
        numbers even if terms cancel.
    """

    data: int | None
    width: ClassVar[int | None] = None
    requires_unique_elements: ClassVar[bool] = True
    sums_terms: ClassVar[bool] = False

    def squared_norms(self, x: Array, ct: Array) -> Estimate:
        """Squared norm of each example's gradient, [batch]."""

    def terms(self, x: Array, ct: Array) -> int:
        """Number of terms that add up to an example's gradient."""

    def term_norms(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Sum of the norms of the terms of each example's gradient, [batch].

        A much smaller gradient is the result of cancellation. The second result is an upper
        bound even if squares of the smallest numbers are rounded to 0.
        """

    def materialize(self, x: Array, ct: Array) -> Array:
        """Per-example gradients, [stack, batch, *parameter]."""

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """Sum of the gradients scaled by ``scales`` [batch]: [stack, *parameter].

        float32 or wider. An example with scale 0 contributes exactly 0, even if its data or
        cotangents are not finite.
        """

    def inner_products(self, x: Array, ct: Array, direction: Array) -> Array:
        """Inner products of each example's gradient with a ``direction``, [batch].

        The direction is [stack, *parameter].
        """
        return jnp.einsum("sb...,s...->b", self.materialize(x, ct), direction)

    def rounding(self, ct: jnp.dtype) -> Array | float:
        """Bound of the error of `weighted_sum`, per sum of the norms of its terms.

        Sums themselves are float32 or wider, and their errors far smaller.
        """
        return 0.0

    def norm_fits(self, eqn: JaxprEqn) -> bool:
        """Whether the norm of one example's gradient takes no more memory than its factors."""
        return False


def upper_squared_norms(equation: LinearEquation, x: Array, ct: Array) -> Array:
    """Upper bound of the squared norm of what an example contributes to a sum, [batch].

    For gradients that cannot be materialized if their terms cancel. The bound may then be much
    larger than the squared norm. Errors below `NEGLIGIBLE` do not count.
    """
    values, errors = equation.squared_norms(x, ct)
    _, terms = equation.term_norms(x, ct)
    if equation.terms(x, ct) > 1:
        bound = jnp.square(_WIDE * terms) + (0 if errors is None else errors)
        values += jnp.where(bound > NEGLIGIBLE * values, bound, 0)
    rounding = equation.rounding(sum_dtype(ct))  # The second backward pass scales in float32.
    return jnp.square(jnp.sqrt(values) + jnp.where(rounding == 0, 0, rounding * terms))


def linear_equation(eqn: JaxprEqn, parameter: int) -> LinearEquation | None:
    """Read an equation as linear in its operand number ``parameter``; None if it is not."""
    if not jnp.issubdtype(aval(eqn.outvars[0]).dtype, jnp.floating):
        return None
    forms = ((form, reader.read(eqn)) for reader, form in _FORMS.items())
    return next((form(found, parameter) for form, found in forms if found is not None), None)


class _Broadcast(LinearEquation, Protocol):
    """An elementwise equation: the gradient is a sum along ``broadcast_axes``."""

    broadcast_axes: tuple[int, ...]
    requires_unique_elements: ClassVar[bool] = False

    def squared_norms(self, x: Array, ct: Array) -> Estimate:
        return Estimate(squared_norms_of(jnp.moveaxis(self.materialize(x, ct), 1, 0)))

    def terms(self, x: Array, ct: Array) -> int:
        return ct.shape[2] * math.prod(ct.shape[3 + i] for i in self.broadcast_axes)

    def term_norms(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """See `LinearEquation`. A norm of the sums of absolute terms."""
        if self.terms(x, ct) > 1:
            x, ct = jnp.abs(x), jnp.abs(ct)
        grads = jnp.moveaxis(self.materialize(x, ct), 1, 0)
        squares = squared_norms_of(grads)
        lost = math.prod(grads.shape[1:]) * float(jnp.finfo(squares.dtype).tiny)
        return jnp.sqrt(squares), jnp.sqrt(squares + lost)

    def norm_fits(self, eqn: JaxprEqn) -> bool:
        return True

    def _summed(self, terms: Array) -> Array:
        return terms.sum((2, *(3 + i for i in self.broadcast_axes)), keepdims=True).squeeze(2)


@dataclasses.dataclass(frozen=True)
class BiasAdd(_Broadcast):
    """``add``: the gradient is the cotangent.

    Attributes:
      broadcast_axes: Axes along which the bias is broadcast.
    """

    broadcast_axes: tuple[int, ...]
    data: None = None

    @classmethod
    def read(cls, add: Add, parameter: int) -> "BiasAdd | None":
        """Read the equation; None if the parameter is a scalar."""
        if not aval(add.eqn.invars[parameter]).ndim:
            return None
        return cls(_broadcast_axes(add.eqn, parameter))

    def materialize(self, x: Array, ct: Array) -> Array:
        return self._summed(upcast(ct))

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        shape = ct.shape[3:]

        def bias_gradient(ct: Array) -> Array:
            scaled, _ = scale_rows(upcast(ct).reshape(*ct.shape[:2], -1), scales)
            gradient = scaled.sum(0)
            return gradient.reshape(shape).sum(self.broadcast_axes, keepdims=True)

        return bias_gradient(ct[0])[None] if len(ct) == 1 else jax.vmap(bias_gradient)(ct)


@dataclasses.dataclass(frozen=True)
class Scale(_Broadcast):
    """``mul``: the gradient is the cotangent times the data.

    Attributes:
      data: Number of the data operand, 0 or 1.
      broadcast_axes: Axes along which the scale is broadcast.
    """

    data: int
    broadcast_axes: tuple[int, ...]

    @classmethod
    def read(cls, mul: Mul, parameter: int) -> "Scale | None":
        """Read the equation; None if an operand is a scalar."""
        if not all(aval(operand).ndim for operand in mul.eqn.invars):
            return None
        return cls(1 - parameter, _broadcast_axes(mul.eqn, parameter))

    def materialize(self, x: Array, ct: Array) -> Array:
        return self._summed(x.astype(sum_dtype(x, ct)) * ct)

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        grads = self.materialize(x, ct)
        scales = scales.reshape(1, -1, *[1] * (grads.ndim - 2))
        return jnp.where(scales != 0, grads * scales, 0).sum(1)


def _broadcast_axes(eqn: JaxprEqn, parameter: int) -> tuple[int, ...]:
    shapes = aval(eqn.invars[parameter]).shape, aval(eqn.outvars[0]).shape
    return tuple(i for i, (n, m) in enumerate(zip(*shapes, strict=True)) if n < m)


def squared_norms_of(grads: Array) -> Array:
    """Squared norms [batch] of gradients [batch, ...]."""
    return jnp.square(upcast(grads)).sum(range(1, grads.ndim))


class OuterProducts(LinearEquation, Protocol):
    """An equation whose gradient is a sum of outer products ``u_t v_t^T`` in groups."""

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Factors u [groups, batch, time, rows] and v [groups, batch, time, cols]."""

    def as_matrix(self, elements: Any) -> Any:
        """Arrange [*stack, *parameter] like the gradient of `factors`: [groups, rows, cols].

        An array or a `fnet.jaxpr.Layout`.
        """

    def squared_norms(self, x: Array, ct: Array) -> Estimate:
        return squared_norms(*self.factors(x, ct))

    def terms(self, x: Array, ct: Array) -> int:
        u, _ = jax.eval_shape(self.factors, x, ct)
        return int(u.shape[2])

    def inner_products(self, x: Array, ct: Array, direction: Array) -> Array:
        """See `LinearEquation`: ``sum_t v_t (u_t direction)`` takes one matrix product."""
        (u, v), matrices = self.factors(x, ct), self.as_matrix(direction)
        if _is_one_hot(u):
            rows = jax.vmap(lambda matrix, index: matrix[index])(matrices, u)
        else:
            matrices = matrices.astype(u.dtype)
            rows = jnp.einsum("gbtr,grc->gbtc", u, matrices, preferred_element_type=sum_dtype(u))
        return (upcast(rows) * v).sum((0, 2, 3))

    def term_norms(self, x: Array, ct: Array) -> tuple[Array, Array]:
        return term_norms(*self.factors(x, ct))

    def norm_fits(self, eqn: JaxprEqn) -> bool:
        assert self.data is not None
        arrays = [aval(v) for v in (eqn.invars[self.data], eqn.outvars[0])]
        shapes = [jax.ShapeDtypeStruct((1, 1, 1, *a.shape), a.dtype) for a in arrays]
        u, v = jax.eval_shape(self.factors, *shapes)
        groups, _, time = u.shape[:3]
        rows, cols = (1 if _is_one_hot(a) else a.shape[-1] for a in (u, v))
        fits: bool = groups * min(2 * time * time, rows * cols) <= u.size + v.size
        return fits


@dataclasses.dataclass(frozen=True)
class Dot(OuterProducts):
    """``dot_general``: a sum of outer products per batch index.

    The equation's batch dimensions become groups of the factors, since each of their indices
    has a matrix of its own.

    Attributes:
      data: Number of the data operand, 0 or 1.
      data_axes: Axes of the data: those of the batch, contracted ones and free ones.
      axes: The same of the parameter.
      parameter: Shape of the parameter.
      dtype: That of materialized gradients; by default float32 or wider.
    """

    data: int
    data_axes: tuple[Axes, Axes, Axes]
    axes: tuple[Axes, Axes, Axes]
    parameter: tuple[int, ...]
    dtype: jnp.dtype | None = None

    @classmethod
    def read(cls, dot: DotGeneral, parameter: int) -> "Dot":
        """Read the equation."""
        shape = aval(dot.eqn.invars[parameter]).shape
        return cls(1 - parameter, dot.axes(1 - parameter), dot.axes(parameter), shape)

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Factors [groups, batch, time, contracting] and [groups, batch, time, free]."""
        batch, contracting, data_free = self.data_axes
        u = _arrange(_not_one_hot(x), batch, data_free, contracting)
        # The result has the batch dimensions, then the free ones of the left and right operand.
        first, parameter_free = len(batch), len(self.axes[2])
        time = range(first, first + len(data_free))
        if self.data == 1:
            time = range(first + parameter_free, first + parameter_free + len(data_free))
        free = [i for i in range(first, first + parameter_free + len(data_free)) if i not in time]
        return u, _arrange(ct, range(first), time, free)

    def products(self, out: Any) -> int:
        """Number of multiplications, given the shape of the result."""
        size: int = out.size * math.prod(self.parameter[i] for i in self.axes[1])
        return size

    def factor_size(self, out: Any) -> int:
        """Elements of the data and of the result."""
        free = math.prod(self.parameter[i] for i in self.axes[2])
        size: int = out.size + self.products(out) // max(free, 1)
        return size

    def as_matrix(self, elements: Any) -> Any:
        stack = elements.ndim - len(self.parameter)
        axes = [stack + i for dims in self.axes for i in dims]
        sizes = [math.prod(self.parameter[i] for i in dims) for dims in self.axes[1:]]
        return elements.transpose((*range(stack), *axes)).reshape((-1, *sizes))

    def _as_parameter(self, g: Array, stack: int) -> Array:
        """Arrange [stack * groups, ..., rows, cols] as [stack, ..., *parameter]."""
        batch, contracting, free = self.axes
        order, n, middle = [*batch, *contracting, *free], len(batch), g.shape[1:-2]
        sizes = [self.parameter[i] for i in order]
        g = g.reshape(stack, *sizes[:n], *middle, *sizes[n:])
        # Now it is [stack, groups..., middle..., rows..., cols...].
        source = {axis: 1 + k + (len(middle) if k >= n else 0) for k, axis in enumerate(order)}
        middle_axes = range(1 + n, 1 + n + len(middle))
        return g.transpose(0, *middle_axes, *(source[i] for i in range(len(order))))

    def materialize(self, x: Array, ct: Array) -> Array:
        return self._as_parameter(materialize(*self.factors(x, ct), self.dtype), x.shape[0])

    def rounding(self, ct: jnp.dtype) -> Array | float:
        return _rounding_of_product(scaled_dtype(ct))

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        return self._as_parameter(weighted_sum(*self.factors(x, ct), scales), x.shape[0])


def _not_one_hot(x: Array) -> Array:
    """Return data as floating numbers: integers stand for one-hot vectors."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _arrange(a: Array, groups: Any, time: Any, last: Any) -> Array:
    """Arrange [stack, batch, time, *shape] as factors [stack * groups, batch, time * ..., last].

    The other arguments are axes of ``shape``.
    """
    groups, time, last = (tuple(3 + i for i in axes) for axes in (groups, time, last))
    shape = (
        a.shape[0] * math.prod(a.shape[i] for i in groups),
        a.shape[1],
        a.shape[2] * math.prod(a.shape[i] for i in time),
        math.prod(a.shape[i] for i in last),
    )
    return a.transpose(0, *groups, 1, 2, *time, *last).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Embedding(OuterProducts):
    """``gather`` of slices that are whole along all axes but the indexed ones.

    The indexed axes are those with slices of one element. Together they number the rows of the
    table, and the other axes are its columns.

    Attributes:
      data: 1, the indices.
      mode: How the gather treats indices outside of the table.
      parameter: Shape of the table.
      dims: Dimension numbers of the gather.
      indexed: Indexed axes of the table.
    """

    data: int
    mode: jax.lax.GatherScatterMode
    parameter: tuple[int, ...]
    dims: jax.lax.GatherDimensionNumbers
    indexed: tuple[int, ...]
    sums_terms: ClassVar[bool] = True

    @classmethod
    def read(cls, gather: Gather, parameter: int) -> "Embedding | None":
        """Read the equation; None for any other gather."""
        dims, shape = gather.dimension_numbers, aval(gather.eqn.invars[0]).shape
        sizes = gather.slice_sizes
        started = {*dims.start_index_map, *dims.operand_batching_dims}
        indexed = tuple(i for i in range(len(shape)) if sizes[i] == 1 and i in started)
        is_whole = all(sizes[i] == n for i, n in enumerate(shape) if i not in indexed)
        if parameter != 0 or not indexed or not is_whole:
            return None
        return cls(1, gather.mode, shape, dims, indexed)

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Row numbers [stack, batch, time] and cotangents of rows [stack, batch, time, width].

        Cotangents at indices outside of the table are 0, as for `jax.grad`, unless it clips them.
        """
        rows, inside = self._rows(x)
        offset = self.dims.offset_dims
        batch = [3 + i for i in range(ct.ndim - 3) if i not in offset]
        ct = ct.transpose(0, 1, 2, *batch, *(3 + i for i in offset))
        ct = ct.reshape(*ct.shape[:2], -1, self._width())
        rows, inside = (a.reshape(ct.shape[:3]) for a in (rows, inside))
        if self.mode != jax.lax.GatherScatterMode.CLIP:
            ct = jnp.where(inside[..., None], ct, 0)
        return rows, ct

    def _rows(self, x: Array) -> tuple[Array, Array]:
        """Row numbers [..., *batch] of indices, and which are within the table."""
        if x.dtype.itemsize < 4:  # Clipping to a long table would overflow.
            x = x.astype(jnp.int32)
        shape = x.shape[:-1]
        rows, inside = jnp.zeros(shape, x.dtype), jnp.ones(shape, bool)
        batching = dict(
            zip(self.dims.operand_batching_dims, self.dims.start_indices_batching_dims, strict=True)
        )
        for axis, size in enumerate(self.parameter):
            if axis in batching:
                index = jax.lax.broadcasted_iota(x.dtype, shape, 3 + batching[axis])
            elif axis in self.dims.start_index_map:
                index = x[..., self.dims.start_index_map.index(axis)]
            else:
                continue
            last = size - 1 if axis in self.indexed else 0
            inside &= (index >= 0) & (index <= last)
            if axis in self.indexed:
                rows = rows * size + index.clip(0, last)
        return rows, inside

    def _width(self) -> int:
        return math.prod(n for i, n in enumerate(self.parameter) if i not in self.indexed)

    def _height(self) -> int:
        return math.prod(self.parameter[i] for i in self.indexed)

    def _order(self) -> list[int]:
        """Axes of the table, the indexed ones first."""
        return [*self.indexed, *(i for i in range(len(self.parameter)) if i not in self.indexed)]

    def _zeros(self, rows: Array) -> Array:
        return jnp.zeros((self._height(), self._width()), sum_dtype(rows))

    def _as_parameter(self, g: Array) -> Array:
        """Arrange [..., rows, width] as [..., *parameter]."""
        order, n = self._order(), g.ndim - 2
        g = g.reshape(*g.shape[:-2], *(self.parameter[i] for i in order))
        return g.transpose(*range(n), *(n + order.index(i) for i in range(len(order))))

    def as_matrix(self, elements: Any) -> Any:
        stack, order = elements.ndim - len(self.parameter), self._order()
        elements = elements.transpose((*range(stack), *(stack + i for i in order)))
        return elements.reshape((-1, self._height(), self._width()))

    def materialize(self, x: Array, ct: Array) -> Array:
        indices, rows = self.factors(x, ct)
        table = self._zeros(rows)
        scatter_add: Callable[[Array, Array], Array] = jax.vmap(
            jax.vmap(lambda indices, rows: table.at[indices].add(rows))
        )
        return self._as_parameter(scatter_add(indices, rows.astype(table.dtype)))

    @property
    def is_in_order(self) -> bool:
        """Whether the indexed axes are the first ones."""
        return self._order() == list(range(len(self.parameter)))

    def add_rows(self, gradients: Array, x: Array, ct: Array) -> Array:
        """Add the gradients to others, [batch, *parameter], if the table `is_in_order`."""
        (indices,), (rows,) = self.factors(x, ct)
        tables = gradients.reshape(len(gradients), self._height(), self._width())

        def add(table: Array, indices: Array, rows: Array) -> Array:
            return table.at[indices].add(rows.astype(table.dtype))

        if len(tables) == 1:
            return add(tables[0], indices[0], rows[0]).reshape(gradients.shape)
        return jax.vmap(add)(tables, indices, rows).reshape(gradients.shape)

    def _summed_rows(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Rows of each example's gradient that are not 0, see `sum_equal_rows`."""
        indices, rows = sum_equal_rows(*self.factors(x, ct))
        return indices, computed_once(rows)

    def squared_norms(self, x: Array, ct: Array) -> Estimate:
        return Estimate(_squares(self._summed_rows(x, ct)[1]).sum((0, 2)))

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        indices, rows = self._summed_rows(x, ct)
        table = self._zeros(rows)

        def scatter_add(indices: Array, rows: Array) -> Array:
            return table.at[indices.ravel()].add(scale_rows(rows, scales)[0])

        if len(rows) == 1:
            return self._as_parameter(scatter_add(indices[0], rows[0])[None])
        return self._as_parameter(jax.vmap(scatter_add)(indices, rows))

    def add_weighted_sum(self, total: Array, x: Array, ct: Array, scales: Array) -> Array:
        """Add the weighted sum to an array [*parameter] in place, if the table `is_in_order`."""
        (indices,), (rows,) = self._summed_rows(x, ct)
        table = total.reshape(self._height(), self._width())
        added = table.at[indices.ravel()].add(scale_rows(rows, scales)[0].astype(table.dtype))
        return added.reshape(total.shape)


@dataclasses.dataclass(frozen=True)
class Convolution(LinearEquation):
    """``conv_general_dilated`` whose kernel is the parameter.

    Each output position reads a patch of the input. An example's gradient is the sum over
    positions of the outer product of patch and cotangent, per feature group (im2col).

    Attributes:
      data: 0, the images.
      conv: The equation.
      kernel: Shape of the kernel.
    """

    data: int
    conv: ConvGeneralDilated
    kernel: tuple[int, ...]

    @classmethod
    def read(cls, conv: ConvGeneralDilated, parameter: int) -> "Convolution | None":
        """Read the equation; None if the parameter is the image."""
        if parameter != 1 or conv.batch_group_count != 1:
            return None
        return cls(0, conv, conv.kernel)

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Patches [stack * groups, batch, position, window * in] and cotangents [..., out].

        ``groups`` are feature groups; ``in`` and ``out`` are the features of one group.
        """
        groups = self.conv.feature_group_count

        def split_groups(a: Array, window: int) -> Array:
            # [stack, batch, position, window * groups * n] -> [..., batch, position, window * n]
            a = a.reshape(*a.shape[:3], window, groups, -1)
            a = a.transpose(0, 4, 1, 2, 3, 5)
            return a.reshape(-1, *a.shape[2:4], window * a.shape[-1])

        u, v = self._patches(_not_one_hot(x)), self._positions(ct)
        return split_groups(u, math.prod(self.conv.window)), split_groups(v, 1)

    def _patches(self, x: Array) -> Array:
        """Input patches, [stack, batch, position, window * features]."""
        x, conv = self._channels_last(x, "lhs_spec"), self.conv
        padding = [
            (low, high, dilation - 1)
            for (low, high), dilation in zip(conv.padding, conv.lhs_dilation, strict=True)
        ]
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + padding + [(0, 0, 0)])
        window, strides, dilations = conv.window, conv.window_strides, conv.rhs_dilation
        out = [
            (size - (w - 1) * d - 1) // s + 1
            for size, w, d, s in zip(padded.shape[3:-1], window, dilations, strides, strict=True)
        ]

        def pixels_at(offset: tuple[int, ...]) -> Array:
            slices = tuple(
                slice(o * d, o * d + (n - 1) * s + 1, s)
                for o, d, n, s in zip(offset, dilations, out, strides, strict=True)
            )
            return padded[(slice(None),) * 3 + slices]

        patches = jnp.stack([pixels_at(offset) for offset in np.ndindex(*window)], axis=-2)
        return patches.reshape(*x.shape[:2], -1, math.prod(window) * x.shape[-1])

    def _positions(self, ct: Array) -> Array:
        """Cotangents, [stack, batch, position, features]."""
        ct = self._channels_last(ct, "out_spec")
        return ct.reshape(*ct.shape[:2], -1, ct.shape[-1])

    def squared_norms(self, x: Array, ct: Array) -> Estimate:
        """See `LinearEquation`. Patches exist for a few examples at a time."""
        u, v = jax.eval_shape(self.factors, x, ct)

        def norms(x: Array, ct: Array) -> Estimate:
            return squared_norms(*self.factors(x, ct))

        groups, _, time, rows = u.shape
        intermediates = min(time * time * 2, rows * v.shape[-1])
        estimate: Estimate = map_groups_in_chunks(
            norms, (x, ct), 4 * groups * (time * rows + intermediates)
        )
        return estimate

    def terms(self, x: Array, ct: Array) -> int:
        u, _ = jax.eval_shape(self.factors, x, ct)
        return int(u.shape[2])

    def term_norms(self, x: Array, ct: Array) -> tuple[Array, Array]:
        conv, groups = self.conv, self.conv.feature_group_count
        x, ct = self._channels_last(x, "lhs_spec"), self._channels_last(ct, "out_spec")

        def squares(a: Array) -> Array:
            # [stack, batch, image, *space, groups * n] -> [..., groups]
            return jnp.square(upcast(a)).reshape(*a.shape[:-1], groups, -1).sum(-1)

        def last(sizes: Any, other: Any) -> tuple[Any, ...]:
            return (other,) * 3 + tuple(sizes) + (other,)

        of_patches = jax.lax.reduce_window(
            squares(x), 0.0, jax.lax.add, last(conv.window, 1), last(conv.window_strides, 1),
            last(conv.padding, (0, 0)), last(conv.lhs_dilation, 1), last(conv.rhs_dilation, 1),
        )  # fmt: skip
        a, b = (
            jax.lax.collapse(jnp.moveaxis(s.reshape(*s.shape[:2], -1, groups), 3, 0), 0, 2)
            for s in (of_patches, squares(ct))
        )
        spec = conv.dimension_numbers.rhs_spec
        rows = self.kernel[spec[1]] * math.prod(conv.window)
        return sum_term_norms(a, b, (rows, self.kernel[spec[0]] // groups))

    def _channels_last(self, a: Array, spec: str) -> Array:
        """Arrange [stack, batch, time, *shape] as [stack, batch, image, *space, features]."""
        image, features, *space = getattr(self.conv.dimension_numbers, spec)
        a = a.transpose(0, 1, 2, *(3 + i for i in (image, *space, features)))
        return a.reshape(*a.shape[:2], -1, *a.shape[4:])

    def materialize(self, x: Array, ct: Array) -> Array:

        def gradients(x: Array, ct: Array) -> Array:
            kernels = self._as_kernels(materialize(*self.factors(x, ct)), len(x))
            return jnp.moveaxis(kernels, 1, 0)

        u, _ = jax.eval_shape(self.factors, x, ct)
        grads = map_groups_in_chunks(gradients, (x, ct), 4 * u.shape[0] * u.shape[2] * u.shape[3])
        return jnp.moveaxis(grads, 0, 1)

    def _as_kernels(self, g: Array, stack: int) -> Array:
        """Arrange [stack * groups, batch, window * in, out] as [stack, batch, *kernel]."""
        window, spec = self.conv.window, self.conv.dimension_numbers.rhs_spec
        batch, out = g.shape[1], g.shape[-1]
        g = g.reshape(stack, -1, batch, *window, g.shape[2] // math.prod(window), out)
        n = 3 + len(window)  # [stack, groups, batch, *window, in, out]
        g = g.transpose(0, 2, 1, n + 1, n, *range(3, n))
        g = g.reshape(stack, batch, -1, *g.shape[4:])  # [stack, batch, groups * out, in, *window]
        order = sorted(range(len(spec)), key=lambda i: spec[i])
        return g.transpose(0, 1, *(2 + i for i in order))

    def inner_products(self, x: Array, ct: Array, direction: Array) -> Array:
        """See `LinearEquation`: cotangents times the convolution with the direction."""

        def product(x: Array, ct: Array, kernel: Array) -> Array:
            images, out = self._merge_batch(x, specs[0][0]), self._merge_batch(ct, specs[1][0])
            y = self.conv.bind(images, kernel.astype(x.dtype))
            y = jnp.moveaxis(upcast(y) * out, specs[1][0], 0)
            return y.reshape(x.shape[0], -1).sum(1)

        dims = self.conv.dimension_numbers
        specs = dims.lhs_spec, dims.out_spec
        products = [product(x[i], ct[i], direction[i]) for i in range(len(x))]
        return functools.reduce(jnp.add, products)

    def _merge_batch(self, a: Array, axis: int) -> Array:
        """Arrange [batch, time, ...] as [...], with batch and time merged into the image axis."""
        a = jnp.moveaxis(a, 2 + axis, 2)
        return jnp.moveaxis(a.reshape(-1, *a.shape[3:]), 0, axis)

    def as_matrix(self, elements: Array) -> Array:
        """See `OuterProducts`; for arrays of JAX [stack, *kernel]."""
        stack, groups = len(elements), self.conv.feature_group_count
        spec = self.conv.dimension_numbers.rhs_spec
        rows = math.prod(self.conv.window) * self.kernel[spec[1]]
        shape = (stack * groups, rows, self.kernel[spec[0]] // groups)

        def kernels(matrices: Array) -> Array:
            return self._as_kernels(matrices[:, None], stack)[:, 0]

        # Elements only move, so the transposition is the inverse.
        matrices: Array
        (matrices,) = jax.linear_transpose(kernels, argument_like(shape, elements))(elements)
        return matrices

    def rounding(self, ct: jnp.dtype) -> Array | float:
        """See `LinearEquation`. Cotangents are scaled in float32."""
        return _rounding_of_product(sum_dtype(ct))

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `LinearEquation`. This is the transposed convolution of any backward pass."""
        # In a narrow dtype of the kernel, the sum over the batch would be rounded.
        dtype = sum_dtype(x, ct)
        dims = self.conv.dimension_numbers

        def kernel_gradient(x: Array, ct: Array) -> Array:
            x = self._merge_batch(x, dims.lhs_spec[0])
            ct = self._merge_batch(ct, dims.out_spec[0])

            def convolve(kernel: Array) -> Array:
                y: Array = self.conv.bind(x, kernel, preferred_element_type=None)
                return y

            gradient: Array
            (gradient,) = jax.linear_transpose(convolve, argument_like(self.kernel, ct))(ct)
            return gradient

        scales = scales.reshape(1, -1, *[1] * (x.ndim - 2))
        x = jnp.where(scales != 0, x, 0).astype(dtype)
        ct = jnp.where(scales != 0, ct.astype(dtype) * scales.astype(dtype), 0)
        if len(x) == 1:
            return kernel_gradient(x[0], ct[0])[None]
        return jnp.stack([kernel_gradient(x[i], ct[i]) for i in range(len(x))])


_FORMS: dict[type[Reader], Callable[[Any, int], LinearEquation | None]] = {
    Add: BiasAdd.read,
    ConvGeneralDilated: Convolution.read,
    DotGeneral: Dot.read,
    Gather: Embedding.read,
    Mul: Scale.read,
}
