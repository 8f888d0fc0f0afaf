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
  - Goodfellow 2015, "Efficient per-example gradient computations", arXiv:1510.01799.
  - Li et al. 2022, "Large language models can be strong differentially private learners",
    arXiv:2110.05679.
  - Bu et al. 2023, "Differentially private optimization on large model at small cost",
    arXiv:2210.00038.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from fnet.jaxpr import aval
from fnet.precision import sum_dtype, upcast

_FACTOR_BYTES_RATIO = 4
"""Intermediates may take as many bytes as the factors, divided by this."""

_MIN_BYTES = 2**20
"""Bytes that intermediates may take in any case."""

_MASKED_CHUNKS = 32
"""Number of chunks in which `weighted_sum` masks examples that are left out."""

_WIDE_RANGE = 1e38
"""Cotangents are scaled in their own dtype if its maximum exceeds this, otherwise in float32."""


def squared_norms(u: Array, v: Array) -> Array:
    """Squared norms ``sum_g |G_gb|^2`` of per-example gradients.

    Uses whichever is cheaper for more than one time step: the Gram matrices ``<u_t, u_s>`` and
    ``<v_t, v_s>``, or the gradients themselves, materialized for a few examples at a time.

    Args:
      u: Factors [groups, batch, time, rows]. Integers [groups, batch, time] stand for one-hot
        vectors.
      v: Factors [groups, batch, time, cols], or integers as for ``u``.

    Returns:
      [batch], float32 or wider.
    """
    groups, _, time = u.shape[:3]
    if time == 1:
        if groups == 1:
            return _squared_lengths(u) * _squared_lengths(v)
        return jax.vmap(lambda u, v: squared_norms(u[None], v[None]))(u, v).sum(0)
    if _is_one_hot(u) or _is_one_hot(v):
        return nonnegative(inner_products(u, v, u, v))
    rows, cols = u.shape[-1], v.shape[-1]
    if time * (rows + cols) < rows * cols:

        def norms(u: Array, v: Array) -> Array:
            return nonnegative((_gram(u, u) * _gram(v, v)).sum((0, 2, 3)))

        size = 2 * groups * time * time
    else:

        def norms(u: Array, v: Array) -> Array:
            return jnp.square(upcast(materialize(u, v))).sum((0, 2, 3))

        size = groups * rows * cols
    return map_groups_in_chunks(norms, (u, v), 4 * size)


def nonnegative(squares: Array) -> Array:
    """Replace negative squared norms, which rounding can cause, by 0. NaN stays NaN."""
    return jax.lax.max(squares, jnp.zeros_like(squares))


def inner_products(u: Array, v: Array, other_u: Array, other_v: Array) -> Array:
    """Inner products ``sum_g <G_gb, G'_gb>`` [batch] of two gradients of the same shape."""

    def products(u: Array, v: Array, other_u: Array, other_v: Array) -> Array:
        return (_gram(u, other_u) * _gram(v, other_v)).sum((0, 2, 3))

    size = 2 * u.shape[0] * u.shape[2] * other_u.shape[2]
    return map_groups_in_chunks(products, (u, v, other_u, other_v), 4 * size)


def materialize(u: Array, v: Array) -> Array:
    """Per-example gradients G, [groups, batch, rows, cols]."""
    return jnp.einsum("gbtr,gbtc->gbrc", u, v, preferred_element_type=sum_dtype(u, v))


def weighted_sum(u: Array, v: Array, scales: Array) -> Array:
    """Weighted sum ``sum_b scales_b G_gb`` of per-example gradients.

    An example with scale 0 contributes exactly 0, even if its factors are not finite.

    Args:
      u: Factors [groups, batch, time, rows].
      v: Factors [groups, batch, time, cols].
      scales: Weight of each example, [batch].

    Returns:
      [groups, rows, cols], float32 or wider.
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
        chunk = jax.lax.dynamic_slice_in_dim(u, i * size, size, axis=1)
        masked = product(jnp.where(included[:, None], chunk, 0))
        return jax.lax.dynamic_update_slice_in_dim(sums, masked, i * size, axis=0)

    # 0 times infinity is not 0, so ``u`` must be masked too. A masked copy would take as much
    # memory as ``u``. The product is therefore repeated in place, chunk by chunk, and only if
    # there is an example to leave out.
    repeats = jnp.where(included.all(), 0, chunks)
    sums: Array = jax.lax.fori_loop(0, repeats, replace_chunk, product(u))
    return sums


def scale_rows(v: Array, scales: Array) -> tuple[Array, Array]:
    """Scale cotangents [batch, time, cols] by ``scales`` [batch].

    All readers of one array of cotangents use this shape, so that XLA computes it once.

    Returns:
      The scaled cotangents [batch * time, cols], and which of these rows belong to an example
      with a scale other than 0, [batch * time].
    """
    scales = jnp.broadcast_to(scales[:, None], v.shape[:2]).ravel()
    v = jax.lax.collapse(v, 0, 2)
    included = scales != 0
    # Scales and scaled cotangents may exceed the range of float16, but not of bfloat16.
    v = v if float(jnp.finfo(v.dtype).max) > _WIDE_RANGE else upcast(v)
    return jnp.where(included[:, None], v * scales[:, None].astype(v.dtype), 0), included


def map_in_chunks(f: Callable[..., Array], arrays: Sequence[Array], example_bytes: int) -> Array:
    """Compute ``f(*arrays)`` for a few examples at a time if its intermediates are large.

    Args:
      f: Function of arrays [batch, ...] that returns an array [batch, ...].
      arrays: Its arguments.
      example_bytes: Bytes of its intermediates per example.
    """
    batch = arrays[0].shape[0]
    allowed = max(_MIN_BYTES, sum(a.nbytes for a in arrays) // _FACTOR_BYTES_RATIO)
    divisors = (n for n in range(1, batch + 1) if batch % n == 0)
    chunks = next((n for n in divisors if batch // n * example_bytes <= allowed), max(batch, 1))
    if chunks == 1:
        return f(*arrays)

    # A chunk is every n-th example, so that each device of a sharded batch has a part of it.
    def split(a: Array) -> Array:
        return jnp.moveaxis(a.reshape(batch // chunks, chunks, *a.shape[1:]), 1, 0)

    results: Any = jax.lax.map(lambda arrays: f(*arrays), tuple(map(split, arrays)))
    return jnp.moveaxis(results, 0, 1).reshape(batch, *results.shape[2:])


def map_groups_in_chunks(
    f: Callable[..., Array], arrays: Sequence[Array], example_bytes: int
) -> Array:
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
    return jnp.einsum(
        "gbtr,gbsr->gbts",
        u,
        other,
        # Terms cancel in the norm, which would lose half of the default precision's digits.
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=sum_dtype(u, other),
    )


def _squared_lengths(factor: Array) -> Array:
    """Squared lengths [batch] of factors [1, batch, 1, n], or of one-hot vectors [1, batch, 1]."""
    if _is_one_hot(factor):
        return jnp.ones(factor.shape[1], jnp.float32)
    return jnp.square(upcast(factor.reshape(factor.shape[1], -1))).sum(1)


def _is_one_hot(factor: Array) -> bool:
    return jnp.issubdtype(factor.dtype, jnp.integer)


class LinearEquation(Protocol):
    """An equation ``out = f(data, parameter)`` that is linear in the parameter.

    ``x`` and ``ct`` are data and cotangents of the result, [stack, batch, time, *shape].
    """

    @property
    def data(self) -> int | None:
        """Number of the operand that the gradient depends on, or None."""

    @property
    def requires_unique_elements(self) -> bool:
        """Whether the norm is wrong if the equation reads an element of the parameter twice."""

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """Squared norm of each example's gradient, [batch]."""

    def materialize(self, x: Array, ct: Array) -> Array:
        """Per-example gradients, [stack, batch, *parameter]."""

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """Sum of the gradients scaled by ``scales`` [batch]: [stack, *parameter].

        float32 or wider. An example with scale 0 contributes exactly 0, even if its data or
        cotangents are not finite.
        """


def linear_equation(eqn: JaxprEqn, parameter: int) -> LinearEquation | None:
    """Read an equation as linear in its operand number ``parameter``; None if it is not."""
    read = _READERS.get(eqn.primitive.name)
    if read is None or not jnp.issubdtype(aval(eqn.outvars[0]).dtype, jnp.floating):
        return None
    return read(eqn, parameter)


class BiasAdd(NamedTuple):
    """``add``: the gradient is the cotangent.

    Attributes:
      broadcast_axes: Axes along which the bias is broadcast.
    """

    broadcast_axes: tuple[int, ...]
    data: None = None
    requires_unique_elements: bool = False

    @classmethod
    def read(cls, eqn: JaxprEqn, parameter: int) -> "BiasAdd | None":
        """Read the equation; None if the parameter is a scalar."""
        if not aval(eqn.invars[parameter]).ndim:
            return None
        return cls(_broadcast_axes(eqn, parameter))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        return _squared_norms_of(self.materialize(x, ct))

    def materialize(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        axes = (2, *(3 + i for i in self.broadcast_axes))
        return upcast(ct).sum(axes, keepdims=True).squeeze(2)

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `LinearEquation`."""
        shape = ct.shape[3:]

        def bias_gradient(ct: Array) -> Array:
            scaled, _ = scale_rows(ct.reshape(*ct.shape[:2], -1), scales)
            gradient = upcast(scaled).sum(0)
            return gradient.reshape(shape).sum(self.broadcast_axes, keepdims=True)

        return bias_gradient(ct[0])[None] if len(ct) == 1 else jax.vmap(bias_gradient)(ct)


class Scale(NamedTuple):
    """``mul``: the gradient is the cotangent times the data.

    Attributes:
      data: Number of the data operand, 0 or 1.
      broadcast_axes: Axes along which the scale is broadcast.
    """

    data: int
    broadcast_axes: tuple[int, ...]
    requires_unique_elements: bool = False

    @classmethod
    def read(cls, eqn: JaxprEqn, parameter: int) -> "Scale | None":
        """Read the equation; None if an operand is a scalar."""
        if not all(aval(operand).ndim for operand in eqn.invars):
            return None
        return cls(1 - parameter, _broadcast_axes(eqn, parameter))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        return _squared_norms_of(self.materialize(x, ct))

    def materialize(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        axes = (2, *(3 + i for i in self.broadcast_axes))
        grads = (x.astype(sum_dtype(x, ct)) * ct).sum(axes, keepdims=True)
        return grads.squeeze(2)

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `LinearEquation`."""
        grads = self.materialize(x, ct)
        scales = scales.reshape(1, -1, *[1] * (grads.ndim - 2))
        return jnp.where(scales != 0, grads * scales, 0).sum(1)


def _broadcast_axes(eqn: JaxprEqn, parameter: int) -> tuple[int, ...]:
    shapes = aval(eqn.invars[parameter]).shape, aval(eqn.outvars[0]).shape
    return tuple(i for i, (n, m) in enumerate(zip(*shapes, strict=True)) if n < m)


def _squared_norms_of(grads: Array) -> Array:
    """Squared norms [batch] of gradients [stack, batch, *parameter]."""
    return jnp.square(grads).sum((0, *range(2, grads.ndim)))


class Dot(NamedTuple):
    """``dot_general``: a sum of outer products per batch index.

    The equation's batch dimensions become groups of the factors, since each of their indices
    has a matrix of its own.

    Attributes:
      data: Number of the data operand, 0 or 1.
      batch_dims: Batch dimensions of data and parameter.
      contracting_dims: Contracting dimensions of data and parameter.
      parameter: Shape of the parameter.
    """

    data: int
    batch_dims: tuple[tuple[int, ...], tuple[int, ...]]
    contracting_dims: tuple[tuple[int, ...], tuple[int, ...]]
    parameter: tuple[int, ...]
    requires_unique_elements: bool = True

    @classmethod
    def read(cls, eqn: JaxprEqn, parameter: int) -> "Dot":
        """Read the equation."""
        contracting, batch = eqn.params["dimension_numbers"]
        data = 1 - parameter
        return cls(
            data,
            (tuple(batch[data]), tuple(batch[parameter])),
            (tuple(contracting[data]), tuple(contracting[parameter])),
            aval(eqn.invars[parameter]).shape,
        )

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Factors [groups, batch, time, contracting] and [groups, batch, time, free]."""
        batch, contracting = self.batch_dims[0], self.contracting_dims[0]
        data_free = [i for i in range(x.ndim - 3) if i not in batch + contracting]
        u = _arrange(x, batch, data_free, contracting)
        # The result has the batch dimensions, then the free ones of the left and right operand.
        first, parameter_free = len(batch), len(self._free_dims())
        time = range(first, first + len(data_free))
        if self.data == 1:
            time = range(first + parameter_free, first + parameter_free + len(data_free))
        free = [i for i in range(first, first + parameter_free + len(data_free)) if i not in time]
        return u, _arrange(ct, range(first), time, free)

    def as_matrix(self, elements: np.ndarray) -> np.ndarray:
        """Arrange [*stack, *parameter] like the gradient of `factors`: [groups, rows, cols]."""
        stack = elements.ndim - len(self.parameter)
        order = (self.batch_dims[1], self.contracting_dims[1], self._free_dims())
        axes = [stack + i for dims in order for i in dims]
        sizes = [math.prod(self.parameter[i] for i in dims) for dims in order[1:]]
        return elements.transpose(*range(stack), *axes).reshape(-1, *sizes)

    def _free_dims(self) -> list[int]:
        taken = self.batch_dims[1] + self.contracting_dims[1]
        return [i for i in range(len(self.parameter)) if i not in taken]

    def _as_parameter(self, g: Array, stack: int) -> Array:
        """Arrange [stack * groups, ..., rows, cols] as [stack, ..., *parameter]."""
        order = [*self.batch_dims[1], *self.contracting_dims[1], *self._free_dims()]
        middle = g.shape[1:-2]
        sizes = [self.parameter[i] for i in order]
        n = len(self.batch_dims[1])
        g = g.reshape(stack, *sizes[:n], *middle, *sizes[n:])
        # Now it is [stack, groups..., middle..., rows..., cols...].
        source = {axis: 1 + k + (len(middle) if k >= n else 0) for k, axis in enumerate(order)}
        middle_axes = range(1 + n, 1 + n + len(middle))
        return g.transpose(0, *middle_axes, *(source[i] for i in range(len(order))))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        return squared_norms(*self.factors(x, ct))

    def materialize(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        return self._as_parameter(materialize(*self.factors(x, ct)), x.shape[0])

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `LinearEquation`."""
        return self._as_parameter(weighted_sum(*self.factors(x, ct), scales), x.shape[0])


def _arrange(a: Array, groups: Any, time: Any, last: Any) -> Array:
    """Arrange [stack, batch, time, *shape] as factors [stack * groups, batch, time * ..., last].

    Args:
      a: The array.
      groups: Axes of ``shape`` that become groups.
      time: Axes of ``shape`` that join the time axis.
      last: Axes of ``shape`` that become the last axis.
    """
    groups, time, last = (tuple(3 + i for i in axes) for axes in (groups, time, last))
    shape = (
        a.shape[0] * math.prod(a.shape[i] for i in groups),
        a.shape[1],
        a.shape[2] * math.prod(a.shape[i] for i in time),
        math.prod(a.shape[i] for i in last),
    )
    return a.transpose(0, *groups, 1, 2, *time, *last).reshape(shape)


class Embedding(NamedTuple):
    """``gather`` of whole rows of a table.

    Attributes:
      data: 1, the indices.
      mode: How the gather treats indices outside of the table.
      parameter: Shape of the table.
    """

    data: int
    mode: jax.lax.GatherScatterMode
    parameter: tuple[int, ...]
    requires_unique_elements: bool = True

    @classmethod
    def read(cls, eqn: JaxprEqn, parameter: int) -> "Embedding | None":
        """Read the equation; None for any other gather."""
        dims, table = eqn.params["dimension_numbers"], aval(eqn.invars[0])
        indices_ndim = aval(eqn.invars[1]).ndim
        takes_rows = (
            parameter == 0
            and dims.collapsed_slice_dims == dims.start_index_map == (0,)
            and tuple(eqn.params["slice_sizes"]) == (1, *table.shape[1:])
            and dims.offset_dims == tuple(range(indices_ndim - 1, indices_ndim - 2 + table.ndim))
            and not dims.operand_batching_dims
        )
        return cls(1, eqn.params["mode"], table.shape) if takes_rows else None

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Indices [stack, batch, time] and cotangents of rows [stack, batch, time, width].

        Cotangents at indices outside of the table are 0 if the gather fills such rows.
        """
        stack, batch = x.shape[:2]
        indices = x.reshape(stack, batch, -1)
        if indices.dtype.itemsize < 4:  # Clipping to a long table would overflow.
            indices = indices.astype(jnp.int32)
        rows = ct.reshape(*indices.shape, math.prod(self.parameter[1:]))
        last = self.parameter[0] - 1
        inside = (indices >= 0) & (indices <= last)
        if self.mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            rows = jnp.where(inside[..., None], rows, 0)
        return indices.clip(0, last), rows

    def as_matrix(self, elements: np.ndarray) -> np.ndarray:
        """Arrange [*stack, *parameter] like the gradient of `factors`: [groups, rows, cols]."""
        return elements.reshape(-1, self.parameter[0], math.prod(self.parameter[1:]))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        return squared_norms(*self.factors(x, ct))

    def materialize(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""
        indices, rows = self.factors(x, ct)
        table = jnp.zeros((self.parameter[0], rows.shape[-1]), sum_dtype(rows))
        scatter_add: Callable[[Array, Array], Array] = jax.vmap(
            jax.vmap(lambda indices, rows: table.at[indices].add(rows))
        )
        grads = scatter_add(indices, rows.astype(table.dtype))
        return grads.reshape(*indices.shape[:2], *self.parameter)

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `LinearEquation`."""
        indices, rows = self.factors(x, ct)
        table = jnp.zeros((self.parameter[0], rows.shape[-1]), sum_dtype(rows))

        def scatter_add(indices: Array, rows: Array) -> Array:
            return table.at[indices.ravel()].add(scale_rows(rows, scales)[0])

        sums = jax.vmap(scatter_add)(indices, rows.astype(table.dtype))
        return sums.reshape(-1, *self.parameter)


class Convolution(NamedTuple):
    """``conv_general_dilated`` whose kernel is the parameter.

    Each output position reads a patch of the input. An example's gradient is the sum over
    positions of the outer product of patch and cotangent, per feature group (im2col).

    Attributes:
      data: 0, the images.
      params: Parameters of the equation.
      kernel: Shape and dtype of the kernel.
    """

    data: int
    params: dict[str, Any]
    kernel: jax.ShapeDtypeStruct
    requires_unique_elements: bool = True

    @classmethod
    def read(cls, eqn: JaxprEqn, parameter: int) -> "Convolution | None":
        """Read the equation; None if the parameter is the image."""
        if parameter != 1 or eqn.params["batch_group_count"] != 1:
            return None
        kernel = aval(eqn.invars[1])
        return cls(0, dict(eqn.params), jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))

    def _factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Patches [stack * groups, batch, position, window * in] and cotangents [..., out].

        ``groups`` are feature groups; ``in`` and ``out`` are the features of one group.
        """
        groups = self.params["feature_group_count"]

        def split_groups(a: Array, window: int) -> Array:
            # [stack, batch, position, window * groups * n] -> [..., batch, position, window * n]
            a = a.reshape(*a.shape[:3], window, groups, -1)
            a = a.transpose(0, 4, 1, 2, 3, 5)
            return a.reshape(-1, *a.shape[2:4], window * a.shape[-1])

        u, v = self._patches(x), self._positions(ct)
        return split_groups(u, math.prod(self._window())), split_groups(v, 1)

    def _window(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape[i] for i in self.params["dimension_numbers"].rhs_spec[2:])

    def _patches(self, x: Array) -> Array:
        """Input patches, [stack, batch, position, window * features]."""
        p = self.params
        spec = p["dimension_numbers"].lhs_spec
        x = x.transpose(0, 1, 2, *(3 + spec[0], *(3 + i for i in spec[2:]), 3 + spec[1]))
        x = x.reshape(*x.shape[:2], -1, *x.shape[4:])  # [stack, batch, image, *space, features]
        padding = [
            (low, high, dilation - 1)
            for (low, high), dilation in zip(p["padding"], p["lhs_dilation"], strict=True)
        ]
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + padding + [(0, 0, 0)])
        window = self._window()
        strides, dilations = p["window_strides"], p["rhs_dilation"]
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
        spec = self.params["dimension_numbers"].out_spec
        ct = ct.transpose(0, 1, 2, *(3 + spec[0], *(3 + i for i in spec[2:]), 3 + spec[1]))
        return ct.reshape(*ct.shape[:2], -1, ct.shape[-1])

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`. Patches exist for a few examples at a time."""
        u, v = jax.eval_shape(self._factors, x, ct)

        def norms(x: Array, ct: Array) -> Array:
            return squared_norms(*self._factors(x, ct))

        groups, _, time, rows = u.shape
        intermediates = min(time * time * 2, rows * v.shape[-1])
        return map_groups_in_chunks(norms, (x, ct), 4 * groups * (time * rows + intermediates))

    def materialize(self, x: Array, ct: Array) -> Array:
        """See `LinearEquation`."""

        def gradients(x: Array, ct: Array) -> Array:
            kernels = self._as_kernels(materialize(*self._factors(x, ct)), len(x))
            return jnp.moveaxis(kernels, 1, 0)

        u, _ = jax.eval_shape(self._factors, x, ct)
        grads = map_groups_in_chunks(gradients, (x, ct), 4 * u.shape[0] * u.shape[2] * u.shape[3])
        return jnp.moveaxis(grads, 0, 1)

    def _as_kernels(self, g: Array, stack: int) -> Array:
        """Arrange [stack * groups, batch, window * in, out] as [stack, batch, *kernel]."""
        window, spec = self._window(), self.params["dimension_numbers"].rhs_spec
        batch, out = g.shape[1], g.shape[-1]
        g = g.reshape(stack, -1, batch, *window, g.shape[2] // math.prod(window), out)
        n = 3 + len(window)  # [stack, groups, batch, *window, in, out]
        g = g.transpose(0, 2, 1, n + 1, n, *range(3, n))
        g = g.reshape(stack, batch, -1, *g.shape[4:])  # [stack, batch, groups * out, in, *window]
        order = sorted(range(len(spec)), key=lambda i: spec[i])
        return g.transpose(0, 1, *(2 + i for i in order))

    def weighted_sum(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `LinearEquation`. This is the transposed convolution of any backward pass."""
        # In a narrow dtype of the kernel, the sum over the batch would be rounded.
        dtype = sum_dtype(x, ct)
        kernel_shape = jax.ShapeDtypeStruct(self.kernel.shape, dtype)
        params = self.params | {"preferred_element_type": None}
        dims = params["dimension_numbers"]

        def merge_batch(a: Array, axis: int) -> Array:
            # [batch, time, ...] -> [...], with batch and time merged into the image axis.
            a = jnp.moveaxis(a, 2 + axis, 2)
            return jnp.moveaxis(a.reshape(-1, *a.shape[3:]), 0, axis)

        def kernel_gradient(x: Array, ct: Array) -> Array:
            x, ct = merge_batch(x, dims.lhs_spec[0]), merge_batch(ct, dims.out_spec[0])

            def convolve(kernel: Array) -> Array:
                y: Array = jax.lax.conv_general_dilated_p.bind(x, kernel, **params)
                return y

            gradient: Array
            (gradient,) = jax.linear_transpose(convolve, kernel_shape)(ct)
            return gradient

        scales = scales.reshape(1, -1, *[1] * (x.ndim - 2))
        x = jnp.where(scales != 0, x, 0).astype(dtype)
        ct = jnp.where(scales != 0, ct.astype(dtype) * scales.astype(dtype), 0)
        if len(x) == 1:
            return kernel_gradient(x[0], ct[0])[None]
        return jnp.stack([kernel_gradient(x[i], ct[i]) for i in range(len(x))])


_READERS: dict[str, Callable[[JaxprEqn, int], LinearEquation | None]] = {
    "add": BiasAdd.read,
    "conv_general_dilated": Convolution.read,
    "dot_general": Dot.read,
    "gather": Embedding.read,
    "mul": Scale.read,
}
