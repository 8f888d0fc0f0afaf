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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fnet.jaxpr import (
    CHECKPOINT,
    Factor,
    Scan,
    aval,
    called_jaxpr,
    evaluate,
    in_scopes,
    interpret,
    is_identity,
    is_separable,
    lengthen,
    row_of,
    separate_factor,
    switch,
)


class Rows(NamedTuple):
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
    """Execute the program of one example for all examples.

    Args:
      closed: The program, traced for one example.
      args: One value per argument of the program.
      batch: Number of examples.
      keep_rules: Whether functions keep their custom derivatives, to differentiate the result.

    Returns:
      One value per result of the program: what it gives for each example alone.
    """
    return _Interpreter(batch, keep_rules).run(closed, args)


def rows_of(value: Value, shape: Sequence[int], batch: int, axis: int = 0) -> Array:
    """Return the values of all examples with the batch as an axis of its own.

    Args:
      value: One value per example of this shape, or an array that all examples share.
      shape: Shape of one example's value.
      batch: Number of examples.
      axis: Position of the batch axis in the result.
    """
    if not isinstance(value, Rows):
        shared = jnp.expand_dims(value, axis)
        return jnp.broadcast_to(shared, (*shape[:axis], batch, *shape[axis:]))
    if not shape:
        return value.array
    return jnp.moveaxis(_split(value, shape, batch), value.axis, axis)


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

    def run(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[Value]:
        return interpret(closed, args, self._equation)

    def _equation(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        if not any(isinstance(a, Rows) for a in operands):
            return evaluate(eqn, operands)
        name = eqn.primitive.name
        if name in CHECKPOINT:
            return self._checkpoint(eqn, operands)
        # A program that was differentiated only has the custom functions it does not
        # differentiate.
        if (inner := called_jaxpr(eqn, custom_derivatives=not self.keep_rules)) is not None:
            with in_scopes(eqn):
                return self.run(inner, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name == "cond" and not isinstance(operands[0], Rows):
            return self._cond(eqn, operands)
        if is_identity(eqn):
            return self._unchanged(eqn, operands)
        if not is_separable(eqn):
            return self._one_by_one(eqn, operands)
        factor = _factor(eqn, operands)
        return (
            self._vmap(eqn, operands) if factor is None else self._lengthen(eqn, operands, factor)
        )

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
            results.append(Rows(a, axis))
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
        structure: list[Value] = []

        def function(*arrays: Array) -> list[Array]:
            results = self.run(inner, _like(operands, arrays))
            structure[:] = results
            return [_array(r) for r in results]

        args = [_array(a) for a in operands]
        closed = jax.make_jaxpr(function)(*args)
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
            outputs = eqn.primitive.bind(*closed.consts, *args, **params)
        return _like(structure, outputs)

    def _cond(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        index, *operands = operands
        shapes = [aval(v).shape for v in eqn.outvars]
        branches = eqn.params["branches"]
        axes: list[int | None] = [None] * len(shapes)
        for branch in branches:
            results = self._result_axes(branch, operands)
            axes = [a if b is None else b for a, b in zip(axes, results, strict=True)]

        def run(branch: ClosedJaxpr, arrays: list[Array]) -> list[Array]:
            return self._with_axes(self.run(branch, _like(operands, arrays)), shapes, axes)

        with in_scopes(eqn):
            functions = [functools.partial(run, b) for b in branches]
            outputs = switch(eqn, index, functions, [_array(a) for a in operands])
        return _with_batch(outputs, axes)

    def _scan(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(operands)
        avals = scan.body.in_avals
        carry_shapes = [a.shape for a in avals[len(consts) : len(consts) + len(carry)]]
        y_shapes = [a.shape for a in scan.body.out_avals[len(carry) :]]

        # Slices have their batch axis behind the scanned one.
        xs_axes: list[int | None] = [a.axis if isinstance(a, Rows) else None for a in xs]
        for k, (x, v) in enumerate(zip(xs, eqn.invars[len(consts) + len(carry) :], strict=True)):
            if isinstance(x, Rows):
                shape, behind = aval(v).shape, max(x.axis, 1)
                if len(shape) == 1:
                    xs[k] = rows_of(x, shape, self.batch, 1)
                else:
                    xs[k] = self._convert(x, shape, behind).array
                xs_axes[k] = behind - 1

        def inputs(carry: Sequence[Value], arrays: Sequence[Array]) -> list[Value]:
            return [*consts, *carry, *_with_batch(arrays, xs_axes)]

        slices = [jax.eval_shape(lambda a: a[0], x) for x in xs]
        axes = [a.axis if isinstance(a, Rows) else None for a in carry]
        while True:  # Each iteration may make more of the carry depend on the example.
            arrays = [
                jax.ShapeDtypeStruct(
                    a.shape if k is None else _merged(a.shape, k, self.batch), a.dtype
                )
                for k, a in zip(axes, avals[len(consts) : len(consts) + len(carry)], strict=True)
            ]
            results = self._result_axes(scan.body, inputs(_with_batch(arrays, axes), slices))
            joined = [
                after if before is None else before
                for before, after in zip(axes, results[: len(carry)], strict=True)
            ]
            if joined == axes:
                break
            axes = joined
        y_axes = results[len(carry) :]

        def body(arrays: Any, slices: Any) -> tuple[Any, Any]:
            results = self.run(scan.body, inputs(_with_batch(arrays, axes), slices))
            carry_out, ys = results[: len(carry)], results[len(carry) :]
            return (
                self._with_axes(carry_out, carry_shapes, axes),
                self._with_axes(ys, y_shapes, y_axes),
            )

        with in_scopes(eqn):
            out, ys = scan.run(body, self._with_axes(carry, carry_shapes, axes), xs)
        stacked: list[Value] = []
        for y, axis, shape in zip(ys, y_axes, y_shapes, strict=True):
            if axis is None:
                stacked.append(y)
            elif shape:
                stacked.append(Rows(y, axis + 1))
            else:  # [length, batch]
                stacked.append(Rows(jnp.swapaxes(y, 0, 1).ravel(), 0))
        return [*_with_batch(out, axes), *stacked]

    def _result_axes(self, closed: ClosedJaxpr, args: Sequence[Value]) -> list[int | None]:
        """Batch axes of the results, without computing them."""
        axes: list[int | None] = []

        def function(arrays: list[Array]) -> list[Array]:
            results = self.run(closed, _like(args, arrays))
            axes[:] = [r.axis if isinstance(r, Rows) else None for r in results]
            return [_array(r) for r in results]

        jax.eval_shape(function, [_array(a) for a in args])
        return axes

    def _with_axes(
        self,
        values: Sequence[Value],
        shapes: Sequence[Sequence[int]],
        axes: Sequence[int | None],
    ) -> list[Array]:
        """Arrays of values that are converted to these batch axes."""
        return [
            _array(value if axis is None else self._convert(value, shape, axis))
            for value, shape, axis in zip(values, shapes, axes, strict=True)
        ]


def _factor(eqn: JaxprEqn, operands: Sequence[Value]) -> Factor | None:
    """The axis along which an equation executes all examples; None if it needs `jax.vmap`."""
    axes = [a.axis if isinstance(a, Rows) else None for a in operands]
    first = next(k for k, a in enumerate(axes) if a is not None)
    own = separate_factor(eqn, axes)
    # Otherwise the other operands are converted to the axis of the first one.
    own = own or separate_factor(eqn, [a if k == first else None for k, a in enumerate(axes)])
    if own is None or None in own.results:
        return None
    for v, value, axis in zip(eqn.invars, operands, own.operands, strict=True):
        if isinstance(value, Rows) and axis is None:
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


def _like(values: Sequence[Value], arrays: Sequence[Array]) -> list[Value]:
    """Return these arrays as values with the batch axes of ``values``."""
    return [
        value._replace(array=a) if isinstance(value, Rows) else a
        for value, a in zip(values, arrays, strict=True)
    ]


def _with_batch(arrays: Sequence[Any], axes: Sequence[int | None]) -> list[Value]:
    return [a if axis is None else Rows(a, axis) for a, axis in zip(arrays, axes, strict=True)]
