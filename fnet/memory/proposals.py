"""Choose what to save for the backward pass within a number of bytes: an integer program.

Each array of a loss (`fnet.memory.graph`) is saved, moved to host memory, or rematerialized when
the backward pass reaches its window. `Planner.solve` minimizes the time of rematerialization.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fnet import measured
from fnet.memory.cost import FLOPS_PER_BYTE
from fnet.memory.graph import Graph, Name, Operation, Tensor, merge
from fnet.memory.windows import Window

_OUT_OF_NODES = 1  # scipy's status
# Time of moving a byte to or from the host, in the unit of `Cost.time`. An H100 computes 1,200
# FLOPs in float32 while PCIe 5 x16 moves one byte.
_HOST_SLOWDOWN = 600.0

Offloads = Literal["nothing", "loops", "all"]
"""Which arrays may be moved to host memory: none, arrays in loops, or all."""


class Proposal(NamedTuple):
    """A choice for every array.

    Attributes:
      windows: Windows of the loss, in forward order.
      bytes: Predicted bytes that are saved or rematerialized at the peak.
      time: Predicted additional time, with fused elementwise operations.
    """

    windows: tuple[Window, ...]
    bytes: int
    time: float


@dataclasses.dataclass(eq=False)
class Planner:
    """Solves the integer program of a loss for any number of bytes.

    Attributes:
      graph: Arrays and operations of the loss.
      offloads: What may be moved to host memory.
    """

    graph: Graph
    offloads: Offloads = "nothing"

    @functools.cached_property
    def plain_bytes(self) -> int:
        """Bytes that the backward pass needs of the plain loss."""
        return sum(self._plain_piece_bytes)

    @functools.cached_property
    def _plain_piece_bytes(self) -> list[int]:
        sizes = [0] * len(self.graph.pieces)
        needed = dict.fromkeys(itertools.chain.from_iterable(self.graph.needs))
        for t in needed:
            if t not in self.graph.fused and t.copy_of not in needed:
                sizes[t.piece] += t.saved_bytes
        return sizes

    @functools.cached_property
    def _partitions(self) -> list[list[int]]:
        """The window of each piece, for windows of several sizes."""
        found: list[list[int]] = []
        pieces, sizes = self.graph.pieces, self._plain_piece_bytes
        for size in measured.WINDOW_SIZES:
            starts = merge(pieces, sizes, size * self.plain_bytes)[1]
            windows = [bisect.bisect(starts, i) - 1 for i in range(len(pieces))]
            if windows not in found:
                found.append(windows)
        return found

    @functools.cached_property
    def _programs(self) -> "list[_Program]":
        small = measured.SMALL * self.plain_bytes
        return [_Program(self.graph, p, small, self.offloads) for p in self._partitions]

    def solve(self, limit: int, plain: bool = True) -> Proposal | None:
        """Return the fastest choice that is predicted to need at most ``limit`` bytes.

        Args:
          limit: Bytes that are saved or rematerialized at the peak.
          plain: Whether windows may save all their residuals. XLA schedules them less tightly.

        Returns:
          The proposal, or None if no choice needs so few bytes.
        """
        bounds = [(p.relaxed(limit, plain), n) for n, p in enumerate(self._programs)]
        promising = sorted((b, n) for b, n in bounds if b is not None)
        best: Proposal | None = None
        for bound, number in promising[:3]:
            if best is not None and (1 - measured.GAP) * best.time <= bound:
                continue
            proposal = self._programs[number].solve(limit, plain)
            if proposal and (best is None or proposal.time < best.time):
                best = proposal
        return best

    @functools.cached_property
    def smallest(self) -> int:
        """Lowest number of bytes that a choice is predicted to need."""
        return min(p.smallest for p in self._programs)


class KeptProposal(NamedTuple):
    """Rows that regions keep.

    Attributes:
      names: Equation and output of each.
      bytes: Their bytes.
      time: Time of computing again what the backward pass needs besides.
    """

    names: frozenset[Name]
    bytes: int
    time: float


class KeptRows:
    """Chooses rows that regions keep for the backward pass.

    Args:
      make_graph: Returns the graph of all regions; see `fnet.memory.graph.analyze_regions`. It is
        called when a time or a choice is asked for, since a plan may need neither.
    """

    def __init__(self, make_graph: Callable[[], Graph]) -> None:
        self._make_graph = make_graph
        self._known: dict[int, KeptProposal | None] = {}

    @functools.cached_property
    def graph(self) -> Graph:
        """The graph of all regions."""
        return self._make_graph()

    @functools.cached_property
    def _program(self) -> "_Program":
        made = sum(t.saved_bytes for ts in self.graph.needs for t in ts)
        windows = range(len(self.graph.pieces))
        small = measured.SMALL * made
        return _Program(self.graph, windows, small, "nothing", traffic=2.0)

    @functools.cached_property
    def again(self) -> float:
        """Time of what runs again if nothing is kept."""
        if not self.graph.pieces:
            return 0.0
        program = self._program
        return program.relaxed(program.smallest + 1, plain=False) or 0.0  # rounded down

    def solve(self, limit: int) -> KeptProposal | None:
        """Return the fastest choice of at most ``limit`` bytes; None if it would be nothing."""
        if limit not in self._known:
            self._known[limit] = self._solve(limit)
        return self._known[limit]

    def _solve(self, limit: int) -> KeptProposal | None:
        proposal = self._program.solve(limit, plain=False)
        if proposal is None:
            return None
        names = frozenset(n for w in proposal.windows for n in w.saved)
        sizes = {t.name: t.saved_bytes for t in self.graph.tensors if t.name in names}
        bytes_ = sum(sizes.values())
        return KeptProposal(names, bytes_, proposal.time) if bytes_ else None


class _Program:
    """The integer program for given windows.

    Columns are binary: whether an array is saved, whether it is offloaded, whether an operation
    runs again, whether a window is plain. ``stored`` columns are arrays that plain windows save.
    ``traffic`` is the time of saving a byte: plain windows save it, too, but chunks of a region
    write and read it in addition.
    """

    def __init__(
        self,
        graph: Graph,
        windows: Sequence[int],
        small: float,
        offloads: Offloads,
        *,
        traffic: float = 1e-9,
    ):
        self.graph, self.windows = graph, windows
        self.traffic = traffic
        self.columns: dict[Any, int] = {}
        self.cost: list[float] = []
        self.integral: list[int] = []
        self.always = {t for t in graph.tensors if t.name and t.saved_bytes <= small}
        self.offloads = offloads
        self.rows: list[dict[int, float]] = []
        self.lower: list[float] = []
        self.peaks: list[int] = []
        self._build()

    def _column(self, key: Any, cost: float = 0.0, integral: bool = False) -> int:
        if key not in self.columns:
            self.columns[key] = len(self.cost)
            self.cost.append(cost)
            self.integral.append(integral)
        return self.columns[key]

    def _at_least(self, terms: dict[int, float], bound: float) -> None:
        self.rows.append(terms)
        self.lower.append(bound)

    def _saved(self, t: Tensor) -> dict[int, float]:
        """Columns whose sum is whether an array outlives the forward pass."""
        terms = {self._column(("save", t), self.traffic * t.saved_bytes, True): 1.0}
        in_loop = t.saved_bytes > t.bytes
        allowed = self.offloads == "all" or (self.offloads == "loops" and in_loop)
        if allowed and t.saved_bytes >= measured.SMALLEST_OFFLOADED:
            cost = 2 * _HOST_SLOWDOWN * t.saved_bytes
            terms[self._column(("offload", t), cost, True)] = 1.0
        return terms

    def _runs(self, o: Operation, piece: int) -> int:
        if ("run", o) in self.columns:
            return self.columns["run", o]
        column = self._column(("run", o), o.cost.flops / FLOPS_PER_BYTE + o.written)
        for t in o.inputs:
            if t not in self.always:
                self._at_least(self._available(t, piece) | {column: -1.0}, 0.0)
        return column

    def _available(self, t: Tensor, piece: int) -> dict[int, float]:
        """Columns of which one is set if an array exists while a piece is rematerialized."""
        terms = self._saved(t) if t.name else {}
        if t.operation and self.windows[t.piece] == self.windows[piece]:
            terms[self._runs(t.operation, t.piece)] = 1.0
        return terms

    def _build(self) -> None:
        count = self.windows[-1] + 1
        here: list[dict[int, float]] = [{} for _ in range(count)]  # bytes at a window's backward
        after: list[dict[int, float]] = [{} for _ in range(count)]  # bytes while later ones run
        fixed_here, fixed_after = [0.0] * count, [0.0] * count
        stored: set[Tensor] = set()
        needed = {(self.windows[n], t) for n, ts in enumerate(self.graph.needs) for t in ts}
        named = {t.copy_of: t for t in self.graph.tensors if t.copy_of}

        def add(row: dict[int, float], column: int, size: float) -> None:
            row[column] = row.get(column, 0.0) + size

        for number, needs in enumerate(self.graph.needs):
            w = self.windows[number]
            plain = self._column(("plain", w), 0.0, True)
            for t in needs:
                if t in self.always:
                    continue
                if self.windows[t.piece] != w:
                    self._at_least(self._saved(t), 1.0)
                    continue
                self._at_least(self._available(t, number) | {plain: 1.0}, 1.0)
                if t in stored or t in self.graph.fused or (w, t.copy_of) in needed:
                    continue
                stored.add(t)
                # The array is in memory here, and with a plain window while later ones run.
                fixed_here[w] += t.bytes
                column = self._column(("stored", t))
                name = t if t.name else named.get(t)
                kept = self._saved(name) if name and name not in self.always else {}
                self._at_least(kept | {column: 1.0, plain: -1.0}, 0.0)
                add(after[w], column, t.saved_bytes)
                if t.saved_bytes > t.bytes:
                    add(here[w], column, t.saved_bytes - t.bytes)
                if t.name:
                    self.columns[("needed", t)] = -1
        for t in self.always:
            fixed_after[self.windows[t.piece]] += t.saved_bytes
            fixed_here[self.windows[t.piece]] += t.saved_bytes
        for (kind, key), column in list(self.columns.items()):
            if kind not in ("save", "offload"):
                continue
            w = self.windows[key.piece]
            is_needed = ("needed", key) in self.columns
            if kind == "save":
                add(after[w], column, key.saved_bytes)
                if key.copy_of in stored:
                    # Rematerialized too, because autodiff reads it before it is named.
                    both = self._column(("both", key))
                    self._at_least({both: 1.0, column: -1.0, self.columns["plain", w]: 1.0}, 0.0)
                    column = both
                add(here[w], column, key.saved_bytes - (key.bytes if is_needed else 0))
            elif not is_needed:
                add(here[w], column, key.bytes)
        before_window = itertools.accumulate(fixed_after, initial=0.0)
        self.constants = [a + b for a, b in zip(before_window, fixed_here, strict=False)]
        # The solver needs numbers near 1, so bytes are in units of the largest peak.
        self.unit = max(*self.constants, *(t.saved_bytes for t in self.graph.tensors), 1.0)
        # Bytes of all windows before, as columns of their own, keep the rows short.
        before: dict[int, float] = {}
        for w in range(count):
            self.peaks.append(len(self.rows))
            self._at_least({c: -v / self.unit for c, v in here[w].items()} | before, 0.0)
            total = self._column(("before", w + 1))
            made = {c: -v / self.unit for c, v in after[w].items()}
            self._at_least(made | before | {total: 1.0}, 0.0)
            before = {total: -1.0}

    @functools.cached_property
    def _matrix(self) -> Any:
        from scipy.sparse import csr_array

        lengths = [len(r) for r in self.rows]
        columns = np.fromiter(itertools.chain.from_iterable(self.rows), int, sum(lengths))
        values = itertools.chain.from_iterable(r.values() for r in self.rows)
        data = np.fromiter(values, float, sum(lengths))
        pointers = np.concatenate([[0], np.cumsum(lengths)])
        return csr_array((data, columns, pointers), shape=(len(self.rows), len(self.cost)))

    def _optimize(
        self, limit: float | None, integral: bool, plain: bool = True
    ) -> tuple[np.ndarray[Any, Any], float] | None:
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix = self._matrix
        lower = np.array(self.lower)
        lower[self.peaks] = (np.array(self.constants) - (limit or 0.0)) / self.unit
        upper = np.ones(len(self.cost))
        for (kind, _), column in self.columns.items():
            if kind == "before":
                upper[column] = np.inf
            elif kind == "plain" and not plain:
                upper[column] = 0.0
        cost = np.array(self.cost)
        if limit is None:  # the smallest peak: one more column, which every peak row may use
            from scipy.sparse import csr_array, hstack

            slack = np.zeros((len(self.rows), 1))
            slack[self.peaks] = 1.0
            matrix = hstack([matrix, csr_array(slack)], format="csr")
            cost, upper = np.append(np.zeros(len(cost)), 1.0), np.append(upper, np.inf)
        size = max(cost.max(), 1e-30)
        solve = functools.partial(
            milp,
            cost / size,
            integrality=np.array([*self.integral, *([0] * (len(cost) - len(self.integral)))])
            if integral
            else None,
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(matrix, lower, np.inf),
        )
        # A limit of time would give other plans on a busy machine. The presolve of HiGHS 1.12
        # prints to the standard output now and then.
        options = {"time_limit": measured.MOST_SECONDS, "mip_rel_gap": measured.GAP}
        for patience in (1, 10):
            nodes = patience * measured.NODES
            result = solve(options=options | {"node_limit": nodes, "presolve": False})
            if result.x is not None or result.status != _OUT_OF_NODES:
                break
        if result.x is None:
            return None
        return result.x, float(result.fun) * size

    def relaxed(self, limit: float, plain: bool) -> float | None:
        """A lower bound on the time of rematerialization, or None if no choice is possible."""
        solution = self._optimize(limit, integral=False, plain=plain)
        return None if solution is None else solution[1]

    @functools.cached_property
    def smallest(self) -> int:
        solution = self._optimize(None, integral=False)
        assert solution is not None
        return int(solution[1] * self.unit)

    def solve(self, limit: float, plain: bool) -> Proposal | None:
        solution = self._optimize(limit, integral=True, plain=plain)
        if solution is None:
            return None
        x = solution[0]
        chosen = {key for key, column in self.columns.items() if column >= 0 and x[column] > 0.5}
        return Proposal(self._as_windows(chosen), self._peak(x), solution[1])

    def _peak(self, x: np.ndarray[Any, Any]) -> int:
        used = self.unit * (self._matrix @ x)[self.peaks]
        return int(np.max(np.array(self.constants) - used))

    def _as_windows(self, chosen: set[Any]) -> tuple[Window, ...]:
        pieces = self.graph.pieces
        saved: list[set[Name]] = [set() for _ in range(self.windows[-1] + 1)]
        offloaded: list[set[Name]] = [set() for _ in saved]
        for t in self.always:
            assert t.name is not None
            saved[self.windows[t.piece]].add(t.name)
        for kind, key in chosen:
            if kind in ("save", "offload") and key.name is None:
                continue  # it cannot be named, but a later window holds it as its input
            if kind == "save":
                saved[self.windows[key.piece]].add(key.name)
            elif kind == "offload":
                offloaded[self.windows[key.piece]].add(key.name)
        windows = []
        for w, group in itertools.groupby(range(len(pieces)), self.windows.__getitem__):
            members = [pieces[i] for i in group]
            windows.append(
                Window(
                    members[0].start,
                    members[-1].end,
                    members[0].is_loop,
                    ("plain", w) in chosen,
                    frozenset(saved[w]),
                    frozenset(offloaded[w]),
                )
            )
        return tuple(windows)
