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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fnet.jaxpr import (
    Factor,
    Scan,
    aval,
    called_jaxpr,
    custom_function,
    evaluate,
    in_scopes,
    interpret,
    is_checkpoint,
    is_identity,
    is_separable,
    lengthen,
    row_of,
    separate_factor,
    switch,
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
    return _Interpreter(batch, keep_rules, {}).run(closed, args)


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
    """Shape of the array of `Rows`."""
    return (*shape[:axis], batch * shape[axis], *shape[axis + 1 :]) if shape else (batch,)


class _Interpreter(NamedTuple):
    batch: int
    keep_rules: bool
    found: dict[Any, list[int | None]]

    def run(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        return interpret(closed, args, self._equation)

    def _equation(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        if not any(isinstance(a, Rows) for a in operands):
            return evaluate(eqn, operands)
        if is_checkpoint(eqn):
            return self._checkpoint(eqn, operands)
        # A program that was differentiated only has the custom functions it does not
        # differentiate.
        inner = called_jaxpr(eqn) or (None if self.keep_rules else custom_function(eqn))
        if inner is not None:
            with in_scopes(eqn):
                return self.run(inner, operands)
        if (scan := Scan.read(eqn)) is not None:
            return self._scan(eqn, scan, operands)
        if "branches" in eqn.params and not isinstance(operands[0], Rows):
            return self._cond(eqn, operands)
        if is_identity(eqn):
            return self._unchanged(eqn, operands)
        if not is_separable(eqn):
            return self._one_by_one(eqn, operands)
        factor = _factor(eqn, _axes_of(operands))
        if factor is None:
            return self._vmap(eqn, operands)
        return self._lengthen(eqn, operands, factor)

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

    def _checkpoint(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Rematerialize the same values as the equation for one example does."""
        inner: Any = called_jaxpr(eqn)
        closed, shapes = jax.make_jaxpr(functools.partial(self.run, inner), return_shape=True)(
            operands
        )
        jaxpr = closed.jaxpr
        jaxpr = jaxpr.replace(
            constvars=[],
            invars=[*jaxpr.constvars, *jaxpr.invars],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        prevent_cse = eqn.params["prevent_cse"]
        if isinstance(prevent_cse, tuple):
            prevent_cse = (True,) * len(closed.consts) + prevent_cse
        params = eqn.params | {"jaxpr": jaxpr, "prevent_cse": prevent_cse}
        with in_scopes(eqn):
            outputs = eqn.primitive.bind(*closed.consts, *jax.tree.leaves(operands), **params)
        results: list[Value] = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return results

    def _cond(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        index, *operands = operands
        branches = eqn.params["branches"]

        def find() -> list[int | None]:
            runs = [functools.partial(self.run, branch) for branch in branches]
            found = [_axes_of(jax.eval_shape(run, operands)) for run in runs]
            return [_first(axes) for axes in zip(*found, strict=True)]

        def run(branch: ClosedJaxpr, *operands: Value) -> list[Value]:
            return self._with_axes(self.run(branch, operands), eqn.outvars, axes)

        with in_scopes(eqn):
            axes = self._found(eqn, operands, find)
            functions = [functools.partial(run, branch) for branch in branches]
            results: list[Value] = switch(eqn, index, functions, *operands)
        return results

    def _scan(self, eqn: JaxprEqn, scan: Scan, operands: list[Value]) -> list[Value]:
        consts, carry, xs = scan.split(operands)
        variables, count = scan.body.jaxpr.outvars, len(carry)
        xs = [self._scanned(*pair) for pair in zip(xs, scan.split(eqn.invars)[2], strict=True)]

        def run(carry: list[Value], slices: list[Value]) -> list[Value]:
            return self.run(scan.body, [*consts, *carry, *(_moved(x, -1) for x in slices)])

        def find() -> list[int | None]:
            """Find one axis, for all iterations, of each value that is carried on."""
            axes = _axes_of(carry)

            def look(carry: list[Value], slices: list[Value], _: None) -> tuple[Any, list[Value]]:
                return carry, run(carry, slices)

            def results_of_all(carry: list[Value], xs: list[Value]) -> list[Value]:
                results: list[Value] = scan.evaluate(
                    look, self._with_axes(carry, variables, axes), xs
                )[1]
                return results

            while True:
                after = _axes_of(jax.eval_shape(results_of_all, carry, xs)[:count])
                joined = [_first(pair) for pair in zip(axes, after, strict=True)]
                if joined == axes:
                    return axes
                axes = joined

        def body(carry: list[Value], slices: list[Value], _: None) -> tuple[list[Value], None]:
            results = run(carry, slices)
            return [*self._with_axes(results[:count], variables, axes), *results[count:]], None

        with in_scopes(eqn):
            axes = self._found(eqn, operands, find)
            out, _ = scan.evaluate(body, self._with_axes(carry, variables, axes), xs)
        ys = zip(out[count:], variables[count:], strict=True)
        return [*out[:count], *(_stacked(y, v) for y, v in ys)]

    def _scanned(self, x: Value, v: Any) -> Value:
        """Return a value that a scan goes over with its batch axis behind the scanned one."""
        shape = aval(v).shape
        if not isinstance(x, Rows):
            return x
        if len(shape) == 1:  # [length, batch]
            return Rows(rows_of(x, shape, self.batch, 1), 1)
        return self._convert(x, shape, max(x.axis, 1))

    def _found(
        self, eqn: JaxprEqn, operands: list[Value], find: Callable[[], list[int | None]]
    ) -> list[int | None]:
        """Return what ``find`` returns, but trace the inside of a loop or branch only once for it.

        Otherwise a loop inside of a loop would be traced twice for each time that loop is.
        """
        key = eqn, *_axes_of(operands)
        if key not in self.found:
            self.found[key] = find()
        return self.found[key]

    def _with_axes(
        self, values: Sequence[Value], variables: Sequence[Any], axes: Sequence[int | None]
    ) -> list[Value]:
        """Convert values to these batch axes."""
        converted = []
        for value, v, axis in zip(values, variables, axes, strict=False):
            if axis is None and isinstance(value, Rows):
                raise AssertionError(
                    "a value has one row per example, and was expected to be shared"
                )
            converted.append(value if axis is None else self._convert(value, aval(v).shape, axis))
        return converted


def _first(axes: Sequence[int | None]) -> int | None:
    """The first of several values decides, and the others are converted."""
    return next((axis for axis in axes if axis is not None), None)


def _axes_of(values: Sequence[Value]) -> list[int | None]:
    return [a.axis if isinstance(a, Rows) else None for a in values]


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


def _moved(value: Value, by: int) -> Value:
    return dataclasses.replace(value, axis=value.axis + by) if isinstance(value, Rows) else value


def _stacked(y: Value, v: Any) -> Value:
    """Return what a scan stacked, given the axes of one iteration's value."""
    if isinstance(y, Rows) and not aval(v).shape:  # [length, batch]
        return Rows(jnp.swapaxes(y.array, 0, 1).ravel(), 0)
    return _moved(y, 1)
