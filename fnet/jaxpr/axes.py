"""Which axis of an operand is which axis of a result: one row per primitive, as data.

A *factor* is an axis that runs through an equation. It names one axis of each operand and of each
result, or none. A matrix product ``[b, i, k] x [b, k, j] -> [b, i, j]`` has four:

    b: (0, 0) -> 0      i: (1, -) -> 1      j: (-, 2) -> 2      k: (2, 1) -> -

Along a *separate* factor, position n of a result depends on position n of the operands alone. All
factors with a result are separate. A factor without one is reduced. An axis that the operation
works along (sorted, convolved, sliced in part) belongs to no factor.

Everything in fnet that asks where an axis goes asks here: examples of a batch, layers of a stack,
shards of a parameter, chunks of a sequence. `lengthen` gives the same equation for a longer axis.

The notation of rows follows JAX's own sharding rules (``jax.experimental.custom_partitioning``):
``"... _ _, ... _ -> ... _"`` has leading axes that are separate, and trailing ones that are not.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple
from typing import Literal as OneOf

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, primitives
from jax.extend.random import threefry2x32_p
from jax.lax import GatherDimensionNumbers, ScatterDimensionNumbers

from fnet.jaxpr.interpreter import aval, bind, primitive_names
from fnet.jaxpr.primitives import ConvGeneralDilated, DotGeneral

Axes = tuple[int | None, ...]
"""One axis per operand or result; None where there is none."""


class Factor(NamedTuple):
    """An axis that runs through an equation.

    A scalar counts as an array with one axis of length 1.

    Attributes:
      operands: Its axis in each operand. None: every position gets the same values.
      results: Its axis in each result. None in all of them if it is reduced.
      is_sum: Whether it is reduced by a sum.
      parts: Number of equal parts, outermost, that the axes consist of, if only these stay apart
        and not their positions: after a reshape or a repetition.
    """

    operands: Axes
    results: Axes
    is_sum: bool = False
    parts: int | None = None

    @property
    def is_separate(self) -> bool:
        """Whether each position is computed for itself."""
        return any(axis is not None for axis in self.results)


Factors = Callable[[JaxprEqn], Iterable[Factor]]
Linear = OneOf["jointly", "each", "cases"] | tuple[int, ...]
"""Operands in which an operation is linear: in all of them jointly, in each for itself, in all but
the first jointly, or in these jointly."""


class Row(NamedTuple):
    """Facts about a primitive.

    Attributes:
      factors: Its factors.
      sizes: Parameters with one size per axis of the first operand or result: "operand" or
        "result" by the parameter's name.
      linear: Operands in which it is linear, for fixed others. Empty if in none.
      is_elementwise: Whether each element of a result depends on one element of each operand.
      is_expensive: Whether an element takes many operations, such as the terms of a series.
      is_identity: Whether result i is operand i.
      otherwise: What happens to the positions of an axis without a factor: they are "mixed" or
        selected, or perhaps only moved, which is "unknown".
      moves: Whether the elements of its results are elements of its operands.
      places_once: Whether it puts each element of its operands into exactly one place.
      broadcasts: Whether operands may have axes of length 1 that the others repeat.
      is_collective: Whether its results combine several devices.
    """

    factors: Factors
    sizes: Mapping[str, str] = {}
    linear: Linear = ()
    is_elementwise: bool = False
    is_expensive: bool = False
    is_identity: bool = False
    otherwise: OneOf["mixed", "unknown"] = "mixed"
    moves: bool = False
    places_once: bool = False
    broadcasts: bool = False
    is_collective: bool = False


# Questions.


def row_of(eqn: JaxprEqn) -> Row | None:
    """Return the row of an equation's primitive; None if nothing is known of it."""
    return ROWS.get(eqn.primitive.name)


def factors(eqn: JaxprEqn) -> list[Factor]:
    """Return the factors of an equation; [] if nothing is known of its primitive.

    Args:
      eqn: An equation without inner jaxprs, whose axes are followed by `Propagation` instead.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.jaxpr import factors
      >>> closed = jax.make_jaxpr(jnp.matmul)(jnp.ones((5, 2)), jnp.ones((2, 3)))
      >>> for factor in factors(closed.eqns[0]):
      ...     print(factor.operands, factor.results)
      (0, None) (0,)
      (None, 1) (1,)
      (1, 0) (None,)
    """
    row = row_of(eqn)
    return [] if row is None else list(row.factors(eqn))


def separate_factor(eqn: JaxprEqn, axes: Sequence[int | None], parts: int = 1) -> Factor | None:
    """Return the separate factor that these axes of the operands belong to.

    Args:
      eqn: An equation.
      axes: One axis per operand, None for operands that the axis is not in.
      parts: Number of equal parts of the axis, outermost, that must stay apart. After a reshape
        they may be part of a longer axis.

    Returns:
      The factor; None if there is none, or the operands have different ones.
    """
    for factor in factors(eqn):
        pairs = zip(axes, factor.operands, strict=True)
        agrees = all(axis is None or axis == own for axis, own in pairs)
        is_met = agrees and any(axis is not None for axis in axes)
        if is_met and factor.is_separate and (factor.parts or parts) % parts == 0:
            return factor
    return None


def is_indexing(eqn: JaxprEqn) -> bool:
    """Whether an equation is a gather or a scatter."""
    kinds = GatherDimensionNumbers | ScatterDimensionNumbers
    return isinstance(eqn.params.get("dimension_numbers"), kinds)


def counted_factor(eqn: JaxprEqn, column: int, axis: int) -> Factor | None:
    """Return the factor of an indexing equation whose indices count the rows of an array.

    In ``x[jnp.arange(n), y]`` each position of the first axis of ``x`` gets its own index.

    Args:
      eqn: A gather or a scatter; None for any other equation.
      column: The component of the index vectors that equals the position along ``axis``.
      axis: An axis of the indices.
    """
    dims = eqn.params.get("dimension_numbers")
    for name in ("start_indices_batching_dims", "scatter_indices_batching_dims"):
        if axis in getattr(dims, name, ()):
            return None  # It meets an axis of the array already.
    if isinstance(dims, GatherDimensionNumbers):
        own = dims.start_index_map[column]
        axes = [i for i in range(_rank(eqn.outvars[0])) if i not in dims.offset_dims]
        return Factor((own, axis), (axes[axis],)) if own in dims.collapsed_slice_dims else None
    if isinstance(dims, ScatterDimensionNumbers):
        own = dims.scatter_dims_to_operand_dims[column]
        axes = [i for i in range(_rank(eqn.invars[2])) if i not in dims.update_window_dims]
        is_row = own in dims.inserted_window_dims
        return Factor((own, axis, axes[axis]), (own,)) if is_row else None
    return None


def joined_axis(eqn: JaxprEqn) -> int | None:
    """Return the axis along which an equation joins arrays; None for any other equation."""
    return eqn.params["dimension"] if eqn.primitive is primitives.concatenate_p else None


def lengthen(eqn: JaxprEqn, factor: Factor, times: int | Fraction) -> JaxprEqn:
    """Return the equation whose parameters fit operands with a ``times`` as long axis.

    Args:
      eqn: An equation.
      factor: The axis, one of its factors.
      times: How much longer the axis becomes, or shorter if it is a fraction.
    """
    row = ROWS[eqn.primitive.name]
    longer: JaxprEqn
    if row.factors is _reshape:
        sizes, own = list(_shape(eqn.outvars[0])), _known(factor.results[0])
        sizes[own] = int(sizes[own] * times)
        order = _order_before_reshape(eqn)
        reshaping = {"new_sizes": tuple(sizes), "dimensions": order, "sharding": None}
        longer = eqn.replace(primitive=primitives.reshape_p, params=reshaping)
        return longer
    params: dict[str, Any] = dict(eqn.params)
    for name, side in row.sizes.items():
        sizes = list(params[name] or ())
        axis = (factor.operands if side == "operand" else factor.results)[0]
        is_indexed = side == "operand" and any(a is not None for a in factor.operands[1:])
        if axis is not None and not is_indexed:
            sizes[axis] = int(sizes[axis] * times)
            params[name] = tuple(sizes)
    if factor.parts and "feature_group_count" in params:
        params["feature_group_count"] = int(params["feature_group_count"] * times)
    longer = eqn.replace(params=params)
    return longer


def with_dtypes(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """Return the equation with other dtypes in the parameters that name the dtype of a result."""
    names = [n for n in ("new_dtype", "preferred_element_type") if eqn.params.get(n) is not None]
    changed: JaxprEqn = eqn.replace(params=eqn.params | {n: change(eqn.params[n]) for n in names})
    return changed


def rows_by_position(
    eqn: JaxprEqn, inputs: Callable[[], Iterable[Any]], axis: int, start: Any, size: int
) -> Any | None:
    """Return a part of the result of an equation whose elements follow from their positions.

    They are numbers that count along an axis, and random bits, which threefry makes one by one of
    the key and the position (Salmon et al. 2011, as in ``jax_threefry_partitionable``).

    Args:
      eqn: An equation.
      inputs: Returns its operands.
      axis: An axis of its result.
      start: First position along the axis.
      size: Number of positions.

    Returns:
      The part; None for any other equation, and if the positions are not known to decide.
    """
    out, name = aval(eqn.outvars[0]), eqn.primitive.name
    part = (*out.shape[:axis], size, *out.shape[axis + 1 :])
    if name == "iota" and axis == eqn.params["dimension"]:
        return jax.lax.broadcasted_iota(out.dtype, part, axis) + jnp.asarray(start, out.dtype)
    if name == "random_bits" and _follows_from_positions(key := next(iter(inputs())), out):
        before, behind = math.prod(part[:axis]), math.prod(part[axis + 1 :])
        blocks, positions = (
            jax.lax.broadcasted_iota(jnp.uint32, (before, size * behind), k) for k in range(2)
        )
        positions += jnp.asarray(start, jnp.uint32) * np.uint32(behind)
        if before > 1:
            positions += blocks * np.uint32(out.shape[axis] * behind)
        # A plan counts equations. The whole is one, and these are few.
        data = jax.random.key_data(key)
        high, low = threefry2x32_p.bind(data[0], data[1], jnp.zeros_like(positions), positions)
        bits = high ^ low
        return bits.reshape(part).astype(out.dtype)
    return None


def _follows_from_positions(key: Any, out: Any) -> bool:
    """Whether random bits are threefry's of a single key and 32-bit positions."""
    return bool(
        not key.shape
        and str(jax.random.key_impl(key)) == "threefry2x32"
        and jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
        and jnp.dtype(out.dtype).itemsize <= 4
        and math.prod(out.shape) < 2**32
    )


def _known(axis: int | None) -> int:
    assert axis is not None
    return axis


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether each element of a result depends on one element of each operand."""
    row = row_of(eqn)
    return row is not None and row.is_elementwise


def is_identity(eqn: JaxprEqn) -> bool:
    """Whether each result of an equation is the operand of the same number."""
    row = row_of(eqn)
    return row is not None and row.is_identity


def moves_elements(eqn: JaxprEqn) -> bool:
    """Whether an equation only rearranges, repeats or selects elements of its operands."""
    row = row_of(eqn)
    return row is not None and row.moves and not _fills(eqn)


def _fills(eqn: JaxprEqn) -> bool:
    """Whether a gather gives a number of its own for indices out of bounds, not 0 or NaN."""
    value = eqn.params.get("fill_value")
    return value is not None and value == value and value != 0


def places_once(eqn: JaxprEqn) -> bool:
    """Whether an equation puts each element of its operands into exactly one place."""
    row = row_of(eqn)
    if row is None or not row.places_once:
        return False
    # A broadcast may only add axes.
    sizes = [sum(int(aval(v).size) for v in atoms) for atoms in (eqn.invars, eqn.outvars)]
    return sizes[0] == sizes[1]


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether each element of a result follows from its position or one element of each operand."""
    row = row_of(eqn)
    is_placed = row is not None and (row.places_once or row.factors in (_iota, _prefix))
    return is_placed or is_elementwise(eqn)


def renames(eqn: JaxprEqn) -> bool:
    """Whether each result of an equation is the array of the operand of the same number.

    It may have another shape, but the same elements in the same order, and in the same memory.
    """
    row = row_of(eqn)
    if row is None or not row.moves or _order_before_reshape(eqn):
        return False
    keeps_order = row.is_identity or row.is_elementwise
    if not keeps_order and row.factors not in (_reshape, _broadcast_in_dim):
        return False
    if eqn.primitive is primitives.reduce_precision_p:  # `jax.checkpoint` adds it with all bits.
        info = jnp.finfo(aval(eqn.outvars[0]).dtype)
        if eqn.params != {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}:
            return False

    def kind(v: Any) -> tuple[Any, ...]:
        return aval(v).size, aval(v).dtype, getattr(aval(v), "memory_space", None)

    pairs = zip(eqn.invars, eqn.outvars, strict=False)
    return len(eqn.invars) >= len(eqn.outvars) and all(kind(a) == kind(b) for a, b in pairs)


def stops_gradients(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `jax.lax.stop_gradient`."""
    return eqn.primitive.name == "stop_gradient"


def combines_devices(eqn: JaxprEqn) -> bool:
    """Whether every element of a result comes from the same element on several devices."""
    row = row_of(eqn)
    return row is not None and row.is_collective and not _positional_axes(eqn)


def is_linear_in(eqn: JaxprEqn, operands: Collection[int]) -> bool:
    """Whether an equation is linear and homogeneous in some operands jointly, for fixed others.

    Rounding counts as linear in floating-point types of 16 bits and more.

    Args:
      eqn: An equation without inner jaxprs.
      operands: Indices of the operands.
    """
    row = row_of(eqn)
    if row is None or _fills(eqn) or not all(_is_wide_float(v) for v in eqn.outvars):
        return False
    p = eqn.params
    if 1 + p.get("exponent_bits", 8) + p.get("mantissa_bits", 7) < 16:
        return False
    chosen, count = set(operands), len(eqn.invars)
    if row.linear == "each":
        return len(chosen) == 1
    named = {"jointly": range(count), "cases": range(1, count)}
    # Jointly linear operands that are not chosen must be zero, which nobody knows.
    return chosen == set(named.get(row.linear, row.linear))  # type: ignore[arg-type]


def slope(eqn: JaxprEqn, operand: int) -> float | None:
    """Return ``c`` if an elementwise equation is ``c x + d`` with a number c, else None.

    ``d`` may be any array that does not depend on ``x``.

    Args:
      eqn: An equation.
      operand: Index of the operand that is ``x``.
    """
    others = [v for k, v in enumerate(eqn.invars) if k != operand]
    arrays = [aval(v) for v in (eqn.invars[operand], *eqn.outvars)]
    shapes = [a.shape for a in arrays]
    is_real = not any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in arrays)
    if not is_elementwise(eqn) or not is_real or len(set(shapes)) > 1:
        return None
    if is_linear_in(eqn, range(len(eqn.invars))):
        numbers = [0.0] * len(others)
    elif is_linear_in(eqn, [operand]) and all(
        isinstance(v, Literal) and not aval(v).shape for v in others
    ):
        numbers = [float(v.val) for v in others if isinstance(v, Literal)]
    else:
        return None
    numbers.insert(operand, 1.0)
    with jax.ensure_compile_time_eval():
        wide = jnp.promote_types(arrays[0].dtype, jnp.float32)
        found = float(*bind(eqn, [*map(wide.type, numbers)]))
    return found if math.isfinite(found) else None


def _is_wide_float(v: Any) -> bool:
    dtype = aval(v).dtype
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and jnp.dtype(dtype).itemsize >= 2


def register(name: str, row: Row) -> None:
    """Add the row of a primitive of your own.

    Args:
      name: Name of the primitive.
      row: What is known of it.

    Raises:
      ValueError: If the primitive has another row already.
    """
    if ROWS.get(name, row) != row:
        raise ValueError(f"register: {name} has a row already")
    ROWS[name] = row


# Factors.


def _shape(v: Any) -> tuple[int, ...]:
    """Shape of an operand or result, where a scalar has one axis of length 1."""
    shape: tuple[int, ...] = aval(v).shape
    return shape or (1,)


def _shapes(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    return [_shape(v) for v in eqn.invars]


def _rank(v: Any) -> int:
    rank: int = len(aval(v).shape)
    return rank


def _elementwise(eqn: JaxprEqn) -> Iterator[Factor]:
    rank = _rank(eqn.outvars[0])
    for axis, size in enumerate(_shape(eqn.outvars[0])):
        own = (axis if _rank(v) == rank and _shape(v)[axis] == size else None for v in eqn.invars)
        yield Factor(tuple(own), (axis,) * len(eqn.outvars))


def _identity(eqn: JaxprEqn) -> Iterator[Factor]:
    for k, shape in enumerate(_shapes(eqn)):
        for axis in range(len(shape)):
            own = tuple(axis if i == k else None for i in range(len(eqn.invars)))
            yield Factor(own, own[: len(eqn.outvars)])


def _first(eqn: JaxprEqn, axis: int | None) -> Axes:
    return (axis, *[None] * (len(eqn.invars) - 1))


def _second(eqn: JaxprEqn) -> Iterator[Factor]:
    return (Factor((None, axis), (axis,)) for axis in range(_rank(eqn.invars[1])))


def _except(*names: str) -> Factors:
    """All arrays have the same axes, and the operation works along those in some parameters."""

    def rule(eqn: JaxprEqn) -> Iterator[Factor]:
        worked: set[int] = set()
        for name in names:
            value = eqn.params.get(name, ())
            worked |= set(value) if isinstance(value, tuple | list) else {int(value)}
        rank = _rank(eqn.outvars[0])
        worked = {axis % rank for axis in worked} if rank else worked
        for axis in range(rank):
            if axis not in worked:
                own = (axis if _rank(v) == rank else None for v in eqn.invars)
                yield Factor(tuple(own), (axis,) * len(eqn.outvars))

    return rule


def _reduction(name: str = "axes", *, is_sum: bool = False) -> Factors:
    """The axes in a parameter are reduced, and the others stay in order."""

    def rule(eqn: JaxprEqn) -> Iterator[Factor]:
        axes = set(eqn.params[name])
        count = len(eqn.outvars)
        kept = itertools.count()
        for axis in range(_rank(eqn.invars[0])):
            own = tuple(axis if _rank(v) == _rank(eqn.invars[0]) else None for v in eqn.invars)
            if axis in axes:
                yield Factor(own, (None,) * count, is_sum)
            else:
                yield Factor(own, (next(kept),) * count)

    return rule


def _leading(notation: str) -> Factors:
    """Leading axes are separate: ``"... _ _, ... _"`` counts the others of each operand.

    The last part holds for all further operands.
    """
    worked = [part.split().count("_") for part in notation.split(",")]

    def rule(eqn: JaxprEqn) -> Iterator[Factor]:
        own = [worked[min(k, len(worked) - 1)] for k in range(len(eqn.invars))]
        ranks = [_rank(v) - n for v, n in zip(eqn.invars, own, strict=True)]
        for axis in range(min(ranks, default=0)):
            yield Factor((axis,) * len(eqn.invars), (axis,) * len(eqn.outvars))

    return rule


def _triangular_solve(eqn: JaxprEqn) -> Iterator[Factor]:
    """Each right-hand side is solved for itself."""
    rank = _rank(eqn.invars[1])
    yield from _leading("... _ _")(eqn)
    own = rank - 1 if eqn.params["left_side"] else rank - 2
    yield Factor((None, own), (own,))


def _broadcast_in_dim(eqn: JaxprEqn) -> Iterator[Factor]:
    shape, out = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    own = {int(d): a for a, d in enumerate(eqn.params["broadcast_dimensions"])}
    for axis, size in enumerate(out):
        repeats = axis not in own or shape[own[axis]] != size
        yield Factor(_first(eqn, None if repeats else own[axis]), (axis,))


def _transpose(eqn: JaxprEqn) -> Iterator[Factor]:
    for axis, own in enumerate(eqn.params["permutation"]):
        yield Factor((int(own),), (axis,))


def _reshape(eqn: JaxprEqn) -> Iterator[Factor]:
    """Axes with as many elements before them as after the reshape: their outermost parts stay."""
    given, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    order = _order_before_reshape(eqn) or range(len(given))
    shape = [given[axis] for axis in order]
    for axis, size in enumerate(shape):
        before = math.prod(shape[:axis])
        if not before:
            break
        same = [i for i in range(len(out)) if math.prod(out[:i]) == before]
        # An axis of the same length is the axis itself.
        for i in sorted(same, key=lambda i: out[i] != size):
            parts = None if out[i] == size else math.gcd(out[i], size)
            yield Factor(_first(eqn, order[axis]), (i,), parts=parts)


def _order_before_reshape(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """The order of axes in which a reshape reads its operand, if it also transposes."""
    is_reshape = eqn.primitive is primitives.reshape_p
    return eqn.params["dimensions"] if is_reshape else None


def _dot_general(eqn: JaxprEqn) -> Iterator[Factor]:
    batch, summed, (left, right) = zip(*map(DotGeneral.of(eqn).axes, range(2)), strict=True)
    own: list[Axes] = [*((i, None) for i in left), *((None, i) for i in right)]
    kept = [*zip(*batch, strict=True), *own]
    yield from (Factor(pair, (axis,)) for axis, pair in enumerate(kept))
    yield from (Factor(pair, (None,), is_sum=True) for pair in zip(*summed, strict=True))


def _convolution(eqn: JaxprEqn) -> Iterator[Factor]:
    conv = ConvGeneralDilated.of(eqn)
    dims, groups = conv.dimension_numbers, conv.feature_group_count
    if conv.batch_group_count == 1:
        yield Factor((dims.lhs_spec[0], None), (dims.out_spec[0],))
    if conv.batch_group_count == groups == 1:
        yield Factor((None, dims.rhs_spec[0]), (dims.out_spec[1],))
        yield Factor((dims.lhs_spec[1], dims.rhs_spec[1]), (None,), is_sum=True)
    if groups > 1:
        own = (dims.lhs_spec[1], dims.rhs_spec[0])
        yield Factor(own, (dims.out_spec[1],), parts=groups)


def _gather(eqn: JaxprEqn) -> Iterator[Factor]:
    dims, shape = eqn.params["dimension_numbers"], aval(eqn.invars[0]).shape
    index_axes = [i for i in range(_rank(eqn.outvars[0])) if i not in dims.offset_dims]
    paired = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    for own, index in paired:
        yield Factor((own, index), (index_axes[index],))
    for index, axis in enumerate(index_axes):
        if index not in dims.start_indices_batching_dims:
            yield Factor((None, index), (axis,))
    removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    window = [own for own in range(len(shape)) if own not in removed]
    for own, axis in zip(window, dims.offset_dims, strict=True):
        if eqn.params["slice_sizes"][own] == shape[own] and own not in dims.start_index_map:
            yield Factor((own, None), (axis,))


def _scatter(eqn: JaxprEqn) -> Iterator[Factor]:
    dims = eqn.params["dimension_numbers"]
    shape, update_shape = aval(eqn.invars[0]).shape, aval(eqn.invars[2]).shape
    index_axes = [i for i in range(len(update_shape)) if i not in dims.update_window_dims]
    paired = zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True)
    for own, index in paired:
        yield Factor((own, index, index_axes[index]), (own,))
    inserted = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window = [own for own in range(len(shape)) if own not in inserted]
    for own, update in zip(window, dims.update_window_dims, strict=True):
        if update_shape[update] == shape[own] and own not in dims.scatter_dims_to_operand_dims:
            yield Factor((own, None, update), (own,))
    for index, update in enumerate(index_axes):
        if index not in dims.scatter_indices_batching_dims:  # Several updates of one place.
            is_sum = eqn.primitive.name in ("scatter-add", "scatter-sub")
            yield Factor((None, index, update), (None,), is_sum)


def _slice(eqn: JaxprEqn) -> Iterator[Factor]:
    """Slices keep the axes that they take all of."""
    shape, out = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    for axis, size in enumerate(shape):
        if size == out[axis]:
            yield Factor(_first(eqn, axis), (axis,))


def _dynamic_update_slice(eqn: JaxprEqn) -> Iterator[Factor]:
    (shape, update), starts = _shapes(eqn)[:2], len(eqn.invars) - 2
    for axis in range(_rank(eqn.outvars[0])):
        if shape[axis] == update[axis]:
            yield Factor((axis, axis, *[None] * starts), (axis,))


def _pad(eqn: JaxprEqn) -> Iterator[Factor]:
    for axis, config in enumerate(eqn.params["padding_config"]):
        if not any(config):
            yield Factor(_first(eqn, axis), (axis,))


def _windows(eqn: JaxprEqn) -> Iterator[Factor]:
    """Windows of one element keep an axis."""
    p = eqn.params
    names = [n for n in ("window_dimensions", "window_strides", "base_dilation") if n in p]
    for axis in range(_rank(eqn.outvars[0])):
        if all(p[n][axis] == 1 for n in names) and not any(p["padding"][axis]):
            own = tuple(axis if _rank(v) else None for v in eqn.invars)
            yield Factor(own, (axis,) * len(eqn.outvars))


def _tile(eqn: JaxprEqn) -> Iterator[Factor]:
    for axis, repeats in enumerate(eqn.params["reps"]):
        if repeats == 1:
            yield Factor((axis,), (axis,))
        else:
            yield Factor((None,), (axis,), parts=repeats)


def _stack(eqn: JaxprEqn) -> Iterator[Factor]:
    new = eqn.params["axis"]
    for axis in range(_rank(eqn.invars[0])):
        yield Factor((axis,) * len(eqn.invars), (axis + (axis >= new),))


def _unstack(eqn: JaxprEqn) -> Iterator[Factor]:
    removed = eqn.params["axis"]
    for axis in range(_rank(eqn.invars[0])):
        if axis != removed:
            yield Factor((axis,), (axis - (axis > removed),) * len(eqn.outvars))


def _iota(eqn: JaxprEqn) -> Iterator[Factor]:
    for axis in range(_rank(eqn.outvars[0])):
        if axis != eqn.params["dimension"]:
            yield Factor((None,) * len(eqn.invars), (axis,))


def _prefix(eqn: JaxprEqn) -> Iterator[Factor]:
    for axis in range(min(_rank(eqn.invars[0]), _rank(eqn.outvars[0]))):
        yield Factor((axis,), (axis,))


def _top_k(eqn: JaxprEqn) -> Iterator[Factor]:
    rank = _rank(eqn.invars[0])
    worked = eqn.params.get("axis", -1) % rank
    return (Factor((a,), (a,) * len(eqn.outvars)) for a in range(rank) if a != worked)


def _fft(eqn: JaxprEqn) -> Iterator[Factor]:
    for axis in range(_rank(eqn.invars[0]) - len(eqn.params["fft_lengths"])):
        yield Factor((axis,), (axis,))


def _positional_axes(eqn: JaxprEqn) -> list[int]:
    """Axes of the arrays that a collective works along; the others are axes of the mesh."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return [a for a in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(a, int)]


def _collective(eqn: JaxprEqn) -> Iterable[Factor]:
    if not _positional_axes(eqn):
        return _identity(eqn)
    return _reduction("axes")(eqn) if len(eqn.invars) == 1 else ()


def _fused_attention(eqn: JaxprEqn) -> Iterator[Factor]:
    """Attention of cuDNN. An array without elements is an option that is absent."""
    offsets_and_pages = eqn.invars[6:10]
    _, sums_bias_gradient = eqn.params["variadic_args"]
    if (
        eqn.params["dropout_rate"]  # The mask depends on the position in the batch.
        or sums_bias_gradient
        or any(math.prod(aval(v).shape) for v in offsets_and_pages)
    ):
        return
    own = tuple(0 if math.prod(aval(v).shape) else None for v in eqn.invars)
    yield Factor(own, (0,) * len(eqn.outvars))


def _none(eqn: JaxprEqn) -> Iterator[Factor]:
    return iter(())


# Rows.


def _rows(names: str, row: Row) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


_ELEMENTWISE = Row(_elementwise, is_elementwise=True, broadcasts=True)
_MOVE = Row(_none, linear="jointly", otherwise="unknown", moves=True, places_once=True)
IDENTITY = _MOVE._replace(factors=_identity, is_identity=True)
"""Row of a primitive whose result i is operand i."""
_SELECT = Row(_slice, linear=(0,), moves=True)
_SCATTER = Row(_scatter, otherwise="unknown")
_MATRICES = Row(_leading("... _ _"))

ROWS: dict[str, Row] = {
    # One element of each operand.
    **_rows(
        "abs and ceil clz eq eq_to floor ge gt integer_pow is_finite le le_to lt lt_to max min "
        "mulhi ne nextafter not one_minus_square or polynomial population_count reciprocal round "
        "shift_left shift_right_arithmetic shift_right_logical sign square xor",
        _ELEMENTWISE,
    ),
    **_rows(
        "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf "
        "erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic "
        "polygamma pow random_fold_in random_seed regularized_incomplete_beta rem rsqrt sin sinh "
        "sqrt tan tanh zeta",
        _ELEMENTWISE._replace(is_expensive=True),
    ),
    **_rows("add sub neg complex conj real imag", _ELEMENTWISE._replace(linear="jointly")),
    **_rows(
        "convert_element_type copy name reduce_precision stop_gradient to_edtype from_edtype",
        _ELEMENTWISE._replace(linear="jointly", moves=True, places_once=True),
    ),
    "mul": _ELEMENTWISE._replace(linear="each"),
    "div": _ELEMENTWISE._replace(linear=(0,), is_expensive=True),
    "add_any": _ELEMENTWISE._replace(linear="jointly", broadcasts=False),
    "clamp": _ELEMENTWISE._replace(broadcasts=False),
    "threefry2x32": _ELEMENTWISE._replace(broadcasts=False, is_expensive=True),
    "select_n": _ELEMENTWISE._replace(linear="cases", broadcasts=False),
    # Result i is operand i.
    **_rows(
        "device_put layout_constraint optimization_barrier preduced pvary random_clone "
        " reduced_vary_cast reduced_vary_cast_p relayout reshard shard_alike "
        "sharding_constraint vary_unreduced_cast vary_unreduced_cast_p "
        "with_memory_space_constraint",
        IDENTITY,
    ),
    # Elements in other places.
    "bitcast_convert_type": Row(_prefix, otherwise="unknown"),
    "broadcast_in_dim": _MOVE._replace(factors=_broadcast_in_dim, sizes={"shape": "result"}),
    "concatenate": _MOVE._replace(factors=_except("dimension")),
    "dynamic_slice": _SELECT._replace(sizes={"slice_sizes": "operand"}),
    "dynamic_update_slice": _MOVE._replace(
        factors=_dynamic_update_slice, linear=(0, 1), places_once=False
    ),
    "gather": _SELECT._replace(factors=_gather, sizes={"slice_sizes": "operand"}),
    "iota": Row(_iota, sizes={"shape": "result"}),
    "pad": _MOVE._replace(factors=_pad, linear=(0, 1), places_once=False),
    "reshape": _MOVE._replace(factors=_reshape),
    "rev": _SELECT._replace(factors=_except("dimensions"), places_once=True),
    **_rows("scatter scatter-add scatter-sub", _SCATTER._replace(linear=(0, 2))),
    **_rows("scatter-max scatter-min scatter-mul", _SCATTER),
    "slice": _SELECT._replace(sizes={"limit_indices": "operand"}),
    "split": _SELECT._replace(factors=_except("axis"), places_once=True),
    "squeeze": _MOVE._replace(factors=_reshape),
    "stack": _MOVE._replace(factors=_stack),
    "tie": Row(_second, linear=(1,)),
    "tile": _MOVE._replace(factors=_tile),
    "transpose": _MOVE._replace(factors=_transpose),
    "unstack": _SELECT._replace(factors=_unstack, places_once=True),
    # Products.
    "conv_general_dilated": Row(_convolution, linear="each"),
    "dot_general": Row(_dot_general, linear="each"),
    # Reductions, and operations along an axis.
    "reduce_sum": Row(_reduction(is_sum=True), linear="jointly"),
    **_rows(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor",
        Row(_reduction()),
    ),
    "reduce": Row(_reduction("dimensions")),
    "cumsum": Row(_except("axis"), linear="jointly"),
    **_rows("cumlogsumexp cummax cummin cumprod", Row(_except("axis"))),
    "sort": Row(_except("dimension")),
    "top_k": Row(_top_k),
    "approx_top_k": Row(_except("reduction_dimension")),
    **_rows("reduce_window reduce_window_max reduce_window_min", Row(_windows)),
    "reduce_window_sum": Row(_windows, linear="jointly"),
    **_rows("select_and_gather_add select_and_scatter_add", Row(_windows, linear=(0,))),
    "fft": Row(_fft, linear="jointly"),
    # Matrices, of which leading axes count several.
    **_rows("cholesky eig eigh geqrf hessenberg lu qr schur svd tridiagonal", _MATRICES),
    **_rows("cholesky_update householder_product", Row(_leading("... _ _, ... _"))),
    "lu_pivots_to_permutation": Row(_leading("... _")),
    "ormqr": Row(_leading("... _ _, ... _, ... _ _")),
    "symmetric_product": _MATRICES,
    "triangular_solve": Row(_triangular_solve, linear=(1,)),
    "tridiagonal_solve": Row(_leading("... _, ... _, ... _, ... _ _"), linear=(3,)),
    # Random numbers: the axes of the keys come first.
    **_rows(
        "random_bits random_split random_unwrap random_wrap", Row(_prefix, otherwise="unknown")
    ),
    # Devices: arrays keep their axes.
    **_rows("ppermute psum psum_invariant", Row(_collective, linear="jointly", is_collective=True)),
    **_rows("pmax pmin", Row(_collective, is_collective=True)),
    # cuDNN.
    **_rows(
        "dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper",
        Row(_fused_attention, otherwise="unknown"),
    ),
}
"""By name of the primitive."""

_VMAPPED = frozenset(
    str.split(
        "all_gather all_to_all axis_index call checkpoint closed_call cond core_call "
        "custom_jvp_call custom_lin custom_linear_solve custom_vjp_call debug_callback eval_jaxpr "
        "get jit pallas_call pjit ragged_dot_general random_gamma remat2 scan select_and_scatter "
        "shard_map swap while"
    )
)
"""Primitives without a row that `jax.vmap` applies to each example alone."""

_NOT_VMAPPED = frozenset(
    ("cholesky_update", "dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper")
)
"""Primitives with a row whose `jax.vmap` may see all examples, or that have none."""


def is_separable(eqn: JaxprEqn) -> bool:
    """Whether `jax.vmap` of an equation certainly applies it to each example alone.

    The batching rule of another primitive may see all examples: callbacks,
    `jax.custom_batching`, the primitives of other libraries.
    """
    if eqn.primitive.name in _NOT_VMAPPED:
        return bool(factors(eqn))
    names = primitive_names(eqn)
    # `jax.vmap` generates the numbers of all "rbg" keys from the first one.
    avals = (aval(v) for v in (*eqn.invars, *eqn.outvars))
    is_rbg = any("rbg" in str(a.dtype) for a in avals if hasattr(a, "dtype"))
    is_random = is_rbg and any(name.startswith("random_") for name in names)
    return not is_random and names <= (ROWS.keys() | _VMAPPED) - _NOT_VMAPPED
