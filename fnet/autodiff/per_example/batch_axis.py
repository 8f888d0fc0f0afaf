"""Find which axis of each value counts the examples of a batch.

`find_batch_axes` walks through the jaxpr of a loss and propagates one `State` per value: the
batch axis, "does not depend on the batch", "mixes examples", or "unknown". It proves two things
that per-example gradients rely on:

  - No equation mixes examples, forward or backward. Otherwise the gradient of one example does
    not exist, as with batch norm in training mode.
  - Every activation has one row per example, so that one backward pass over the whole batch
    yields per-example cotangents. Where this cannot be proven, the caller traces the loss for
    one example and vectorizes it with `jax.vmap`.

The rules at the end of this file say how primitives move the batch axis. A primitive without a
rule gives "unknown", which is always correct, but slower.
"""

import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.jaxpr import ELEMENTWISE, Scan, aval, called_jaxpr, evaluate, interpret, scopes


class BatchAxis(NamedTuple):
    """A value with one row per example.

    Attributes:
      axis: The axis that counts examples. If other axes were merged into it, examples are its
        outermost part.
    """

    axis: int


class Mixed(NamedTuple):
    """A value in which examples are mixed.

    Attributes:
      layer: Named scopes of the equation that mixes them, such as "block/norm".
      operation: Name of its primitive.
    """

    layer: str = ""
    operation: str = ""


class Unknown(enum.Enum):
    """A value that depends on the batch in a way that was not analyzed."""

    UNKNOWN = "unknown"


UNKNOWN = Unknown.UNKNOWN

State = BatchAxis | Mixed | Unknown | None
"""The result of the analysis for one value. None: it does not depend on the batch."""

Path = tuple[int, ...]
"""Position of an equation: its index, preceded by the indices of the calls and scans around it."""


class BatchAxes(NamedTuple):
    """The batch axes of a traced function.

    Attributes:
      outputs: State of each result.
      equations: States of the operands and of the results of each equation that depends on the
        batch.
    """

    outputs: list[State]
    equations: dict[Path, tuple[list[State], list[State]]]


def find_batch_axes(closed: ClosedJaxpr, batched: Sequence[bool], batch_size: int) -> BatchAxes:
    """Find the batch axis of every value in a traced function.

    The analysis looks into calls, `jax.checkpoint`, branches and scans. It also checks the
    backward pass of functions with custom derivatives.

    Args:
      closed: ``jax.make_jaxpr(f)(*args)``, traced for at least two examples.
      batched: Whether the leading axis of each argument counts examples.
      batch_size: Number of examples in the trace.
    """
    analysis = _Analysis({}, batch_size)
    states: list[State] = [BatchAxis(0) if b else None for b in batched]
    return BatchAxes(analysis.visit(closed, states, "", ()), analysis.equations)


def reachable(closed: ClosedJaxpr, inputs: Sequence[bool]) -> BatchAxes:
    """Find the values and equations that may depend on the selected inputs.

    Args:
      closed: A traced function.
      inputs: Whether each of its arguments is selected.

    Returns:
      A state that is not None for each value that may depend on them.
    """
    analysis = _Analysis({}, 1)
    states: list[State] = [UNKNOWN if selected else None for selected in inputs]
    return BatchAxes(analysis.visit(closed, states, "", ()), analysis.equations)


def depends_on(closed: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Whether each result of a traced function may depend on the selected inputs."""
    return [state is not None for state in reachable(closed, inputs).outputs]


class _Analysis(NamedTuple):
    equations: dict[Path, tuple[list[State], list[State]]]
    batch_size: int
    is_differentiated: bool = True

    def visit(
        self, closed: ClosedJaxpr, inputs: Sequence[State], scope: str, path: Path
    ) -> list[State]:
        """Analyze a jaxpr and return the states of its results."""
        index = itertools.count()

        def handle(eqn: JaxprEqn, operands: list[State]) -> list[State]:
            eqn_path = (*path, next(index))
            if eqn.primitive.name in ("new_ref", "empty_ref"):
                return [UNKNOWN] * len(eqn.outvars)  # Later writes to it are not analyzed.
            if all(state is None for state in operands):
                return [None] * len(eqn.outvars)
            eqn_scope = "/".join(filter(None, (scope, *scopes(eqn))))
            # JAX differentiates the custom rule, never the equations inside the function.
            has_rule = eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))
            analysis = self._replace(is_differentiated=False) if has_rule else self
            results = analysis._equation(eqn, operands, eqn_scope, eqn_path)
            if has_rule and self.is_differentiated:
                results = self._check_backward(eqn, operands, results, eqn_scope)
            self.equations[eqn_path] = operands, results
            return results

        return interpret(closed, inputs, handle, lambda constant: None)

    def _equation(
        self, eqn: JaxprEqn, operands: list[State], scope: str, path: Path
    ) -> list[State]:
        name = eqn.primitive.name
        inner = called_jaxpr(eqn, custom_derivatives=True)
        if inner is not None:
            return self.visit(inner, operands, scope, path)
        if name == "scan":
            return self._scan(eqn, operands, scope, path)
        if name == "optimization_barrier":
            return operands
        count = len(eqn.outvars)
        if mixed := next((s for s in operands if isinstance(s, Mixed)), None):
            return [mixed] * count
        if UNKNOWN in operands:
            return [UNKNOWN] * count
        if name == "cond":
            return self._branches(eqn, operands[1:], scope)
        state = _apply_rule(eqn, operands, self.batch_size)
        return [Mixed(scope, name) if isinstance(state, Mixed) else state] * count

    def _check_backward(
        self, eqn: JaxprEqn, operands: list[State], results: list[State], scope: str
    ) -> list[State]:
        """Check that a custom backward pass keeps examples apart.

        Returns:
          ``results``, if each cotangent has its batch axis where the operand has it. Otherwise
          mixed or unknown states.
        """
        inputs, outputs = (
            [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]
            for variables in (eqn.invars, eqn.outvars)
        )
        differentiable = [i for i, output in enumerate(outputs) if _is_floating(output)]
        batched = [i for i, state in enumerate(operands) if isinstance(state, BatchAxis)]
        batched = [i for i in batched if _is_floating(inputs[i])]
        if not batched or not differentiable:
            return results

        def backward(inputs: list[Any], cotangents: list[Any]) -> Any:
            def function(*rows: Any) -> list[Any]:
                values = dict(enumerate(inputs)) | dict(zip(batched, rows, strict=True))
                outputs = evaluate(eqn, list(values.values()))
                return [outputs[i] for i in differentiable]

            return jax.vjp(function, *(inputs[i] for i in batched))[1](cotangents)

        closed = jax.make_jaxpr(backward)(inputs, [outputs[i] for i in differentiable])
        analysis = self._replace(equations={}, is_differentiated=False)
        states = [*operands, *(results[i] for i in differentiable)]
        cotangents = analysis.visit(closed, states, scope, ())
        if mixed := next((state for state in cotangents if isinstance(state, Mixed)), None):
            operation = f"{mixed.operation}, in the backward pass"
            return [mixed._replace(operation=operation)] * len(results)
        if any(
            state not in (None, operands[i]) for i, state in zip(batched, cotangents, strict=True)
        ):
            return [UNKNOWN] * len(results)
        return results

    def _branches(self, eqn: JaxprEqn, operands: list[State], scope: str) -> list[State]:
        analysis = self._replace(equations={})
        results = [analysis.visit(b, operands, scope, ()) for b in eqn.params["branches"]]
        return [_join(states) for states in zip(*results, strict=True)]

    def _scan(self, eqn: JaxprEqn, operands: list[State], scope: str, path: Path) -> list[State]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(operands)

        def without_scan_axis(state: State) -> State:
            if isinstance(state, BatchAxis):
                return BatchAxis(state.axis - 1) if state.axis else UNKNOWN
            return state

        def with_scan_axis(state: State) -> State:
            return BatchAxis(state.axis + 1) if isinstance(state, BatchAxis) else state

        slices = [without_scan_axis(state) for state in xs]
        while True:  # A fixed point exists: each iteration knows less of the carry.
            out = self.visit(scan.body, [*consts, *carry, *slices], scope, path)
            joined = [_join(pair) for pair in zip(carry, out[: scan.num_carry], strict=True)]
            if joined == carry:
                return [*carry, *map(with_scan_axis, out[scan.num_carry :])]
            carry = joined


def _is_floating(a: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def _join(states: Sequence[State]) -> State:
    """State of a value that is one of several values."""
    if mixed := next((s for s in states if isinstance(s, Mixed)), None):
        return mixed
    dependent = {s for s in states if s is not None}
    if len(dependent) > 1:
        return UNKNOWN
    return dependent.pop() if dependent else None


def _apply_rule(eqn: JaxprEqn, operands: list[State], batch_size: int) -> State:
    """State of an equation's results, given batch axes (or None) of its operands.

    ``Mixed()`` says that the equation mixes examples.
    """
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(eqn, operands)
    if name in _RULES:
        return _RULES[name](eqn, operands)
    unary: UnaryRule | None = _UNARY_RULES.get(name)
    if name == "reshape":
        unary = functools.partial(_reshape, batch_size=batch_size)
    elif unary is None and name.startswith(("reduce_", "arg")):
        unary = _reduce
    first, *others = operands
    if unary is None or not isinstance(first, BatchAxis) or any(others):
        return UNKNOWN
    return unary(eqn, first.axis)


Rule = Callable[[JaxprEqn, list[State]], State]
"""``(equation, states of its operands) -> state of its results``."""

UnaryRule = Callable[[JaxprEqn, int], State]
"""``(equation, batch axis of its first operand) -> state of its results``.

For equations whose other operands do not depend on the batch.
"""


def _elementwise(eqn: JaxprEqn, operands: list[State]) -> State:
    # Examples along different axes: every example meets every other.
    state = _join(operands)
    return Mixed() if state is UNKNOWN else state


def _dot_general(eqn: JaxprEqn, operands: list[State]) -> State:
    contracting, batch = eqn.params["dimension_numbers"]
    results: list[State] = []
    for k, state in enumerate(operands):
        if not isinstance(state, BatchAxis):
            continue
        if state.axis in contracting[k]:
            return Mixed()
        if state.axis in batch[k]:
            results.append(BatchAxis(tuple(batch[k]).index(state.axis)))
            continue
        removed = (*contracting[k], *batch[k])
        axis = len(batch[k]) + state.axis - sum(r < state.axis for r in removed)
        if k == 1:
            axis += aval(eqn.invars[0]).ndim - len(contracting[0]) - len(batch[0])
        results.append(BatchAxis(axis))
    return _elementwise(eqn, results)


def _concatenate(eqn: JaxprEqn, operands: list[State]) -> State:
    state = _join(operands)
    along_batch = isinstance(state, BatchAxis) and state.axis == eqn.params["dimension"]
    return UNKNOWN if along_batch else state


def _sort(eqn: JaxprEqn, operands: list[State]) -> State:
    state = _join(operands)
    if not isinstance(state, BatchAxis):
        return UNKNOWN
    return Mixed() if state.axis == eqn.params["dimension"] else state


def _gather(eqn: JaxprEqn, operands: list[State]) -> State:
    """Index a shared table per example, or one table per example."""
    dims, (table, indices) = eqn.params["dimension_numbers"], operands
    ndim = aval(eqn.outvars[0]).ndim
    index_axes = [i for i in range(ndim) if i not in dims.offset_dims]
    if isinstance(table, BatchAxis) and table.axis in dims.operand_batching_dims:
        paired = dims.start_indices_batching_dims[dims.operand_batching_dims.index(table.axis)]
        return BatchAxis(index_axes[paired]) if indices in (None, BatchAxis(paired)) else UNKNOWN
    if table is None and isinstance(indices, BatchAxis) and indices.axis < len(index_axes):
        return BatchAxis(index_axes[indices.axis])
    if isinstance(table, BatchAxis) and indices is None:
        removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
        shape = aval(eqn.invars[0]).shape
        whole = eqn.params["slice_sizes"][table.axis] == shape[table.axis]
        if whole and table.axis not in (*removed, *dims.start_index_map):
            return BatchAxis(dims.offset_dims[table.axis - sum(r < table.axis for r in removed)])
    return UNKNOWN


def _dynamic_update_slice(eqn: JaxprEqn, operands: list[State]) -> State:
    """Overwrite the same slice of each example."""
    state = _join(operands[:2])
    if not isinstance(state, BatchAxis) or any(operands[2:]):
        return UNKNOWN
    size, update_size = (aval(a).shape[state.axis] for a in eqn.invars[:2])
    return state if size == update_size else UNKNOWN


def _scatter(eqn: JaxprEqn, operands: list[State]) -> State:
    """Update the same indices of each example."""
    dims, (operand, indices, updates) = eqn.params["dimension_numbers"], operands
    shape, update_shape = (aval(eqn.invars[i]).shape for i in (0, 2))
    inserted = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window = [axis for axis in range(len(shape)) if axis not in inserted]
    for axis, update_axis in zip(window, dims.update_window_dims, strict=True):
        fits = operand in (None, BatchAxis(axis)) and updates in (None, BatchAxis(update_axis))
        whole = update_shape[update_axis] == shape[axis]
        if fits and whole and axis not in dims.scatter_dims_to_operand_dims and indices is None:
            return BatchAxis(axis)
    return UNKNOWN


_RULES: dict[str, Rule] = {
    "add_any": _elementwise,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "sort": _sort,
}


def _same_axis(eqn: JaxprEqn, axis: int) -> State:
    return BatchAxis(axis)


def _reduce(eqn: JaxprEqn, axis: int) -> State:
    axes = eqn.params.get("axes")
    if axes is None:
        return UNKNOWN
    return Mixed() if axis in axes else BatchAxis(axis - sum(a < axis for a in axes))


def _cumulative(eqn: JaxprEqn, axis: int) -> State:
    return Mixed() if axis == eqn.params["axis"] else BatchAxis(axis)


def _broadcast_in_dim(eqn: JaxprEqn, axis: int) -> State:
    return BatchAxis(eqn.params["broadcast_dimensions"][axis])


def _transpose(eqn: JaxprEqn, axis: int) -> State:
    return BatchAxis(tuple(eqn.params["permutation"]).index(axis))


def _reshape(eqn: JaxprEqn, axis: int, batch_size: int) -> State:
    """Examples stay outermost in the axis that has as many elements before it as before."""
    shape, new_shape = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    before = math.prod(shape[:axis])
    new_before = 1
    for new_axis, size in enumerate(new_shape):
        if new_before == before and size != 1:
            # The axis itself, merged with later axes, or split into whole examples.
            return BatchAxis(new_axis) if size % batch_size == 0 else UNKNOWN
        new_before *= size
    return UNKNOWN


def _squeeze(eqn: JaxprEqn, axis: int) -> State:
    dimensions = eqn.params["dimensions"]
    return UNKNOWN if axis in dimensions else BatchAxis(axis - sum(d < axis for d in dimensions))


def _convolution(eqn: JaxprEqn, axis: int) -> State:
    dims = eqn.params["dimension_numbers"]
    if axis != dims.lhs_spec[0] or eqn.params["batch_group_count"] != 1:
        return UNKNOWN
    return BatchAxis(dims.out_spec[0])


def _reduce_window(eqn: JaxprEqn, axis: int) -> State:
    p = eqn.params
    windows = p["window_dimensions"], p["window_strides"], p["base_dilation"]
    moved = any(sizes[axis] != 1 for sizes in windows) or any(p["padding"][axis])
    return UNKNOWN if moved else BatchAxis(axis)


def _pad(eqn: JaxprEqn, axis: int) -> State:
    return UNKNOWN if any(eqn.params["padding_config"][axis]) else BatchAxis(axis)


def _slice(eqn: JaxprEqn, axis: int) -> State:
    before, after = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    return BatchAxis(axis) if before[axis] == after[axis] else UNKNOWN


def _split(eqn: JaxprEqn, axis: int) -> State:
    return UNKNOWN if axis == eqn.params["axis"] else BatchAxis(axis)


def _reverse(eqn: JaxprEqn, axis: int) -> State:
    return Mixed() if axis in eqn.params["dimensions"] else BatchAxis(axis)


def _bitcast(eqn: JaxprEqn, axis: int) -> State:
    before, after = aval(eqn.invars[0]), aval(eqn.outvars[0])
    return BatchAxis(axis) if before.ndim == after.ndim else UNKNOWN


_UNARY_RULES: dict[str, UnaryRule] = {
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _convolution,
    "cumlogsumexp": _cumulative,
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumprod": _cumulative,
    "cumsum": _cumulative,
    "dynamic_slice": _slice,
    "pad": _pad,
    "reduce_window_max": _reduce_window,
    "reduce_window_sum": _reduce_window,
    "rev": _reverse,
    "sharding_constraint": _same_axis,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stop_gradient": _same_axis,
    "transpose": _transpose,
}
