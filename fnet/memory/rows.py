"""Execute a program for some rows of an axis: exactly what the whole program computes of them.

An axis of arguments runs through a program. Where it is in a separate factor of every equation
(`fnet.jaxpr.factors`), the same equations with a shorter axis give a part of the rows. In contrast
to a microbatch, the rows keep their positions: row 5 of a mask, of a table of positions or of
``jnp.arange(n)`` stays row 5. What the program computes from other values is computed for these
rows alone, if that is possible, such as the random bits of a dropout mask.

`RowAxes` finds the axis of each value, and sums over it. `run_rows` executes.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from fnet.jaxpr import (
    CUSTOM_DERIVATIVES,
    Executor,
    Factor,
    Scan,
    Site,
    active_variables,
    aval,
    bind,
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
    is_indexing,
    is_linear_in,
    lengthen,
    place,
    row_of,
    rows_by_position,
    separate_factor,
    source_line,
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


States = Sequence[Any]
Rule = tuple[list[ClosedJaxpr], list[Any]]
"""The derivative rule of a function, as programs, and the states of tangents or residuals.

The program of a `jax.custom_jvp` is ``inputs and tangents -> results and tangents``. Those of
others are ``inputs -> results and residuals`` and ``residuals and cotangents -> cotangents``.
"""


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
        if not is_indexing(eqn):
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
        # What is inside is followed without derivative rules.
        results = BatchAxes.custom(RowAxes(self.batch_size), eqn, states, site)
        floating = _operands(eqn, self.active)
        if not floating or not any(isinstance(s, BatchAxis) for s in states):
            return results
        if any(isinstance(state, Mixed | Unknown | Sum | Indices) for state in results):
            return results if any(isinstance(s, Mixed) for s in results) else self._unknown(eqn)
        return results if self.rule(eqn, states, results, floating) else self._unknown(eqn)

    def _unknown(self, eqn: JaxprEqn) -> list[Any]:
        return [Unknown(eqn.primitive.name, source_line(eqn))] * len(eqn.outvars)

    def rule(self, eqn: JaxprEqn, states: States, results: States, over: list[int]) -> Rule | None:
        """Return the derivative rule of an equation; None if it does not keep rows apart."""
        key = eqn, tuple(s if isinstance(s, BatchAxis) else None for s in states)
        if key not in self.rules:
            self.rules[key] = self._rule(eqn, states, results, over)
        return self.rules[key]

    def _rule(self, eqn: JaxprEqn, states: States, results: States, over: list[int]) -> Rule | None:
        differentiable = _inexact(eqn.outvars)
        programs = _derivative_programs(eqn, over)
        if _reads_traced_arrays(programs):
            return None
        analysis, is_forward = RowAxes(self.batch_size), len(programs) == 1
        tangents = [s if isinstance(s, BatchAxis) else Shared() for s in states]
        more = [tangents[i] for i in over if is_forward]
        wanted = [*results, *(results[i] for i in differentiable if is_forward)]
        found = analysis.run(programs[0], [*states, *more])
        if not _agree(found[: len(wanted)], wanted):
            return None
        if is_forward:
            return programs, more
        residuals = found[len(results) :]
        if any(not isinstance(state, BatchAxis | Shared) for state in residuals):
            return None
        cotangents = [found[i] for i in differentiable]
        found = analysis.run(programs[1], [*residuals, *cotangents])
        wanted = [_of_cotangent(states[i]) for i in over]
        return (programs, residuals) if _agree(found, wanted) else None


def _agree(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether values have wanted states, or none of their own."""
    pairs = zip(found, wanted, strict=True)
    return all(a == b or isinstance(a, Shared) for a, b in pairs)


def _of_cotangent(state: Any) -> Any:
    """State of the cotangent of a value: each chunk has its rows, or adds its part."""
    return state if isinstance(state, BatchAxis) else Sum()


def _operands(eqn: JaxprEqn, active: Collection[Var]) -> list[int]:
    """Indices of the operands that are differentiated."""
    return [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and v in active]


def _inexact(atoms: Sequence[Any]) -> list[int]:
    return [i for i, v in enumerate(atoms) if is_floating(v)]


def _derivative_programs(eqn: JaxprEqn, floating: Sequence[int]) -> list[ClosedJaxpr]:
    """Trace the derivative rule of an equation: the programs of `Rule`."""
    inputs = [aval(v) for v in eqn.invars]  # inside of `jax.shard_map` with the axes they vary over
    if eqn.primitive.name.startswith("custom_jvp"):

        def with_tangents(*arrays: Any) -> list[Any]:
            primals, tangents = arrays[: len(inputs)], arrays[len(inputs) :]

            def jvp(f: Any, *chosen: Any, has_aux: bool) -> Any:
                return jax.jvp(f, chosen, tangents, has_aux=has_aux)

            outputs, found = differentiate(eqn, primals, floating, jvp)
            return [*outputs, *found]

        return [jax.make_jaxpr(with_tangents)(*inputs, *(inputs[i] for i in floating))]
    forward, (outputs, vjp) = jax.make_jaxpr(
        lambda *inputs: differentiate(eqn, inputs, floating), return_shape=True
    )(*inputs)
    cotangents = [a for a in outputs if jnp.issubdtype(a.dtype, jnp.inexact)]
    return [forward, jax.make_jaxpr(lambda vjp, cts: vjp(cts))(vjp, cotangents)]


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


Change = Callable[[Var, Value], Value]


class _Later(NamedTuple):
    """A result of an equation of whole values, which is computed where it is used.

    Attributes:
      eqn: The equation.
      inputs: Its inputs.
      result: Index of the result.
      memo: Arrays of all results by scope and axis of the rows; None for whole arrays.
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
    change: "Change | None" = None,
) -> "tuple[_Interpreter, list[Value]]":
    """Execute a program for some rows.

    Args:
      closed: The program, traced for all rows.
      args: One value per argument.
      part: Which rows.
      axes: The analysis of the program.
      change: ``change(variable, value) -> value`` sees each value that is made.
    """
    interpreter = _Interpreter(part, axes, change)
    return interpreter, interpreter.run(closed, args)


class _Interpreter(Executor[Value]):
    """Evaluates equations for some rows, and converts values between whole arrays, rows and sums.

    Attributes:
      part: Which rows.
      axes: The analysis of the program.
      is_rule: Whether it runs a derivative rule, which may be differentiated again: with the rules
        of all functions in it.
      scope: The function that is traced now, an object that is equal to itself alone. JAX allows no
        array outside of the function that made it, so `_Later.memo` has entries per scope.
    """

    def __init__(
        self, part: Part, axes: RowAxes, change: "Change | None" = None, is_rule: bool = False
    ) -> None:
        self.part, self.axes, self._change, self.is_rule = part, axes, change, is_rule
        self.scope = object()

    def constant(self, value: Any) -> Value:
        return Value(self.axes.constant(value), value)

    # How values enter and leave functions that JAX traces.

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Compute whole values of an inner function in it."""
        before, self.scope = self.scope, object()
        try:
            yield
        finally:
            self.scope = before

    def form(self, value: Value) -> Any:
        return value.state

    def forms(self, eqn: JaxprEqn, values: list[Value], site: Site) -> Sequence[Any]:
        """The analysis joins the states of iterations and branches."""
        return self.axes.visit(eqn, [value.state for value in values], Site())

    def lower(self, value: Value, form: Any, atom: Any) -> Any:
        """Array of a value in a state. What rows do not tell has none, and is not read."""
        if isinstance(form, Mixed | Unknown):
            return None
        if isinstance(form, BatchAxis):
            return self.rows(value, form.axis)
        return self.sum(value) if isinstance(form, Sum) else self.whole(value)

    def lift(self, arrays: Any, form: Any) -> Value:
        return Value(form, arrays)

    def unstack(self, value: Value, atom: Any) -> tuple[Any, Any]:
        """Iterations go over another axis than rows."""
        return self.whole(value), self.axes.sliced(value.state)

    def stack(self, arrays: Any, form: Any, atom: Any) -> Value:
        """The axis that a scan made comes first."""
        return Value(self.axes.stacked(form), arrays)

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
        if isinstance(value.state, BatchAxis | Indices):
            assert value.state.axis == axis
            return value.array
        assert isinstance(value.state, Shared)
        if not isinstance(value.array, _Later):
            return slice_rows(value.array, axis, self.part)
        memo = value.array.memo.setdefault((self.scope, axis), {})
        if value.array.result not in memo:
            memo |= self._compute_rows(value.array, axis)
        return memo[value.array.result]

    def _compute_rows(self, later: _Later, axis: int) -> dict[int, Any]:
        eqn, index = later.eqn, later.result
        unit = aval(eqn.outvars[index]).shape[axis] // self.part.total
        size, start = self.part.size * unit, self.part.start * unit
        made = rows_by_position(eqn, lambda: map(self.whole, later.inputs), axis, start, size)
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

    def visit(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Execute an equation. What is computed of whole values is computed when it is used."""
        results = self._visit(eqn, states, site)
        if self._change is None or len(site.path) > 1:
            return results
        return [self._change(v, a) for v, a in zip(eqn.outvars, results, strict=True)]

    def _visit(self, eqn: JaxprEqn, inputs: list[Value], site: Site) -> Sequence[Value]:
        known: list[Any] = [value.state for value in inputs]
        is_whole = all(isinstance(state, Shared) for state in known)
        if not is_whole and called_jaxpr(eqn) is not None:
            return super().visit(eqn, inputs, site)
        found = self.axes.visit(eqn, known, Site())
        if is_whole:
            memo: dict[Any, Any] = {}
            return [Value(s, _Later(eqn, inputs, k, memo)) for k, s in enumerate(found)]
        if all(isinstance(state, Mixed | Unknown) for state in found):
            return [Value(state, None) for state in found]
        return super().visit(eqn, inputs, site)

    def equation(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Evaluate an equation without inner jaxprs."""
        results = self.forms(eqn, states, site)
        if is_identity(eqn):
            return self.lifted(evaluate(eqn, [self.whole(v) for v in states]), results)
        return self.lifted(self._plain(eqn, states), results)

    def _plain(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Any]:
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
            indices = self.rows(inputs[k], counted.axis)
            columns = jax.lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
            before = jnp.where(columns == counted.column, self.part.start, 0)
            own = Value(counted, indices - before.astype(indices.dtype))
            inputs = [*inputs[:k], own, *inputs[k + 1 :]]
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
            return bind(eqn, arrays)

    def scan(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Execute a scan, over the rows or within them."""
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(states)
        if all(x.state != BatchAxis(0) for x in xs):
            return super().scan(eqn, states, site)
        # Its iterations are rows, so those of these rows run alone.
        wholes = [self.whole(v) for v in consts]
        shorter = scan._replace(length=scan.length * self.part.size // self.part.total)

        def body(carry: list[Any], rows: list[Any], _: None) -> tuple[list[Any], None]:
            return interpret(scan.body, [*wholes, *carry, *rows], evaluate), None

        with in_scopes(eqn):
            results, _ = shorter.evaluate(
                body, [self.whole(v) for v in carry], [self.rows(v, 0) for v in xs]
            )
        return self.lifted(results, self.forms(eqn, states, site))

    def custom(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Run a function with its derivative rule, for these rows."""
        floating = _operands(eqn, self.axes.active)
        if self.is_rule and eqn.primitive.name.startswith(CUSTOM_DERIVATIVES):
            floating = _inexact(eqn.invars)
        if not floating:
            return super().custom(eqn, states, site)
        results, inputs = self.forms(eqn, states, site), [value.state for value in states]
        inner: Any = custom_function(eqn)
        plain, differentiable = RowAxes(self.part.total), _inexact(eqn.outvars)
        count = len(results)

        def find() -> Rule:
            found = self.axes.rule(eqn, inputs, results, floating)
            if found is None:
                raise ValueError(
                    f"the derivative of the derivative of {place(eqn)} is not known for a part of "
                    "the rows; a loss that is differentiated again must run without a plan"
                )
            return found

        def run(start: Any, closed: ClosedJaxpr, arrays: Any, given: Any, wanted: Any) -> list[Any]:
            interpreter = _Interpreter(self.part._replace(start=start), plain, is_rule=True)
            found = interpreter.run(closed, interpreter.lifted(arrays, given))
            return interpreter.lowered(found, wanted, closed.jaxpr.outvars)

        def primal(start: Any, *arrays: Any) -> list[Any]:
            return run(start, inner, arrays, inputs, results)

        def with_tangents(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            (program,), more = find()
            arrays = [*primals[1:], *(tangents[1 + i] for i in floating)]
            wanted = [*results, *(results[i] for i in differentiable)]
            found = run(primals[0], program, arrays, [*inputs, *more], wanted)
            made = dict(zip(differentiable, found[count:], strict=True))
            zeros = (np.zeros(jnp.shape(a), jax.dtypes.float0) for a in found[:count])
            return found[:count], [made.get(i, zero) for i, zero in enumerate(zeros)]

        def forward(start: Any, *arrays: Any) -> tuple[list[Any], Any]:
            (program, _), more = find()
            outputs = run(start, program, arrays, inputs, [*results, *more])
            return outputs[:count], (start, outputs[count:])

        def backward(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
            (start, residuals), ((_, program), more) = saved, find()
            arrays = [*residuals, *(cotangents[i] for i in differentiable)]
            given = [*more, *(results[i] for i in differentiable)]
            wanted = [_of_cotangent(inputs[i]) for i in floating]
            found = run(start, program, arrays, given, wanted)
            grads = dict(zip(floating, found, strict=True))
            return (None, *(grads.get(i) for i in range(len(inputs))))

        # Arrays that it closes over may be traced, so all are arguments.
        function: Any
        if eqn.primitive.name.startswith("custom_jvp"):
            function = jax.custom_jvp(primal)
            function.defjvp(with_tangents)
        else:
            function = jax.custom_vjp(primal)
            function.defvjp(forward, backward)
        with in_scopes(eqn):
            outputs = function(self.part.start, *map(self.whole, states))
        return self.lifted(outputs, results)
