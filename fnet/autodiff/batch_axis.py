"""Which axis of each value in a traced function counts examples, and where examples mix."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

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


class Followed(NamedTuple):
    """Where a batch went.

    Attributes:
      outputs: of each result.
      at: of the inputs and the results of every equation that the batch reaches, by
        the equation's number, after those of the calls and loops it is in.
    """

    outputs: list[State]
    at: dict[tuple[int, ...], tuple[list[State], list[State]]]


def follow(closed: ClosedJaxpr, batched: Sequence[bool]) -> Followed:
    """Follows the examples of a batch through a function.

    They are seen through elementwise operations, products, convolutions,
    reductions, reshapes, transposes, lookups, calls and loops; also where a `jax.custom_vjp`
    goes back.

    Args:
      closed: ``jax.make_jaxpr(f)(*args)``, for at least two examples.
      batched: of each argument, whether its leading axis is that of examples.
    """
    trail = _Trail({})
    states: list[State] = [Along(0) if b else None for b in batched]
    return Followed(trail.visit(closed, states, "", ()), trail.at)


def depends(closed: ClosedJaxpr, on: Sequence[bool]) -> list[bool]:
    """Of each result of a traced function, whether it may depend on the arguments marked."""
    states: list[State] = [UNKNOWN if marked else None for marked in on]
    return [state is not None for state in _Trail({}).visit(closed, states, "", ())]


class _Trail(NamedTuple):
    at: dict[tuple[int, ...], tuple[list[State], list[State]]]

    def visit(
        self, closed: ClosedJaxpr, inputs: Sequence[State], scope: str, path: tuple[int, ...]
    ) -> list[State]:
        known: dict[Any, State] = dict(zip(closed.jaxpr.invars, inputs, strict=True))

        def states(atoms: Sequence[Any]) -> list[State]:
            return [None if isinstance(a, Literal) else known.get(a) for a in atoms]

        for i, eqn in enumerate(closed.jaxpr.eqns):
            given, place = states(eqn.invars), (*path, i)
            if any(s is not None for s in given):
                here = "/".join(filter(None, (scope, *jaxprs.scopes(eqn))))
                out = self._equation(eqn, given, here, place)
                if eqn.primitive.name.startswith("custom_vjp_call"):
                    mixed = _mixed_going_back(closed.jaxpr, eqn, given, out, here)
                    out = [mixed] * len(out) if mixed else out
                self.at[place] = given, out
                known |= zip(eqn.outvars, out, strict=True)
        return states(closed.jaxpr.outvars)

    def _equation(
        self, eqn: JaxprEqn, given: list[State], here: str, path: tuple[int, ...]
    ) -> list[State]:
        name = eqn.primitive.name
        inner = jaxprs.computed(eqn)
        if inner is not None:
            return self.visit(inner, given, here, path)
        if name == "scan":
            return self._scan(eqn, given, here, path)
        if name == "optimization_barrier":
            return given
        count = len(eqn.outvars)
        if mixed := next((s for s in given if isinstance(s, Mixed)), None):
            return [mixed] * count
        if UNKNOWN in given:
            return [UNKNOWN] * count
        found = _rule(name)(eqn, given)
        return [Mixed(here, name) if found == _MIXED else found] * count

    def _scan(
        self, eqn: JaxprEqn, given: list[State], here: str, path: tuple[int, ...]
    ) -> list[State]:
        s = jaxprs.scan(eqn)
        before = s.constants + s.carry

        def in_round(state: State) -> State:
            if isinstance(state, Along):
                return Along(state.axis - 1) if state.axis else UNKNOWN
            return state

        def stacked(state: State) -> State:
            return Along(state.axis + 1) if isinstance(state, Along) else state

        rows = [in_round(state) for state in given[before:]]
        carry = given[s.constants : before]
        while True:  # it ends: of a carry less and less is certain
            out = self.visit(s.body, [*given[: s.constants], *carry, *rows], here, path)
            joined = [_joined(pair) for pair in zip(carry, out[: s.carry], strict=True)]
            if joined == carry:
                return [*carry, *map(stacked, out[s.carry :])]
            carry = joined


def _mixed_going_back(
    jaxpr: Jaxpr, eqn: JaxprEqn, given: list[State], out: list[State], here: str
) -> Mixed | None:
    """Where examples meet in a backward rule: of values that have a row each."""
    shapes, results = (
        [jax.ShapeDtypeStruct(jaxprs.aval(v).shape, jaxprs.aval(v).dtype) for v in variables]
        for variables in (eqn.invars, eqn.outvars)
    )
    rows = [i for i, s in enumerate(given) if isinstance(s, Along) and _is_floating(shapes[i])]
    ends = [i for i, result in enumerate(results) if _is_floating(result)]
    if not rows or not ends:
        return None

    def back(inputs: list[Any], cotangents: list[Any]) -> Any:
        def function(*own: Any) -> list[Any]:
            values = dict(enumerate(inputs)) | dict(zip(rows, own, strict=True))
            made = jaxprs.run(jaxpr, eqn, list(values.values()))
            return [made[i] for i in ends]

        return jax.vjp(function, *(inputs[i] for i in rows))[1](cotangents)

    closed = jax.make_jaxpr(back)(shapes, [results[i] for i in ends])
    found = _Trail({}).visit(closed, [*given, *(out[i] for i in ends)], here, ())
    mixed = next((state for state in found if isinstance(state, Mixed)), None)
    return mixed and mixed._replace(operation=f"{mixed.operation}, on the way back")


def _is_floating(a: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


_MIXED = "mixed"


def _joined(given: Sequence[State]) -> State:
    if mixed := next((s for s in given if isinstance(s, Mixed)), None):
        return mixed
    states = {s for s in given if s is not None}
    return states.pop() if len(states) == 1 else UNKNOWN if states else None


def _paired(given: Sequence[State]) -> State:
    """Of elements that meet: where their examples are along different axes, all meet all."""
    joined = _joined(given)
    return _MIXED if joined == UNKNOWN else joined


def _rule(name: str) -> Rule:
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
    return _MIXED if axis in axes else Along(axis - sum(a < axis for a in axes))


def _cumulative(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 else _MIXED if axis == eqn.params["axis"] else Along(axis)


def _broadcast(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 else Along(eqn.params["broadcast_dimensions"][axis])


def _transposed(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 else Along(tuple(eqn.params["permutation"]).index(axis))


def _reshaped(eqn: JaxprEqn, given: list[State]) -> State:
    """Examples stay outermost where as much stands before them as did."""
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
            return Along(place) if size % before[axis] == 0 else UNKNOWN
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
            return _MIXED
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
    joined = _joined(given)
    along = isinstance(joined, Along) and joined.axis != eqn.params["dimension"]
    return joined if along else UNKNOWN


def _sliced(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    before, after = jaxprs.aval(eqn.invars[0]).shape, jaxprs.aval(eqn.outvars[0]).shape
    return Along(axis) if axis >= 0 and before[axis] == after[axis] else UNKNOWN


def _split(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 or axis == eqn.params["axis"] else Along(axis)


def _reversed(eqn: JaxprEqn, given: list[State]) -> State:
    axis = _only(given)
    return UNKNOWN if axis < 0 or axis in eqn.params["dimensions"] else Along(axis)


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


_RULES: dict[str, Rule] = {
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
    "gather": _gathered,
    "pad": _padded,
    "reduce_window_max": _windowed,
    "reduce_window_sum": _windowed,
    "reshape": _reshaped,
    "rev": _reversed,
    "slice": _sliced,
    "split": _split,
    "squeeze": _squeezed,
    "stop_gradient": lambda eqn, given: given[0],
    "transpose": _transposed,
}
