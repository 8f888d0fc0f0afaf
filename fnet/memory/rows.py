"""Execute a program for some rows of an axis: exactly what the whole program computes of them.

An axis of arguments runs through a program. Where it is in a separate factor of every equation
(`fnet.jaxpr.factors`), the same equations with a shorter axis give a part of the rows. In contrast
to a microbatch, the rows keep their positions: row 5 of a mask, of a table of positions or of
``jnp.arange(n)`` stays row 5. What the program computes from other values is computed for these
rows alone, if that is possible, such as the random bits of a dropout mask.

`RowAxes` finds the axis of each value, and sums over it. `run_rows` executes.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from fnet.jaxpr import (
    CUSTOM_DERIVATIVES,
    Factor,
    Scan,
    Site,
    While,
    active_variables,
    aval,
    call_like,
    called_jaxpr,
    counted_factor,
    custom_function,
    differentiate,
    evaluate,
    factors,
    find_equations,
    has_backward_rule,
    in_scopes,
    interpret,
    is_floating,
    is_identity,
    is_linear_in,
    lengthen,
    row_of,
    rows_by_position,
    separate_factor,
    source_line,
    switch,
)
from fnet.jaxpr.batch_axis import (
    CONSTANT_SIZE,
    BatchAxes,
    BatchAxis,
    Indices,
    Mixed,
    Shared,
    Unknown,
)


class Sum(NamedTuple):
    """A sum over the rows. Each chunk adds its part."""


def _linear_operands(eqn: JaxprEqn, sums: Sequence[int]) -> set[int] | None:
    """Return operands that include these sums, and in which the equation is jointly linear."""
    count, row = len(eqn.invars), row_of(eqn)
    together = row.linear if row is not None and isinstance(row.linear, tuple) else ()
    for operands in ({*sums}, {*together}, {*range(count)}, {*range(1, count)}):
        if operands >= {*sums} and is_linear_in(eqn, operands):
            return operands
    return None


class Rule(NamedTuple):
    """The derivative rule of a function, as programs.

    Attributes:
      forward: ``inputs -> results and residuals``.
      backward: ``residuals and cotangents -> cotangents of the differentiated inputs``.
      floating: Indices of the differentiated inputs, and of the inexact results.
      states: States of the residuals.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    floating: tuple[list[int], list[int]]
    states: list[Any]


class RowAxes(BatchAxes):
    """Follow rows that keep their positions, so values may differ from row to row, and sums.

    Args:
      rows: Number of rows.
      active: Variables that are differentiated, also in inner jaxprs. A derivative rule
        is that with respect to the active operands, as JAX calls it.
    """

    def __init__(self, rows: int, active: Collection[Var] = ()) -> None:
        super().__init__(rows, is_differentiated=bool(active))
        self.active = active
        # With its equation, which stays alive, so that no other one gets its id.
        self.rules: dict[tuple[JaxprEqn, tuple[Any, ...]], Rule | None] = {}

    def _fits_any_row(self, state: Shared, axis: int, shape: Sequence[int]) -> bool:
        return True  # Each row meets its own.

    def constant(self, value: Any) -> Shared:
        """Constants are whole. Small ones of integers may be indices."""
        is_small = not isinstance(value, jax.core.Tracer) and np.size(value) <= CONSTANT_SIZE
        is_known = is_small and jnp.result_type(value).kind in "iub"
        return Shared(value=lambda: np.asarray(value)) if is_known else Shared()

    def _shared(self, eqn: JaxprEqn, states: list[Any], index: int) -> Shared:
        return super()._shared(eqn, states, index) if all(s.value for s in states) else Shared()

    def shard_map(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        """Rows are not separated inside of what devices compute."""
        return self._unknown(eqn)

    def branches(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        """Follow branches. A sum cannot choose one, because a chunk has its part alone."""
        if isinstance(states[0], Sum):
            return self._unknown(eqn)
        return super().branches(eqn, states, site)

    def equation(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        """Follow rows along the factors of an equation, and sums through linear ones."""
        is_solve = has_backward_rule(eqn) and not all(isinstance(s, Shared) for s in states)
        if eqn.effects or is_solve:
            return self._unknown(eqn)
        sums = [k for k, state in enumerate(states) if isinstance(state, Sum)]
        if not sums or is_identity(eqn):
            return super().equation(eqn, self.indexed(eqn, states), site)
        if not all(isinstance(state, Shared | Sum) for state in states):  # a sum and rows
            return [Mixed("", eqn.primitive.name, source_line(eqn))] * len(eqn.outvars)
        if _linear_operands(eqn, sums) is None:
            return self._unknown(eqn)
        return [Sum()] * len(eqn.outvars)

    def indexed(self, eqn: JaxprEqn, states: list[Any]) -> list[Any]:
        """Return the states, where whole indices that count the rows are seen as such."""
        if "dimension_numbers" not in eqn.params or len(states) < 2:
            return states
        array, indices = states[:2]
        if not isinstance(array, BatchAxis) or not isinstance(indices, Shared):
            return states
        known = indices.value() if indices.value else np.zeros(())
        for column, axis in itertools.product(
            range(known.shape[-1] if known.ndim else 0), range(known.ndim - 1)
        ):
            rows = np.moveaxis(known[..., column], axis, 0)
            is_own = len(rows) == self.batch_size and (np.arange(len(rows)) == rows.T).all()
            factor = counted_factor(eqn, column, axis) if is_own else None
            if factor is not None and factor.operands[0] == array.axis:
                return [array, Indices(axis, column), *states[2:]]
        return states

    def _not_separate(
        self, eqn: JaxprEqn, states: Sequence[Any], axes: Sequence[int | None]
    ) -> Any:
        if not any(isinstance(s, Indices) for s in states) and sum_factor(eqn, axes):
            return Sum()
        return super()._not_separate(eqn, states, axes)

    def custom(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        """Follow a function with its derivative rule, which must keep rows apart, too."""
        results = RowAxes(self.batch_size).follow(eqn, states, site)
        if not self.operands(eqn) or not any(isinstance(s, BatchAxis) for s in states):
            return results
        if any(isinstance(state, Mixed | Unknown | Sum | Indices) for state in results):
            return results if any(isinstance(s, Mixed) for s in results) else self._unknown(eqn)
        return results if self.rule(eqn, states, results) else self._unknown(eqn)

    def follow(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        """Follow a function with custom derivatives without them."""
        return BatchAxes.custom(self, eqn, states, site)

    def _unknown(self, eqn: JaxprEqn) -> list[Any]:
        return [Unknown(eqn.primitive.name, source_line(eqn))] * len(eqn.outvars)

    def operands(self, eqn: JaxprEqn) -> list[int]:
        """Indices of the operands that are differentiated."""
        return _operands(eqn, self.active)

    def rule(self, eqn: JaxprEqn, states: Sequence[Any], results: Sequence[Any]) -> Rule | None:
        """Return the derivative rule of an equation; None if it does not keep rows apart."""
        key = eqn, tuple(s if isinstance(s, BatchAxis) else None for s in states)
        if key not in self.rules:
            self.rules[key] = self._find_rule(eqn, states, results)
        return self.rules[key]

    def _find_rule(
        self, eqn: JaxprEqn, states: Sequence[Any], results: Sequence[Any]
    ) -> Rule | None:
        floating = self.operands(eqn)
        differentiable = [i for i, v in enumerate(eqn.outvars) if is_floating(v)]
        programs = _derivative_programs(eqn, floating)
        if _reads_traced_arrays(programs):
            return None
        forward, backward = programs
        analysis = RowAxes(self.batch_size)
        found = analysis.run(forward, list(states))
        residuals = found[len(eqn.outvars) :]
        if any(not isinstance(state, BatchAxis | Shared) for state in residuals):
            return None
        pairs = zip(found, results, strict=False)
        if any(a != b and BatchAxis in (type(a), type(b)) for a, b in pairs):
            return None
        cotangents = [found[i] for i in differentiable]
        wanted = analysis.run(backward, [*residuals, *cotangents])
        for i, state in zip(floating, wanted, strict=True):
            if state != _of_cotangent(states[i]) and not isinstance(state, Shared):
                return None
        return Rule(forward, backward, (floating, differentiable), residuals)


def _of_cotangent(state: Any) -> Any:
    """State of the cotangent of a value: each chunk has its rows, or adds its part."""
    return state if isinstance(state, BatchAxis) else Sum()


def _operands(eqn: JaxprEqn, active: Collection[Var]) -> list[int]:
    """Indices of the operands of an equation that are differentiated."""
    return [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v in active]


def _derivative_programs(eqn: JaxprEqn, floating: Sequence[int]) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Trace the derivative rule of an equation in reverse mode: the programs of `Rule`."""
    inputs = [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in eqn.invars]
    forward, (outputs, vjp) = jax.make_jaxpr(
        lambda *inputs: differentiate(eqn, inputs, floating), return_shape=True
    )(*inputs)
    cotangents = [a for a in outputs if jnp.issubdtype(a.dtype, jnp.inexact)]
    return forward, jax.make_jaxpr(lambda vjp, cts: vjp(cts))(vjp, cotangents)


def _reads_traced_arrays(programs: Sequence[ClosedJaxpr]) -> bool:
    """Whether a rule reads what the loss computes, other than by its arguments."""
    return any(isinstance(c, jax.core.Tracer) for program in programs for c in program.consts)


def rule_of_this_trace(closed: ClosedJaxpr, differentiated: Sequence[bool]) -> JaxprEqn | None:
    """Return an equation whose derivative rule reads traced arrays other than its arguments.

    Such a program cannot be evaluated again: these arrays belong to the trace that made it.

    Args:
      closed: The program.
      differentiated: Whether it is differentiated with respect to each argument.
    """
    active = active_variables(closed.jaxpr, differentiated)
    for eqn in find_equations(closed, CUSTOM_DERIVATIVES):
        floating = _operands(eqn, active)
        if floating and _reads_traced_arrays(_derivative_programs(eqn, floating)):
            return eqn
    return None


def sum_factor(eqn: JaxprEqn, axes: Sequence[int | None]) -> Factor | None:
    """Return the factor that has these axes of the operands, if the equation sums over it."""
    for factor in factors(eqn):
        pairs = list(zip(axes, factor.operands, strict=True))
        agrees = all(axis in (None, own) for axis, own in pairs)
        if factor.is_sum and agrees and any(axis is not None for axis in axes):
            return factor
    return None


# Execution.


class Part(NamedTuple):
    """Which rows are computed.

    Attributes:
      start: Index of the first row, an int32 that may be traced.
      size: Number of rows.
      total: Number of all rows.
    """

    start: Any
    size: int
    total: int


def slice_rows(array: Any, axis: int, part: Part) -> Any:
    """Return the rows of an array; each may be several positions of the axis."""
    unit = jnp.shape(array)[axis] // part.total
    return jax.lax.dynamic_slice_in_dim(array, part.start * unit, part.size * unit, axis)


class Value(NamedTuple):
    """A value of a program that runs for some rows.

    Attributes:
      state: What it is: rows, a sum, or a whole value.
      array: Its rows, its part of the sum, or all of it; `_Later` if it was not computed yet; None
        if its rows cannot be computed, and no result needs it.
    """

    state: Any
    array: Any


class _Later(NamedTuple):
    """A result of an equation of whole values, which is computed where it is used.

    Attributes:
      eqn: The equation.
      inputs: Its inputs.
      result: Index of the result.
      memo: Arrays of all results by scope (`_Scope`) and axis of the rows; None for whole arrays.
    """

    eqn: JaxprEqn
    inputs: list[Value]
    result: int
    memo: dict[Any, Any]


def run_rows(
    closed: ClosedJaxpr,
    args: Sequence[Value],
    part: Part,
    axes: RowAxes,
    change: Callable[[Var, Value], Value] | None = None,
) -> "tuple[_Interpreter, list[Value]]":
    """Execute a program for some rows.

    Args:
      closed: The program, traced for all rows.
      args: One value per argument.
      part: Which rows.
      axes: The analysis of the program.
      change: ``change(variable, value) -> value`` sees each value that is made.
    """
    interpreter = _Interpreter(part, axes)

    def equation(eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
        values = interpreter.equation(eqn, inputs)
        return (
            [change(v, a) for v, a in zip(eqn.outvars, values, strict=True)] if change else values
        )

    return interpreter, interpreter.run(closed, args, equation)


class _Interpreter:
    """Evaluates equations for some rows, and converts values between whole arrays, rows and sums.

    Attributes:
      part: Which rows.
      axes: The analysis of the program.
      scope: The function that is traced now, an object that is equal to itself alone.
    """

    def __init__(self, part: Part, axes: RowAxes) -> None:
        self.part, self.axes = part, axes
        self.scope = object()

    def run(self, closed: ClosedJaxpr, args: Sequence[Value], equation: Any = None) -> list[Value]:
        constant = lambda raw: Value(self.axes.constant(raw), raw)  # noqa: E731
        return interpret(closed, args, equation or self.equation, constant)

    # Arrays of values.

    def whole(self, value: Value) -> Any:
        """A value that does not depend on the rows, or a part of a sum."""
        array = value.array
        if not isinstance(array, _Later):
            return array
        key = self.scope, None
        if key not in array.memo:
            array.memo[key] = evaluate(array.eqn, [self.whole(v) for v in array.inputs])
        return array.memo[key][array.result]

    def sum(self, value: Value) -> Any:
        """A part of a sum. A whole value belongs to the first part."""
        assert isinstance(value.state, Shared | Sum)
        array = self.whole(value)
        if isinstance(value.state, Sum):
            return array
        return jnp.where(self.part.start == 0, array, jnp.zeros_like(array))

    def rows(self, value: Value, axis: int) -> Any:
        """The rows of a value along an axis."""
        if isinstance(value.state, BatchAxis | Indices):
            assert value.state.axis == axis
            return value.array
        assert isinstance(value.state, Shared)
        if isinstance(value.array, _Later):
            return self._rows_later(value.array, axis)
        return slice_rows(value.array, axis, self.part)

    def _rows_later(self, later: _Later, axis: int) -> Any:
        key = self.scope, axis
        if key not in later.memo:
            later.memo[key] = self._compute_rows(later, axis)
        return later.memo[key][later.result]

    def _compute_rows(self, later: _Later, axis: int) -> dict[int, Any]:
        eqn, index = later.eqn, later.result
        unit = aval(eqn.outvars[index]).shape[axis] // self.part.total
        size, start = self.part.size * unit, self.part.start * unit
        if eqn.primitive.name in ("iota", "random_bits"):
            inputs = [self.whole(v) for v in later.inputs]
            made = rows_by_position(eqn, inputs, axis, start, size)
            if made is not None:
                return {index: made}
        for factor in factors(eqn):
            if factor.results[index] != axis or (factor.parts or self.part.total) % self.part.total:
                continue
            outputs = self._shorter(eqn, later.inputs, factor)
            return {k: a for k, a in enumerate(outputs) if factor.results[k] == axis}
        return {index: slice_rows(self.whole(Value(Shared(), later)), axis, self.part)}

    def _shorter(self, eqn: JaxprEqn, inputs: Sequence[Value], factor: Factor) -> list[Any]:
        """Evaluate an equation whose axis has these rows alone."""
        arrays = [
            self.whole(value) if axis is None else self.rows(value, axis)
            for value, axis in zip(inputs, factor.operands, strict=True)
        ]
        return evaluate(lengthen(eqn, factor, Fraction(self.part.size, self.part.total)), arrays)

    # Equations.

    def equation(self, eqn: JaxprEqn, inputs: list[Value]) -> Sequence[Value]:
        states: list[Any] = [value.state for value in inputs]
        if all(isinstance(state, Shared) for state in states):
            memo: dict[Any, Any] = {}
            return [
                Value(state, _Later(eqn, inputs, index, memo))
                for index, state in enumerate(self.axes.visit(eqn, states, Site()))
            ]
        if (inner := called_jaxpr(eqn)) is not None:
            return self._call(eqn, inner, inputs)
        results = self.axes.visit(eqn, states, Site())
        if all(isinstance(state, Mixed | Unknown) for state in results):
            return [Value(state, None) for state in results]
        if (scan := Scan.read(eqn)) is not None:
            outputs = self._scan(eqn, scan, inputs)
        elif eqn.primitive.name == "while":
            outputs = self._while(eqn, inputs, results)
        elif "branches" in eqn.params:
            outputs = self._branches(eqn, inputs, results)
        elif custom_function(eqn) is not None:
            outputs = self._custom(eqn, inputs, results)
        elif is_identity(eqn):
            outputs = evaluate(eqn, [self.whole(v) for v in inputs])
        else:
            outputs = self._plain(eqn, inputs)
        return [Value(state, a) for state, a in zip(results, outputs, strict=True)]

    def _plain(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Any]:
        """Evaluate an equation without inner jaxprs."""
        states = [value.state for value in inputs]
        if any(isinstance(state, Sum) for state in states):
            return self._add_up(eqn, inputs)
        if indices := self.axes._indices(eqn, states):
            factor = Factor((indices.axis,) * len(inputs), (indices.axis,))
            return self._shorter(eqn, inputs, factor)
        states = self.axes.indexed(eqn, states)
        counted = next((s for s in states if isinstance(s, Indices)), None)
        if counted is None:
            axes = [s.axis if isinstance(s, BatchAxis) else None for s in states]
            found = separate_factor(eqn, axes, self.part.total) or sum_factor(eqn, axes)
        else:
            found = counted_factor(eqn, counted.column, counted.axis)
            k = states.index(counted)
            inputs = [*inputs[:k], self._from_first_row(inputs[k], counted), *inputs[k + 1 :]]
        assert found is not None
        if not found.is_separate and found.operands[0] is None:  # what a scatter adds to
            inputs = [Value(Sum(), self.sum(inputs[0])), *inputs[1:]]
        return self._shorter(eqn, inputs, found)

    def _add_up(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Any]:
        """Evaluate an equation that is linear in sums: parts of them give a part of the result."""
        sums = [k for k, value in enumerate(inputs) if isinstance(value.state, Sum)]
        linear: Any = _linear_operands(eqn, sums)
        arrays = [self.sum(v) if k in linear else self.whole(v) for k, v in enumerate(inputs)]
        if not any(isinstance(eqn.invars[k], Literal) for k in linear):
            return evaluate(eqn, arrays)
        # `evaluate` would read the literal of the equation, in every part.
        shape = aval(eqn.outvars[0]).shape
        arrays = [jnp.broadcast_to(a, shape) if k in linear else a for k, a in enumerate(arrays)]
        with in_scopes(eqn):
            return [eqn.primitive.bind(*arrays, **eqn.params)]

    def _from_first_row(self, value: Value, indices: Indices) -> Value:
        """Count the rows of indices from the first row of the chunk."""
        array = self.rows(value, indices.axis)
        columns = jax.lax.broadcasted_iota(jnp.int32, array.shape, array.ndim - 1)
        before = jnp.where(columns == indices.column, self.part.start, 0)
        return Value(indices, array - before.astype(array.dtype))

    def _call(self, eqn: JaxprEqn, inner: ClosedJaxpr, inputs: list[Value]) -> list[Value]:
        """Run a function under the `jax.checkpoint` of its equation."""
        states: list[Any] = []
        given = [k for k, v in enumerate(inputs) if not isinstance(v.array, _Later)]

        def function(*arrays: Any) -> list[Any]:
            values = list(inputs)
            for k, a in zip(given, arrays, strict=True):
                values[k] = values[k]._replace(array=a)
            with _Scope(self):
                results = self.run(inner, values)
                states[:] = [r.state for r in results]
                return [self.whole(r) for r in results]

        with in_scopes(eqn):
            outputs = call_like(eqn, function)(*(inputs[k].array for k in given))
        return [Value(state, a) for state, a in zip(states, outputs, strict=True)]

    def converted(self, values: Sequence[Value], states: Sequence[Any]) -> list[Any]:
        """Arrays of values in these states. What rows do not tell has none, and is not read."""

        def convert(value: Value, state: Any) -> Any:
            if isinstance(state, Mixed | Unknown):
                return None
            if isinstance(state, BatchAxis):
                return self.rows(value, state.axis)
            return self.sum(value) if isinstance(state, Sum) else self.whole(value)

        return [convert(v, s) for v, s in zip(values, states, strict=True)]

    def _scan(self, eqn: JaxprEqn, scan: Scan, inputs: list[Value]) -> list[Any]:
        consts, carry, xs = scan.split(inputs)
        if any(x.state == BatchAxis(0) for x in xs):
            return self._loop_over_rows(eqn, scan, inputs)
        slices = [self.axes.sliced(x.state) for x in xs]
        states, y_states = self.axes.fixed_point(
            scan.body, [c.state for c in consts], [c.state for c in carry], slices, Site()
        )

        def body(arrays: list[Any], rows: list[Any], _: None) -> tuple[list[Any], None]:
            with _Scope(self):
                given = [
                    Value(s, a) for s, a in zip([*states, *slices], [*arrays, *rows], strict=True)
                ]
                results = self.run(scan.body, [*consts, *given])
                return self.converted(results, [*states, *y_states]), None

        with in_scopes(eqn):
            results, _ = scan.evaluate(
                body, self.converted(carry, states), [self.whole(x) for x in xs]
            )
        return results

    def _loop_over_rows(self, eqn: JaxprEqn, scan: Scan, inputs: list[Value]) -> list[Any]:
        """Run a scan whose iterations are rows: for the iterations of these rows alone."""
        consts, carry, xs = scan.split(inputs)
        wholes = [self.whole(v) for v in consts]
        shorter = scan._replace(length=scan.length * self.part.size // self.part.total)

        def body(carry: list[Any], rows: list[Any], _: None) -> tuple[list[Any], None]:
            return interpret(scan.body, [*wholes, *carry, *rows], evaluate), None

        with in_scopes(eqn):
            results, _ = shorter.evaluate(
                body, [self.whole(v) for v in carry], [self.rows(v, 0) for v in xs]
            )
        return results

    def _while(self, eqn: JaxprEqn, inputs: list[Value], states: Sequence[Any]) -> list[Any]:
        loop = While.of(eqn)
        condition_consts, consts, carry = loop.split(inputs)

        def values(arrays: Any) -> list[Value]:
            return [Value(s, a) for s, a in zip(states, arrays, strict=True)]

        def condition(arrays: Any) -> Any:
            with _Scope(self):
                (result,) = self.run(loop.condition, [*condition_consts, *values(arrays)])
                return self.whole(result)

        def body(arrays: Any) -> Any:
            with _Scope(self):
                return self.converted(self.run(loop.body, [*consts, *values(arrays)]), states)

        with in_scopes(eqn):
            return loop.evaluate(condition, body, self.converted(carry, states))

    def _branches(self, eqn: JaxprEqn, inputs: list[Value], results: Sequence[Any]) -> list[Any]:
        index, *operands = inputs

        def run(branch: ClosedJaxpr) -> list[Any]:
            with _Scope(self):
                return self.converted(self.run(branch, operands), results)

        functions = [functools.partial(run, branch) for branch in eqn.params["branches"]]
        with in_scopes(eqn):
            outputs: list[Any] = switch(eqn, self.whole(index), functions)
        return outputs

    def _custom(self, eqn: JaxprEqn, inputs: list[Value], results: Sequence[Any]) -> list[Any]:
        """Run a function with its derivative rule, for these rows."""
        states: list[Any] = [value.state for value in inputs]
        inner: Any = custom_function(eqn)
        if not self.axes.operands(eqn):
            return self.converted(self.run(inner, inputs), results)
        rule = self.axes.rule(eqn, states, results)
        assert rule is not None
        plain = RowAxes(self.part.total)
        floating, differentiable = rule.floating
        of_cotangents = [_of_cotangent(states[i]) for i in floating]

        def run(
            start: Any,
            closed: ClosedJaxpr,
            arrays: Sequence[Any],
            given: Sequence[Any],
            wanted: Sequence[Any],
        ) -> list[Any]:
            interpreter = _Interpreter(self.part._replace(start=start), plain)
            values = [Value(s, a) for s, a in zip(given, arrays, strict=True)]
            return interpreter.converted(interpreter.run(closed, values), wanted)

        def primal(start: Any, *arrays: Any) -> list[Any]:
            return run(start, inner, arrays, states, results)

        def forward(start: Any, *arrays: Any) -> tuple[list[Any], Any]:
            outputs = run(start, rule.forward, arrays, states, [*results, *rule.states])
            return outputs[: len(results)], (start, outputs[len(results) :])

        def backward(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            start, residuals = saved
            arrays = [*residuals, *(cotangents[i] for i in differentiable)]
            given = [*rule.states, *(results[i] for i in differentiable)]
            grads = dict(
                zip(floating, run(start, rule.backward, arrays, given, of_cotangents), strict=True)
            )
            return (None, *(grads.get(i) for i in range(len(states))))

        # Arrays that it closes over may be traced, so all are arguments.
        function: Any = jax.custom_vjp(primal)
        function.defvjp(forward, backward)
        with in_scopes(eqn):
            outputs: list[Any] = function(self.part.start, *map(self.whole, inputs))
        return outputs


class _Scope:
    """An inner function that JAX traces, such as the body of a loop.

    Arrays of whole values that are computed in it stay there: JAX allows no tracer outside of the
    function that made it. So `_Later.memo` has entries per scope.
    """

    def __init__(self, interpreter: _Interpreter) -> None:
        self._interpreter, self._before = interpreter, interpreter.scope

    def __enter__(self) -> None:
        self._interpreter.scope = object()

    def __exit__(self, *_: Any) -> None:
        self._interpreter.scope = self._before
