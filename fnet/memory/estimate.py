"""Estimate the peak of a traced step without compiling it.

A step becomes operations on buffers. Calls are inlined, equal operations are merged. Models of
XLA follow. Which results are stored: an elementwise operation is computed where it is read, unless
that repeats expensive work or keeps two large operands alive in the place of one. In which order
operations run: the best of three, as XLA tries several schedules. What is alive: a result may be
written over an operand that nothing reads later.
"""

import dataclasses
import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fnet.jaxpr import (
    Scan,
    aval,
    called_jaxpr,
    inner_jaxprs,
    is_checkpoint,
    is_elementwise,
    nbytes,
    renames,
)
from fnet.jaxpr.axes import ROWS
from fnet.memory.cost import Cost, equation_cost

# Not computed twice where two operations read the result.
_EXPENSIVE = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 "  # noqa: SIM905
    "expm1 gather lgamma log log1p logistic pow rem rsqrt sin sinh sqrt tan tanh".split()
)
_MOVES = frozenset(
    "bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy dynamic_slice "  # noqa: SIM905
    "gather iota pad reshape rev select_n slice split squeeze transpose".split()
)
_UPDATES = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())  # noqa: SIM905
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot")
BARRIER = "optimization_barrier"
# XLA's CPU backend gives sums of more bytes to a library, with what they alone read.
_LIBRARY_SUM = 2**14


_FREE = Cost(0, 0)


@dataclasses.dataclass(eq=False)
class Array:
    """An array in memory.

    Attributes:
      bytes: Its size; 0 for a number.
      maker: The operation that makes it; None for an argument or a constant.
      of: The array whose memory it shares, itself if it has its own.
    """

    bytes: int
    maker: "Operation | None" = None
    of: "Array" = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.of = self.of or self


@dataclasses.dataclass(eq=False)
class Operation:
    """An operation on arrays.

    Attributes:
      name: Its primitive.
      inputs: Arrays that it reads.
      outputs: Arrays that it makes.
      working: Bytes that it takes while it runs, such as the body of a loop.
      launches: Kernels that start when it runs, if its results are stored.
      over: Inputs that outputs of a loop are written over, by position of the output.
      is_elementwise: Whether each element of a result depends on one of each operand.
      is_large: Whether it reads at most one array as large as its result.
      readers: Operations that read its outputs.
      tag: Equation of the loss that it belongs to, and whether it is of the backward pass.
      cost: FLOPs and bytes of running it.
      densities: For each output, FLOPs of computing it again for each byte; see `density`.
      iterations: Of a scan, how many.
      body: Of a scan, density, bytes and cost of each equation of an iteration.
    """

    name: str
    inputs: list[Array]
    outputs: list[Array]
    working: int = 0
    launches: int = 1
    over: dict[int, Array] = dataclasses.field(default_factory=dict)
    is_elementwise: bool = False
    is_large: bool = False
    readers: "list[Operation]" = dataclasses.field(default_factory=list)
    tag: tuple[int, bool] | None = None
    cost: Cost = _FREE
    densities: Sequence[float] = ()
    iterations: int = 1
    body: Sequence[tuple[float, int, Cost]] = ()


class Program:
    """Collects the operations of a jaxpr.

    Attributes:
      operations: In program order.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._known: dict[Any, list[Array]] = {}
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
        if renames(eqn) and len(inputs) == len(eqn.outvars):
            return inputs
        if name == "dot_general":
            inputs = [self._matrix(eqn, k, a) for k, a in enumerate(inputs)]
        key = _key(eqn, inputs)
        if key is None or key not in self._known:
            made = self.add(self._operation(eqn, inputs))
            if key is None:
                return made
            self._known[key] = made
        return self._known[key]

    def _barrier(self, inputs: list[Array]) -> list[Array]:
        outputs = [Array(a.bytes, of=a.of) for a in inputs]
        return self.add(Operation(BARRIER, inputs, outputs, launches=0))

    def _matrix(self, eqn: JaxprEqn, side: int, operand: Array) -> Array:
        """An operand of a product in the order of axes that the product reads; a copy is shared."""
        contracted, batch = (tuple(axes[side]) for axes in eqn.params["dimension_numbers"])
        rank = len(aval(eqn.invars[side]).shape)
        free = tuple(d for d in range(rank) if d not in {*contracted, *batch})
        order = (*batch, *(contracted + free if side else free + contracted))
        leads = batch == tuple(range(len(batch)))
        if not operand.bytes or order == tuple(range(rank)) or (leads and rank <= len(batch) + 2):
            return operand
        key = operand, order
        if key not in self._known:
            copy = Operation("copy", [operand], [Array(operand.bytes)])
            self._known[key] = self.add(copy)
        return self._known[key][0]

    def _operation(self, eqn: JaxprEqn, inputs: list[Array]) -> Operation:
        operation = Operation(eqn.primitive.name, inputs, [Array(nbytes(v)) for v in eqn.outvars])
        operation.cost = equation_cost(eqn)
        operation.densities = [density_of(eqn)] * len(eqn.outvars)
        if (scan := Scan.read(eqn)) is not None:
            operation.densities = _densities_of_stacks(scan)
            operation.iterations = scan.length
            operation.body = [
                (density_of(e), sum(map(nbytes, e.outvars)), equation_cost(e))
                for e in _called(scan.body.jaxpr)
            ]
            first = scan.num_consts
            operation.working, launches = _of_body(scan.body, first, scan.num_carry)
            operation.launches = scan.length * launches
            carry = inputs[first : first + scan.num_carry]
        elif eqn.primitive.name == "while":
            first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            carry = inputs[first:]
            body = eqn.params["body_jaxpr"]
            first = eqn.params["body_nconsts"]
            operation.working, operation.launches = _of_body(body, first, len(carry))
        else:
            carry = []
            bodies = (
                [] if eqn.primitive.name.startswith(("reduce", "scatter")) else inner_jaxprs(eqn)
            )
            own = sum(a.bytes for a in operation.outputs)
            inner = [_of_program(body) for body in bodies]
            operation.working = max((max(0, size - own) for size, _ in inner), default=0)
            operation.launches = max((launches for _, launches in inner), default=1)
        if eqn.primitive.name == "random_bits":  # two words of a block cipher
            operation.working = sum(map(_bytes, operation.outputs))
        operation.over = dict(enumerate(carry))
        operation.is_elementwise = is_elementwise(eqn)
        large = [a for a in {*inputs} if a.bytes >= max(map(_bytes, operation.outputs), default=0)]
        operation.is_large = len(large) <= 1
        return operation


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
    if name in ("iota", *_MOVES - {"gather"}):
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


def _bytes(array: Array) -> int:
    return array.bytes


def _key(eqn: JaxprEqn, inputs: list[Array]) -> Any:
    """Equal operations have equal keys; None for one that is never merged."""
    if eqn.effects or inner_jaxprs(eqn) or eqn.primitive.name.startswith("random"):
        return None
    operands = tuple(
        str(v.val) if isinstance(v, Literal) else a for v, a in zip(eqn.invars, inputs, strict=True)
    )
    shapes = tuple(str(aval(v)) for v in eqn.outvars)
    return eqn.primitive.name, operands, shapes, str(sorted(eqn.params.items(), key=str))


def _of_program(inner: ClosedJaxpr | Jaxpr) -> tuple[int, int]:
    """Bytes of an inner program besides its arguments, and its kernels."""
    closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])
    program = Program()
    results = program.run(closed, [Array(nbytes(v)) for v in closed.jaxpr.invars])
    return peak_of(program.operations, results, {})


def _of_body(body: ClosedJaxpr, first: int, count: int) -> tuple[int, int]:
    """Bytes and kernels of one iteration of a loop, whose carry is updated in place.

    Its slices of scanned arrays are made in the iteration, its outputs are written to their stacks.
    """
    program = Program()
    arguments = [Array(nbytes(v)) for v in body.jaxpr.invars]
    for a in arguments[first + count :]:
        program.add(Operation("dynamic_slice", [], [a]))
    results = program.run(body, arguments)
    for a in results[count:]:
        program.add(Operation("dynamic_update_slice", [Array(0), a], [Array(0)]))
    carry = arguments[first : first + count]
    over = {r: a for r, a in zip(results[:count], carry, strict=True) if r is not a}
    return peak_of(program.operations, results[:count], over)


# Stored results.


class _Stored:
    """Decides which results are stored, and finds what stored operations read.

    Attributes:
      operations: Operations whose results are stored, in program order.
      reads: Stored arrays that each of them reads, through those that are computed in place.
    """

    def __init__(self, operations: Sequence[Operation], results: Sequence[Array]) -> None:
        needed = _needed(operations, results)
        for o in needed:
            o.readers = [r for r in o.readers if r in needed]
        self._returned = {a.maker for a in results}
        self._in_library: set[Operation] = set()
        for o in reversed([*needed]):
            large = sum(map(_bytes, o.inputs)) >= _LIBRARY_SUM
            alone = len(o.readers) == 1 and o.readers[0] in self._in_library
            joins = alone and (o.is_elementwise or o.name == "broadcast_in_dim")
            if (o.name.startswith("reduce_") and large) or (joins and o not in self._returned):
                self._in_library.add(o)
        stored: set[Operation] = set()
        for o in reversed([*needed]):
            if (
                o in self._returned
                or not o.readers
                or not all(self._fuses(o, r) for r in o.readers)
            ):
                stored.add(o)
        self.operations = [o for o in needed if o in stored]
        self.reads: dict[Operation, list[Array]] = {}
        for o in needed:
            found: dict[Array, None] = {}
            for a in o.inputs:
                is_inside = a.maker is not None and a.maker in self.reads and a.maker not in stored
                found |= dict.fromkeys(self.reads[a.maker] if is_inside and a.maker else [a])
            self.reads[o] = list(found)

    def _fuses(self, o: Operation, reader: Operation) -> bool:
        """Whether an operation is computed where another one reads it."""
        is_sum = o.name.startswith("reduce_")
        if not (o.is_elementwise or o.name in _MOVES or is_sum):
            return False
        if is_sum and o in self._in_library:
            return False
        if reader.name.startswith(_PRODUCTS):
            return o.name == "transpose"
        if reader in self._in_library:
            return o in self._in_library
        if reader.name == "dynamic_update_slice" and reader.inputs[0] not in o.outputs:
            return True
        if not (reader.is_elementwise or reader.name in _MOVES or is_sum):
            return False
        several = len(o.readers) > 1
        if o.name in _EXPENSIVE or is_sum:
            return not several and reader.name != "broadcast_in_dim"
        return not several or o.is_large


def _needed(operations: Sequence[Operation], results: Sequence[Array]) -> "dict[Operation, None]":
    """Operations that results, or writes into stacks, are computed from, in order."""
    needed = {a.maker for a in results} - {None}
    for o in reversed(operations):
        if o in needed or (not any(map(_bytes, o.outputs)) and o.name == "dynamic_update_slice"):
            needed |= {o, *(a.maker for a in o.inputs)}
    return {o: None for o in operations if o in needed}


# Schedules, and what is alive.


def peak_of(
    operations: Sequence[Operation], results: Sequence[Array], over: dict[Array, Array]
) -> tuple[int, int]:
    """Bytes besides the arguments at the worst moment, in the best of three orders, and kernels."""
    stored = _Stored(operations, results)
    orders = (stored.operations, _depth_first(stored, results), _freeing_most(stored, results))
    most = min(_most_alive(order, stored, results, over) for order in orders)
    return most, sum(o.launches for o in stored.operations)


def _depth_first(stored: _Stored, results: Sequence[Array]) -> list[Operation]:
    """Each operation right after what it reads."""
    order: dict[Operation, None] = {}
    own = set(stored.operations)

    def before(o: Operation) -> Iterator[Operation]:
        return (a.maker for a in stored.reads[o] if a.maker in own and a.maker)

    for root in [*(a.maker for a in results), *stored.operations]:
        stack = [(root, False)] if root in own else []
        while stack:
            o, is_ready = stack.pop()
            if o is None or o in order:
                continue
            if is_ready:
                order[o] = None
            else:
                stack += [(o, True), *((q, False) for q in [*before(o)][::-1])]
    return list(order)


def _freeing_most(stored: _Stored, results: Sequence[Array]) -> list[Operation]:
    """Among the operations that can run, first the one that frees the most bytes."""
    own = {o: n for n, o in enumerate(stored.operations)}
    left = Counter(a.of for o in own for a in stored.reads[o])
    left.update(a.of for a in results)
    waits = {o: {a.maker for a in stored.reads[o] if a.maker in own} for o in own}
    readers: dict[Operation, list[Operation]] = {o: [] for o in own}
    for o, makers in waits.items():
        for maker in makers:
            if maker:
                readers[maker].append(o)

    def cost(o: Operation) -> int:
        made = 0 if o.name == BARRIER else sum(map(_bytes, o.outputs))
        counts = Counter(a.of for a in stored.reads[o])
        return made - sum(a.bytes for a, n in counts.items() if a.maker and left[a] == n)

    missing = {o: len(makers) for o, makers in waits.items()}
    ready = [(cost(o), n, o) for o, n in own.items() if not missing[o]]
    heapq.heapify(ready)
    order = []
    while ready:
        known, n, o = heapq.heappop(ready)
        if (now := cost(o)) > known and ready:  # what it would have freed is read once more
            heapq.heappush(ready, (now, n, o))
            if ready[0][2] is not o:
                continue
            heapq.heappop(ready)
        order.append(o)
        left.subtract(a.of for a in stored.reads[o])
        for r in readers[o]:
            missing[r] -= 1
            if not missing[r]:
                heapq.heappush(ready, (cost(r), own[r], r))
    return order


def _most_alive(
    order: Sequence[Operation],
    stored: _Stored,
    results: Sequence[Array],
    over: dict[Array, Array],
) -> int:
    """The most bytes that are alive at once, without arguments."""
    last = {a.of: t for t, o in enumerate(order) for a in stored.reads[o]}
    last |= {a.of: len(order) for a in results}
    now = most = 0
    alive: dict[Array, int] = {}
    for t, o in enumerate(order):
        dying = [a for a in dict.fromkeys(a.of for a in stored.reads[o]) if last[a] == t]
        free = [a for a in dying if a in alive]
        for k, a in enumerate(o.outputs if o.name != BARRIER else ()):
            if a in over and last.get(over[a], -1) <= t:
                continue
            place = _place(o, k, a, free)
            if place is not None:
                free.remove(place)
                alive[a] = alive.pop(place)
            else:
                alive[a] = a.bytes
                now += a.bytes
        most = max(most, now + o.working)
        for a in [*dying, *(a for a in o.outputs if a.of not in last)]:
            now -= alive.pop(a, 0)
    return most


def _place(o: Operation, k: int, made: Array, free: Sequence[Array]) -> Array | None:
    """An operand that nothing reads later, over which a result is written."""
    if k in o.over:
        return o.over[k].of if o.over[k].of in free else None
    if o.is_elementwise or o.name in _UPDATES or o.name in _MOVES:
        return next((a for a in free if a.bytes == made.bytes), None)
    return None
