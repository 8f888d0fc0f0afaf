"""Search: the tree of a loss with the least estimated time within a number of bytes.

A tree is traced once. From its trace, all ways to run it in windows are assembled and estimated
(`fnet.memory.assemble`). Nothing is compiled here, and nothing is kept between plans.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from fnet.jaxpr import nbytes, place
from fnet.jaxpr.primitives import made_bytes
from fnet.memory.apply import Repeated
from fnet.memory.assemble import Loss, Step, tagged
from fnet.memory.cost import Cost, Rates, equation_cost
from fnet.memory.devices import is_on_devices, on_devices
from fnet.memory.loops import loop_choices
from fnet.memory.regions import MOST_REGIONS, ONE_ROW, Division
from fnet.memory.remat import Policy
from fnet.memory.rows import rule_of_this_trace
from fnet.memory.tree import NOTHING, PLAIN, Blocks, Loops, OnDevices, Rows, Tree, Window, partition

Build = Callable[[Any, int], jax.stages.Traced]
"""``build(policy, microbatches)`` traces a step, with ``policy.apply(loss)`` as its loss."""

SIZES = (0.06, 0.15, 0.3, 0.5, 1.0)
"""Bytes of a window that are tried, as shares of all; in and around chunks every second one."""
_MOST_LEVELS = 10
_MOST_KEPT = 3  # numbers of kept arrays that are tried
_FAST, _FEW, _MUCH = 1.01, 1.02, 1.3  # times, relative to the plain one, that are good enough


class Option(NamedTuple):
    """A tree with its estimate."""

    tree: Any
    microbatches: int
    bytes: int
    cost: Cost

    @property
    def order(self) -> tuple[float, int]:
        """By time, then by bytes."""
        return self.cost.time, self.bytes


Fits = Callable[[Option], bool]
Node = Any
"""A tree, or a remat policy."""


class Traced(NamedTuple):
    """A traced tree, its step and the loss of it."""

    option: Option
    step: Step
    loss: Loss | None


class Planner:
    """Finds trees for a step.

    Attributes:
      choices: Numbers of microbatches, the smallest first.
      named: Policies to choose from, of which rows may run in chunks; None to choose from all.
      regions: Whether rows may run in chunks.
      state_bytes: Bytes that each microbatch reads in addition.
      on_host: Whether arrays may be moved to the memory of the host.
      rates: Of an accelerator.
      reason: Why a part of the loss is not computed in chunks, as the end of a message.
      is_on_devices: Whether it plans what is inside of a `jax.shard_map`.
    """

    def __init__(
        self,
        build: Build,
        choices: Sequence[int],
        named: Sequence[Node] | None,
        regions: bool,
        state_bytes: int,
        on_host: bool = False,
        rates: Rates | None = None,
    ) -> None:
        self.build, self.choices, self.named = build, choices, named
        self.regions, self.state_bytes, self._rates = regions, state_bytes, rates
        self._on_host = on_host
        self.reason, self.is_on_devices = "", False
        self._known: dict[tuple[Node, int], Traced | None] = {}
        self._paths: dict[Node, list[_Path]] = {}
        self._jaxprs: dict[Any, Any] = {}

    @property
    def is_exact(self) -> bool:
        """Whether estimates are of one device."""
        return self.regions and not self.is_on_devices

    def policy(self, tree: Node) -> Policy:
        """The remat policy of a tree."""
        is_inside = self.is_on_devices and tree != PLAIN
        return Policy.of(OnDevices(tree) if is_inside else tree)

    def trace(self, tree: Node, microbatches: int = 0) -> Traced | None:
        """Trace a tree; None if it is impossible, such as microbatches too small for a norm."""
        n = microbatches or self.choices[0]
        if (tree, n) not in self._known:
            try:
                self._known[tree, n] = self._trace(tree, n)
            except (ValueError, jax.errors.KeyReuseError) as error:
                if tree == PLAIN and n == self.choices[0]:
                    raise
                if self.is_on_devices:  # values may vary over fewer axes than chunks
                    self.reason = f"; what devices compute does not run in chunks: {error}"
                self._known[tree, n] = None
        return self._known[tree, n]

    def _trace(self, tree: Node, n: int) -> Traced:
        losses: list[Loss] = []
        applied = itertools.count()

        def apply(f: Any) -> Any:
            if self.is_on_devices:
                return on_devices(f, lambda g: tagged(tree.apply(g), losses, divide_all=True))
            repeated = Repeated(f, self._jaxprs, (n, next(applied)), itertools.count())
            return tagged(tree.apply(repeated), losses)

        traced = self.build(self.policy(tree)._replace(apply=apply), n)
        donated = [a.donated for a in jax.tree.leaves(traced.args_info)]
        step = Step(traced.jaxpr, donated, self._rates)
        size, cost = step.estimate()
        cost = cost._replace(bytes=cost.bytes + (n - self.choices[0]) * self.state_bytes)
        return Traced(Option(tree, n, size, cost), step, losses[0] if losses else None)

    @functools.cached_property
    def plain(self) -> Traced:
        """The plain step, or the first of the named ones."""
        tree = self.named[0] if self.named else PLAIN
        traced = self._trace(tree, self.choices[0])
        if traced.loss and is_on_devices(traced.loss.closed):
            self.is_on_devices = True
            traced = self._trace(tree, self.choices[0])
        elif traced.loss and (rule := rule_of_this_trace(*traced.loss[:2])):
            self.reason = (
                f"; nothing is planned, because the derivative rule of {place(rule)} reads "
                "traced arrays that are not its arguments"
            )
            traced = traced._replace(loss=None)
        self._known[tree, self.choices[0]] = traced
        return traced

    @functools.cached_property
    def divisions(self) -> dict[int, Division]:
        """Regions of the loss by depth; none if there are none."""
        loss = self.plain.loss
        if loss is None or not self.regions:
            return {}
        found = loss.divided()
        division = found[MOST_REGIONS]
        if division.reasons:
            kind = "a part" if division.regions else "the loss"
            self.reason = f"; {kind} is not computed in chunks, because {division.reasons[0]}"
        if not division.regions and division.reasons and division.reasons[0] != ONE_ROW:
            self.reason += (
                ": fnet.make_step(..., microbatches=n) splits the batch, and statistics with it"
            )
        return {depth: division for depth, division in found.items() if division.regions}

    @functools.cached_property
    def loops(self) -> list[tuple[int, float, int]]:
        """Arguments of `Loops`, with the bytes that loops hold, from the fewest FLOPs on."""
        loss = self.plain.loss
        if loss is None or self.is_on_devices:  # they are known where they are traced alone
            return []
        return loop_choices(loss.closed, loss.differentiated)

    # The fastest tree that fits.

    def best(self, fits: Fits) -> Option | None:
        """Return the option with the least estimated time that fits; None if none does."""
        plain = self.plain
        if fits(plain.option):
            return plain.option
        if self.named:
            return self._best_named(fits)
        found: list[Option] = []

        def is_done(slower: float) -> bool:
            return any(o.cost.time <= slower * plain.option.cost.time for o in found)

        found += self._blocks(plain, fits)
        found += () if is_done(_FAST) else self._microbatches(fits)
        found += () if is_done(_FAST) else self._rows(fits)
        found += () if is_done(_FEW) else self._loops(fits)
        if not is_done(_MUCH):
            found += self._both(fits, min((o.cost.time for o in found), default=math.inf))
        found += () if found else filter(fits, self._moved())
        return min(found, key=lambda o: o.order, default=None)

    def _moved(self) -> Iterator[Option]:
        """The plain loss in windows whose inputs are in host memory."""
        loss = self.plain.loss
        if loss is None or not self._on_host:
            return
        for size in SIZES:
            tree = Blocks(size, (NOTHING,), on_host=True)
            yield Option(
                tree, self.choices[0], *self.plain.step.estimate(tree.windows(loss.closed))
            )

    def _best_named(self, fits: Fits) -> Option | None:
        found: list[Option] = []
        for tree in self.named or ():
            if (traced := self.trace(tree)) and fits(traced.option):
                found.append(traced.option)
            else:
                found += [*self._rows(fits, tree), *self._microbatches(fits, [tree])]
        return min(found, key=lambda o: o.order, default=None)

    def windows(self, limit: int) -> Option | None:
        """The plain loss in windows of at most so many bytes, or the smallest."""
        found = self._blocks(self.plain, lambda o: o.bytes <= limit)
        small = (path.smallest for path in self._paths_of(self.plain))
        fastest = min(found, key=lambda o: o.order, default=None)
        return fastest or min(small, key=lambda o: o.bytes, default=None)

    def _blocks(self, base: Traced, fits: Fits) -> Iterator[Option]:
        """Windows of a traced tree: of the best of several sizes, the fewest savings that fit."""
        first = [path.first(fits) for path in self._paths_of(base)]
        if options := [option for option in first if option]:
            best = min(options, key=lambda o: o.order)
            yield self._paths_of(base)[first.index(best)].improved(best, fits)

    def _paths_of(self, base: Traced) -> "list[_Path]":
        if base.loss is None or base.option.microbatches > 1 or self.is_on_devices:
            return []
        if base.option.tree not in self._paths:
            found: dict[tuple[Window, ...], float] = {}
            for size in SIZES if base.option.tree == PLAIN else SIZES[1::2]:
                parts = tuple(partition(base.loss.closed.jaxpr, size))
                found.setdefault(parts, size)
            paths = [_Path(base, size, parts) for parts, size in found.items()]
            self._paths[base.option.tree] = paths
        return self._paths[base.option.tree]

    def _counts(self, division: Division) -> list[int]:
        largest = max(r.size for r in division.regions)
        return [*itertools.takewhile(lambda n: n < largest, (2**k for k in range(1, 30))), largest]

    def _rows(self, fits: Fits, inside: Node = PLAIN) -> Iterator[Option]:
        """Chunks of rows: the fewest that fit, and more that keep arrays."""
        for depth, division in [*self.divisions.items()]:
            counts = self._counts(division)
            tree = self._cut(depth, division, inside)
            first, line = self._fewest(tree, counts, fits)
            if first is None:
                if len(line) == 1 and inside == PLAIN:  # these regions save nothing
                    del self.divisions[depth]
                continue
            known = self.trace(tree(counts[first]))
            assert known is not None
            yield known.option
            if division.repeated and not self.is_on_devices:
                yield from self._keeping(tree, counts[first:], known.option, line, division, fits)
            if known.option.cost.time <= _FEW * self.plain.option.cost.time:
                return

    def _cut(self, depth: int, division: Division, inside: Node = PLAIN) -> Callable[[int], Rows]:
        assert self.plain.loss is not None
        made = sum(map(made_bytes, self.plain.loss.closed.eqns))
        sizes = made - division.made, division.made
        return lambda n: Rows(n, depth, 0, inside, sizes)

    def _fewest(
        self, tree: Callable[[int], Tree], counts: list[int], fits: Fits
    ) -> tuple[int | None, dict[float, int]]:
        """The position of the fewest chunks that fit, and known bytes by size of a chunk."""
        line = {1.0: self.plain.option.bytes}
        low, high = -1, len(counts)
        while high - low > 1:
            at = low + 1
            if low >= 0:  # the first that would fit if bytes were linear in the size of a chunk
                guesses = (at for at in range(low + 1, high) if fits(self._guess(line, counts[at])))
                at = next(guesses, min(high, len(counts)) - 1)
            traced = self.trace(tree(counts[at]))
            if traced is None or traced.option.bytes >= line[1.0]:
                return None, line
            line[1 / counts[at]] = traced.option.bytes
            if fits(traced.option):
                high = at
            else:
                low = at
        return (high if high < len(counts) else None), line

    def _guess(self, line: dict[float, int], count: int) -> Option:
        """Bytes of a number of chunks, from the two nearest sizes that are known."""
        (x0, y0), (x1, y1) = sorted(line.items(), key=lambda p: abs(p[0] - 1 / count))[:2]
        size = y0 + (y1 - y0) / (x1 - x0) * (1 / count - x0)
        return self.plain.option._replace(tree=Rows(count), bytes=max(int(size), 0))

    def _keeping(
        self,
        tree: Callable[[int], Rows],
        counts: Sequence[int],
        fewest: Option,
        line: dict[float, int],
        division: Division,
        fits: Fits,
    ) -> Iterator[Option]:
        """Rows that keep as many arrays as fit, the dearest first."""
        rows = division.dearest
        sizes = [0, *itertools.accumulate(nbytes(v) for _, v, _ in rows)]
        saved = [0.0, *itertools.accumulate(equation_cost(e).time for _, _, e in rows)]

        def most(base: Option) -> int:  # how many arrays may be kept
            fitting = (k for k, s in enumerate(sizes) if fits(base._replace(bytes=base.bytes + s)))
            return max(fitting, default=0)

        known = {counts[0]: fewest}
        for _ in range(_MOST_KEPT):
            bases = {n: known.get(n) or self._guess(line, n) for n in counts[:4]}
            n, base = max(bases.items(), key=lambda pair: saved[most(pair[1])])
            k = most(base)
            kept = self.trace(dataclasses.replace(tree(n), keep=k)) if k else None
            if kept is None:
                return
            if fits(kept.option):
                yield kept.option
                return
            known[n] = kept.option._replace(bytes=kept.option.bytes - sizes[k])
            line[1 / n] = known[n].bytes

    def _loops(self, fits: Fits) -> Iterator[Option]:
        """Iterations of loops in chunks, also with what is outside of them in windows."""
        tried = 0
        for passes, share, _ in self.loops:
            traced = self.trace(Loops(passes, share))
            if traced is None:
                continue
            if fits(traced.option):
                yield traced.option
                return
            options = [*self._blocks(traced, fits)]
            yield from options
            tried += bool(options)
            if tried > 1:
                return

    def _both(self, fits: Fits, bound: float) -> Iterator[Option]:
        """Chunks of rows with windows or loops in and around them, which add to their time."""
        for depth, division in self.divisions.items():
            tree = self._cut(depth, division)
            counts = self._counts(division)
            for n in dict.fromkeys((*counts[2:3], counts[len(counts) // 2])):
                rows = self._known.get((tree(n), self.choices[0]))
                fewer = (self._known.get((tree(m), self.choices[0])) for m in counts if m <= n)
                if any(t and t.option.cost.time >= bound for t in fewer):
                    break
                if rows:
                    yield from self._blocks(rows, fits)
                for inside in self._insides():
                    traced = self.trace(self._cut(depth, division, inside)(n))
                    if traced and fits(traced.option):
                        yield traced.option
                    elif traced:
                        yield from self._blocks(traced, fits)

    def _insides(self) -> list[Tree]:
        loops = [Loops(*choice[:2]) for choice in self.loops[-1:]]
        windows = [] if self.is_on_devices else [Blocks(0.1, (20.0,)), Blocks(0.1, (NOTHING,))]
        return [*loops, *windows]

    def _microbatches(self, fits: Fits, trees: Sequence[Node] = ()) -> Iterator[Option]:
        """The fewest microbatches that fit."""
        for n in self.choices[1:]:
            for tree in trees or self._trees_in_parts(fits, n):
                if (traced := self.trace(tree, n)) and fits(traced.option):
                    yield traced.option
                    return

    def _trees_in_parts(self, fits: Fits, n: int) -> Iterator[Node]:
        """A tree of which a part fits, then one that makes room for what microbatches add."""
        plain, added = self.plain, 0

        def part(o: Option) -> Option:
            size = plain.step.fixed + added + (o.bytes - plain.step.fixed) // n
            return o._replace(bytes=size, microbatches=n)

        for _ in range(2):
            whole = [plain.option] if fits(part(plain.option)) else []
            for option in whole or self._blocks(plain, lambda o: fits(part(o))):
                yield option.tree
                if traced := self.trace(option.tree, n):
                    added += traced.option.bytes - part(option).bytes

    def smallest(self) -> list[Option]:
        """Trees of each kind with the fewest estimated bytes, whatever the budget is."""
        bases = [self.trace(tree) for tree in self.named or (PLAIN,)]
        bases += [self.trace(tree, self.choices[-1]) for tree in self.named or (PLAIN,)]
        for depth, division in self.divisions.items():
            most = self._counts(division)[-1]
            for inside in self.named or (PLAIN, *self._insides()):
                bases.append(self.trace(self._cut(depth, division, inside)(most)))
        if not self.named:
            bases += [self.trace(Loops(*choice[:2])) for choice in self.loops[-2:]]
        found: dict[Node, Option] = {}
        for base in filter(None, bases):
            found[base.option.tree] = base.option
            for path in () if self.named else self._paths_of(base):
                found[path.smallest.tree] = path.smallest
        if not self.named:
            found |= {o.tree: o for o in self._moved()}
        ranked = sorted(found.values(), key=lambda o: (-o.bytes, *o.order))
        of_kinds = {(o.tree.name, o.tree.chunks, o.microbatches): o for o in ranked}
        return sorted(of_kinds.values(), key=lambda o: (o.bytes, *o.order))


class _Path:
    """Windows of a traced tree, from those that save everything to those that save nothing.

    A step on the path lets one more window save only what takes more FLOPs for each byte. What runs
    last is needed at once: the backward pass begins with it.
    """

    def __init__(self, base: Traced, size: float, windows: Sequence[Window]) -> None:
        self._base, self._size = base, size
        self._last = [0] * (len(windows) > 1 and not windows[-1].is_loop)
        self._count = len(windows) - len(self._last)
        dense = [d for d in base.step.densities if d]
        step = -(-len(dense) // _MOST_LEVELS) if dense else 1
        self._levels: list[float | None] = [None, *dense[::step], NOTHING]
        self._known: dict[tuple[float | None, ...], Option] = {}

    def _least(self, place: int) -> list[int]:
        level, ahead = divmod(place, self._count)
        return [level + (k < ahead) for k in range(self._count)] + self._last

    def _option(self, levels: Sequence[int]) -> Option:
        least = tuple(self._levels[k] for k in levels)
        if least not in self._known:
            assert self._base.loss is not None
            tree = Blocks(self._size, least, self._base.option.tree)
            estimate = self._base.step.estimate(tree.windows(self._base.loss.closed))
            self._known[least] = Option(tree, self._base.option.microbatches, *estimate)
        return self._known[least]

    @property
    def smallest(self) -> Option:
        """The option with the fewest bytes."""
        return self._option(self._least(self._lowest))

    @functools.cached_property
    def _lowest(self) -> int:
        """The place of the level with the fewest bytes, from the last one back while they fall."""

        def size(level: int) -> int:
            return self._option(self._least(level * self._count)).bytes

        level = len(self._levels) - 1
        while level > 1 and size(level - 1) <= size(level):
            level -= 1
        return level * self._count

    def first(self, fits: Fits) -> Option | None:
        """The first option on the path that fits."""
        low, high = 0, self._lowest
        if not fits(self.smallest):
            return None
        while low < high:
            middle = (low + high) // 2
            if fits(self._option(self._least(middle))):
                high = middle
            else:
                low = middle + 1
        return self._option(self._least(high))

    def improved(self, option: Option, fits: Fits) -> Option:
        """The option with what windows can save besides."""
        levels = [*map(self._levels.index, option.tree.least)]
        for k in range(self._count):
            less = [*levels[:k], max(levels[k] - 1, 0), *levels[k + 1 :]]
            if less != levels and fits(self._option(less)):
                levels = less
        return self._option(levels)
