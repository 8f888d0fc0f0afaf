"""ONNX programs of networks for images: a traced function, one node for each operation.

Only this module uses `onnx`. It writes what image networks compute in evaluation: convolutions,
products, sums over axes, elementwise operations and moves of elements. What depends on parameters
alone is computed when the file is written. The size of the batch stays open.

References:
  https://onnx.ai/onnx/operators: the operators, of opset 18.
"""

import itertools
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.extend.core import Literal

from fnet.jaxpr import Scan, called_jaxpr, custom_function, evaluate, renames

OPSET, _IR_VERSION = 18, 9
"""Versions that onnxruntime 1.24 and all later ones read."""


class UnsupportedError(Exception):
    """The network has an operation that is not written. The message names it."""


class _Ref(NamedTuple):
    """A result of a node: its name, and its shape and dtype."""

    name: str
    aval: Any


_Value = _Ref | np.ndarray
_Values = list[_Value]
_Emit = Callable[["_Writer", Any, _Values, Any], _Value | _Values]
"""Writes an equation with these inputs, whose first result has this shape and dtype."""


def to_onnx(
    function: Callable[[Array], Mapping[str, Array]],
    shape: Sequence[int],
    metadata: Mapping[str, str],
) -> bytes:
    """Write ``images float32 [N, *shape] -> {name: output}`` as an ONNX program, for any N.

    Raises:
      ImportError: if onnx is not installed.
      UnsupportedError: for an operation that has no row in the table here.
    """
    from onnx import TensorProto, checker, helper

    (batch,) = export.symbolic_shape("batch")
    image = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
    closed, outputs = jax.make_jaxpr(function, return_shape=True)(image)
    writer = _Writer("image")
    argument = _Ref("image", closed.in_avals[0])
    results = writer.inline(closed.jaxpr, closed.consts, [argument])
    writer.keep_needed(results)
    for name, value in zip(sorted(outputs), results, strict=True):
        writer.nodes.append(helper.make_node("Identity", [writer.name(value)], [name]))

    def tensor(name: str, aval: Any) -> Any:
        dims = ["N" if _is_open(dim) else int(dim) for dim in aval.shape]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

    graph = helper.make_graph(
        writer.nodes,
        "fnet",
        [tensor("image", argument.aval)],
        [tensor(name, outputs[name]) for name in sorted(outputs)],
        writer.initializers,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
        producer_name="fnet",
    )
    helper.set_model_props(model, dict(metadata))
    checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _is_open(dim: Any) -> bool:
    return not isinstance(dim, int | np.integer)


class _Writer:
    def __init__(self, image: str):
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._image = image
        self._numbers = itertools.count()
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], str] = {}

    def name(self, value: _Value) -> str:
        if isinstance(value, _Ref):
            return value.name
        from onnx import numpy_helper

        value = np.asarray(value, order="C")
        key = value.tobytes(), str(value.dtype), value.shape
        if key not in self._constants:
            name = self._constants[key] = f"c{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(value, name))
        return self._constants[key]

    def add(self, kind: str, inputs: Sequence[_Value], aval: Any, **attributes: Any) -> _Ref:
        from onnx import helper

        ref = _Ref(f"v{next(self._numbers)}", aval)
        names = [self.name(value) for value in inputs]
        self.nodes.append(helper.make_node(kind, names, [ref.name], **attributes))
        return ref

    def inline(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[_Value]) -> _Values:
        env: dict[Any, _Value] = {}

        def read(atom: Any) -> _Value:
            if not isinstance(atom, Literal):
                return env[atom]
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)

        env.update(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            results = self._equation(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, values: _Values) -> _Values:
        name = eqn.primitive.name
        inner = called_jaxpr(eqn) or custom_function(eqn)
        if inner is not None:
            return self.inline(inner.jaxpr, inner.consts, values)
        is_open = any(_is_open(dim) for var in eqn.outvars for dim in var.aval.shape)
        is_constant = not any(isinstance(value, _Ref) for value in values) and not is_open
        if is_constant and name != "dim_as_value":
            return [np.asarray(result) for result in evaluate(eqn, values)]
        pairs = zip(eqn.invars, eqn.outvars, strict=False)
        if renames(eqn) and all(a.aval.shape == b.aval.shape for a, b in pairs):
            return values[: len(eqn.outvars)]
        unsupported = [f"unsupported {name}"] if name not in _TABLE else []
        unsupported += [v.name for v in values if isinstance(v, _Ref) and " " in v.name]
        if unsupported:
            # It may not be needed: the nodes that lead to no output are dropped.
            return [_Ref(unsupported[0], var.aval) for var in eqn.outvars]
        written = _TABLE[name](self, eqn, values, eqn.outvars[0].aval)
        return written if isinstance(written, list) else [written]

    def keep_needed(self, results: Sequence[_Value]) -> None:
        """Drop nodes and constants that no result needs."""
        needed = {self.name(value) for value in results}
        for name in needed:
            if name.startswith("unsupported "):
                raise UnsupportedError(f"no operation {name.removeprefix('unsupported ')}")
        kept = []
        for node in reversed(self.nodes):
            if needed & {*node.output}:
                needed |= {*node.input}
                kept.append(node)
        self.nodes[:] = kept[::-1]
        self.initializers[:] = [tensor for tensor in self.initializers if tensor.name in needed]

    def shape(self, dims: Sequence[Any]) -> _Value:
        """Return a shape as int64 values; an open dimension is the batch size."""
        if not any(map(_is_open, dims)):
            return np.array(dims, np.int64)
        aval = jax.ShapeDtypeStruct((1,), np.int64)
        batch = self.add("Shape", [_Ref(self._image, None)], aval, start=0, end=1)
        parts = [batch if _is_open(dim) else np.array([dim], np.int64) for dim in dims]
        return self.add("Concat", parts, jax.ShapeDtypeStruct((len(dims),), np.int64), axis=0)


def _bitwise(kind: str) -> _Emit:
    def emit(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
        return w.add(kind if aval.dtype == bool else f"Bitwise{kind}", values, aval)

    return emit


def _composed(*kinds: str) -> _Emit:
    def emit(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
        for kind in kinds:
            values = [w.add(kind, values, aval)]
        return values[0]

    return emit


def _reduce(kind: str) -> _Emit:
    def emit(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
        axes = np.array(eqn.params["axes"], np.int64)
        if aval.dtype != bool:
            return w.add(kind, [values[0], axes], aval, keepdims=0)
        number = _as_dtype(w, values[0], jax.ShapeDtypeStruct(eqn.invars[0].aval.shape, np.int32))
        return _as_dtype(w, w.add(kind, [number, axes], aval, keepdims=0), aval)

    return emit


def _scan(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Values:
    scan = Scan.of(eqn)
    consts, carry, rows = scan.split(values)
    body = scan.body.jaxpr
    outputs: list[_Values] = []
    steps = range(scan.length)
    for i in reversed(steps) if scan.reverse else steps:
        own = [
            row[i]
            if isinstance(row, np.ndarray)
            else w.add("Gather", [row, np.array(i, np.int64)], var.aval, axis=0)
            for row, var in zip(rows, scan.split(body.invars)[2], strict=True)
        ]
        results = w.inline(body, scan.body.consts, [*consts, *carry, *own])
        carry = results[: scan.num_carry]
        outputs.append(results[scan.num_carry :])
    if scan.reverse:
        outputs.reverse()
    columns = zip(eqn.outvars[scan.num_carry :], zip(*outputs, strict=True), strict=False)
    return [*carry, *(_stack(w, column, 0, var.aval) for var, column in columns)]


def _transpose(w: _Writer, value: _Value, permutation: Sequence[int]) -> _Value:
    if list(permutation) == sorted(permutation):
        return value
    if isinstance(value, np.ndarray):
        return value.transpose(permutation)
    shape = tuple(value.aval.shape[i] for i in permutation)
    aval = jax.ShapeDtypeStruct(shape, value.aval.dtype)
    return w.add("Transpose", [value], aval, perm=list(permutation))


def _convolution(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    p = eqn.params
    numbers = p["dimension_numbers"]
    if p["batch_group_count"] != 1 or set(p["lhs_dilation"]) != {1}:
        raise UnsupportedError("no transposed convolution")
    before, after = zip(*p["padding"], strict=True)
    shape = tuple(aval.shape[i] for i in numbers.out_spec)
    y = w.add(
        "Conv",
        [_transpose(w, values[0], numbers.lhs_spec), _transpose(w, values[1], numbers.rhs_spec)],
        jax.ShapeDtypeStruct(shape, aval.dtype),
        strides=list(p["window_strides"]),
        dilations=list(p["rhs_dilation"]),
        pads=[*before, *after],
        group=p["feature_group_count"],
    )
    return _transpose(w, y, np.argsort(numbers.out_spec).tolist())


def _dot(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    ranks = [len(var.aval.shape) for var in eqn.invars]
    if not lhs_batch and (lhs_sum, rhs_sum) == ((ranks[0] - 1,), (0,)) and ranks[1] == 2:
        return w.add("MatMul", values, aval)
    letters = iter(string.ascii_lowercase)
    lhs = [next(letters) for _ in range(ranks[0])]
    rhs = [""] * ranks[1]
    for i, j in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        rhs[j] = lhs[i]
    rhs = [letter or next(letters) for letter in rhs]
    out = [lhs[i] for i in lhs_batch]
    out += [x for i, x in enumerate(lhs) if i not in (*lhs_sum, *lhs_batch)]
    out += [x for j, x in enumerate(rhs) if j not in (*rhs_sum, *rhs_batch)]
    equation = f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}"
    return w.add("Einsum", values, aval, equation=equation)


def _broadcast(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    shape, at = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    value = values[0]
    new = [i for i in range(len(shape)) if i not in at]
    if new:
        inner = jax.ShapeDtypeStruct(shape, aval.dtype)
        value = w.add("Unsqueeze", [value, np.array(new, np.int64)], inner)
    old = dict(zip(at, eqn.invars[0].aval.shape, strict=True))
    if all(i in old and _equal(old[i], dim) for i, dim in enumerate(shape)):
        return value
    kept = [1 if i in old and _equal(old[i], dim) else dim for i, dim in enumerate(shape)]
    return w.add("Expand", [value, w.shape(kept)], aval)


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b)


def _reshape(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    sizes = [-1 if _is_open(dim) else dim for dim in aval.shape]
    if sizes.count(-1) > 1:
        raise UnsupportedError("no reshape to two open dimensions")
    return w.add("Reshape", [values[0], np.array(sizes, np.int64)], aval)


def _stack(w: _Writer, values: Iterable[_Value], axis: int, aval: Any) -> _Value:
    parts = [w.add("Unsqueeze", [value, np.array([axis], np.int64)], aval) for value in values]
    return w.add("Concat", parts, aval, axis=axis)


def _pad(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    before, after, inside = zip(*eqn.params["padding_config"], strict=True)
    if any(inside):
        raise UnsupportedError("no padding between elements")
    pads = np.array([*before, *after], np.int64)
    return w.add("Pad", [values[0], pads, values[1]], aval)


def _slice(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    p, shape = eqn.params, eqn.invars[0].aval.shape
    strides = p["strides"] or (1,) * len(shape)
    rows = zip(shape, p["start_indices"], p["limit_indices"], strides, strict=True)
    return _cut(w, values[0], rows, aval)


def _cut(w: _Writer, value: _Value, rows: Iterable[tuple[Any, ...]], aval: Any) -> _Value:
    """Cut each axis by its row: size, start, limit and stride."""
    cut = [
        (start, limit, axis, stride)
        for axis, (size, start, limit, stride) in enumerate(rows)
        if not (start == 0 and _equal(limit, size) and stride == 1)
    ]
    parts = [np.array(column, np.int64) for column in zip(*cut, strict=True)]
    return w.add("Slice", [value, *parts], aval) if cut else value


def _split(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Values:
    sizes, at = eqn.params["sizes"], eqn.params["axis"]
    shape = eqn.invars[0].aval.shape
    whole, ends = [(size, 0, size, 1) for size in shape], np.cumsum(sizes)
    return [
        _cut(w, values[0], [*whole[:at], (shape[at], end - n, end, 1), *whole[at + 1 :]], var.aval)
        for n, end, var in zip(sizes, ends, eqn.outvars, strict=True)
    ]


def _gather(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    """Write a slice that begins at a constant index, or the choice of rows of one axis."""
    numbers, indices = eqn.params["dimension_numbers"], values[1]
    sizes, shape = eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    axes, dropped = numbers.start_index_map, numbers.collapsed_slice_dims
    last = [shape[axis] - sizes[axis] for axis in axes]
    if not isinstance(indices, np.ndarray) or ((indices < 0) | (indices > last)).any():
        raise UnsupportedError("no gather by other than constant indices inside an array")
    if indices.ndim == 1:
        first = dict(zip(axes, indices.tolist(), strict=True))
        starts = [first.get(axis, 0) for axis in range(len(shape))]
        rows = [(dim, i, i + n, 1) for dim, i, n in zip(shape, starts, sizes, strict=True)]
        y = _cut(w, values[0], rows, aval)
        return w.add("Squeeze", [y, np.array(dropped, np.int64)], aval) if dropped else y
    others = [*zip(sizes, shape, strict=True)]
    del others[axes[0]]
    new = tuple(i for i in range(len(aval.shape)) if i not in numbers.offset_dims)
    # As rows of one axis, the axes of the indices take its place.
    expected = tuple(range(axes[0], axes[0] + indices.ndim - 1))
    is_whole = new == expected and all(itertools.starmap(_equal, others))
    if len(axes) != 1 or axes != dropped or not is_whole:
        raise UnsupportedError("no gather of other than constant rows of one axis")
    return w.add("Gather", [values[0], indices[..., 0].astype(np.int64)], aval, axis=axes[0])


def _as_dtype(w: _Writer, value: _Value, aval: Any) -> _Ref:
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(aval.dtype))
    return w.add("Cast", [value], aval, to=kind)


def _select(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    which, *cases = values
    if len(cases) != 2 or eqn.invars[0].aval.dtype != bool:
        raise UnsupportedError("no choice of other than two values")
    return w.add("Where", [which, cases[1], cases[0]], aval)


def _window(kind: str, **options: Any) -> _Emit:
    def emit(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
        p = eqn.params
        size, strides, padding = p["window_dimensions"], p["window_strides"], p["padding"]
        if len(size) != 4 or (size[0], size[3], strides[0], strides[3]) != (1, 1, 1, 1):
            raise UnsupportedError("no window over other than rows and columns")
        if {*p["window_dilation"], *p["base_dilation"]} != {1}:
            raise UnsupportedError("no dilated window")
        y = w.add(
            kind,
            [_transpose(w, values[0], (0, 3, 1, 2))],
            jax.ShapeDtypeStruct(tuple(aval.shape[i] for i in (0, 3, 1, 2)), aval.dtype),
            kernel_shape=list(size[1:3]),
            strides=list(strides[1:3]),
            pads=[*(p[0] for p in padding[1:3]), *(p[1] for p in padding[1:3])],
            **options,
        )
        result = _transpose(w, y, (0, 2, 3, 1))
        count = np.array(size[1] * size[2], aval.dtype)
        return w.add("Mul", [result, count], aval) if kind == "AveragePool" else result

    return emit


def _round(w: _Writer, eqn: Any, values: _Values, aval: Any) -> _Value:
    if int(eqn.params["rounding_method"]) != 1:
        raise UnsupportedError("no rounding of halves away from zero")
    return w.add("Round", values, aval)


_SIMPLE = {
    **{"add": "Add", "add_any": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg"},
    **{"max": "Max", "min": "Min", "pow": "Pow", "exp": "Exp", "log": "Log", "tanh": "Tanh"},
    **{"sqrt": "Sqrt", "erf": "Erf", "abs": "Abs", "sign": "Sign", "floor": "Floor"},
    **{"ceil": "Ceil", "sin": "Sin", "cos": "Cos", "logistic": "Sigmoid", "lt": "Less"},
    **{"le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal"},
}
_TABLE: Mapping[str, _Emit] = {
    **{name: _composed(kind) for name, kind in _SIMPLE.items()},
    **{name: _bitwise(name.capitalize()) for name in ("and", "or", "xor", "not")},
    "rsqrt": _composed("Sqrt", "Reciprocal"),
    "ne": _composed("Equal", "Not"),
    "square": lambda w, eqn, values, aval: w.add("Mul", values * 2, aval),
    "erfc": lambda w, eqn, values, aval: w.add(
        "Sub", [np.ones((), aval.dtype), w.add("Erf", values, aval)], aval
    ),
    "expm1": lambda w, eqn, values, aval: w.add(
        "Sub", [w.add("Exp", values, aval), np.ones((), aval.dtype)], aval
    ),
    "log1p": lambda w, eqn, values, aval: w.add(
        "Log", [w.add("Add", [np.ones((), aval.dtype), *values], aval)], aval
    ),
    "integer_pow": lambda w, eqn, values, aval: w.add(
        "Pow", [values[0], np.array(eqn.params["y"], aval.dtype)], aval
    ),
    "round": _round,
    "clamp": lambda w, eqn, v, aval: w.add("Min", [w.add("Max", [v[1], v[0]], aval), v[2]], aval),
    "is_finite": lambda w, eqn, v, aval: w.add(
        "Not", [w.add("Or", [w.add("IsNaN", v, aval), w.add("IsInf", v, aval)], aval)], aval
    ),
    "select_n": _select,
    "convert_element_type": lambda w, eqn, values, aval: _as_dtype(w, values[0], aval),
    "argmax": lambda w, eqn, values, aval: _as_dtype(
        w, w.add("ArgMax", values[:1], aval, axis=eqn.params["axes"][0], keepdims=0), aval
    ),
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_and": _reduce("ReduceMin"),
    "reduce_or": _reduce("ReduceMax"),
    "reduce_window_max": _window("MaxPool"),
    "reduce_window_sum": _window("AveragePool", count_include_pad=1),
    "scan": _scan,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": lambda w, eqn, values, aval: _transpose(w, values[0], eqn.params["permutation"]),
    "concatenate": lambda w, eqn, values, aval: w.add(
        "Concat", values, aval, axis=eqn.params["dimension"]
    ),
    "stack": lambda w, eqn, values, aval: _stack(w, values, eqn.params["axis"], aval),
    "pad": _pad,
    "slice": _slice,
    "split": _split,
    "gather": _gather,
}
"""How each operation is written, by the name of its primitive."""
