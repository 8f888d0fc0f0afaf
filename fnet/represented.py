"""Run a function with weights in parts: quantized, or with a low-rank update.

`run` traces the function on the shapes of the full weights and interprets it. A matrix product
with a weight in parts multiplies by the parts. The sum ``W + A B`` is never materialized, and a
quantized ``W`` is dequantized for one product at a time, in the backward pass again. Any other
operation gets the materialized weight.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from fnet.backward_pass import FINISH_TOGETHER, finish_together
from fnet.jaxpr import Executor, Site, aval, evaluate, in_scopes
from fnet.jaxpr.primitives import DotGeneral, Gather, Slice
from fnet.precision import multiply, sum_dtype
from fnet.quantization import Layout, Quantized, is_quantized

Adapter = Mapping[str, Any]
"""``{"a": [*stack, in, rank], "b": [*stack, rank, out]}``, with DoRA also ``"magnitude"``
[*stack, out]."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "adapter"],
    meta_fields=["layout", "scale", "view", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight in parts: ``W + scale A B``, where ``W`` may be quantized.

    With a magnitude m, output o is scaled by ``m_o / |W_o + scale A B_o|`` (DoRA).

    Attributes:
      base: ``W``, an array or `Quantized`.
      adapter: The update, or None.
      layout: Role of each axis of ``W``.
      scale: Factor of the update.
      view: For each axis of the value in the program, the axis of ``W``, counted from the end.
      dtype: Dtype of the value in the program.
    """

    base: Any
    adapter: Adapter | None
    layout: Layout
    scale: float
    view: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, base: Any, adapter: Adapter | None, layout: Layout, scale: float) -> "Weight":
        """Return a weight with the axes of its array."""
        return cls(base, adapter, layout, scale, tuple(range(-base.ndim, 0)), base.dtype)

    @property
    def stack(self) -> tuple[int, ...]:
        """Axes that count layers."""
        return tuple(range(-self.base.ndim, -len(self.layout.roles)))

    def map_parts(self, f: Callable[[Any], Any], view: tuple[int, ...]) -> "Weight":
        """Apply a function to all arrays, such as a slice of layers, and set the view."""
        base, adapter = jax.tree.map(f, (self.base, self.adapter))
        return dataclasses.replace(self, base=base, adapter=adapter, view=view)

    def materialize(self) -> Array:
        """Return the value in the program."""
        if self.adapter is None:
            stored = _stored(self.base, self.dtype)
        else:
            stored = updated(self.base, self.adapter, self.layout, self.scale).astype(self.dtype)
        return jnp.transpose(stored, [axis + stored.ndim for axis in self.view])


def _stored(base: Any, dtype: Any) -> Array:
    array: Array = base.dequantize(dtype) if is_quantized(base) else base.astype(dtype)
    return array


def updated(base: Any, adapter: Adapter, layout: Layout, scale: float) -> Array:
    """Return ``W + scale A B`` in float32 or wider, with DoRA scaled to the magnitude."""
    dtype = sum_dtype(base.dtype)
    a, b = (adapter[name].astype(dtype) for name in ("a", "b"))
    delta = jnp.matmul(a, b, precision="highest") * scale
    matrix = layout.as_matrix(_stored(base, dtype)) + delta
    if "magnitude" in adapter:
        matrix = matrix * _dora_scales(base, adapter, layout, scale)[..., None, :]
    return layout.from_matrix(matrix, base.shape[-len(layout.roles) :])


def norms(base: Any, adapter: Adapter, layout: Layout, scale: float) -> Array:
    """Return the norm of ``W + scale A B`` for each output, without that sum.

    ``|W_o + s A B_o|^2 = |W_o|^2 + 2 s (A^T W)_o B_o + s^2 B_o A^T A B_o``.

    Returns:
      [*stack, out], float32 or wider, without gradient.
    """
    dtype = sum_dtype(base.dtype)
    matrix = layout.as_matrix(_stored(base, dtype))
    a, b = (jax.lax.stop_gradient(adapter[name]).astype(dtype) for name in ("a", "b"))
    product = functools.partial(jnp.einsum, precision="highest")
    met = product("...ir,...io->...ro", a, matrix)
    of_update = product("...ri,...io->...ro", product("...ir,...is->...rs", a, a), b)
    squares = jnp.square(matrix).sum(-2) + (b * (2 * scale * met + scale**2 * of_update)).sum(-2)
    return jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(squares, 0)))


def _dora_scales(base: Any, adapter: Adapter, layout: Layout, scale: float) -> Array:
    """Return the factor of each output, [*stack, out]. It has no gradient through the norm."""
    length = norms(base, adapter, layout, scale)
    factors: Array = adapter["magnitude"].astype(length.dtype) / jnp.where(length == 0, 1, length)
    return factors


def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of parameters take quantized weights.

    Args:
      f: A function of pytrees, such as ``model.apply`` or a loss. Arguments that are no arrays,
        such as ``train=True``, are static.

    Returns:
      A function with the same arguments, whose leaves may be `fnet.quantization.Quantized`. It
      dequantizes a weight for one operation at a time.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import quantization, represented
      >>> params = {"kernel": jax.random.normal(jax.random.key(0), (64, 8))}
      >>> quantized = quantization.quantize(params, "int8")
      >>> apply = represented.wrap(lambda params, x: x @ params["kernel"])
      >>> x = jnp.ones((2, 64))
      >>> bool(jnp.allclose(apply(quantized, x), x @ params["kernel"], atol=0.5))
      True
    """

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return run(f, args, kwargs)

    return wrapped


def run(f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``f(*args, **kwargs)``, where some leaves are `Weight` or `Quantized`, as for arrays.

    Leaves that are no arrays, such as ``train=True``, are static.
    """
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_in_parts)
    arrays = Weight | Quantized | jax.Array | np.ndarray | np.generic
    numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, arrays)]
    given = [leaves[i] for i in numbers]
    values = [Weight.of(a, None, a.layout, 1.0) if is_quantized(a) else a for a in given]

    def of_arrays(*arrays: Any) -> Any:
        full = list(leaves)
        for i, array in zip(numbers, arrays, strict=True):
            full[i] = array
        args, kwargs = jax.tree.unflatten(structure, full)
        return f(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*map(_shape, values))
    results = [_whole(value) for value in _InParts().run(closed, values)]
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _is_in_parts(leaf: Any) -> bool:
    return isinstance(leaf, Weight | Quantized)


def _shape(value: Any) -> Any:
    """Return what `jax.make_jaxpr` takes for a value: arrays as they are, with their sharding."""
    if not isinstance(value, Weight):
        return value
    if not is_quantized(value.base):
        return value.base
    return jax.ShapeDtypeStruct(value.base.shape, value.base.dtype)


def _whole(value: Any) -> Any:
    return value.materialize() if isinstance(value, Weight) else value


# Equations.


class _InParts(Executor[Any]):
    """Execute equations on arrays and weights in parts. A loop carries whole weights."""

    def form(self, value: Any) -> bool | None:
        return isinstance(value, Weight) or None

    def lower(self, value: Any, form: bool | None, atom: Any) -> Any:
        """Materialize a weight where its parts cannot go."""
        return value if form else _whole(value)

    def unstack(self, value: Any, atom: Any) -> tuple[Any, bool | None]:
        if not isinstance(value, Weight) or not _counts_layers(value):
            return _whole(value), None
        return dataclasses.replace(value, view=value.view[1:]), True

    def stack(self, arrays: Any, form: bool | None, atom: Any) -> Any:
        if not isinstance(arrays, Weight):
            return arrays
        return dataclasses.replace(arrays, view=(-arrays.base.ndim, *arrays.view))

    def visit(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        if not any(isinstance(value, Weight) for value in states):
            return evaluate(eqn, states)
        return super().visit(eqn, states, site)

    def custom(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        """Keep custom derivatives, which know whole arrays."""
        return self.equation(eqn, states, site)

    def equation(self, eqn: JaxprEqn, states: list[Any], site: Site) -> Sequence[Any]:
        if eqn.primitive is FINISH_TOGETHER:
            # The gradients of adapters are ordered, in place of the gradients of their weights.
            trained = [v.adapter if isinstance(v, Weight) else v for v in states]
            leaves, structure = jax.tree.flatten(trained)
            ordered = jax.tree.unflatten(structure, finish_together(*leaves))
            return [
                dataclasses.replace(v, adapter=new) if isinstance(v, Weight) else new
                for v, new in zip(states, ordered, strict=True)
            ]
        return _RULES.get(eqn.primitive.name, _materialized)(eqn, states)


def _materialized(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """Evaluate an equation of materialized weights, and materialize them for its backward pass."""

    def function(*inputs: Any) -> list[Any]:
        return evaluate(eqn, [_whole(value) for value in inputs])

    outputs: Sequence[Any] = jax.checkpoint(function)(*inputs)
    return outputs


def _convert(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        return _materialized(eqn, inputs)
    return [dataclasses.replace(inputs[0], dtype=dtype)]


def _transpose(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    view = tuple(inputs[0].view[axis] for axis in eqn.params["permutation"])
    return [dataclasses.replace(inputs[0], view=view)]


def _slice_layers(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    weight, *starts = inputs
    shape, sizes = aval(eqn.invars[0]).shape, aval(eqn.outvars[0]).shape
    if not isinstance(weight, Weight) or not _counts_layers(weight) or sizes[1:] != shape[1:]:
        return _materialized(eqn, inputs)
    if starts:
        (start, *_), size = starts, sizes[0]
        return [
            weight.map_parts(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), weight.view)
        ]
    part = Slice.of(eqn)
    first, last, stride = part.start_indices[0], part.limit_indices[0], (part.strides or (1,))[0]
    return [weight.map_parts(lambda a: jax.lax.slice_in_dim(a, first, last, stride), weight.view)]


def _gather_layers(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """Choose stacked layers by number, as in ``w[i]`` for data ``i``: one, or one per example."""
    weight, indices = inputs
    gather, rank = Gather.of(eqn), aval(eqn.outvars[0]).ndim
    n = gather.dimension_numbers
    sizes, batch = aval(eqn.invars[0]).shape, aval(eqn.invars[1]).ndim - 1
    takes_layers = (
        isinstance(weight, Weight)
        and _counts_layers(weight)
        and (n.collapsed_slice_dims, n.start_index_map, n.operand_batching_dims) == ((0,), (0,), ())
        and gather.slice_sizes == (1, *sizes[1:])
        and n.offset_dims == tuple(range(batch, rank))
        and gather.mode == jax.lax.GatherScatterMode.CLIP
        and batch <= 1
    )
    if not takes_layers:
        return _materialized(eqn, inputs)
    view = weight.view if batch else weight.view[1:]
    return [weight.map_parts(lambda a: jnp.take(a, indices[..., 0], axis=0, mode="clip"), view)]


def _squeeze(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    weight = inputs[0]
    if tuple(eqn.params["dimensions"]) != (0,) or not _counts_layers(weight):
        return _materialized(eqn, inputs)
    return [weight.map_parts(lambda a: jax.lax.squeeze(a, (0,)), weight.view[1:])]


def _mark_as_varying(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """Mark every part of a weight as different on each device of a `jax.shard_map`."""
    mark = functools.partial(eqn.primitive.bind, **eqn.params)
    return [inputs[0].map_parts(mark, inputs[0].view)]


def _counts_layers(weight: Weight) -> bool:
    return weight.view[0] in weight.stack[:1]


def _dot_general(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    if all(isinstance(value, Weight) for value in inputs):
        return _materialized(eqn, inputs)
    side = 0 if isinstance(inputs[0], Weight) else 1
    weight, x = inputs[side], inputs[1 - side]
    if weight.adapter is None:
        return _frozen_product(eqn, inputs)
    contracted, batch = DotGeneral.of(eqn).dimension_numbers
    axes = [weight.view[d] for d in contracted[side]]
    roles = [r for r in "io" if sorted(axes) == list(weight.layout.axes(r))]
    if not roles or tuple(weight.view[d] for d in batch[side]) != weight.stack:
        return _materialized(eqn, inputs)
    with in_scopes(eqn):
        scales = None
        if "magnitude" in weight.adapter:
            scales = _dora_scales(weight.base, weight.adapter, weight.layout, weight.scale)
            if roles == ["o"]:
                where = _places(weight, axes, batch[1 - side], contracted[1 - side])
                x, scales = _scaled(weight, x, scales, "o", where), None
        update = _low_rank_product(eqn, side, weight, x, roles[0], axes)
    frozen = dataclasses.replace(weight, adapter=None)
    inputs = [frozen, x] if side == 0 else [x, frozen]
    (y,) = _frozen_product(eqn, inputs)
    with in_scopes(eqn):
        y = y + update
        if scales is not None:
            free = [v for v in weight.view if v in weight.layout.axes("o")]
            first = len(batch[0]) if side == 0 else y.ndim - len(free)
            dims = range(len(batch[0])), range(first, first + len(free))
            y = _scaled(weight, y, scales, "o", _places(weight, free, *dims))
    return [y]


def _frozen_product(eqn: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    weights = [value for value in inputs if isinstance(value, Weight)]
    if any(is_quantized(w.base) or w.dtype != w.base.dtype for w in weights):
        return _materialized(eqn, inputs)
    return evaluate(eqn, [_whole(value) for value in inputs])


def _low_rank_product(
    eqn: JaxprEqn, side: int, weight: Weight, x: Array, role: str, axes: Sequence[int]
) -> Array:
    """Return the product of ``x`` and ``scale A B``: [.., rank] first, then all outputs.

    ``side`` is the weight's position among the operands, ``role`` whether its inputs or outputs are
    contracted, and ``axes`` are those axes, in the order of the axes of ``x``.
    """
    assert weight.adapter is not None
    contracted, batch = DotGeneral.of(eqn).dimension_numbers
    layout, stack = weight.layout, len(weight.stack)
    sizes = {r: [weight.base.shape[a] for a in layout.axes(r)] for r in "io"}
    a, b = (weight.adapter[name].astype(x.dtype) for name in ("a", "b"))
    a = _reshape(a, (*a.shape[:-2], *sizes["i"], a.shape[-1]))
    b = _reshape(b, (*b.shape[:-1], *sizes["o"]))
    first, second = (a, b) if role == "i" else (b, a)
    own = layout.axes(role)
    # Inputs of A come after the stack, outputs of B after the rank.
    start = {"i": stack, "o": stack + 1}
    dims = tuple(start[role] + own.index(axis) for axis in axes)
    stacked = tuple(range(stack))
    precision, out = DotGeneral.of(eqn).precision, aval(eqn.outvars[0])
    low = jax.lax.dot_general(
        x, first, ((contracted[1 - side], dims), (batch[1 - side], stacked)), precision=precision
    )
    if weight.scale != 1:
        low = low * weight.scale
    rank_of_second = stack if role == "i" else second.ndim - 1
    rank_dims, stack_dims = ((low.ndim - 1,), (rank_of_second,)), (stacked, stacked)
    free = [v for v in weight.view if v in layout.axes("o" if role == "i" else "i")]
    order = sorted(range(len(free)), key=free.__getitem__)
    operands = low, second
    if side == 0:
        operands, rank_dims = operands[::-1], rank_dims[::-1]
    y = jax.lax.dot_general(
        *operands, (rank_dims, stack_dims), precision=precision, preferred_element_type=out.dtype
    )
    first_free = stack if side == 0 else y.ndim - len(free)
    if order != list(range(len(free))):
        # The value in the program has its axes in another order than the weight.
        permutation = list(range(y.ndim))
        for i, position in enumerate(order):
            permutation[first_free + position] = first_free + i
        y = jnp.transpose(y, permutation)
    return y.astype(out.dtype)


def _reshape(a: Array, shape: tuple[int, ...]) -> Array:
    return a if a.shape == shape else a.reshape(shape)


def _places(
    weight: Weight, axes: Sequence[int], batch: Sequence[int], dims: Sequence[int]
) -> dict[int, int]:
    return dict(zip(weight.stack, batch, strict=True)) | dict(zip(axes, dims, strict=True))


def _scaled(weight: Weight, x: Array, scales: Array, role: str, places: Mapping[int, int]) -> Array:
    """Multiply the axes of ``x`` that belong to a weight's outputs by the factors [*stack, out]."""
    own = weight.layout.axes(role)
    sizes = [weight.base.shape[axis] for axis in own]
    scales = _reshape(scales, (*scales.shape[:-1], *sizes))
    dims = [places[axis] for axis in (*weight.stack, *own)]
    order = sorted(range(len(dims)), key=dims.__getitem__)
    if order != list(range(len(dims))):
        scales = jnp.transpose(scales, order)
    shape = [n if i in dims else 1 for i, n in enumerate(x.shape)]
    return multiply(x, scales.reshape(shape))


_RULES: dict[str, Callable[[JaxprEqn, list[Any]], Sequence[Any]]] = {
    "convert_element_type": _convert,
    "copy": lambda eqn, inputs: inputs,
    "name": lambda eqn, inputs: inputs,
    "transpose": _transpose,
    "pvary": _mark_as_varying,
    "slice": _slice_layers,
    "dynamic_slice": _slice_layers,
    "gather": _gather_layers,
    "squeeze": _squeeze,
    "optimization_barrier": lambda eqn, inputs: list(jax.lax.optimization_barrier(inputs)),
    "dot_general": _dot_general,
}
