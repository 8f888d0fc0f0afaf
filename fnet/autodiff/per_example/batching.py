"""Execute the traced program of one example for a whole batch.

`run_for_batch` is a `jax.vmap` that knows where the batch goes. The loss is traced for a batch of
one, so most of its values have an axis of length 1 that counts examples. A rule per primitive
makes this axis as long as the batch and executes the same equation once: a matrix product of
[1, time, features] becomes one of [batch, time, features]. `jax.vmap` would add an axis instead,
and XLA keeps some arrays twice if they have axes of length 1. An equation without a rule, or with
operands that its rule does not cover, is vectorized by `jax.vmap`.

So every result is, by construction, what the program gives for each example alone. Rules may only
say that one equation treats the rows of an axis alike.

An example's value of shape ``s`` is stored as `Rows`: an array of the same number of axes, in which
one axis is ``batch * s[axis]`` long, with examples outermost.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, primitives

from fnet.backward_pass import is_finish_together
from fnet.jaxpr import (
    CHECKPOINT,
    ELEMENTWISE,
    Scan,
    aval,
    called_jaxpr,
    evaluate,
    in_scopes,
    interpret,
    primitive_names,
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


class Plan(NamedTuple):
    """How one equation is executed for all examples at once.

    Attributes:
      axis: The axis that counts examples in the results.
      params: Parameters of the equation that change.
      operands: The axis that counts examples in each operand, after a conversion. None leaves
        the operand unchanged.
      reshapes: Whether the equation is a reshape to the new shape of its result.
    """

    axis: int
    params: dict[str, Any] = {}  # noqa: RUF012
    operands: Sequence[int | None] = ()
    reshapes: bool = False


class Operands(NamedTuple):
    """An equation with the batch axes of its operands.

    Attributes:
      eqn: The equation, for one example.
      axes: The axis that counts examples in each operand, None if all examples share it.
      batch: Number of examples.
      rows: Number of examples that the equation was traced for.
    """

    eqn: JaxprEqn
    axes: Sequence[int | None]
    batch: int
    rows: int = 1

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the equation."""
        params: dict[str, Any] = self.eqn.params
        return params

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the operands for one example."""
        return [aval(v).shape for v in self.eqn.invars]

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the first result for one example."""
        shape: tuple[int, ...] = aval(self.eqn.outvars[0]).shape
        return shape

    def only_first(self) -> int | None:
        """The batch axis of the first operand, if all examples share the other operands."""
        first, *others = self.axes
        return None if any(a is not None for a in others) or not self.shapes[0] else first

    def first_axis(self) -> int:
        """The batch axis of the first operand that has one."""
        return next(a for a in self.axes if a is not None)


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
        if name in UNCHANGED or is_finish_together(eqn):
            return self._unchanged(eqn, operands)
        if not is_separable(eqn):
            return self._one_by_one(eqn, operands)
        axes = [a.axis if isinstance(a, Rows) else None for a in operands]
        rule = rule_of(name)
        plan = rule(Operands(eqn, axes, self.batch)) if rule else None
        return self._vmap(eqn, operands) if plan is None else self._execute(eqn, operands, plan)

    def _execute(self, eqn: JaxprEqn, operands: list[Value], plan: Plan) -> list[Value]:
        targets = plan.operands or [None] * len(operands)
        arrays = [
            _array(a if axis is None else self._convert(a, aval(v).shape, axis))
            for a, v, axis in zip(operands, eqn.invars, targets, strict=True)
        ]
        shapes = [_merged(aval(v).shape, plan.axis, self.batch) for v in eqn.outvars]
        if plan.reshapes:
            with in_scopes(eqn):
                outputs = [jax.lax.reshape(arrays[0], shapes[0])]
        else:
            outputs = evaluate(eqn.replace(params=eqn.params | plan.params), arrays)
        for a, shape in zip(outputs, shapes, strict=True):
            if a.shape != shape:
                raise AssertionError(f"the rule of {eqn.primitive} gave {a.shape}, not {shape}")
        return [Rows(a, int(plan.axis)) for a in outputs]  # Rules compute axes with numpy.

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


_SEPARABLE = frozenset(
    p.name
    for module in (jax.lax, jax.lax.linalg, primitives)
    for p in vars(module).values()
    if isinstance(p, Primitive)
) - {"rng_bit_generator", "rng_uniform"} | ELEMENTWISE | {
    "checkpoint", "debug_callback", "pallas_call", "ragged_dot_general", "random_unwrap",
    "random_wrap", "shard_map", "squeeze",
}  # fmt: skip
"""Primitives that `jax.vmap` applies to each example alone.

The batching rule of another primitive may see all examples: callbacks, `jax.custom_batching`, the
primitives of other libraries.
"""


def is_separable(eqn: JaxprEqn) -> bool:
    """Whether `jax.vmap` of an equation certainly applies it to each example alone."""
    if eqn.primitive.name in _FUSED_ATTENTION:
        return _keeps_rows_apart(eqn)
    names = primitive_names(eqn)
    # `jax.vmap` generates the numbers of all "rbg" keys from the first one.
    avals = (aval(v) for v in (*eqn.invars, *eqn.outvars))
    is_rbg = any("rbg" in str(a.dtype) for a in avals if hasattr(a, "dtype"))
    return names <= _SEPARABLE and not (is_rbg and any(n.startswith("random_") for n in names))


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


# Rules: how an equation for one example becomes one for all. None: it needs `jax.vmap`.

Rule = Callable[[Operands], Plan | None]


def rule_of(name: str) -> Rule | None:
    """Return the rule of a primitive, None if it has none."""
    if name in ELEMENTWISE:
        return _elementwise
    if name not in _RULES and name.startswith(("reduce_", "arg")):
        return _reduce
    return _RULES.get(name)


UNCHANGED = ("device_put", "optimization_barrier", "pbroadcast", "pcast", "pvary", "random_clone")
"""Primitives whose results are their operands."""

_SAME_SHAPES = ("add_any", "clamp", "select_n")
"""Elementwise primitives that do not broadcast axes of length 1."""


def _elementwise(op: Operands) -> Plan | None:
    out, axis = op.out, op.first_axis()
    strict = op.eqn.primitive.name in _SAME_SHAPES
    targets: list[int | None] = []
    for shape, own in zip(op.shapes, op.axes, strict=True):
        if own is None and not shape:
            if strict and not out:
                return None  # A literal cannot become an array of the batch.
            targets.append(None)
        elif len(shape) != len(out) or (shape and own is not None and shape[axis] != out[axis]):
            return None  # A row of the operand is repeated within the example.
        else:
            repeats = own is None and shape[axis] == 1 and not strict
            targets.append(None if repeats else axis)
    return Plan(axis, operands=targets)


def _dot_general(op: Operands) -> Plan | None:
    contracting, batch = op.params["dimension_numbers"]
    pairs = list(zip(*batch, strict=True))
    for position, pair in enumerate(pairs):
        if all(own in (None, axis) for own, axis in zip(op.axes, pair, strict=True)):
            return Plan(position, operands=pair)
    if all(axis is not None for axis in op.axes):
        return None
    k = 0 if op.axes[0] is not None else 1
    axis: Any = op.axes[k]
    if axis in contracting[k]:
        return None
    removed = (*contracting[k], *batch[k])
    new_axis = len(batch[k]) + axis - sum(r < axis for r in removed)
    if k == 1:
        new_axis += len(op.shapes[0]) - len(contracting[0]) - len(batch[0])
    return Plan(new_axis)


def _aligned(op: Operands, dimension: int) -> Plan | None:
    """All operands become rows of the same axis, which the equation does not work along."""
    axis = op.first_axis()
    if not op.out or axis == dimension:
        return None
    return Plan(axis, operands=[axis] * len(op.shapes))


def _stack(op: Operands) -> Plan | None:
    axis = op.first_axis()
    if not op.shapes[0]:
        return None
    return Plan(axis + (axis >= op.params["axis"]), operands=[axis] * len(op.shapes))


def _unstack(op: Operands) -> Plan | None:
    axis, removed = op.first_axis(), op.params["axis"]
    return None if axis == removed else Plan(axis - (axis > removed))


def _tile(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None or op.params["reps"][axis] != 1 else Plan(axis)


def _gather(op: Operands) -> Plan | None:
    """Index a shared table per example, or one table per example."""
    dims, (table, indices) = op.params["dimension_numbers"], op.axes
    shapes = op.shapes
    index_axes = [i for i in range(len(op.out)) if i not in dims.offset_dims]
    for axis, paired in zip(
        dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True
    ):
        if table in (None, axis) and indices in (None, paired):
            return Plan(index_axes[paired], operands=[axis, paired])
    if table is None and indices is not None and indices < len(index_axes):
        return Plan(index_axes[indices])
    if table is not None and indices is None:
        removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
        sizes = list(op.params["slice_sizes"])
        whole = sizes[table] == shapes[0][table]
        if whole and table not in (*removed, *dims.start_index_map):
            sizes[table] *= op.batch
            axis = dims.offset_dims[table - sum(r < table for r in removed)]
            return Plan(axis, {"slice_sizes": tuple(sizes)})
    return None


def _dynamic_update_slice(op: Operands) -> Plan | None:
    """Overwrite the same slice of each example."""
    axis = op.first_axis()
    if any(a is not None for a in op.axes[2:]) or not op.out:
        return None
    if op.shapes[0][axis] != op.shapes[1][axis]:
        return None
    return Plan(axis, operands=[axis, axis, *[None] * (len(op.axes) - 2)])


def _scatter(op: Operands) -> Plan | None:
    """Update one array per example, or the same indices of each example."""
    dims, (operand, indices, updates) = op.params["dimension_numbers"], op.axes
    index_axes = [i for i in range(len(op.shapes[2])) if i not in dims.update_window_dims]
    for axis, paired in zip(
        dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True
    ):
        targets = axis, paired, index_axes[paired]
        if all(own in (None, target) for own, target in zip(op.axes, targets, strict=True)):
            return Plan(axis, operands=targets)
    if indices is not None:
        return None
    shape, update_shape = op.shapes[0], op.shapes[2]
    inserted = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window = [axis for axis in range(len(shape)) if axis not in inserted]
    for axis, update_axis in zip(window, dims.update_window_dims, strict=True):
        fits = operand in (None, axis) and updates in (None, update_axis)
        whole = update_shape[update_axis] == shape[axis]
        if fits and whole and axis not in dims.scatter_dims_to_operand_dims:
            return Plan(axis, operands=[axis, None, update_axis])
    return None


def _same_axis(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None else Plan(axis)


def _reduce(op: Operands) -> Plan | None:
    axis, axes = op.only_first(), op.params.get("axes")
    if axis is None or axes is None or axis in axes or any(isinstance(a, str) for a in axes):
        return None
    return Plan(axis - sum(a < axis for a in axes))


def _cumulative(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None or axis == op.params["axis"] else Plan(axis)


def _broadcast_in_dim(op: Operands) -> Plan | None:
    axis = op.only_first()
    if axis is None:
        return None
    shape = list(op.params["shape"])
    new_axis = int(op.params["broadcast_dimensions"][axis])
    if shape[new_axis] != op.shapes[0][axis]:
        return None
    shape[new_axis] *= op.batch
    return Plan(new_axis, {"shape": tuple(shape)})


def _transpose(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None else Plan(tuple(op.params["permutation"]).index(axis))


def _reshape(op: Operands) -> Plan | None:
    """Examples stay outermost in an axis with as many elements before it as now."""
    shape, axis, out = op.shapes[0], op.axes[0], op.out
    if op.params.get("dimensions") is not None and op.eqn.primitive.name == "reshape":
        return None  # It also transposes.
    if axis is None or not out:
        return None if axis is None else Plan(0, reshapes=True)
    before = math.prod(shape[:axis])
    candidates = [i for i, n in enumerate(out) if math.prod(out[:i]) == before and n % op.rows == 0]
    if not candidates:
        return None
    # Prefer an axis of the same length: it is the axis itself.
    same = [i for i in candidates if out[i] == shape[axis]] if shape else []
    return Plan((same or candidates)[0], reshapes=True)


def _convolution(op: Operands) -> Plan | None:
    dims, axis = op.params["dimension_numbers"], op.only_first()
    if axis != dims.lhs_spec[0] or op.params["batch_group_count"] != 1:
        return None
    return Plan(dims.out_spec[0])


def _window(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None or not _keeps_rows(op.params, axis) else Plan(axis)


def _keeps_rows(params: dict[str, Any], axis: int) -> bool:
    names = "window_dimensions", "window_strides", "base_dilation"
    sizes = [params[name][axis] for name in names if name in params]
    return all(n == 1 for n in sizes) and not any(params["padding"][axis])


def _select_and_scatter_add(op: Operands) -> Plan | None:
    axis = op.first_axis()
    return Plan(axis, operands=[axis, axis]) if _keeps_rows(op.params, axis) else None


def _leading(count: int) -> Rule:
    """Rule of an equation that works along the last ``count`` axes of its operands."""

    def rule(op: Operands) -> Plan | None:
        axis = op.first_axis()
        if any(len(shape) <= axis + count for shape in op.shapes):
            return None
        return Plan(axis, operands=[axis] * len(op.shapes))

    return rule


def _fft(op: Operands) -> Plan | None:
    return _leading(len(op.params["fft_lengths"]))(op)


def _random_bits(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None else Plan(axis)


def _random_wrap(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None or axis >= len(op.out) else Plan(axis)


def _pad(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None or any(op.params["padding_config"][axis]) else Plan(axis)


def _slice(op: Operands) -> Plan | None:
    axis = op.only_first()
    if axis is None or op.shapes[0][axis] != op.out[axis]:
        return None
    name = "limit_indices" if "limit_indices" in op.params else "slice_sizes"
    sizes = list(op.params[name])
    sizes[axis] *= op.batch
    return Plan(axis, {name: tuple(sizes)})


def _reverse(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None or axis in op.params["dimensions"] else Plan(axis)


def _bitcast(op: Operands) -> Plan | None:
    axis = op.only_first()
    return None if axis is None or len(op.shapes[0]) != len(op.out) else Plan(axis)


_FUSED_ATTENTION = ("dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper")
"""Primitives of cuDNN's attention in JAX. An array without elements is an option that is absent."""


def _keeps_rows_apart(attention: JaxprEqn) -> bool:
    """Whether an equation of `_FUSED_ATTENTION` has one row per example in all of its arrays."""
    offsets_and_pages = attention.invars[6:10]
    _, sums_bias_gradient = attention.params["variadic_args"]
    return not (
        attention.params["dropout_rate"]  # The mask depends on the position in the batch.
        or sums_bias_gradient
        or any(math.prod(aval(v).shape) for v in offsets_and_pages)
    )


def _fused_attention(op: Operands) -> Plan | None:
    is_whole_batch = op.rows > 1
    if not _keeps_rows_apart(op.eqn) or (is_whole_batch and any(op.axes)):
        return None
    return Plan(0, operands=[0 if math.prod(shape) else None for shape in op.shapes])


_RULES: dict[str, Rule] = {
    "add_any": _elementwise,
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "cholesky": _leading(2),
    "concatenate": lambda op: _aligned(op, op.params["dimension"]),
    "conv_general_dilated": _convolution,
    "cumlogsumexp": _cumulative,
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumprod": _cumulative,
    "cumsum": _cumulative,
    "dot_general": _dot_general,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "eigh": _leading(2),
    "fft": _fft,
    "gather": _gather,
    "lu": _leading(2),
    "pad": _pad,
    "pmax": _reduce,
    "pmin": _reduce,
    "psum": _reduce,
    "qr": _leading(2),
    "random_bits": _random_bits,
    "random_unwrap": _random_bits,
    "random_wrap": _random_wrap,
    "reduce_window_max": _window,
    "reduce_window_sum": _window,
    "reshape": _reshape,
    "rev": _reverse,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    "select_and_scatter_add": _select_and_scatter_add,
    "sharding_constraint": _same_axis,
    "slice": _slice,
    "sort": lambda op: _aligned(op, op.params["dimension"]),
    "split": _cumulative,
    "squeeze": _reshape,
    "stack": _stack,
    "stop_gradient": _same_axis,
    "svd": _leading(2),
    "tile": _tile,
    "top_k": _leading(1),
    "transpose": _transpose,
    "triangular_solve": _leading(2),
    "unstack": _unstack,
} | dict.fromkeys(_FUSED_ATTENTION, _fused_attention)
