"""What is known of a value of which some axis counts examples, and what equations make of it."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from fnet import jaxprs
from fnet.autodiff.equations import ELEMENTWISE


class Mixed(NamedTuple):
    """A value in which examples met.

    Attributes:
      layer: named scopes of the equation where they did.
      operation: what that equation does.
    """

    layer: str
    operation: str


class Along(NamedTuple):
    """A value with one row an example: of ``axis``, the outermost part where axes were merged."""

    axis: int


UNKNOWN = "unknown"
"""A value that follows from the batch in a way that is not looked into."""

State = Along | Mixed | str | None
"""What is known of a value; None: it does not depend on the batch."""

Rule = Callable[[JaxprEqn, list[State]], State]
"""From an equation and what is known of its operands to what is known of its results."""

MIXED = "mixed"
"""What a rule says of a value in which examples meet."""


def joined(given: Sequence[State]) -> State:
    """What is known of a value that may be any of these."""
    if mixed := next((s for s in given if isinstance(s, Mixed)), None):
        return mixed
    states = {s for s in given if s is not None}
    return states.pop() if len(states) == 1 else UNKNOWN if states else None


def _paired(given: Sequence[State]) -> State:
    """Of elements that meet: where their examples are along different axes, all meet all."""
    found = joined(given)
    return MIXED if found == UNKNOWN else found


def rule(name: str, rows: int) -> Rule:
    """The rule of a primitive that makes the same of all its results, for so many examples."""
    if name == "reshape":
        return functools.partial(_reshaped, rows)
    if name in ELEMENTWISE:
        return lambda eqn, given: _paired(given)
    if name.startswith(("reduce_", "arg")) and name not in _RULES:
        return _reduced
    return _RULES.get(name, lambda eqn, given: UNKNOWN)


def _only(given: list[State]) -> int:
    """The axis of the first operand, where the others do not depend on the batch."""
    first = given[0]
    return first.axis if isinstance(first, Along) and not any(given[1:]) else -1


def _reduced(eqn: JaxprEqn, given: list[State]) -> State:
    axis, axes = _only(given), eqn.params.get("axes")
    if axis < 0 or axes is None:
        return UNKNOWN
    return MIXED if axis in axes else Along(axis - sum(a < axis for a in axes))


def _cumulative(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 else MIXED if axis == eqn.params["axis"] else Along(axis)


def _broadcast(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 else Along(eqn.params["broadcast_dimensions"][axis])


def _transposed(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 else Along(tuple(eqn.params["permutation"]).index(axis))


def _reshaped(rows: int, eqn: JaxprEqn, given: list[State]) -> State:
    """Examples, so many rows, stay outermost where as much stands before them as did."""
    axis = _only(given)
    if axis < 0:
        return UNKNOWN
    before, after = jaxprs.aval(eqn.invars[0]).shape, jaxprs.aval(eqn.outvars[0]).shape
    outer = 1
    for size in before[:axis]:
        outer *= size
    seen = 1
    for place, size in enumerate(after):
        if seen == outer and size != 1:
            # The axis itself, merged with those behind it, or cut into pieces from the outside.
            return Along(place) if size % rows == 0 else UNKNOWN
        seen *= size
    return UNKNOWN


def _squeezed(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    dimensions = eqn.params["dimensions"]
    if axis < 0 or axis in dimensions:
        return UNKNOWN
    return Along(axis - sum(d < axis for d in dimensions))


def _dot(eqn: JaxprEqn, given: list[State]) -> State:
    contracted, batch = eqn.params["dimension_numbers"]
    found: list[State] = []
    for k, state in enumerate(given):
        if not isinstance(state, Along):
            continue
        if state.axis in contracted[k]:
            return MIXED
        if state.axis in batch[k]:
            found.append(Along(tuple(batch[k]).index(state.axis)))
            continue
        taken = (*contracted[k], *batch[k])
        place = len(batch[k]) + state.axis - sum(t < state.axis for t in taken)
        if k == 1:
            place += jaxprs.aval(eqn.invars[0]).ndim - len(contracted[0]) - len(batch[0])
        found.append(Along(place))
    return _paired(found)


def _convolved(eqn: JaxprEqn, given: list[State]) -> State:
    d, axis = eqn.params["dimension_numbers"], _only(given)
    if axis != d.lhs_spec[0] or eqn.params["batch_group_count"] != 1:
        return UNKNOWN
    return Along(d.out_spec[0])


def _windowed(eqn: JaxprEqn, given: list[State]) -> State:
    axis, p = _only(given), eqn.params
    steps = p["window_dimensions"], p["window_strides"], p["base_dilation"]
    if axis < 0 or any(step[axis] != 1 for step in steps) or any(p["padding"][axis]):
        return UNKNOWN
    return Along(axis)


def _padded(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 or any(eqn.params["padding_config"][axis]) else Along(axis)


def _concatenated(eqn: JaxprEqn, given: list[State]) -> State:
    found = joined(given)
    along = isinstance(found, Along) and found.axis != eqn.params["dimension"]
    return found if along else UNKNOWN


def _sliced(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    before, after = jaxprs.aval(eqn.invars[0]).shape, jaxprs.aval(eqn.outvars[0]).shape
    return Along(axis) if axis >= 0 and before[axis] == after[axis] else UNKNOWN


def _split(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 or axis == eqn.params["axis"] else Along(axis)


def _reversed(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 else MIXED if axis in eqn.params["dimensions"] else Along(axis)


def _sorted(eqn: JaxprEqn, given: list[State]) -> State:
    found = joined(given)
    if not isinstance(found, Along):
        return UNKNOWN
    return MIXED if found.axis == eqn.params["dimension"] else found


def _gathered(eqn: JaxprEqn, given: list[State]) -> State:
    """Rows of a table that all share, by each example's indices; or of a table for each example."""
    d, (table, indices) = eqn.params["dimension_numbers"], given
    places = [i for i in range(jaxprs.aval(eqn.outvars[0]).ndim) if i not in d.offset_dims]
    if isinstance(table, Along) and table.axis in d.operand_batching_dims:
        paired = d.start_indices_batching_dims[d.operand_batching_dims.index(table.axis)]
        return Along(places[paired]) if indices in (None, Along(paired)) else UNKNOWN
    if table is None and isinstance(indices, Along) and indices.axis < len(places):
        return Along(places[indices.axis])
    if isinstance(table, Along) and indices is None:
        gone = (*d.collapsed_slice_dims, *d.operand_batching_dims)
        shape = jaxprs.aval(eqn.invars[0]).shape
        whole = eqn.params["slice_sizes"][table.axis] == shape[table.axis]
        if whole and table.axis not in (*gone, *d.start_index_map):
            return Along(d.offset_dims[table.axis - sum(g < table.axis for g in gone)])
    return UNKNOWN


def _updated(eqn: JaxprEqn, given: list[State]) -> State:
    """A part written over: of every example's row, at a place that all share."""
    found = joined(given[:2])
    if not isinstance(found, Along) or any(given[2:]):
        return UNKNOWN
    whole, part = (jaxprs.aval(a).shape[found.axis] for a in eqn.invars[:2])
    return found if whole == part else UNKNOWN


def _scattered(eqn: JaxprEqn, given: list[State]) -> State:
    """The same, at indices."""
    d, (operand, indices, updates) = eqn.params["dimension_numbers"], given
    shape, small = (jaxprs.aval(eqn.invars[i]).shape for i in (0, 2))
    gone = (*d.inserted_window_dims, *d.operand_batching_dims)
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    for axis, place in zip(kept, d.update_window_dims, strict=True):
        fits = operand in (None, Along(axis)) and updates in (None, Along(place))
        moved = axis in d.scatter_dims_to_operand_dims or small[place] != shape[axis]
        if fits and not moved and indices is None:
            return Along(axis)
    return UNKNOWN


def _reinterpreted(eqn: JaxprEqn, given: list[State]) -> State:
    ndims = [jaxprs.aval(a).ndim for a in (*eqn.invars, *eqn.outvars)]
    return given[0] if ndims[0] == ndims[1] else UNKNOWN


_RULES: dict[str, Rule] = {
    "add_any": lambda eqn, given: _paired(given),
    "bitcast_convert_type": _reinterpreted,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenated,
    "conv_general_dilated": _convolved,
    "cumlogsumexp": _cumulative,
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumprod": _cumulative,
    "cumsum": _cumulative,
    "dot_general": _dot,
    "dynamic_slice": _sliced,
    "dynamic_update_slice": _updated,
    "gather": _gathered,
    "pad": _padded,
    "reduce_window_max": _windowed,
    "reduce_window_sum": _windowed,
    "rev": _reversed,
    "scatter": _scattered,
    "scatter-add": _scattered,
    "sharding_constraint": lambda eqn, given: given[0],
    "slice": _sliced,
    "sort": _sorted,
    "split": _split,
    "squeeze": _squeezed,
    "stop_gradient": lambda eqn, given: given[0],
    "transpose": _transposed,
}
