"""Find losses whose examples depend on each other, or on their position in the batch.

The gradient of an example is the gradient of the loss on a batch that holds it alone
(`batching`). If the loss of the whole batch mixes examples, this is not the loss that was written.
`find_batch_axes` follows the batch axis through the traced loss of a whole batch, along the factors
of equations (`fnet.jaxpr.factors`). An equation in which the batch is in no separate factor either
mixes examples, or is unknown.

A value that does not depend on the batch may still differ from row to row, such as dropout masks
from one key for all examples. So the analysis also follows along which axes shared values are
uniform.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.jaxpr import (
    Factor,
    Propagation,
    Scan,
    Site,
    aval,
    combines_devices,
    counted_factor,
    depends_on,
    differentiate,
    evaluate,
    factors,
    has_backward_rule,
    is_identity,
    joined_axis,
    row_of,
    separate_factor,
    solver,
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
      value: Returns the value, if it is an array of at most `CONSTANT_SIZE` integers that is known
        while tracing.
    """

    uniform: frozenset[int] | None = frozenset()
    value: Callable[[], np.ndarray] | None = None

    def is_uniform(self, axis: int, shape: Sequence[int]) -> bool:
        """Whether all examples get the same rows of an axis."""
        return not shape or shape[axis] == 1 or self.uniform is None or axis in self.uniform


class Indices(NamedTuple):
    """Indices into an array: one vector per example, with the example's own row in a column.

    Attributes:
      axis: The axis that counts examples.
      column: Index of the component that is the example's row.
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

CONSTANT_SIZE = 2**20
"""Constants up to this many elements are looked at."""


def find_batch_axes(closed: ClosedJaxpr, inputs: Sequence[State], batch_size: int) -> list[State]:
    """Find the batch axis of every result of a function that was traced for at least two examples.

    The analysis looks into calls, `jax.checkpoint`, branches and loops. It checks functions with
    custom derivatives as they are executed when they are differentiated.
    """
    return BatchAxes(batch_size).run(closed, inputs)


class BatchAxes(Propagation[State]):
    """Follow the batch axis.

    Attributes:
      batch_size: Number of examples in the trace.
    """

    def __init__(self, batch_size: int, is_differentiated: bool = True) -> None:
        self.batch_size = batch_size
        self._is_differentiated = is_differentiated
        self._is_manual = False  # Inside of a `jax.shard_map` whose devices have all examples.

    def constant(self, value: Any) -> Shared:
        """Find along which axes a constant is uniform."""
        if isinstance(value, jax.core.Tracer) or getattr(value, "size", 1) > CONSTANT_SIZE:
            return Shared()
        if jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
            return Shared()
        array, uniform = np.asarray(value), set()
        for axis, size in enumerate(array.shape):
            parts = self.batch_size if size % self.batch_size == 0 else size
            rows = np.moveaxis(array, axis, 0).reshape(parts, -1) if array.size else array
            if (rows == rows[:1]).all():
                uniform.add(axis)
        return Shared(frozenset(uniform), (lambda: array) if array.dtype.kind in "iub" else None)

    def visit(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Analyze any equation, and say where one is that mixes examples or is unknown."""
        return [
            # Equations inside functions of JAX have no line of their own.
            state._replace(line=source_line(eqn))
            if isinstance(state, Mixed | Unknown) and not state.line
            else state
            for state in super().visit(eqn, states, site)
        ]

    def join(self, states: Sequence[State]) -> State:
        """Return the state of a value that is one of several values."""
        for kind in (Mixed, Unknown):
            for state in states:
                if isinstance(state, kind):
                    return state
        dependent = {s for s in states if not isinstance(s, Shared)}
        if len(dependent) > 1:
            return Unknown()
        if dependent:
            return dependent.pop()
        sets = [s.uniform for s in states if isinstance(s, Shared) and s.uniform is not None]
        return Shared(frozenset.intersection(*sets) if sets else None)

    def chosen(self, predicate: State, states: Sequence[State]) -> Sequence[State]:
        """A choice that depends on the batch is made for all examples together."""
        return states if isinstance(predicate, Shared) else [predicate] * len(states)

    def sliced(self, state: State) -> State:
        """The batch axis comes behind the axis that is scanned."""
        return _moved(state, -1)

    def stacked(self, state: State) -> State:
        """The opposite of `sliced`."""
        return _moved(state, 1)

    def scan(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Follow a scan, over the examples or within each."""
        if any(state == BatchAxis(0) for state in Scan.of(eqn).split(states)[2]):
            return self._loop_over_batch(eqn, states, site)
        return super().scan(eqn, states, site)

    def branches(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Follow branches. A choice per example was not analyzed."""
        if isinstance(states[0], BatchAxis | Indices):
            return [Unknown(eqn.primitive.name, source_line(eqn))] * len(eqn.outvars)
        return super().branches(eqn, states, site)

    def shard_map(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Analyze what each device computes, if every device has all examples."""
        before, self._is_manual = self._is_manual, True
        try:
            return super().shard_map(eqn, states, site)
        finally:
            self._is_manual = before

    def to_device(self, state: State, splits: Sequence[int]) -> State:
        """Examples that are split between devices were not analyzed."""
        if isinstance(state, Shared) and state.uniform is not None:
            return Shared(frozenset(a for a in state.uniform if splits[a] == 1))
        is_whole = isinstance(state, BatchAxis) and splits[state.axis] == 1
        if is_whole or not isinstance(state, BatchAxis | Indices):
            return state
        return Unknown("shard_map")

    from_device = to_device

    def custom(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Analyze a function with custom derivatives as it runs when it is differentiated.

        JAX differentiates the custom rule, never the equations inside the function.
        """
        if not self._is_differentiated:
            solve = solver(eqn, states)
            return super().custom(eqn, states, site) if solve is None else self.run(*solve, site)
        inputs, outputs = (
            [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]
            for variables in (eqn.invars, eqn.outvars)
        )
        analysis = BatchAxes(self.batch_size, is_differentiated=False)
        analysis._is_manual = self._is_manual
        differentiable = [i for i, output in enumerate(outputs) if _is_floating(output)]
        batched = [i for i, state in enumerate(states) if isinstance(state, BatchAxis)]
        batched = [i for i in batched if _is_floating(inputs[i])]
        if not batched or not differentiable:
            return analysis.custom(eqn, states, site)

        def backward(inputs: list[Any], cotangents: list[Any]) -> Any:
            outputs, vjp = differentiate(eqn, inputs, batched)
            return vjp(cotangents), outputs

        unknown: list[State] = [Unknown(eqn.primitive.name, source_line(eqn))] * len(outputs)
        try:
            closed = jax.make_jaxpr(backward)(inputs, [outputs[i] for i in differentiable])
        except Exception:
            # With check_vma, the rules of functions inside of `jax.shard_map` only run there.
            if not self._is_manual:
                raise
            return unknown
        # Cotangents have their batch axis where the results have it.
        primal = analysis.custom(eqn, states, site)
        found = analysis.run(closed, [*states, *(primal[i] for i in differentiable)], site)
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

    def _fits_any_row(self, state: Shared, axis: int, shape: Sequence[int]) -> bool:
        """Whether an example may meet any row of a shared value."""
        return state.is_uniform(axis, shape)

    def _loop_over_batch(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """A loop over the examples, such as `jax.lax.map`: its iterations must not depend."""
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(states)
        mixed = Mixed("/".join(site.scopes), eqn.primitive.name, source_line(eqn))
        dependent = [not isinstance(state, Shared) for state in states]
        depends = depends_on(scan.body, dependent)[: scan.num_carry]
        if any(dependent[: len(consts) + len(carry)]) or any(depends):
            return [mixed] * len(eqn.outvars)
        slices: list[State] = []
        for state, v in zip(xs, eqn.invars[len(consts) + len(carry) :], strict=True):
            if state == BatchAxis(0):
                slices.append(KEY)  # A value of the example alone.
            elif isinstance(state, Shared) and self._fits_any_row(state, 0, aval(v).shape):
                slices.append(Shared())
            else:
                slices.append(mixed._replace(by_position=True))
        # A value that is carried on differs between iterations, unless it never changes.
        variables = scan.body.jaxpr.invars[len(consts) :], scan.body.jaxpr.outvars
        carried = [
            state if before is after else mixed._replace(by_position=True)
            for state, before, after in zip(carry, *variables, strict=False)
        ]
        out = self.run(scan.body, [*consts, *carried, *slices], site)
        ys = out[scan.num_carry :]
        return [*carry, *(BatchAxis(0) if isinstance(y, Shared) else y for y in ys)]

    def equation(self, eqn: JaxprEqn, states: list[State], site: Site) -> Sequence[State]:
        """Follow the batch along the factors of an equation."""
        count = len(eqn.outvars)
        if is_identity(eqn):
            return states
        if has_backward_rule(eqn):
            return self.custom(eqn, states, site)
        if self._is_manual and combines_devices(eqn):
            return [Shared(s.uniform) if isinstance(s, Shared) else s for s in states]
        for kind in (Mixed, Unknown):
            for state in states:
                if isinstance(state, kind):
                    return [state] * count
        if all(isinstance(state, Shared) for state in states):
            return [self._shared(eqn, states, index) for index in range(count)]
        operation = eqn.primitive.name, source_line(eqn)
        results: list[State] = []
        for state in self._rows(eqn, states):
            if isinstance(state, Mixed):
                state = Mixed("/".join(site.scopes), *operation, state.by_position)
            results.append(Unknown(*operation) if isinstance(state, Unknown) else state)
        return results

    def _rows(self, eqn: JaxprEqn, states: list[State]) -> Sequence[State]:
        """States of the results of an equation of rows. ``Mixed()`` says that it mixes them."""
        count = len(eqn.outvars)
        if indices := self._indices(eqn, states):
            return [indices]
        axes = [state.axis if isinstance(state, BatchAxis) else None for state in states]
        if any(isinstance(state, Indices) for state in states):
            factor = self._of_indices(eqn, states, axes)
        else:
            factor = separate_factor(eqn, axes, self.batch_size)
        if factor is None:
            return [self._not_separate(eqn, states, axes)] * count
        for state, v, axis in zip(states, eqn.invars, factor.operands, strict=True):
            if axis is None or not isinstance(state, Shared):
                continue
            if not self._fits_any_row(state, axis, aval(v).shape):
                return [Mixed(by_position=True)] * count
        return [Unknown() if axis is None else BatchAxis(axis) for axis in factor.results]

    def _not_separate(
        self, eqn: JaxprEqn, states: Sequence[State], axes: Sequence[int | None]
    ) -> State:
        """State of the results of an equation that has the batch in no separate factor."""
        row = row_of(eqn)
        if any(isinstance(state, Indices) for state in states):
            return Unknown() if row and row.otherwise == "unknown" else Mixed(by_position=True)
        own = {(k, axis) for k, axis in enumerate(axes) if axis is not None}
        for factor in factors(eqn):
            met = own & set(enumerate(factor.operands))
            if met and (not factor.is_separate or len(own) > 1):
                # The batch is reduced, or every example meets every other one.
                return Mixed()
        return Mixed() if row is not None and row.otherwise == "mixed" else Unknown()

    def _indices(self, eqn: JaxprEqn, states: list[State]) -> Indices | None:
        """Index vectors in which a column counts the rows of the batch."""
        axis = next((state.axis for state in states if isinstance(state, BatchAxis)), None)
        dimension = joined_axis(eqn)
        if dimension is None or axis is None or axis == dimension:
            return None
        column = 0
        for state, v in zip(states, eqn.invars, strict=True):
            if isinstance(state, Shared) and state.value is not None:
                moved = np.moveaxis(state.value(), axis, 0)
                rows = np.arange(self.batch_size).reshape(-1, *[1] * (moved.ndim - 1))
                if len(moved) == self.batch_size and (moved == rows).all():
                    return Indices(axis, column)
            column += aval(v).shape[dimension]
        return None

    def _of_indices(
        self, eqn: JaxprEqn, states: list[State], axes: Sequence[int | None]
    ) -> Factor | None:
        """The factor of an indexing equation in which each example has its own row."""
        found = next(state for state in states if isinstance(state, Indices))
        factor = counted_factor(eqn, found.column, found.axis)
        if factor is None:
            return None
        pairs = zip(axes, factor.operands, strict=True)
        return factor if all(axis in (None, own) for axis, own in pairs) else None

    def _shared(self, eqn: JaxprEqn, states: list[Any], index: int) -> Shared:
        """Find along which axes a result of an equation of shared values is uniform."""
        shapes = [aval(v).shape for v in eqn.invars]
        out = aval(eqn.outvars[index])
        pairs = list(zip(states, shapes, strict=True))
        everywhere = all(s.uniform is None or len(s.uniform) == len(shape) for s, shape in pairs)
        if everywhere and any(s.uniform is None for s in states):
            return KEY
        uniform = {
            factor.results[index]
            for factor in factors(eqn)
            if (factor.parts or self.batch_size) % self.batch_size == 0
            and all(
                axis is None or state.is_uniform(axis, shape)
                for axis, (state, shape) in zip(factor.operands, pairs, strict=True)
            )
        }
        axes = frozenset(a for a in uniform if a is not None and a < len(out.shape))
        # Integers of known integers are evaluated only if they are looked at.
        value = None
        if out.size <= CONSTANT_SIZE and _is_index(out) and all(s.value for s in states):
            value = functools.cache(lambda: _evaluated(eqn, [s.value() for s in states], index))
        return Shared(axes, value)


def _moved(state: State, by: int) -> State:
    if isinstance(state, BatchAxis):
        return BatchAxis(state.axis + by)
    if isinstance(state, Shared) and state.uniform is not None:
        return Shared(frozenset(axis + by for axis in state.uniform if axis + by >= 0))
    return state


def _is_floating(a: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(a.dtype, jnp.inexact)


def _is_index(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool


def _evaluated(eqn: JaxprEqn, values: Sequence[np.ndarray], index: int) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        return np.asarray(evaluate(eqn, values)[index])
