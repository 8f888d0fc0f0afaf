"""Which results of operations are stored, in which order they run, and what is alive.

Models of XLA's CPU compiler (github.com/openxla/xla). Which results are stored: an elementwise
operation is computed where it is read, unless that repeats expensive work, reads two large arrays
in the place of one, or makes a kernel longer (`xla/service/instruction_fusion.cc` and
`cpu/cpu_instruction_fusion.cc`); large sums and what surrounds them are computed by a library
(`xla/backends/cpu/transforms/library_rewriter.cc`). In which order they run: the better of those
of `memory.CANDIDATE_OPTIONS` (`xla/service/hlo_memory_scheduler.cc`). What is alive: a result
may be written over an operand that nothing reads later.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fnet.cpu.workspaces import most_at_once
from fnet.memory.cost import Cost

# Not computed twice where two operations read the result.
_EXPENSIVE = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cosh digamma div erf erf_inv erfc exp exp2 "  # noqa: SIM905
    "expm1 gather lgamma log log1p logistic pow rem rsqrt sinh sqrt tan tanh".split()
)
MOVES = frozenset(
    "bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy dynamic_slice "  # noqa: SIM905
    "gather iota pad reshape rev select_n slice split squeeze transpose".split()
)
_SAME_INDEX = frozenset("convert_element_type copy select_n".split())  # noqa: SIM905
_UPDATES = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())  # noqa: SIM905
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot")
BARRIER = "optimization_barrier"
# Copies of an operation in one kernel, from which on XLA stores its result.
_MOST_COPIES = 15
# Not computed in two places of a kernel, where they need loops or branches of their own.
_BRANCHES = ("concatenate", "dynamic_update_slice", "pad", "reduce_")
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

    @property
    def is_filled(self) -> bool:
        """Whether fewer bytes than its own are read to make it."""
        made = self.maker is not None and self.maker.name in ("broadcast_in_dim", "iota")
        return made or not self.bytes

    @property
    def is_constant(self) -> bool:
        """Whether nothing is read to make it."""
        made = self.maker is not None and not any(a.bytes for a in self.maker.inputs)
        return (made and self.is_filled) or not self.bytes


@dataclasses.dataclass(eq=False)
class Operation:
    """An operation on arrays.

    Attributes:
      name: Its primitive.
      inputs: Arrays that it reads.
      outputs: Arrays that it makes.
      working: Bytes that it takes while it runs, such as the body of a loop.
      workspace: Bytes that a library takes on a CPU while it runs; see `fnet.cpu.workspaces`.
      launches: Kernels that start when it runs, if its results are stored.
      over: Inputs that outputs of a loop are written over, by position of the output.
      is_elementwise: Whether each element of a result depends on one of each operand.
      is_cheap_twice: Whether it reads at most one array of as many axes as its result.
      is_in_library: Whether the library that computes sums on a CPU can compute it.
      has_effect: Whether it runs though nothing reads its outputs, such as a write to a reference.
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
    workspace: int = 0
    launches: int = 1
    over: dict[int, Array] = dataclasses.field(default_factory=dict)
    is_elementwise: bool = False
    is_cheap_twice: bool = False
    is_in_library: bool = False
    has_effect: bool = False
    readers: "list[Operation]" = dataclasses.field(default_factory=list)
    tag: tuple[int, bool] | None = None
    cost: Cost = _FREE
    densities: Sequence[float] = ()
    iterations: int = 1
    body: Sequence[tuple[float, int, Cost]] = ()

    @property
    def is_same_index(self) -> bool:
        """Whether an element of a result depends on no other element of an operand."""
        return self.is_elementwise or self.name in _SAME_INDEX

    @property
    def bytes(self) -> int:
        """Bytes of what it makes."""
        return sum(a.bytes for a in self.outputs)

    def use(self, inner: "Usage", times: int = 1) -> None:
        """Set the usage of the program inside of it, which runs so many times."""
        self.working, self.workspace = inner.bytes, inner.workspace
        self.launches = times * inner.launches


class Stored:
    """Decides which results are stored, and finds what stored operations read.

    Args:
      operations: In program order.
      results: What they are needed for.

    Attributes:
      operations: Operations whose results are stored, in program order.
      reads: Stored arrays that each of them reads, through those that are computed in place, and
        whether an element of its result depends on no other element of them.
      makers: Stored operations that make what each of them reads.
    """

    def __init__(self, operations: Sequence[Operation], results: Sequence[Array]) -> None:
        needed = _needed(operations, results)
        for o in needed:
            o.readers = list(dict.fromkeys(r for r in o.readers if r in needed))
        returned = {a.maker for a in results}
        self._library = _calls_of_library(needed, returned)
        self._apart: set[Operation] = set()  # computed once
        self._find_apart(needed)
        stored: set[Operation] = set()
        # Operations in each kernel, by its last one, that index the result in their own way, and
        # how often the kernel computes it.
        indexing: dict[Operation, dict[Operation, set[Operation]]] = {}
        copies: dict[Operation, dict[Operation, int]] = {}
        for o in reversed(needed):
            found: dict[Operation, set[Operation]] = {}
            for r in o.readers:
                if self._fuses(o, r):
                    for kernel, by in indexing[r].items():
                        found.setdefault(kernel, set()).update(by if r.is_same_index else {r})
            counts = {kernel: sum(copies[q][kernel] for q in by) for kernel, by in found.items()}
            most = max(counts.values(), default=0)
            branches = o.name.startswith(_BRANCHES) and max(most, len(o.readers)) > 1
            if branches or (most > _MOST_COPIES and o.name != "broadcast_in_dim"):
                self._apart.add(o)
                found, counts = {}, {}
            if o in returned or not o.readers or not all(self._fuses(o, r) for r in o.readers):
                stored.add(o)
                found[o], counts[o] = {o}, 1
            indexing[o], copies[o] = found, counts
        self.operations = [o for o in needed if o in stored]
        self.reads: dict[Operation, dict[Array, bool]] = {}
        for o in needed:
            reads: dict[Array, bool] = {}
            for a in o.inputs:
                is_inside = a.maker in self.reads and self._fuses(a.maker, o)
                inner = self.reads[a.maker] if is_inside and a.maker else {a: True}
                for b, is_same in inner.items():
                    reads[b] = reads.get(b, True) and is_same and o.is_same_index
            self.reads[o] = reads
        self.makers = {
            o: [q for q in dict.fromkeys(a.maker for a in self.reads[o]) if q in stored and q]
            for o in self.operations
        }

    def _find_apart(self, needed: "dict[Operation, None]") -> None:
        """Find those that read several large arrays and are stored on a path to a reader."""
        bit = {o: 1 << n for n, o in enumerate(needed)}
        later: dict[Operation, int] = {}  # the operation and what depends on it, as bits
        for o in reversed(needed):
            later[o] = bit[o]
            for r in o.readers:
                later[o] |= later[r]
            if len(o.readers) < 2 or o.is_cheap_twice:
                continue
            wanted = sum(bit[r] for r in o.readers)
            paths, seen = [o], {o}
            while paths:
                q = paths.pop()
                on_path = [r for r in q.readers if later[r] & wanted]
                if not all(self._fuses(q, r) for r in on_path):
                    self._apart.add(o)
                    break
                paths += [r for r in on_path if r not in seen]
                seen |= {*on_path}

    def _fuses(self, o: Operation, reader: Operation) -> bool:
        """Whether an operation is computed where another one reads it."""
        if o in self._library or reader in self._library:
            return self._library.get(o) is self._library.get(reader)
        is_sum = o.name.startswith("reduce_")
        if o in self._apart or not (o.is_elementwise or o.name in MOVES or is_sum):
            return False
        if reader.name.startswith(_PRODUCTS):
            return o.name == "transpose"
        if reader.name == "dynamic_update_slice" and reader.inputs[0] not in o.outputs:
            return True
        if not (reader.is_elementwise or reader.name in MOVES or reader.name.startswith("reduce_")):
            return False
        if o.name in _EXPENSIVE or is_sum:
            return len(o.readers) == 1 and reader.name != "broadcast_in_dim"
        return True


def _calls_of_library(
    needed: "dict[Operation, None]", returned: "set[Operation | None]"
) -> dict[Operation, Operation]:
    """For operations that a call of a library computes, the last one of the call.

    A call grows from a sum: upwards by what nothing else reads, downwards as long as its result has
    one reader.
    """
    found: dict[Operation, Operation] = {}
    for seed in reversed(needed):
        if seed in found or not (seed.is_in_library and seed.name.startswith("reduce_")):
            continue
        root, call = seed, {seed: None}
        grows = True
        while grows:
            size = len(call)
            for o in call.copy():
                for maker in dict.fromkeys(a.maker for a in o.inputs):
                    joins = maker in needed and maker not in returned and maker not in found
                    if maker and joins and maker.is_in_library and call.keys() >= {*maker.readers}:
                        call[maker] = None
            if len(root.readers) == 1 and root not in returned:
                (reader,) = root.readers
                if reader.is_in_library and reader not in found:
                    root = reader
                    call[root] = None
            grows = len(call) > size
        found |= dict.fromkeys(call, root)
    return found


def _needed(operations: Sequence[Operation], results: Sequence[Array]) -> "dict[Operation, None]":
    """Operations that results, or writes into stacks, are computed from, in order."""
    needed = {a.maker for a in results} - {None}
    for o in reversed(operations):
        is_stack = not o.bytes and o.name == "dynamic_update_slice"
        if o in needed or o.has_effect or is_stack:
            needed |= {o, *(a.maker for a in o.inputs)}
    return {o: None for o in operations if o in needed}


# Schedules, and what is alive.


class Usage(NamedTuple):
    """Bytes besides arguments and workspaces, bytes of workspaces, and kernels of operations."""

    bytes: int
    workspace: int
    launches: int


def usage(
    operations: Sequence[Operation], results: Sequence[Array], over: dict[Array, Array]
) -> Usage:
    """Return the usage of operations at the worst moment, in the better of two orders."""
    stored = Stored(operations, results)
    orders = (_breadth_first(stored.makers), _depth_first(stored.makers, results))
    most, order = min(
        ((_most_alive(order, stored, results, over), order) for order in orders),
        key=lambda pair: pair[0],
    )
    workspace = most_at_once([o.workspace for o in order if o.workspace])
    return Usage(most, workspace, sum(o.launches for o in order))


def _breadth_first(makers: dict[Operation, list[Operation]]) -> list[Operation]:
    """Each operation as soon as what it reads is there."""
    readers: dict[Operation, list[Operation]] = {o: [] for o in makers}
    for o, own in makers.items():
        for q in own:
            readers[q].append(o)
    missing = {o: len(own) for o, own in makers.items()}
    order = [o for o, n in missing.items() if not n]
    for o in order:
        for r in readers[o]:
            missing[r] -= 1
            if not missing[r]:
                order.append(r)
    return order


def _depth_first(
    makers: dict[Operation, list[Operation]], results: Sequence[Array]
) -> list[Operation]:
    """Each operation right after what it reads, first what has more that is read again above it."""
    readers = Counter(q for own in makers.values() for q in own)
    roots = [o for o in dict.fromkeys(a.maker for a in results) if o in makers and o]
    readers.update(roots)
    rank: dict[Operation, tuple[int, int, int]] = {}
    total = 0
    for n, (o, own) in enumerate(makers.items()):
        total += o.bytes
        again = max(readers[o] - 1, 0) + sum(rank[q][0] for q in own)
        rank[o] = min(again, len(makers)), min(o.bytes + sum(rank[q][1] for q in own), total), n

    order: dict[Operation, None] = {}
    stack = [(o, False) for o in (*reversed(makers), *sorted(roots, key=rank.__getitem__))]
    while stack:
        o, is_ready = stack.pop()
        if is_ready:
            order[o] = None
        elif o not in order:
            stack += [(o, True), *((q, False) for q in sorted(makers[o], key=rank.__getitem__))]
    return list(order)


def _most_alive(
    order: Sequence[Operation], stored: Stored, results: Sequence[Array], over: dict[Array, Array]
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
            place = _place(o, k, a, free, stored.reads[o])
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


def _place(
    o: Operation, k: int, made: Array, free: Sequence[Array], reads: dict[Array, bool]
) -> Array | None:
    """An operand that nothing reads later, over which a result is written."""
    if k in o.over:
        return o.over[k].of if o.over[k].of in free else None
    if o.name in _UPDATES:
        return next((a for a in free if a is o.inputs[0].of and a.bytes == made.bytes), None)
    same = {a.of for a, is_same in reads.items() if is_same}
    return next((a for a in free if a in same and a.bytes == made.bytes), None)
