"""Estimate the peak of a traced step without compiling it.

A step becomes operations on buffers. Calls are inlined, equal operations are merged, operands get
the shape and the order of axes in which XLA reads them. `fnet.memory.buffers` follows them.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from fnet.backward_pass import DEAR
from fnet.cpu.workspaces import eigen_bytes, packed_bytes
from fnet.jaxpr import (
    Scan,
    While,
    aval,
    called_jaxpr,
    inner_jaxprs,
    is_checkpoint,
    is_elementwise,
    nbytes,
    renames,
)
from fnet.jaxpr.axes import ROWS
from fnet.memory.buffers import BARRIER, MOVES, Array, Operation, Usage, usage
from fnet.memory.cost import equation_cost

# Operations that the library of sums on a CPU takes, from so many bytes on; see
# `xla/backends/cpu/ynn_support.cc`.
_LIBRARY = frozenset(
    "abs add add_any broadcast_in_dim ceil cos div dot_general erf exp expm1 floor integer_pow log "  # noqa: SIM905
    "log1p logistic max min mul neg pow reduce_max reduce_min reduce_sum round sign sin sqrt "
    "square sub tan tanh".split()
)
_LIBRARY_DTYPES = (jnp.float32, jnp.float64)
_LEAST_IN_LIBRARY = 2**14
_OF_REFERENCES = ("new_ref", "get", "freeze")  # What is made has the memory of what is read.


class Program:
    """Collects the operations of a jaxpr.

    Args:
      on_cpu: Whether it runs on a CPU, which computes bfloat16 in float32.

    Attributes:
      operations: In program order.
    """

    def __init__(self, on_cpu: bool = True) -> None:
        self._on_cpu = on_cpu
        self.operations: list[Operation] = []
        self._known: dict[Any, list[Array]] = {}
        self._zeros: set[Array] = set()
        self._parts: dict[Any, list[Array]] = {}  # of a concatenation that is cut again
        self._tag: tuple[int, bool] | None = None

    def run(self, closed: ClosedJaxpr, arguments: Sequence[Array]) -> list[Array]:
        """Add the equations of a jaxpr, and return its results."""
        arrays: dict[Var, Array] = {v: Array(0) for v in closed.jaxpr.constvars}
        outer = self._tag
        arrays |= zip(closed.jaxpr.invars, arguments, strict=True)

        def read(atoms: Iterable[Any]) -> list[Array]:
            return [Array(0) if isinstance(v, Literal) else arrays[v] for v in atoms]

        for eqn in closed.jaxpr.eqns:
            self._tag = outer or _tag_of(eqn)
            arrays |= zip(eqn.outvars, self._equation(eqn, read(eqn.invars)), strict=True)
        self._tag = outer
        return read(closed.jaxpr.outvars)

    def add(self, operation: Operation) -> list[Array]:
        """Add an operation, and return its results."""
        operation.tag = operation.tag or self._tag
        for a in operation.outputs:
            a.maker = operation
        for a in dict.fromkeys(operation.inputs):
            if a.maker:
                a.maker.readers.append(operation)
        self.operations.append(operation)
        return operation.outputs

    def _equation(self, eqn: JaxprEqn, inputs: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        if (called := called_jaxpr(eqn, custom_derivatives=True)) is not None:
            # Rematerialized equations are not merged with the first run.
            if is_checkpoint(eqn) and eqn.params["prevent_cse"] and eqn.params["differentiated"]:
                inputs = self._barrier(inputs)
            return self.run(called, inputs)
        if name == BARRIER:
            return self._barrier(inputs)
        if _changes_nothing(eqn):
            return inputs[-1:]
        if len(inputs) == len(eqn.outvars) and (renames(eqn) or name in _OF_REFERENCES):
            if name == "name" and density_of(eqn) and inputs[0].maker:
                inputs[0].maker.densities = [density_of(eqn)]
            return inputs
        if name == "split" and (parts := self._parts.get((inputs[0], *_cut(eqn)))):
            return parts
        if name in ("dot_general", "conv_general_dilated"):
            inputs = [self._factor(eqn, k, a) for k, a in enumerate(inputs)]
        elif is_elementwise(eqn):
            inputs = [self._broadcast(eqn, v, a) for v, a in zip(eqn.invars, inputs, strict=True)]
        if name in ("add", "add_any") and (made := self._scatter_into(*inputs)):
            return made
        key = _key(eqn, inputs)
        if key is None or key not in self._known:
            made = self.add(self._operation(eqn, inputs))
            if key is None:
                return made
            self._known[key] = made
            if name == "concatenate":
                self._parts[(*made, *_cut(eqn))] = inputs
            if name == "broadcast_in_dim" and str(getattr(eqn.invars[0], "val", "")) == "0.0":
                self._zeros |= {*made}
        return self._known[key]

    def _scatter_into(self, a: Array, b: Array) -> list[Array] | None:
        """The sum of an array and of what is scattered into zeros: XLA scatters into the array."""
        for scattered, other in ((a, b), (b, a)):
            o = scattered.maker
            if o and o.name == "scatter-add" and o.inputs[0] in self._zeros:
                inputs, outputs = [other, *o.inputs[1:]], [Array(scattered.bytes)]
                return self.add(
                    dataclasses.replace(o, inputs=inputs, outputs=outputs, readers=[], tag=None)
                )
        return None

    def _barrier(self, inputs: list[Array]) -> list[Array]:
        outputs = [Array(a.bytes, of=a.of) for a in inputs]
        return self.add(Operation(BARRIER, inputs, outputs, launches=0))

    def _broadcast(self, eqn: JaxprEqn, operand: Any, array: Array) -> Array:
        """An operand of an elementwise operation in the shape of the result."""
        shape, own = aval(eqn.outvars[0]).shape, aval(operand)
        if math.prod(own.shape) == math.prod(shape):
            return array
        key = str(operand.val) if isinstance(operand, Literal) else array, own.dtype, shape
        if key not in self._known:
            made = Array(math.prod(shape) * own.dtype.itemsize)
            broadcast = Operation("broadcast_in_dim", [array], [made], is_cheap_twice=True)
            broadcast.is_in_library = own.dtype in _LIBRARY_DTYPES
            self._known[key] = self.add(broadcast)
        return self._known[key][0]

    def _factor(self, eqn: JaxprEqn, side: int, operand: Array) -> Array:
        """An operand of a product in the order of axes that the product reads; a copy is shared."""
        rank = len(aval(eqn.invars[side]).shape)
        if eqn.primitive.name == "conv_general_dilated":
            order = tuple(eqn.params["dimension_numbers"][side])
            is_read = order[:2] == ((rank - 1, rank - 2) if side else (0, rank - 1))
        else:
            contracted, batch = (tuple(axes[side]) for axes in eqn.params["dimension_numbers"])
            free = tuple(d for d in range(rank) if d not in {*contracted, *batch})
            order = (*batch, *(contracted + free if side else free + contracted))
            leads = batch == tuple(range(len(batch))) and rank <= len(batch) + 2
            is_read = leads or order == tuple(range(rank))
        if is_read or not operand.bytes:
            return operand
        key = operand, order
        if key not in self._known:
            copy = Operation("copy", [operand], [Array(operand.bytes)])
            self._known[key] = self.add(copy)
        return self._known[key][0]

    def _operation(self, eqn: JaxprEqn, inputs: list[Array]) -> Operation:
        outputs = [
            Array(nbytes(v) * (1 + (self._on_cpu and aval(v).dtype == jnp.bfloat16)))
            for v in eqn.outvars
        ]
        operation = Operation(_name(eqn), inputs, outputs, has_effect=bool(eqn.effects))
        operation.cost = equation_cost(eqn)
        operation.densities = [density_of(eqn)] * len(eqn.outvars)
        carry: list[Array] = []
        if (scan := Scan.read(eqn)) is not None:
            consts, carry, _ = scan.split(inputs)
            is_stack = [k >= len(carry) for k in range(len(eqn.outvars))]
            stacked, _ = dce_jaxpr(scan.body.jaxpr, is_stack)  # what iterations save, or run again
            operation.densities = _densities_of_stacks(scan)
            operation.iterations = scan.length
            operation.body = [
                (density_of(e), sum(map(nbytes, e.outvars)), equation_cost(e))
                for e in _called(stacked)
            ]
            operation.use(self._of_body(scan.body, len(consts), len(carry)), scan.length)
        elif eqn.primitive.name == "while":
            loop = While.of(eqn)
            _, consts, carry = loop.split(inputs)
            operation.use(self._of_body(loop.body, len(consts), len(carry)))
        elif not eqn.primitive.name.startswith(("reduce", "scatter")):
            inner = [self._of_program(body) for body in inner_jaxprs(eqn)]
            if inner:
                most = Usage(*map(max, zip(*inner, strict=True)))
                operation.use(most._replace(bytes=max(0, most.bytes - operation.bytes)))
        if eqn.primitive.name == "random_bits":  # two words of a block cipher
            operation.working = operation.bytes
        if self._on_cpu and eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            operation.workspace = _workspace(eqn)
        operation.over = dict(enumerate(carry))
        operation.is_elementwise = is_elementwise(eqn)
        rank = max((_rank(v) for v in eqn.outvars), default=0)
        operands = {a: _rank(v) for v, a in zip(eqn.invars, inputs, strict=True)}
        large = [a for a, n in operands.items() if n >= rank and not a.is_filled]
        operation.is_cheap_twice = len(large) <= 1
        sizes = [nbytes(v) for v in (*eqn.invars, *eqn.outvars)]
        operation.is_in_library = (
            self._on_cpu
            and eqn.primitive.name in _LIBRARY
            and max(sizes) >= _LEAST_IN_LIBRARY
            and all(aval(v).dtype in _LIBRARY_DTYPES for v in (*eqn.invars, *eqn.outvars))
        )
        return operation

    def _of_program(self, inner: Jaxpr) -> Usage:
        program = Program(self._on_cpu)
        results = program.run(ClosedJaxpr(inner, []), [Array(nbytes(v)) for v in inner.invars])
        return usage(program.operations, results, {})

    def _of_body(self, body: ClosedJaxpr, first: int, count: int) -> Usage:
        """Return the usage of an iteration of a loop, whose carry is updated in place.

        Its slices of scanned arrays are made in it, its outputs are written to their stacks.
        """
        program = Program(self._on_cpu)
        arguments = [Array(nbytes(v)) for v in body.jaxpr.invars]
        for a in arguments[first + count :]:
            program.add(Operation("dynamic_slice", [], [a]))
        results = program.run(body, arguments)
        for a in results[count:]:
            program.add(Operation("dynamic_update_slice", [Array(0), a], [Array(0)]))
        carry = arguments[first : first + count]
        over = {r: a for r, a in zip(results[:count], carry, strict=True) if r is not a}
        return usage(program.operations, results[:count], over)


def _name(eqn: JaxprEqn) -> str:
    """The name of a primitive, except where XLA treats it in another way."""
    name = eqn.primitive.name
    if name == "div" and isinstance(eqn.invars[1], Literal):
        return "mul"
    if name == "concatenate" and (
        len(eqn.invars) > 8 or eqn.params["dimension"] == len(aval(eqn.outvars[0]).shape) - 1 > 0
    ):
        return "concatenate, not fused"
    return name


def _cut(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The axis and the sizes of the parts of a split or a concatenation."""
    if eqn.primitive.name == "split":
        return eqn.params["axis"], *map(int, eqn.params["sizes"])
    axis = eqn.params["dimension"]
    return axis, *(aval(v).shape[axis] for v in eqn.invars)


def _workspace(eqn: JaxprEqn) -> int:
    """Bytes that a library takes on a CPU for a product."""
    lhs, rhs, result = map(nbytes, (*eqn.invars, *eqn.outvars))
    shape, kernel, made = (aval(v).shape for v in (*eqn.invars, *eqn.outvars))
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "dot_general":
        (contracted, _), (batch, _) = numbers
        return packed_bytes(shape, batch, contracted, lhs, rhs, result)
    channels, features = shape[numbers.lhs_spec[1]], made[numbers.out_spec[1]]
    elements = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
    groups = eqn.params["feature_group_count"]
    is_dilated = any(d > 1 for d in eqn.params["lhs_dilation"])
    return eigen_bytes(lhs, channels, result, features, elements, groups, is_dilated)


def _changes_nothing(eqn: JaxprEqn) -> bool:
    """Whether XLA drops an operation: a sum over axes of size 1, a maximum with minus infinity."""
    if eqn.primitive.name == "max":
        return isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == -math.inf
    is_sum = eqn.primitive.name.startswith("reduce_") and len(eqn.invars) == 1
    return is_sum and aval(eqn.invars[0]).size == aval(eqn.outvars[0]).size


def density_of(eqn: JaxprEqn) -> float:
    """FLOPs of an equation for each byte of its result; see `density`."""
    return density(eqn.primitive.name, [aval(v) for v in eqn.invars], eqn.params)


def density(name: str, avals: Sequence[Any], params: Mapping[str, Any]) -> float:
    """FLOPs that a byte of a result takes: 0 if it is computed where it is read, 100 if unknown."""
    row = ROWS.get(name)
    shapes = [getattr(a, "shape", ()) for a in avals]
    size = getattr(getattr(avals[0], "dtype", None), "itemsize", 4) if avals else 4
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return float(2 * math.prod(shapes[0][d] for d in contracted) / size)
    if name == "conv_general_dilated":
        features = shapes[1][params["dimension_numbers"].rhs_spec[0]]
        return float(2 * math.prod(shapes[1]) / features / size)
    if name == "name" and params["name"] == DEAR:
        return 1e6
    if name in ("iota", *MOVES - {"gather"}):
        return 0.0
    if row is None or "jaxpr" in params or name in ("sort", "top_k"):
        return 100.0
    if all(isinstance(d, int) for d in params.get("axes", [None])):
        return float(max(math.prod(shapes[0][d] for d in params["axes"]), 1)) / size
    if row.is_identity or (row.is_elementwise and not row.is_expensive):
        return 0.0
    return 10 / size if row.is_expensive else 4 / size


def _called(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Equations of a jaxpr and of what it calls."""
    for eqn in jaxpr.eqns:
        called = called_jaxpr(eqn, custom_derivatives=True)
        yield from _called(called.jaxpr) if called else [eqn]


def _densities_of_stacks(scan: Scan) -> list[float]:
    """The density of each result of a scan: as in its body, infinite for a carry."""
    made = {v: density_of(e) for e in scan.body.jaxpr.eqns for v in e.outvars}
    return [
        math.inf if isinstance(v, Literal) else made.get(v, math.inf)
        for v in scan.body.jaxpr.outvars
    ]


_TAG = re.compile(r"fnet@(\d+)")


def _tag_of(eqn: JaxprEqn) -> tuple[int, bool] | None:
    """The number of the named scope ``fnet@7`` of an equation, and whether it is transposed."""
    stack = str(eqn.source_info.name_stack)
    found = _TAG.search(stack) if "@" in stack else None
    return (int(found[1]), "transpose(" in stack) if found else None


def _rank(v: Any) -> int:
    return sum(n > 1 for n in aval(v).shape)


def _key(eqn: JaxprEqn, inputs: list[Array]) -> Any:
    """Equal operations have equal keys; None for one that is never merged."""
    if eqn.effects or [*inner_jaxprs(eqn)] or eqn.primitive.name.startswith("random"):
        return None
    operands = tuple(
        str(v.val) if isinstance(v, Literal) else a for v, a in zip(eqn.invars, inputs, strict=True)
    )
    shapes = tuple(str(aval(v)) for v in eqn.outvars)
    return eqn.primitive.name, operands, shapes, str(sorted(eqn.params.items(), key=str))
