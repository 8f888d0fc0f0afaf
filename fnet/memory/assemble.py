"""The operations of a step whose loss runs in windows, assembled from one trace of the plain step.

Each equation of the loss is traced in a named scope with its number (`tagged`). So it is known to
which equation an operation of the step belongs, and whether it is of the backward pass. Where the
backward pass of a window begins, the operations that it needs and that are not saved run again.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.jaxpr import evaluate, interpret, nbytes
from fnet.memory.apply import evaluate_as
from fnet.memory.buffers import BARRIER, Array, Operation, usage
from fnet.memory.cost import Cost, Rates, estimate_cost
from fnet.memory.estimate import Program
from fnet.memory.regions import MOST_REGIONS, Division, divide
from fnet.memory.tree import NOTHING, Window

F = TypeVar("F", bound=Callable[..., Any])

_HOST_SLOWDOWN = 600
"""Bytes that an H100 moves in its memory while PCIe 5 x16 moves one."""


class Loss(NamedTuple):
    """A traced and inlined loss, and which arguments are differentiated."""

    closed: ClosedJaxpr
    differentiated: list[bool]

    def divided(self) -> dict[int, Division]:
        """Its regions: all, and if these are several, also the first alone, by depth."""
        found = {MOST_REGIONS: divide(*self)}
        if len(found[MOST_REGIONS].regions) > 1:
            found[1] = divide(*self, depth=1)
        return found


def tagged(f: F, losses: list[Loss], *, divide_all: bool = False) -> F:
    """Trace each equation of a loss in a scope with its number, and append it to ``losses``.

    What devices compute is divided where it is traced, because rules of it need their axes.
    """

    def run(closed: ClosedJaxpr, leaves: list[Any], differentiated: list[bool]) -> list[Any]:
        losses.append(Loss(closed, differentiated))
        if divide_all:
            losses[-1].divided()  # `divide` keeps it
        numbers = itertools.count()

        def handle(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
            with jax.named_scope(f"fnet@{next(numbers)}"):
                return evaluate(eqn, inputs)

        return interpret(closed, leaves, handle)

    return evaluate_as(f, run, first_alone=False)


class Step:
    """A traced step of a tagged loss.

    Args:
      closed: The traced step, ``jitted.trace(...).jaxpr``.
      donated: Whether each argument is donated.
      rates: Of the accelerator that it is for, if it is one.
    """

    def __init__(
        self, closed: ClosedJaxpr, donated: Sequence[bool], rates: Rates | None = None
    ) -> None:
        self._rates = rates
        program = Program(on_cpu=rates is None)
        arguments = [Array(nbytes(v)) for v in closed.jaxpr.invars]
        self._results = program.run(closed, arguments)
        self._operations = program.operations
        self.fixed = sum(a.bytes for a in arguments)
        self.fixed += sum(getattr(c, "nbytes", 0) for c in closed.consts)
        own = arguments[len(arguments) - len(donated) :]  # after what the step closes over
        free = [a for a, d in zip(own, donated, strict=True) if d]
        self._over: dict[Array, Array] = {}
        for r in dict.fromkeys(self._results):
            if place := next((a for a in free if a.bytes == r.bytes and r.maker), None):
                free.remove(place)
                self._over[r] = place
        self._cost = estimate_cost(closed)

    def estimate(self, windows: Sequence[Window] = ()) -> tuple[int, Cost]:
        """Estimate bytes at the peak and the cost of the step with its loss in windows."""
        assembly = _Assembly(self._operations, windows)
        results = [assembly.now.get(a, a) for a in self._results]
        over = {assembly.now.get(r, r): a for r, a in self._over.items()}
        need = usage(assembly.operations, results, over)
        cost = self._cost.with_more(assembly.more)
        size = self.fixed + need.bytes + need.workspace
        return size, self._rates.priced(cost, need.launches) if self._rates else cost

    @property
    def densities(self) -> list[float]:
        """FLOPs per byte of what the loss makes, from the cheapest on."""
        found = {
            d
            for o in self._operations
            if o.tag and not o.tag[1]
            for a, d in zip(o.outputs, o.densities, strict=False)
            if a.bytes and d != float("inf")
        }
        return sorted(found)


class _Assembly:
    """Operations in windows.

    Attributes:
      operations: In order.
      now: Arrays that stand for those of the plain step.
      more: Cost of what runs again.
    """

    def __init__(self, plain: Sequence[Operation], windows: Sequence[Window]) -> None:
        self._program = Program()
        self.operations = self._program.operations
        self.now: dict[Array, Array] = {}
        self.more = Cost(0, 0)
        self._windows = windows
        self._saved: dict[int, list[Array]] = {}  # by a scan, for the one of the backward pass
        self._least = {n: w.least for n, w in enumerate(windows) if w.least is not None}
        self._number = {k: n for n in self._least for k in range(windows[n].start, windows[n].end)}
        forward: dict[int, list[Operation]] = {}
        backward: dict[int, list[Operation]] = {}
        for o in plain:
            n = self._window_of(o)
            if n is not None and o.tag:
                (backward if o.tag[1] else forward).setdefault(n, []).append(o)
        last = {own[-1]: n for n, own in backward.items()}
        inside: dict[int, dict[Array, Array]] = {}
        for o in plain:
            n = self._window_of(o)
            if n is None or n not in forward or n not in backward:
                self._copy(o, self.now)
            elif self._windows[n].is_loop and o.name == "scan":
                self._copy_loop(o, n, forward[n], backward[n])
            elif not o.tag or not o.tag[1] or self._windows[n].is_loop:
                self._copy(o, self.now)
            else:
                if n not in inside:
                    inside[n] = self._again(n, forward[n], backward[n])
                self._copy(o, inside[n])
                self.now |= {a: inside[n][a] for a in o.outputs}
                if o in last:
                    self._finish(n, backward[n])

    def _window_of(self, o: Operation) -> int | None:
        return self._number.get(o.tag[0]) if o.tag else None

    def _read(self, a: Array, inside: dict[Array, Array]) -> Array:
        return inside.get(a) or self.now.get(a, a)

    def _copy(self, o: Operation, inside: dict[Array, Array], **changes: Any) -> None:
        inputs = [self._read(a, inside) for a in changes.pop("inputs", o.inputs)]
        if o.name == BARRIER:
            outputs = [Array(a.bytes, of=a.of) for a in inputs]
        else:
            outputs = [Array(a.bytes) for a in o.outputs]
        over = {k: self._read(a, inside) for k, a in o.over.items()}
        new = dataclasses.replace(
            o, inputs=inputs, outputs=outputs, over=over, readers=[], **changes
        )
        self._program.add(new)
        inside |= zip(o.outputs, outputs, strict=True)

    def _barrier(self, arrays: Sequence[Array]) -> list[Array]:
        outputs = [Array(a.bytes, of=a.of) for a in arrays]
        return self._program.add(Operation(BARRIER, list(arrays), outputs, launches=0))

    def _again(
        self, n: int, forward: Sequence[Operation], backward: Sequence[Operation]
    ) -> dict[Array, Array]:
        """Run again what the backward pass of a window needs, and is not saved."""
        least, is_on_host = self._least[n], self._windows[n].is_on_host
        saved = {
            a
            for o in forward
            for a, d in zip(o.outputs, o.densities or [0.0] * len(o.outputs), strict=False)
            if d >= least
        }
        made = {a: o for o in forward for a in o.outputs if a not in saved}
        later = {a for o in backward for a in o.outputs}
        needed: set[Operation] = set()
        given: dict[Array, None] = {}
        todo = [a for o in backward for a in o.inputs if a not in later]
        while todo:
            a = todo.pop()
            o = made.get(a)
            if o is None:
                given[a] = None
            elif o not in needed:
                needed.add(o)
                todo += o.inputs
        known = [a for a in given if not a.is_constant]
        arrays = [self.now.get(a, a) for a in known]
        moved = [
            is_on_host and bool(a.maker and a.maker.tag and not a.maker.tag[1]) for a in arrays
        ]
        arrays = [
            self._move("to_host", a, 0) if m else a for m, a in zip(moved, arrays, strict=True)
        ]
        outputs = self._barrier(arrays)
        inside = {
            a: self._move("to_device", b, a.bytes) if m else b
            for m, a, b in zip(moved, known, outputs, strict=True)
        }
        for o in forward:
            if o in needed:
                self._copy(o, inside)
                self.more = self.more.with_more(o.cost)
        return inside

    def _move(self, name: str, a: Array, size: int) -> Array:
        """An array in another memory."""
        self.more = self.more.with_more(Cost(0, _HOST_SLOWDOWN * max(a.bytes, size)))
        return self._program.add(Operation(name, [a], [Array(size)]))[0]

    def _finish(self, n: int, backward: Sequence[Operation]) -> None:
        out = [
            a
            for o in backward
            for a in o.outputs
            if any(self._window_of(r) != n for r in o.readers)
        ]
        if out:
            self.now |= zip(out, self._barrier([self.now[a] for a in out]), strict=True)

    def _copy_loop(
        self, o: Operation, n: int, forward: Sequence[Operation], backward: Sequence[Operation]
    ) -> None:
        """A scan whose iterations save what is dear to compute, and the carry."""
        least, is_on_host, later = self._least[n], self._windows[n].is_on_host, set(backward)
        stacks = [
            a
            for f in forward
            for a in f.outputs
            if f.name == "scan"
            and f.readers
            and all(r in later for r in f.readers if a in r.inputs)
        ]
        of = {a: d for f in forward for a, d in zip(f.outputs, f.densities, strict=False)}
        if o not in later:
            saved = sum(size for d, size, _ in o.body if d >= least)
            known = sum(a.bytes for a in stacks if a in o.outputs and least <= of[a] < NOTHING)
            carry = sum(a.bytes for a in o.over.values()) * (not is_on_host)
            carry *= not any(of[a] == NOTHING for a in stacks)
            self._copy(o, self.now)
            more = Array(max(o.iterations * (saved + carry) - known, 0))
            new = self.operations[-1]
            more.maker = new
            new.outputs = [*new.outputs, more]
            self._saved.setdefault(id(forward), []).append(more)
            for a in stacks:
                if a in o.outputs and of[a] < least:
                    self.now[a].bytes = 0
            for d, _, cost in o.body:
                if d < least:
                    self.more = self.more.with_more(cost, o.iterations)
            return
        dropped = sum(a.bytes for a in stacks if of[a] < least and a in o.inputs)
        self._copy(o, self.now, working=o.working + dropped // o.iterations)
        new = self.operations[-1]
        for more in self._saved.get(id(forward), ()):
            new.inputs.append(more)
            assert more.maker
            more.maker.readers.append(new)
