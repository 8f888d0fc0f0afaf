"""Find losses whose examples depend on each other, or on their position in the batch.

The gradient of an example is the gradient of the loss on a batch that holds it alone
(`batching`). If the loss of the whole batch mixes examples, this is not the loss that was written.
`find_batch_axes` walks through the traced loss of a whole batch and follows the batch axis. The
rules are the ones of `batching`, here for a batch of several examples: an equation that has no such
rule either mixes examples, or is unknown.

A value that does not depend on the batch may still differ from row to row, such as dropout masks
from one key for all examples. So the analysis also follows along which axes shared values are
uniform.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.autodiff.per_example.batching import UNCHANGED, Operands, rule_of
from fnet.jaxpr import (
    ELEMENTWISE,
    Scan,
    ShardMap,
    While,
    aval,
    called_jaxpr,
    evaluate,
    interpret,
    scopes,
    source_line,
)


class BatchAxis(NamedTuple):
    """A value with one row per example.

    Attributes:
      axis: The axis that counts examples. If other axes were merged into it, examples are its
        outermost part.
    """

    axis: int


class Shared(NamedTuple):
    """A value that does not depend on the batch.

    Attributes:
      uniform: Axes along which all examples would get the same rows; None for all axes. Such an
        axis consists of equal parts, one for each example.
      value: The value, if it is a small array of integers that is known while tracing.
    """

    uniform: frozenset[int] | None = frozenset()
    value: np.ndarray | None = None

    def is_uniform(self, axis: int, shape: Sequence[int]) -> bool:
        """Whether all examples get the same rows of an axis."""
        return not shape or shape[axis] == 1 or self.uniform is None or axis in self.uniform


class Indices(NamedTuple):
    """Indices into an array: one vector per example, with the example's own row in a column.

    Attributes:
      axis: The axis that counts examples.
      column: Number of the component that is the example's row.
    """

    axis: int
    column: int


class Mixed(NamedTuple):
    """A value in which examples are mixed, or that depends on their position.

    Attributes:
      layer: Named scopes of the equation, such as "block/norm".
      operation: Name of its primitive.
      line: Its source line.
      by_position: Whether the value depends on the example's position in the batch.
    """

    layer: str = ""
    operation: str = ""
    line: str = ""
    by_position: bool = False


class Unknown(NamedTuple):
    """A value that depends on the batch in a way that was not analyzed.

    Attributes:
      operation: Name of the primitive without a rule.
      line: Its source line.
    """

    operation: str = ""
    line: str = ""


State = BatchAxis | Indices | Mixed | Unknown | Shared
"""The result of the analysis for one value."""

KEY = Shared(None)
"""A random key of each example's own. Numbers that follow from it are as good as uniform."""

_CONSTANT_SIZE = 2**20
"""Constants up to this many elements are looked at."""


def find_batch_axes(closed: ClosedJaxpr, inputs: Sequence[State], batch_size: int) -> list[State]:
    """Find the batch axis of every result of a traced function.

    The analysis looks into calls, `jax.checkpoint`, branches and loops. It checks functions with
    custom derivatives as they are executed when they are differentiated.

    Args:
      closed: ``jax.make_jaxpr(f)(*args)``, traced for at least two examples.
      inputs: State of each argument.
      batch_size: Number of examples in the trace.
    """
    return _Analysis(batch_size).visit(closed, inputs, "")


def depends_on(closed: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Whether each result of a traced function may depend on the selected inputs."""

    def handle(eqn: JaxprEqn, operands: list[bool]) -> Sequence[bool]:
        if eqn.primitive.name in ("new_ref", "empty_ref"):
            return [True] * len(eqn.outvars)  # Later writes to it are not analyzed.
        if (inner := called_jaxpr(eqn, custom_derivatives=True)) is not None:
            return depends_on(inner, operands)
        if eqn.primitive.name == "scan":
            scan = Scan.of(eqn)
            consts, carry, xs = scan.split(operands)
            while True:
                out = depends_on(scan.body, [*consts, *carry, *xs])
                joined = [a or b for a, b in zip(carry, out[: scan.num_carry], strict=True)]
                if joined == carry:
                    return [*carry, *out[scan.num_carry :]]
                carry = joined
        return [any(operands)] * len(eqn.outvars)

    return interpret(closed, inputs, handle, lambda constant: False)


class _Analysis(NamedTuple):
    batch_size: int
    is_differentiated: bool = True
    is_manual: bool = False  # Inside of a `jax.shard_map` whose devices have all examples.

    def visit(self, closed: ClosedJaxpr, inputs: Sequence[State], scope: str) -> list[State]:
        """Analyze a jaxpr and return the states of its results."""

        def handle(eqn: JaxprEqn, states: list[State]) -> list[State]:
            eqn_scope = "/".join(filter(None, (scope, *scopes(eqn))))
            # JAX differentiates the custom rule, never the equations inside the function.
            if self.is_differentiated and eqn.primitive.name.startswith(_CUSTOM):
                results = self._differentiated(eqn, states, eqn_scope)
            else:
                results = self._equation(eqn, states, eqn_scope)
            # Equations inside functions of JAX have no line of their own.
            return [
                state._replace(line=source_line(eqn))
                if isinstance(state, Mixed | Unknown) and not state.line
                else state
                for state in results
            ]

        return interpret(closed, inputs, handle, self._constant)

    def _constant(self, value: Any) -> Shared:
        if isinstance(value, jax.core.Tracer) or getattr(value, "size", 1) > _CONSTANT_SIZE:
            return Shared()
        if jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
            return Shared()
        return _known(np.asarray(value), self.batch_size)

    def _equation(self, eqn: JaxprEqn, states: list[State], scope: str) -> list[State]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if (inner := called_jaxpr(eqn, custom_derivatives=True)) is not None:
            return self.visit(inner, states, scope)
        if name == "scan":
            return self._scan(eqn, states, scope)
        if name in UNCHANGED:
            return states
        if self.is_manual and _combines_devices(eqn):
            return [Shared(s.uniform) if isinstance(s, Shared) else s for s in states]
        if name == "while":
            return self._while(eqn, states, scope)
        if name == "shard_map":
            return self._shard_map(eqn, states, scope)
        for kind in (Mixed, Unknown):
            for state in states:
                if isinstance(state, kind):
                    return [state] * count
        if name == "cond" and isinstance(states[0], Shared):
            return self._branches(eqn, states[1:], scope)
        if all(isinstance(state, Shared) for state in states):
            return [_shared(eqn, states, self.batch_size)] * count
        state = self._apply_rule(eqn, states)
        if isinstance(state, Mixed):
            state = state._replace(layer=scope, operation=name, line=source_line(eqn))
        elif isinstance(state, Unknown):
            state = Unknown(name, source_line(eqn))
        return [state] * count

    def _apply_rule(self, eqn: JaxprEqn, states: list[State]) -> State:
        """State of an equation of rows. ``Mixed()`` says that it mixes examples."""
        name = eqn.primitive.name
        if name == "concatenate" and (indices := self._indices(eqn, states)):
            return indices
        if any(isinstance(state, Indices) for state in states):
            return _index(eqn, states)
        axes = [state.axis if isinstance(state, BatchAxis) else None for state in states]
        op = Operands(eqn, axes, self.batch_size, rows=self.batch_size)
        rule = rule_of(name)
        plan = rule(op) if rule else None
        if plan is None:
            return Mixed() if rule and _mixes(op) else Unknown()
        for state, shape, target in zip(
            states, op.shapes, plan.operands or [None] * len(states), strict=True
        ):
            if target is None:
                continue
            if isinstance(state, BatchAxis) and state.axis != target:
                return Mixed()  # Every example meets every other one.
            if isinstance(state, Shared) and not state.is_uniform(target, shape):
                return Mixed(by_position=True)
        return BatchAxis(plan.axis)

    def _indices(self, eqn: JaxprEqn, states: list[State]) -> Indices | None:
        """Index vectors in which a column counts the rows of the batch."""
        axis = next(state.axis for state in states if isinstance(state, BatchAxis))
        dimension = eqn.params["dimension"]
        column = 0
        for state, v in zip(states, eqn.invars, strict=True):
            if isinstance(state, Shared) and state.value is not None and axis != dimension:
                moved = np.moveaxis(state.value, axis, 0)
                rows = np.arange(self.batch_size).reshape(-1, *[1] * (moved.ndim - 1))
                if len(moved) == self.batch_size and (moved == rows).all():
                    return Indices(axis, column)
            column += aval(v).shape[dimension]
        return None

    def _differentiated(self, eqn: JaxprEqn, states: list[State], scope: str) -> list[State]:
        """Analyze a function with custom derivatives as it runs when it is differentiated."""
        inputs, outputs = (
            [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]
            for variables in (eqn.invars, eqn.outvars)
        )
        analysis = self._replace(is_differentiated=False)
        differentiable = [i for i, output in enumerate(outputs) if _is_floating(output)]
        batched = [i for i, state in enumerate(states) if isinstance(state, BatchAxis)]
        batched = [i for i in batched if _is_floating(inputs[i])]
        if not batched or not differentiable:
            return analysis._equation(eqn, states, scope)

        def backward(inputs: list[Any], cotangents: list[Any]) -> Any:
            def function(*rows: Any) -> Any:
                values = dict(enumerate(inputs)) | dict(zip(batched, rows, strict=True))
                outputs = evaluate(eqn, list(values.values()))
                return [outputs[i] for i in differentiable], outputs

            _, vjp, outputs = jax.vjp(function, *(inputs[i] for i in batched), has_aux=True)
            return vjp(cotangents), outputs

        unknown: list[State] = [Unknown(eqn.primitive.name, source_line(eqn))] * len(outputs)
        try:
            closed = jax.make_jaxpr(backward)(inputs, [outputs[i] for i in differentiable])
        except Exception:
            # With check_vma, the rules of functions inside of `jax.shard_map` only run there.
            if not self.is_manual:
                raise
            return unknown
        # Cotangents have their batch axis where the results have it.
        primal = analysis._equation(eqn, states, scope)
        found = analysis.visit(closed, [*states, *(primal[i] for i in differentiable)], scope)
        cotangents, results = found[: len(batched)], found[len(batched) :]
        for state in found:
            if isinstance(state, Mixed):
                operation = f"{state.operation}, in the derivative rule of {eqn.primitive.name}"
                return [state._replace(operation=operation)] * len(results)
        if any(
            isinstance(state, Unknown) or (isinstance(state, BatchAxis) and state != states[i])
            for i, state in zip(batched, cotangents, strict=True)
        ):
            return unknown
        return results

    def _branches(self, eqn: JaxprEqn, states: list[State], scope: str) -> list[State]:
        results = [self.visit(b, states, scope) for b in eqn.params["branches"]]
        return [_join(states) for states in zip(*results, strict=True)]

    def _scan(self, eqn: JaxprEqn, states: list[State], scope: str) -> list[State]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(states)

        if any(state == BatchAxis(0) for state in xs):
            return self._loop_over_batch(eqn, scan, consts, carry, xs, scope)

        def without_scan_axis(state: State) -> State:
            if isinstance(state, BatchAxis):
                return BatchAxis(state.axis - 1)
            return Shared() if isinstance(state, Shared) and state.uniform is not None else state

        slices = [without_scan_axis(state) for state in xs]
        while True:  # A fixed point exists: each iteration knows less of the carry.
            out = self.visit(scan.body, [*consts, *carry, *slices], scope)
            joined = [_join(pair) for pair in zip(carry, out[: scan.num_carry], strict=True)]
            if joined == carry:
                break
            carry = joined
        stacked = [
            BatchAxis(state.axis + 1) if isinstance(state, BatchAxis) else state
            for state in out[scan.num_carry :]
        ]
        return [*carry, *(Shared() if isinstance(s, Shared) else s for s in stacked)]

    def _loop_over_batch(
        self,
        eqn: JaxprEqn,
        scan: Scan,
        consts: list[State],
        carry: list[State],
        xs: list[State],
        scope: str,
    ) -> list[State]:
        """A loop over the examples, such as `jax.lax.map`: its iterations must not depend."""
        mixed = Mixed(scope, eqn.primitive.name, source_line(eqn))
        inputs = [*consts, *carry, *xs]
        dependent = [not isinstance(state, Shared) for state in inputs]
        depends = depends_on(scan.body, dependent)[: scan.num_carry]
        if any(dependent[: len(consts) + len(carry)]) or any(depends):
            return [mixed] * len(eqn.outvars)
        slices: list[State] = []
        for state, v in zip(xs, eqn.invars[len(consts) + len(carry) :], strict=True):
            if state == BatchAxis(0):
                slices.append(KEY)  # A value of the example alone.
            elif isinstance(state, Shared) and state.is_uniform(0, aval(v).shape):
                slices.append(Shared())
            else:
                slices.append(mixed._replace(by_position=True))
        # A value that is carried on differs between iterations, unless it never changes.
        variables = scan.body.jaxpr.invars[len(consts) :], scan.body.jaxpr.outvars
        carried = [
            state if before is after else mixed._replace(by_position=True)
            for state, before, after in zip(carry, *variables, strict=False)
        ]
        out = self.visit(scan.body, [*consts, *carried, *slices], scope)
        ys = out[scan.num_carry :]
        return [*carry, *(BatchAxis(0) if isinstance(y, Shared) else y for y in ys)]

    def _shard_map(self, eqn: JaxprEqn, states: list[State], scope: str) -> list[State]:
        """Analyze what each device computes, if every device has all examples."""
        mapped = ShardMap.of(eqn)

        def seen(state: State, splits: list[int]) -> State:
            if isinstance(state, Shared) and state.uniform is not None:
                return Shared(frozenset(a for a in state.uniform if splits[a] == 1))
            is_whole = isinstance(state, BatchAxis) and splits[state.axis] == 1
            if is_whole or not isinstance(state, BatchAxis | Indices):
                return state
            return Unknown(eqn.primitive.name, source_line(eqn))

        inputs = [seen(*pair) for pair in zip(states, mapped.inputs, strict=True)]
        results = self._replace(is_manual=True).visit(mapped.body, inputs, scope)
        return [seen(*pair) for pair in zip(results, mapped.outputs, strict=True)]

    def _while(self, eqn: JaxprEqn, states: list[State], scope: str) -> list[State]:
        loop = While.of(eqn)
        condition_consts, body_consts, carry = loop.split(states)
        while True:
            out = self.visit(loop.body, [*body_consts, *carry], scope)
            joined = [_join(pair) for pair in zip(carry, out, strict=True)]
            if joined == carry:
                break
            carry = joined
        (condition,) = self.visit(loop.condition, [*condition_consts, *carry], scope)
        return carry if isinstance(condition, Shared) else [condition] * len(carry)


_CUSTOM = ("custom_jvp_call", "custom_vjp_call")

_COLLECTIVES = ("pmax", "pmin", "ppermute", "psum", "psum_invariant")


def _combines_devices(eqn: JaxprEqn) -> bool:
    """Whether every element of a result comes from the same element on several devices."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return eqn.primitive.name in _COLLECTIVES and all(isinstance(a, str) for a in axes)


def _is_floating(a: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def _join(states: Sequence[State]) -> State:
    """State of a value that is one of several values."""
    for kind in (Mixed, Unknown):
        for state in states:
            if isinstance(state, kind):
                return state
    dependent = {s for s in states if not isinstance(s, Shared)}
    if len(dependent) > 1:
        return Unknown()
    if dependent:
        return dependent.pop()
    shared = [s for s in states if isinstance(s, Shared)]
    sets = [s.uniform for s in shared if s.uniform is not None]
    return Shared(frozenset.intersection(*sets) if sets else None)


def _mixes(op: Operands) -> bool:
    """Whether an equation without a row-wise rule is seen to mix examples."""
    name, axes = op.eqn.primitive.name, {a for a in op.axes if a is not None}
    if name in ELEMENTWISE or name == "add_any":
        return len(axes) > 1
    if name.startswith(("reduce_", "arg", "psum", "pm")) and "axes" in op.params:
        return bool(axes & set(op.params["axes"]))
    if name == "scatter" or name.startswith("scatter-"):
        # Several examples are added to one place.
        dims, (operand, indices, updates) = op.params["dimension_numbers"], op.axes
        into_shared = operand is None and indices is not None
        return into_shared and updates is not None and updates not in dims.update_window_dims
    if name == "gather":
        return op.axes[0] is not None and op.axes[1] is None  # Selects rows of the batch.
    return name.startswith("cum") or name in _MIX_ALONG_BATCH


_MIX_ALONG_BATCH = frozenset(
    (
        "conv_general_dilated", "dot_general", "dynamic_slice", "fft", "reduce_window_max",
        "reduce_window_sum", "rev", "select_and_scatter_add", "slice", "sort", "split", "top_k",
        "unstack",
    )
)  # fmt: skip
"""Primitives that combine or select the elements of an axis that their rule does not cover."""


def _index(eqn: JaxprEqn, states: list[State]) -> State:
    """State of an indexing equation in which each example has its own row."""
    name, (operand, indices, *updates) = eqn.primitive.name, states
    dims: Any = eqn.params.get("dimension_numbers")
    if not isinstance(indices, Indices) or not isinstance(operand, BatchAxis):
        return Mixed(by_position=True)
    if name == "gather":
        map_, removed = dims.start_index_map, dims.collapsed_slice_dims
        axes = [i for i in range(len(aval(eqn.outvars[0]).shape)) if i not in dims.offset_dims]
        if map_[indices.column] == operand.axis and operand.axis in removed:
            return BatchAxis(axes[indices.axis])
    elif name.startswith("scatter") and isinstance(updates[0], BatchAxis | Shared):
        map_, removed = dims.scatter_dims_to_operand_dims, dims.inserted_window_dims
        if map_[indices.column] == operand.axis and operand.axis in removed:
            return operand
    return Unknown()


# Values that do not depend on the batch.


def _known(array: np.ndarray, batch_size: int) -> Shared:
    """State of a known array."""
    uniform = set()
    for axis, size in enumerate(array.shape):
        parts = batch_size if size % batch_size == 0 else size
        moved = np.moveaxis(array, axis, 0).reshape(parts, -1) if array.size else array
        if (moved == moved[:1]).all():
            uniform.add(axis)
    is_small = array.size <= _CONSTANT_SIZE and array.dtype.kind in "iub"
    return Shared(frozenset(uniform), array if is_small else None)


def _shared(eqn: JaxprEqn, states: list[Any], batch_size: int) -> Shared:
    """Find along which axes the result of an equation of shared values is uniform."""
    name, out = eqn.primitive.name, aval(eqn.outvars[0]).shape
    shapes = [aval(v).shape for v in eqn.invars]
    pairs = list(zip(states, shapes, strict=True))
    everywhere = all(s.uniform is None or len(s.uniform) == len(shape) for s, shape in pairs)
    if everywhere and any(s.uniform is None for s in states):
        return KEY
    known = _EVALUATE.get(name)
    if known and math.prod(out) <= _CONSTANT_SIZE and all(s.value is not None for s in states):
        return _known(known(eqn, *(s.value for s in states)), batch_size)
    if name == "iota":
        return Shared(frozenset(range(len(out))) - {eqn.params["dimension"]})
    uniform: set[int] = set()
    if name == "broadcast_in_dim":
        dimensions = [int(d) for d in eqn.params["broadcast_dimensions"]]
        uniform |= set(range(len(out))) - set(dimensions)
        uniform |= {d for a, d in enumerate(dimensions) if shapes[0][a] == 1}
    if name == "tile":
        repeats = zip(eqn.params["reps"], shapes[0], strict=True)
        uniform |= {a for a, (n, size) in enumerate(repeats) if size == 1 or n % batch_size == 0}
    if not (rule := rule_of(name)):
        return Shared()
    # An axis along which the rows are equal and treated alike gives equal rows.
    for axis in range(max((len(shape) for shape in shapes), default=0)):
        own = [
            axis
            if axis < len(shape) and shape[axis] > 1 and state.is_uniform(axis, shape)
            else None
            for state, shape in pairs
        ]
        if all(a is None for a in own):
            continue
        plan = rule(Operands(eqn, own, batch_size, rows=batch_size))
        targets = plan.operands or [None] * len(own) if plan else []
        if plan and all(
            target is None or state.is_uniform(target, shape)
            for (state, shape), target in zip(pairs, targets, strict=True)
        ):
            uniform.add(plan.axis)
    return Shared(frozenset(uniform))


_EVALUATE: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda eqn, a, b: np.asarray(a + b, a.dtype),
    "broadcast_in_dim": lambda eqn, a: _broadcast(eqn, a),
    "concatenate": lambda eqn, *parts: np.concatenate(parts, eqn.params["dimension"]),
    "convert_element_type": lambda eqn, a: a.astype(eqn.params["new_dtype"]),
    "iota": lambda eqn: _iota(eqn),
    "lt": lambda eqn, a, b: a < b,
    "mul": lambda eqn, a, b: np.asarray(a * b, a.dtype),
    "reshape": lambda eqn, a: a.reshape(eqn.params["new_sizes"]),
    "select_n": lambda eqn, which, a, b: np.asarray(np.where(which, b, a)),
    "squeeze": lambda eqn, a: a.squeeze(eqn.params["dimensions"]),
    "sub": lambda eqn, a, b: np.asarray(a - b, a.dtype),
    "transpose": lambda eqn, a: a.transpose(eqn.params["permutation"]),
}
"""Primitives of constant integers that are evaluated to recognize the rows of a batch."""


def _broadcast(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    sizes = [1] * len(eqn.params["shape"])
    for axis, size in zip(eqn.params["broadcast_dimensions"], a.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(a.reshape(sizes), eqn.params["shape"])


def _iota(eqn: JaxprEqn) -> np.ndarray:
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    sizes = [size if a == dimension else 1 for a, size in enumerate(shape)]
    counts = np.arange(shape[dimension], dtype=eqn.params["dtype"])
    return np.broadcast_to(counts.reshape(sizes), shape)
