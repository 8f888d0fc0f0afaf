"""Execute the traced program of one example for a whole batch.

`run_for_batch` is a `jax.vmap` that knows where the batch goes. The loss is traced for a batch of
one, so most of its values have an axis of length 1 that counts examples. If this axis is a separate
factor of an equation (`fnet.jaxpr.factors`), it becomes as long as the batch and the same equation
is executed once: a matrix product of [1, time, features] becomes one of [batch, time, features].
`jax.vmap` would add an axis instead, and XLA keeps some arrays twice if they have axes of length 1.
Any other equation is vectorized by `jax.vmap`.

So every result is, by construction, what the program gives for each example alone. A factor only
says that one equation treats the rows of an axis alike.

An example's value of shape ``s`` is stored as `Rows`: an array of the same number of axes, in which
one axis is ``batch * s[axis]`` long, with examples outermost.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fnet.jaxpr import (
    Executor,
    Factor,
    Propagation,
    Scan,
    Site,
    aval,
    evaluate,
    is_identity,
    is_separable,
    lengthen,
    row_of,
    separate_factor,
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["axis"])
@dataclasses.dataclass(frozen=True)
class Rows:
    """One value per example.

    Attributes:
      array: The values of all examples. Like one example's value, but ``axis`` is ``batch`` times
        as long. [batch] if the value is a scalar.
      axis: The axis that counts examples, and within each example its own elements.
    """

    array: Array
    axis: int


Value = Rows | Any
"""`Rows`, or an array that all examples share."""


def run_for_batch(
    closed: ClosedJaxpr, args: Sequence[Value], batch: int, *, keep_rules: bool = False
) -> list[Value]:
    """Execute a program that was traced for one example for all examples.

    With ``keep_rules`` functions keep their custom derivatives, to differentiate the result.
    """
    return _Interpreter(batch, keep_rules).run(closed, args)


def rows_of(value: Value, shape: Sequence[int], batch: int, axis: int = 0) -> Array:
    """Return values of this shape each with the batch as an axis of its own."""
    if not isinstance(value, Rows):
        shared = jnp.expand_dims(value, axis)
        return jnp.broadcast_to(shared, (*shape[:axis], batch, *shape[axis:]))
    if not shape:
        return value.array
    return jnp.moveaxis(_split(value, shape, batch), value.axis, axis)


def rows_from(values: Array) -> Rows:
    """Return values [batch, ...] of all examples as rows."""
    return Rows(values.reshape(-1, *values.shape[2:]) if values.ndim > 1 else values, 0)


def _split(value: Rows, shape: Sequence[int], batch: int) -> Array:
    """Return the array with the batch axis before the axis that it was merged with."""
    a = value.axis
    return value.array.reshape(*shape[:a], batch, *shape[a:]) if shape else value.array


def _merged(shape: Sequence[int], axis: int, batch: int) -> tuple[int, ...]:
    return (*shape[:axis], batch * shape[axis], *shape[axis + 1 :]) if shape else (batch,)


class _Axes(Propagation[int | None]):
    """Find the axis of each value's `Rows`; None if all examples share it.

    Attributes:
      keep_rules: Whether functions keep their custom derivatives.
    """

    def __init__(self, keep_rules: bool) -> None:
        self.keep_rules = keep_rules

    def constant(self, value: Any) -> None:
        """All examples share a constant."""

    def visit(self, eqn: JaxprEqn, states: list[int | None], site: Site) -> Sequence[int | None]:
        """All examples share what is computed from shared values."""
        if all(axis is None for axis in states):
            return [None] * len(eqn.outvars)
        return super().visit(eqn, states, site)

    def equation(self, eqn: JaxprEqn, states: list[int | None], site: Site) -> Sequence[int | None]:
        """Follow the axis along which the equation executes all examples."""
        if is_identity(eqn):
            return states
        factor = _factor(eqn, states) if is_separable(eqn) else None
        # `jax.vmap` and loops have examples first.
        return [0] * len(eqn.outvars) if factor is None else factor.results

    shard_map = loop = equation

    def custom(self, eqn: JaxprEqn, states: list[int | None], site: Site) -> Sequence[int | None]:
        """Follow a function with its rules as one equation."""
        return (self.equation if self.keep_rules else super().custom)(eqn, states, site)

    def branches(self, eqn: JaxprEqn, states: list[int | None], site: Site) -> Sequence[int | None]:
        """Follow branches. Where each example chooses its own, `jax.vmap` runs all."""
        handle = super().branches if states[0] is None else self.equation
        return handle(eqn, states, site)

    def scan(self, eqn: JaxprEqn, states: list[int | None], site: Site) -> Sequence[int | None]:
        """Follow a scan. Scalars that it stacks become rows of a vector."""
        scan, results = Scan.of(eqn), super().scan(eqn, states, site)
        pairs = zip(results, scan.body.jaxpr.outvars, strict=True)
        ys = [0 if axis == 1 and not aval(v).shape else axis for axis, v in pairs]
        return [*results[: scan.num_carry], *ys[scan.num_carry :]]

    def sliced(self, state: int | None) -> int | None:
        """The batch axis comes behind the axis that is scanned."""
        return None if state is None else max(state - 1, 0)

    def stacked(self, state: int | None) -> int | None:
        return None if state is None else state + 1

    def join(self, states: Sequence[int | None]) -> int | None:
        """The first of several values decides, and the others are converted."""
        return next((axis for axis in states if axis is not None), None)

    def chosen(self, predicate: int | None, states: Sequence[int | None]) -> Sequence[int | None]:
        return states


class _Interpreter(Executor[Value]):
    """Execute equations on `Rows`; their form is their axis."""

    def __init__(self, batch: int, keep_rules: bool) -> None:
        self.batch, self._axes = batch, _Axes(keep_rules)

    def form(self, value: Value) -> int | None:
        return value.axis if isinstance(value, Rows) else None

    def forms(self, eqn: JaxprEqn, values: list[Value], site: Site) -> Sequence[int | None]:
        """One axis for all iterations or branches."""
        return self._axes.visit(eqn, list(map(self.form, values)), site)

    def lower(self, value: Value, form: int | None, atom: Any) -> Value:
        if form is not None:
            return self._convert(value, aval(atom).shape, form)
        if isinstance(value, Rows):
            raise AssertionError("a value has one row per example, and was expected to be shared")
        return value

    def unstack(self, value: Value, atom: Any) -> tuple[Value, int | None]:
        """Rows that a scan goes over have their batch axis behind the scanned one."""
        shape = aval(atom).shape
        if not isinstance(value, Rows):
            return value, None
        if len(shape) == 1:  # [length, batch]
            return Rows(rows_of(value, shape, self.batch, 1), 0), 0
        axis = max(value.axis, 1)
        return Rows(self._convert(value, shape, axis).array, axis - 1), axis - 1

    def stack(self, arrays: Value, form: int | None, atom: Any) -> Value:
        """The axis that a scan made comes first."""
        if form is None:
            return arrays
        if not aval(atom).shape:  # [length, batch]
            return Rows(jnp.swapaxes(arrays.array, 0, 1).ravel(), 0)
        return Rows(arrays.array, form + 1)

    def visit(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Evaluate equations of shared values as they are."""
        if not any(isinstance(a, Rows) for a in states):
            return evaluate(eqn, states)
        return super().visit(eqn, states, site)

    def custom(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Execute a function without its rules, unless the result is differentiated.

        A program that was differentiated has no rules but of what it does not differentiate.
        """
        return (self.equation if self._axes.keep_rules else super().custom)(eqn, states, site)

    def branches(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Choose for all examples together, if they share the choice."""
        handle = self.equation if isinstance(states[0], Rows) else super().branches
        return handle(eqn, states, site)

    def loop(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        """Execute a while loop by `jax.vmap`: each example ends after iterations of its own."""
        return self.equation(eqn, states, site)

    def equation(self, eqn: JaxprEqn, states: list[Value], site: Site) -> Sequence[Value]:
        if is_identity(eqn):
            return self._unchanged(eqn, states)
        if not is_separable(eqn):
            return self._one_by_one(eqn, states)
        factor = _factor(eqn, list(map(self.form, states)))
        if factor is not None:
            return self._lengthen(eqn, states, factor)
        try:
            return self._vmap(eqn, states)
        except NotImplementedError:  # JAX cannot vectorize all of its own, such as ragged_dot.
            return self._one_by_one(eqn, states)

    def _lengthen(self, eqn: JaxprEqn, operands: list[Value], factor: Factor) -> list[Value]:
        """Execute the equation once, with an axis that is as long as the batch."""
        arrays = []
        for value, v, axis in zip(operands, eqn.invars, factor.operands, strict=True):
            if axis is None or not (isinstance(value, Rows) or _must_repeat(eqn, v, axis)):
                arrays.append(_array(value))
            else:
                arrays.append(self._convert(value, aval(v).shape, axis).array)
        outputs = evaluate(lengthen(eqn, factor, self.batch), arrays)
        results: list[Value] = []
        for a, v, axis in zip(outputs, eqn.outvars, factor.results, strict=True):
            assert axis is not None
            expected = _merged(aval(v).shape, axis, self.batch)
            if a.shape != expected:
                raise AssertionError(f"the row of {eqn.primitive} gave {a.shape}, not {expected}")
            results.append(Rows(a, int(axis)))  # Shapes may be computed with NumPy.
        return results

    def _vmap(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Vectorize one equation with `jax.vmap`: right for every separable equation."""
        arrays, axes = [], []
        for a, v in zip(operands, eqn.invars, strict=True):
            is_rows = isinstance(a, Rows)
            arrays.append(_split(a, aval(v).shape, self.batch) if is_rows else a)
            axes.append(a.axis if is_rows else None)

        def function(arrays: list[Array]) -> list[Array]:
            return evaluate(eqn, arrays)

        vectorized: Any = jax.vmap(function, (axes,), axis_size=self.batch)
        return self._batch_first(eqn, vectorized(arrays))

    def _one_by_one(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Execute one equation for one example after the other: right for every equation."""
        numbers = [k for k, a in enumerate(operands) if isinstance(a, Rows)]
        rows = [rows_of(operands[k], aval(eqn.invars[k]).shape, self.batch) for k in numbers]

        def function(example: list[Array]) -> list[Array]:
            own = dict(zip(numbers, example, strict=True))
            return evaluate(eqn, [own.get(k, a) for k, a in enumerate(operands)])

        return self._batch_first(eqn, jax.lax.map(function, rows))

    def _batch_first(self, eqn: JaxprEqn, results: Sequence[Array]) -> list[Value]:
        """Return the results [batch, ...] of an equation as rows."""
        return [
            Rows(a.reshape(_merged(aval(v).shape, 0, self.batch)), 0)
            for a, v in zip(results, eqn.outvars, strict=True)
        ]

    def _convert(self, value: Value, shape: Sequence[int], axis: int) -> Rows:
        """Return ``value`` with examples along ``axis``; copy what all examples share."""
        if isinstance(value, Rows) and (value.axis == axis or not shape):
            return value
        axis = axis if shape else 0
        rows = rows_of(value, shape, self.batch, axis)
        return Rows(rows.reshape(_merged(shape, axis, self.batch)), axis)

    def _unchanged(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        outputs = evaluate(eqn, [_array(a) for a in operands])
        return [
            Rows(out, a.axis) if isinstance(a, Rows) else out
            for out, a in zip(outputs, operands, strict=True)
        ]


def _factor(eqn: JaxprEqn, axes: Sequence[int | None]) -> Factor | None:
    """The axis along which an equation executes all examples; None if it needs `jax.vmap`."""
    first = next(k for k, a in enumerate(axes) if a is not None)
    own = separate_factor(eqn, axes)
    # Otherwise the other operands are converted to the axis of the first one.
    own = own or separate_factor(eqn, [a if k == first else None for k, a in enumerate(axes)])
    if own is None or None in own.results:
        return None
    for v, before, axis in zip(eqn.invars, axes, own.operands, strict=True):
        if before is not None and axis is None:
            return None
        if isinstance(v, Literal) and axis is not None and _must_repeat(eqn, v, axis):
            return None  # A literal cannot become an array of the batch.
    return own


def _must_repeat(eqn: JaxprEqn, operand: Any, axis: int) -> bool:
    """Whether an operand that all examples share must be repeated for each of them."""
    row, shape = row_of(eqn), aval(operand).shape
    return not (row and row.broadcasts and (not shape or shape[axis] == 1))


def _array(value: Value) -> Any:
    return value.array if isinstance(value, Rows) else value
