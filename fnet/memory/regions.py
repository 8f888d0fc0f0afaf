"""Regions: run the part of a loss that keeps rows apart in chunks.

A *region* is the equations of a loss in which one axis of some arrays is separate: examples,
points, rays, edges, rows of a matrix of similarities. It runs as a loop over chunks of the axis;
sums over the axis are accumulated. The backward pass runs each chunk again. Where the region ends
in a single number that is differentiated, such as the loss, each chunk's gradient is computed at
once, and nothing runs twice.

Values and gradients stay the same, except for the order of sums: what mixes rows, such as a
matrix of similarities or batch statistics, is not in the region and runs for all rows. What is left
is searched for regions again. This is what GradCache (Gao et al. 2021) does by hand for contrastive
losses, and gradient accumulation for per-example losses.
"""

import functools
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from fnet.cpu.convolutions import for_loops
from fnet.jaxpr import (
    Site,
    active_variables,
    aval,
    dependencies,
    evaluate,
    factors,
    has_small_range,
    interpret,
    is_cheap,
    is_floating,
    is_identity,
    located,
    nbytes,
    part_of_jaxpr,
    place,
)
from fnet.jaxpr.batch_axis import BatchAxis, Indices, Mixed, Shared, Unknown
from fnet.jaxpr.custom_rules import has_linear_rules
from fnet.jaxpr.primitives import made_bytes
from fnet.memory.apply import evaluate_as, variables
from fnet.memory.axis_classes import AxisClasses, Group
from fnet.memory.cost import estimate_cost
from fnet.memory.estimate import density_of
from fnet.memory.rows import Part, RowAxes, Sum, Value, run_rows, slice_rows
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype

F = TypeVar("F", bound=Callable[..., Any])
Chunk = Callable[[list[Any], Any, list[Any]], tuple[list[Any], list[Any]]]
"""``chunk(differentiated arguments, start, others) -> (floating results, others)``."""

LEAST_SHARE = 0.002
"""Regions that save a smaller share of all bytes are not worth a loop."""
ONE_ROW = "the batch has one row"
"""The reason why such a batch is not cut."""
_NAMED = 0.1
"""Reasons are given for parts without a region that make at least this share of all bytes."""
MOST_AGAIN = 0.05
"""Share of the time that may run twice, because a sum and the rows that meet it need it."""
MOST_AXES = 6
"""Classes of axes that are tried, the most bytes first."""
MOST_REGIONS = 128
"""Regions that are searched for one after the other."""


class Region(NamedTuple):
    """Equations that run in chunks.

    Attributes:
      jaxpr: The equations. Its arguments are rows, then wholes; its results are rows, then sums.
      axes: Axis of the rows of each variable that has rows.
      size: Number of rows.
      objective: Number of the result that is differentiated, if it is a single number, else None.
    """

    jaxpr: Jaxpr
    axes: dict[Any, int]
    size: int
    objective: int | None

    @property
    def made(self) -> int:
        """Bytes that it makes."""
        return sum(map(made_bytes, self.jaxpr.eqns))


class Whole(NamedTuple):
    """Equations that run as they are.

    Attributes:
      eqns: The equations.
      reason: What keeps the rows of their largest arguments together; "" if nothing was tried.
    """

    eqns: list[JaxprEqn]
    reason: str = ""


class Division(NamedTuple):
    """A loss in parts.

    Attributes:
      parts: In order.
      reasons: What keeps rows together, in the largest parts without a region.
      active: Variables that are differentiated.
    """

    parts: list[Region | Whole]
    reasons: list[str]
    active: set[Var]

    @property
    def regions(self) -> list[Region]:
        """The parts that run in chunks."""
        return [part for part in self.parts if isinstance(part, Region)]

    @property
    def repeated(self) -> dict[int, Region]:
        """The regions whose chunks run again in the backward pass, by number of the part."""
        return {
            n: part
            for n, part in enumerate(self.parts)
            if isinstance(part, Region)
            and part.objective is None
            and not self.active.isdisjoint(part.jaxpr.invars)
        }

    @property
    def largest(self) -> Region | None:
        """The region that makes the most bytes of those that are differentiated."""
        regions = [r for r in self.regions if not self.active.isdisjoint(r.jaxpr.invars)]
        return max(regions, key=lambda region: region.made, default=None)

    @property
    def made(self) -> int:
        """Bytes that the regions make."""
        return sum(region.made for region in self.regions)

    @property
    def held(self) -> set[Var]:
        """Arguments of repeated regions, which are in memory until these run again."""
        return {v for r in self.repeated.values() for v in r.jaxpr.invars}

    @property
    def dearest(self) -> list[tuple[int, Var, JaxprEqn]]:
        """Rows that repeated regions may keep: part, variable, equation, the dearest first."""
        held = self.held
        found = [
            (-density_of(e), n, v, e)
            for n, region in self.repeated.items()
            for e in region.jaxpr.eqns
            for v in e.outvars
            if v in region.axes and v in self.active and v not in held and is_floating(v)
        ]
        # To write and read a row takes as long as a few operations on it.
        return [row[1:] for row in sorted(found, key=lambda row: row[0]) if row[0] < -4]


# Find regions.


def divide(
    closed: ClosedJaxpr,
    differentiated: Sequence[bool],
    depth: int = MOST_REGIONS,
    params: Collection[Var] | None = None,
) -> Division:
    """Divide an inlined loss into regions and the rest.

    Args:
      closed: The loss.
      differentiated: Whether it is differentiated with respect to each argument.
      depth: Regions that are searched for one after the other. 1 is the region that saves most.
      params: Differentiated arguments that have no rows. By default all of them.
    """
    known = _DIVISIONS.setdefault(closed.jaxpr, {})
    key = (*differentiated, depth, None if params is None else frozenset(params))
    if key in known:
        return known[key]
    # Loops may compute more than what is read of them.
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    active = active_variables(jaxpr, differentiated)
    params = active.intersection(jaxpr.invars if params is None else params)
    finder = _Finder(active, params, jaxpr, depth)
    _, parts = finder.find(list(jaxpr.eqns), set(variables(jaxpr.outvars)))
    wholes = {
        p.reason: sum(map(made_bytes, p.eqns)) for p in parts if isinstance(p, Whole) and p.reason
    }
    reasons = [r for r, size in wholes.items() if size >= _NAMED * finder.total]
    batch = [v for v in jaxpr.invars if v not in active and aval(v).shape]
    if reasons and batch and all(aval(v).shape[0] == 1 for v in batch):
        reasons = [ONE_ROW]
    known[key] = Division(parts, sorted(reasons, key=lambda r: -wholes.get(r, 0)), active)
    return known[key]


_DIVISIONS: weakref.WeakKeyDictionary[Jaxpr, dict[Any, Division]] = weakref.WeakKeyDictionary()
"""Of jaxprs that exist: a plan divides a loss once, whatever its trees are."""


class _Found(NamedTuple):
    """A candidate for a region.

    Attributes:
      states: State of each variable.
      eqns: Its equations.
      crossing: Rows that it keeps.
      score: Bytes that it makes, without those that it keeps.
      kept: Bytes that it keeps. A region that makes only twice as much is not worth a loop, since
        XLA fuses what a few equations make.
      size: Number of rows.
      rest: Equations outside of it, some of which may be in both.
      roots: Arrays that are cut.
      reason: The first equation that keeps rows together.
      met: Whole values that follow from sums over the rows, and that rows meet later.
    """

    states: dict[Var, Any]
    eqns: list[JaxprEqn]
    crossing: list[Var]
    score: int
    kept: int
    size: int
    rest: list[JaxprEqn]
    roots: dict[Var, int]
    reason: str
    met: Collection[Var]


class _Finder:
    def __init__(self, active: set[Var], params: set[Var], jaxpr: Jaxpr, depth: int) -> None:
        self.active, self.params, self.depth = active, params, depth
        self.total, self.time = sum(map(made_bytes, jaxpr.eqns)), estimate_cost(jaxpr).time
        self.axes: dict[int, RowAxes] = {}  # by number of rows

    def find(
        self,
        eqns: list[JaxprEqn],
        results: Collection[Var],
        depth: int = 0,
        size: int = 0,
        bound: float = math.inf,
        can_finish: bool = True,
    ) -> tuple[int, list[Region | Whole]]:
        """Divide equations into parts, so that few bytes are made or kept outside of chunks.

        Args:
          eqns: The equations.
          results: Variables that are read later.
          depth: Number of regions before.
          size: Number of rows of the region before, which are cut again if they can be.
          bound: Bytes outside of chunks of another division, which is better from there on.
          can_finish: Whether sums that rows meet later may be computed first.

        Returns:
          The bytes outside of chunks, and the parts.
        """
        whole = sum(map(made_bytes, eqns))
        least = LEAST_SHARE * self.total
        if depth == self.depth or whole <= least or bound <= 0:
            return whole, [Whole(eqns)] if eqns else []
        classes = AxisClasses(eqns)
        roots = list(_roots(eqns, self.params, classes))
        known = [r for r in roots if depth >= 2 and r[1] == size]  # after two regions
        pairs = itertools.islice(_pair_roots(eqns, self.params, classes), MOST_AXES)
        reason = ""
        for some in (known, roots, pairs):
            found = [self._follow(eqns, results, *r) for r in some]
            largest = max(found, key=lambda f: sum(map(nbytes, f.roots)), default=None)
            reason = reason or (largest.reason if largest else "")
            promising = [f for f in found if f.score >= max(least, f.kept)]
            promising.sort(key=lambda f: (f.size != size, -f.score))
            best = self._best(results, depth, min(bound, whole), promising)
            if can_finish:
                limit = best[0] if best else min(bound, whole)
                best = self._finish_sums(eqns, results, depth, limit, found) or best
            if best:
                return best
            if promising and bound < whole:  # Another division is better, and the search is long.
                break
        return whole, [Whole(eqns, reason or "no argument but the parameters has rows")]

    def _best(
        self, results: Collection[Var], depth: int, bound: float, candidates: Iterable[_Found]
    ) -> tuple[int, list[Region | Whole]] | None:
        """Divide equations at one of the first candidates, as `find`; None if none is better."""
        best: tuple[int, list[Region | Whole]] | None = None
        extracted = (self._extract(candidate, results) for candidate in candidates)
        # The rest may compute all of a region from the arguments.
        tried = (each for each in extracted if each[0].jaxpr.eqns)
        for region, before, after in itertools.islice(tried, 1 if depth else 3):
            read = {v for e in after for v in variables(e.invars)}
            read |= {*region.jaxpr.invars, *results}
            kept = sum(map(nbytes, region.jaxpr.outvars))
            inner = depth + 1, region.size
            more, parts_before = self.find(before, read, *inner, bound - kept, False)
            kept += more
            more, parts_after = self.find(after, results, *inner, bound - kept, False)
            kept += more
            if kept < bound:
                bound = kept
                best = kept, [*parts_before, region, *parts_after]
        return best

    def _finish_sums(
        self,
        eqns: list[JaxprEqn],
        results: Collection[Var],
        depth: int,
        bound: float,
        candidates: Iterable[_Found],
    ) -> tuple[int, list[Region | Whole]] | None:
        """Divide equations as `find`, with sums that rows meet later, such as batch statistics.

        These are computed first, in parts of their own. Then they are whole values, and the rows
        that meet them stay rows. None if no such division is better.
        """
        score, size = 0, 0
        chosen: list[tuple[list[JaxprEqn], Collection[Var]]] = []
        for found in candidates:
            steps: list[tuple[list[JaxprEqn], Collection[Var]]] = []
            rest, again = eqns, 0.0
            while found.met:
                first, rest, twice = self._computed_first(rest, found.met, results)
                again += estimate_cost(part_of_jaxpr(twice, [], [])).time
                if again > MOST_AGAIN * self.time or any(e.effects for e in first):
                    break
                steps.append((first, found.met))
                found = self._follow(rest, results, found.roots, found.size)
                if found.score > score:
                    score, size = found.score, found.size
                    chosen = [*steps, (rest, results)]
        kept = 0
        parts: list[Region | Whole] = []
        for part, read in chosen:
            more, some = self.find(part, read, depth, size, bound - kept, False)
            kept, parts = kept + more, [*parts, *some]
        return (kept, parts) if parts and kept < bound else None

    def _computed_first(
        self, eqns: list[JaxprEqn], sums: Collection[Var], results: Collection[Var]
    ) -> tuple[list[JaxprEqn], list[JaxprEqn], list[JaxprEqn]]:
        """Return the equations of sums, the rest, and those that are in both.

        The first ones have variables of their own, except for the sums.
        """
        _, first = dependencies(part_of_jaxpr(eqns, [], []), sums)
        members = set(first)
        others = {v for e in eqns if e not in members for v in variables(e.invars)}
        _, again = dependencies(part_of_jaxpr(first, [], []), others.union(results), sums)
        own = {v: Var(v.aval) for e in first for v in e.outvars if v not in sums}
        self.active |= {new for v, new in own.items() if v in self.active}
        twice = set(again)
        known = {v: Var(v.aval) for e in again for v in e.outvars if v in sums}
        rest = [_renamed(e, {}, known) for e in eqns if e not in members or e in twice]
        return [_renamed(e, own, own) for e in first], rest, again

    def _follow(
        self, eqns: list[JaxprEqn], results: Collection[Var], roots: dict[Var, int], size: int
    ) -> _Found:
        axes = self.axes.setdefault(size, RowAxes(size, self.active))
        states: dict[Var, Any] = {v: BatchAxis(a) for v, a in roots.items()}
        same: dict[Any, Any] = {}
        inside: list[JaxprEqn] = []
        late: set[Var] = set()  # whole values that are known after sums over the rows
        met: set[Var] = set()
        made, reason = 0, ""
        for eqn in eqns:
            given = [
                axes.constant(v.val) if isinstance(v, Literal) else states.get(v, Shared())
                for v in eqn.invars
            ]
            if all(isinstance(s, Shared) for s in given) and not eqn.effects:
                if not any(v in roots for v in eqn.outvars):
                    states |= zip(eqn.outvars, axes.visit(eqn, given, Site()), strict=True)
                continue
            if eqn.effects or any(isinstance(s, Mixed | Unknown) for s in given):
                out: Sequence[Any] = [Unknown()] * len(eqn.outvars)
            else:
                out = axes.visit(eqn, given, Site())
            bad = next((s for s in out if isinstance(s, Mixed | Unknown)), None)
            # Equations whose results have no rows are outside: each chunk would run all of them.
            is_whole = all(isinstance(s, Shared) for s in out) and not is_identity(eqn)
            states_by_operand = zip(eqn.invars, given, strict=True)
            rows = [s for v, s in states_by_operand if not isinstance(s, Shared) and v not in late]
            if not rows:  # What follows a sum alone would run for each chunk, as for a row more.
                is_whole |= size * sum(map(nbytes, eqn.outvars)) > made and not is_identity(eqn)
                late |= set(eqn.outvars)
            elif all(isinstance(s, BatchAxis | Indices) for s in rows):
                met |= late.intersection(variables(eqn.invars))
            if bad is not None or is_whole:
                if not reason and eqn.effects:
                    reason = f"{place(eqn)} has an effect"
                if not reason and bad and bad.operation:
                    verb = "mixes" if isinstance(bad, Mixed) else "may mix"
                    reason = f"{located(bad.operation, bad.line)} {verb} rows"
                out = [Unknown()] * len(eqn.outvars)
            else:
                inside.append(eqn)
                made += made_bytes(eqn)
                if is_identity(eqn):
                    pairs = zip(eqn.outvars, eqn.invars, out, strict=False)
                    same |= {v: same.get(u, u) for v, u, s in pairs if isinstance(s, Shared)}
                else:  # A whole value of an equation with rows is known after the region alone.
                    out = [Sum() if isinstance(s, Shared) else s for s in out]
            states |= zip(eqn.outvars, out, strict=True)
            late |= {v for v in eqn.outvars if isinstance(states[v], Sum)}
        outside = set(eqns).difference(inside)
        rest = [_renamed(e, same, {}) for e in eqns if e in outside]
        read = {v for e in rest for v in variables(e.invars)}
        own = [v for e in inside for v in e.outvars]
        sums = {v for v in own if v in read and isinstance(states[v], Sum)}
        read = read.union(results)
        crossing = [v for v in own if v in read and not isinstance(states[v], Sum | Shared)]
        part = part_of_jaxpr(inside, [], [])
        again = {v for v in crossing if _is_cheaper_outside(v, part, results)}
        crossing = [v for v in crossing if v not in again]
        outside.update(dependencies(part, again, {*crossing})[1])
        rest = [_renamed(e, same, {}) for e in eqns if e in outside]
        kept = sum(map(nbytes, {*crossing, *sums}))
        return _Found(states, inside, crossing, made - kept, kept, size, rest, roots, reason, met)

    def _extract(
        self, found: _Found, results: Collection[Var]
    ) -> tuple[Region, list[JaxprEqn], list[JaxprEqn]]:
        """Return a region, and what runs before and after it."""
        states, rest = found.states, found.rest
        read = {v for e in rest for v in variables(e.invars)}.union(results)
        read -= {v for e in rest for v in e.outvars}
        made_inside = [v for e in found.eqns for v in e.outvars]
        sums = [v for v in made_inside if v in read and isinstance(states[v], Sum | Shared)]
        # Equations of whole values that the region alone reads, and that are cheap, move into it.
        before = [
            e
            for e in rest
            if not e.effects
            and all(isinstance(states.get(v, Shared()), Shared) for v in variables(e.invars))
        ]
        outs = [*found.crossing, *sums]
        _, needed = dependencies(part_of_jaxpr(found.eqns, [], outs), outs)
        _, before = dependencies(
            part_of_jaxpr(before, [], []), [v for e in needed for v in variables(e.invars)]
        )
        is_before = set(before)
        after = [e for e in rest if e not in is_before]
        read = {v for e in after for v in variables(e.invars)}.union(found.roots, results)
        moved, before = self._movable(before, read, found.roots)
        body = [*moved, *needed]
        made = {v for e in body for v in e.outvars}
        inputs = dict.fromkeys(v for e in body for v in variables(e.invars) if v not in made)
        axes = {v: s.axis for v, s in states.items() if isinstance(s, BatchAxis | Indices)}
        arguments = sorted(inputs, key=lambda v: v not in axes)  # rows first
        differentiated = [v for v in outs if v in self.active]
        is_number = len(differentiated) == 1 and differentiated[0] in sums
        is_number = is_number and not aval(differentiated[0]).shape
        # The gradient is scaled by the cotangent after the rules have seen 1 in its place. In
        # float16, the cotangent may be a loss scale, without which gradients round to 0.
        used = [e for e in body if any(v in self.active for v in variables(e.invars))]
        is_number &= all(has_linear_rules(e) and not has_small_range(e) for e in used)
        objective = outs.index(differentiated[0]) if is_number else None
        jaxpr = part_of_jaxpr(body, arguments, outs)
        return Region(jaxpr, axes, found.size, objective), before, after

    def _movable(
        self, before: list[JaxprEqn], outside: set[Var], roots: Collection[Var]
    ) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """Divide equations of whole values into the region's own and the earlier ones.

        Cheap ones that only the region reads are its own: masks, zeros, positions. Those whose
        results are larger than what they read, such as comparisons of pairs, may be in both.
        """
        inside: list[JaxprEqn] = []
        rest: list[JaxprEqn] = []
        for eqn in reversed(before):
            cheap = is_cheap(eqn) and not any(v in self.active for v in eqn.outvars)
            is_read = any(v in outside for v in eqn.outvars)
            grows = sum(map(nbytes, variables(eqn.invars))) < sum(map(nbytes, eqn.outvars))
            is_root = any(v in roots for v in eqn.outvars)
            is_inside = cheap and (grows or not is_read) and not is_root
            if is_inside:
                inside.append(eqn)
            if is_read or not is_inside:
                rest.append(eqn)
                outside |= set(variables(eqn.invars))
        return inside[::-1], rest[::-1]


def _renamed(eqn: JaxprEqn, operands: Mapping[Var, Any], results: Mapping[Var, Var]) -> JaxprEqn:
    """Return the equation with others in the place of some operands and results."""
    invars = [v if isinstance(v, Literal) else operands.get(v, v) for v in eqn.invars]
    outvars = [results.get(v, v) for v in eqn.outvars]
    if (invars, outvars) == (eqn.invars, eqn.outvars):
        return eqn
    new: JaxprEqn = eqn.replace(invars=invars, outvars=outvars)
    return new


def _is_cheaper_outside(v: Var, region: Jaxpr, results: Collection[Var]) -> bool:
    """Whether few bytes are made to compute rows of a region from its arguments."""
    if jnp.issubdtype(aval(v).dtype, jax.dtypes.extended):
        return True  # Keys take no memory, and no buffer.
    if v in results:
        return False
    _, eqns = dependencies(region, [v])
    return sum(map(made_bytes, eqns)) - sum(map(nbytes, eqns[-1].outvars)) < nbytes(v)


def _roots(
    eqns: Sequence[JaxprEqn], params: Collection[Var], classes: AxisClasses
) -> Iterator[tuple[dict[Var, int], int]]:
    """Arrays and their axes that may be cut, with the number of rows.

    An axis may begin anywhere: in an argument, or in a result whose operands do not have it, such
    as heads that were features, or two batches that are joined. Parameters are not cut.
    """
    groups: dict[Group, dict[Var, int]] = {}
    made: set[Var] = set()

    def add(v: Var, given: Collection[Group] = ()) -> None:
        for axis, group in enumerate(classes.of(v)):
            if group[1] > 1 and group not in given:
                groups.setdefault(group, {}).setdefault(v, axis)

    for eqn in eqns:
        operands = list(variables(eqn.invars))
        for v in operands:
            if v not in made and v not in params:
                add(v)
        given = {group for v in operands for group in classes.of(v)}
        # Rows that are repeated, or follow from their positions, need not exist before.
        is_repeated = any(not {*factor.operands} - {None} for factor in factors(eqn))
        if given and not is_repeated:
            for v in eqn.outvars:
                add(v, given)
        made.update(operands, eqn.outvars)
    total = classes.bytes()
    largest = sorted(groups, key=lambda group: -total[group])[:MOST_AXES]
    # Axes that never meet may run together, such as generated examples and real ones.
    together: dict[int, dict[Var, int]] = {}
    for group in largest:
        together[group[1]] = groups[group] | together.get(group[1], {})
    yield from ((roots, size) for size, roots in together.items())
    for group in largest:
        roots, size = groups[group], group[1]
        if len(roots) < len(together[size]):
            yield roots, size
        if len(roots) > 1:
            large = sorted(roots, key=nbytes, reverse=True)[:4]
            yield from (({v: roots[v]}, size) for v in large)


def _pair_roots(
    eqns: Sequence[JaxprEqn], params: Collection[Var], classes: AxisClasses
) -> Iterator[tuple[dict[Var, int], int]]:
    """Operands of one axis that meet on two axes of a result, such as ``y[:, None] > y[None]``.

    If one of them is cut, and the other is whole, the pairs are rows.
    """
    for eqn in sorted(eqns, key=made_bytes, reverse=True):
        uses = Counter(v for v in variables(eqn.invars) if v not in params)
        groups = [group for v in eqn.outvars for group in Counter(classes.of(v)).items()]
        for group in [group for group, count in groups if count > 1 < group[1]]:
            for v, count in uses.items():
                if count == classes.of(v).count(group) == 1:
                    yield {v: classes.of(v).index(group)}, group[1]


# Run them.


def run_divided(
    closed: ClosedJaxpr,
    args: Sequence[Any],
    division: Division,
    chunks: int,
    inner: Callable[[Chunk], Chunk] = lambda f: f,
    keep: int = 0,
) -> list[Any]:
    """Evaluate a divided loss.

    Args:
      closed: The loss.
      args: Its arguments.
      division: Its parts.
      chunks: Number of chunks of each region, at most.
      inner: Wraps the function of a chunk of the largest region.
      keep: Number of arrays of rows that the backward pass does not compute again, the dearest.
    """
    jaxpr, largest = closed.jaxpr, division.largest
    keeps = {(n, v) for n, v, _ in division.dearest[:keep]}
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a.val if isinstance(a, Literal) else values[a] for a in atoms]

    later = [set(variables(jaxpr.outvars))]
    for part in reversed(division.parts[1:]):
        eqns = part.eqns if isinstance(part, Whole) else [part.jaxpr]
        later.append(later[-1].union(*(variables(e.invars) for e in eqns)))
    for n, (part, read_later) in enumerate(zip(division.parts, reversed(later), strict=True)):
        if isinstance(part, Whole):
            for eqn in part.eqns:
                values |= zip(eqn.outvars, evaluate(eqn, read(eqn.invars)), strict=True)
        else:
            wrap = inner if part is largest else lambda chunk: chunk
            kept = {v for v in part.axes if (n, v) in keeps}
            loop = _Loop(part, division, chunks, wrap, read_later, kept)
            values |= loop.run(read(part.jaxpr.invars))
    return read(jaxpr.outvars)


class _Loop:
    """The loop over the chunks of a region, and its derivative.

    Attributes:
      passed: Differentiated rows that later parts read, by number. They are results, too, so that
        their gradient is added to the gradient of the later parts in place.
    """

    def __init__(
        self,
        region: Region,
        division: Division,
        chunks: int,
        inner: Callable[[Chunk], Chunk],
        read_later: Collection[Var],
        kept: Collection[Var],
    ) -> None:
        self.region, self.inner, self.active = region, inner, division.active
        self.results: list[Any] = region.jaxpr.outvars
        # Axes of the rows of arguments and of results; None for whole values and for sums.
        self.axis_of = [region.axes.get(v) for v in region.jaxpr.invars]
        self.out_axis = [region.axes.get(v) for v in self.results]
        self.axes = RowAxes(region.size, self.active)
        self.size = -(-region.size // min(chunks, region.size))
        self.closed = ClosedJaxpr(region.jaxpr, [])
        self.chosen, self.others = self._separate(self.axis_of)
        self.floats = [k for k, v in enumerate(self.results) if is_floating(v)]
        self.arguments, _ = self._separate(region.jaxpr.invars)
        self.passed = [
            i
            for i, (v, axis) in enumerate(zip(self.arguments, self.chosen, strict=True))
            if axis is not None and v in read_later and region.objective is None
        ]
        # Rows that are kept for the backward pass, in the order in which they are made, and all
        # that it need not make again.
        rows, held = region.axes, division.held
        self.held = {v: rows[v] for v in self.results if v in held and v in rows}
        self.kept = {v: a for v, a in rows.items() if v in kept and v not in self.held}
        self.known = self.kept | self.held

    def _separate(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The differentiated arguments and the others."""
        lists: tuple[list[Any], list[Any]] = ([], [])
        for v, a in zip(self.region.jaxpr.invars, arguments, strict=True):
            lists[v not in self.active].append(a)
        return lists

    def run(self, args: Sequence[Any]) -> dict[Var, Any]:
        """Return the results, and the arguments that pass."""
        active, others = equally_varying(self._separate(args))
        if not active:
            return dict(zip(self.results, self.values([], others)[0], strict=True))
        function: Any = jax.custom_vjp(self.values)
        if self.region.objective is None:
            function.defvjp(self.forward, self.backward)
        else:
            function.defvjp(self.values_and_grads, self.scaled)
        results, passed = function(active, others)
        # Later equations may have no derivative, such as a loop or a callback of stopped values.
        found = {
            v: a if v in self.active else jax.lax.stop_gradient(a)
            for v, a in zip(self.results, results, strict=True)
        }
        return found | {self.arguments[i]: a for i, a in zip(self.passed, passed, strict=True)}

    def _chunk(self, size: int) -> Chunk:
        """The function of one chunk.

        Rows to keep are its last results, or read if they are its last arguments.
        """

        def chunk(active: list[Any], start: Any, others: list[Any]) -> tuple[list[Any], list[Any]]:
            chosen, rest = iter(active), iter(others)
            arrays = [next(chosen if v in self.active else rest) for v in self.closed.jaxpr.invars]
            known = dict(zip(self.known, rest, strict=False))
            made: list[Any] = []

            def keep(v: Var, value: Value) -> Value:
                if v in known:
                    return value._replace(array=_in_place_of(value.array, known[v]))
                if v in self.kept:
                    made.append(value.array)
                return value

            values = [
                Value(Shared() if axis is None else BatchAxis(axis), a)
                for axis, a in zip(self.axis_of, arrays, strict=True)
            ]
            part = Part(start, size, self.region.size)
            interpreter, results = run_rows(self.closed, values, part, self.axes, keep)
            wanted = [Sum() if axis is None else BatchAxis(axis) for axis in self.out_axis]
            found = interpreter.lowered(results, wanted, self.closed.jaxpr.outvars)
            return (
                [found[k] for k in self.floats],
                [*(a for k, a in enumerate(found) if k not in self.floats), *made],
            )

        return chunk

    def _joined(self, floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        chosen, rest = iter(floats), iter(others)
        return [next(chosen if k in self.floats else rest) for k in range(len(self.results))]

    def _over_chunks(
        self,
        body: Callable[[Any, int, Any, Any], Any],
        empty: Callable[[Any], Any],
        *arrays: list[Any],
    ) -> Any:
        """Run ``carry = body(start, size, carry, arrays)`` for all chunks, from ``empty(0)`` on."""
        whole, rest = divmod(self.region.size, self.size)
        # XLA would make the zeros of all loops once, at the beginning, and copy them there.
        zero, arrays = equally_varying((jnp.zeros((), jnp.int32), arrays))
        zero, arrays = _after_one_another((zero, arrays))
        starts = jnp.arange(whole, dtype=jnp.int32) * self.size
        chunk = for_loops(lambda carry, start: body(start, self.size, carry, arrays))
        carry, _ = jax.lax.scan(lambda c, s: (chunk(c, s), None), empty(zero), starts)
        if rest:
            carry, arrays = _after_one_another((carry, arrays))
            carry = body(whole * self.size, rest, carry, arrays)
        return carry

    def _rows(
        self, arrays: Sequence[Any], axes: Sequence[int | None], start: Any, size: int
    ) -> Any:
        part, pairs = Part(start, size, self.region.size), zip(arrays, axes, strict=False)
        return [a if axis is None else slice_rows(a, axis, part) for a, axis in pairs]

    @staticmethod
    def _buffers(arrays: Sequence[Any], axes: Sequence[int | None], zero: Any) -> list[Any]:
        """Zeros, to write rows to or to add parts to; parts are added in float32 or wider."""
        buffers = []
        for a, axis in zip(arrays, axes, strict=True):
            is_added = axis is None and jnp.issubdtype(a.dtype, jnp.floating)
            dtype = sum_dtype(a.dtype) if is_added else a.dtype
            buffers.append(jnp.broadcast_to(zero.astype(dtype), a.shape))
        return buffers

    def _put(
        self, buffers: list[Any], found: Sequence[Any], axes: Sequence[int | None], start: Any
    ) -> list[Any]:
        new = []
        for buffer, a, axis in zip(buffers, found, axes, strict=True):
            if axis is None:
                new.append(buffer + a.astype(buffer.dtype))
            else:
                at = start * (buffer.shape[axis] // self.region.size)
                new.append(jax.lax.dynamic_update_slice_in_dim(buffer, a, at, axis))
        return new

    def _finished(self, buffers: Sequence[Any]) -> list[Any]:
        return [b.astype(aval(v).dtype) for b, v in zip(buffers, self.results, strict=True)]

    def _empty(self, zero: Any, kept: Collection[Var] = ()) -> list[Any]:
        axes = [*self.out_axis, *(self.kept[v] for v in kept)]
        return self._buffers([aval(v) for v in (*self.results, *kept)], axes, zero)

    def values(self, active: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the results, and the arguments that pass."""

        def body(start: Any, size: int, buffers: list[Any], arrays: Any) -> list[Any]:
            active, others = arrays
            given = self._rows(active, self.chosen, start, size)
            rest = self._rows(others, self.others, start, size)
            found = self._joined(*self._chunk(size)(given, start, rest))
            return self._put(buffers, found, self.out_axis, start)

        buffers = self._over_chunks(body, self._empty, active, others)
        return self._finished(buffers), [active[i] for i in self.passed]

    def _linearized(
        self,
        start: Any,
        size: int,
        active: list[Any],
        others: list[Any],
        *,
        wrap: Callable[[Chunk], Chunk] = lambda chunk: chunk,
    ) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
        """The results of a chunk with the rows to keep, and the function of its gradient."""
        given = self._rows(active, self.chosen, start, size)
        rest = self._rows(others, [*self.others, *self.known.values()], start, size)
        chunk = wrap(self._chunk(size))
        floats, vjp, found = jax.vjp(lambda given: chunk(given, start, rest), given, has_aux=True)
        kept = found[len(self.results) - len(self.floats) :]
        return [*self._joined(floats, found), *kept], lambda cotangents: vjp(cotangents)[0]

    def forward(self, active: list[Any], others: list[Any]) -> tuple[Any, Any]:
        """Return the results as `values`, and save the arguments alone."""

        def body(start: Any, size: int, buffers: list[Any], arrays: Any) -> list[Any]:
            # As JAX runs it when it is differentiated, with the values of derivative rules.
            found, _ = self._linearized(start, size, *arrays)
            return self._put(buffers, found, axes, start)

        axes = [*self.out_axis, *self.kept.values()]
        empty = functools.partial(self._empty, kept=self.kept)
        buffers = self._over_chunks(body, empty, active, others)
        kept = buffers[len(self.results) :]
        results = self._finished(buffers[: len(self.results)])
        held = [a for a, v in zip(results, self.results, strict=True) if v in self.held]
        passed = [active[i] for i in self.passed]
        return (results, passed), (active, [*others, *kept, *held])

    def backward(self, saved: Any, given: Any) -> tuple[list[Any], None]:
        """Return the gradients: each chunk runs again, except for the rows that are kept."""
        active, others = saved
        cotangents, passed = given
        sums_of = dict(zip(self.passed, passed, strict=True))
        wanted, axes = [cotangents[k] for k in self.floats], [self.out_axis[k] for k in self.floats]
        over = self._overwritten(active, wanted, axes)
        kept = [None if k in over.values() else ct for k, ct in enumerate(wanted)]

        def body(start: Any, size: int, sums: list[Any], arrays: Any) -> list[Any]:
            active, others, wanted = arrays
            wanted = [*wanted]
            for i, k in over.items():
                wanted[k] = sums[i]

            def gradient(start: Any, *arrays: Any) -> list[Any]:
                active, others, wanted = arrays
                _, vjp = self._linearized(start, size, active, others, wrap=self.inner)
                return vjp(self._rows(wanted, axes, start, size))

            grads = _without_unused(gradient, start, active, others, wanted)
            before = self._rows(sums, self.chosen, start, size)
            grads = [g + before[i] if i in self.passed else g for i, g in enumerate(grads)]
            return self._put(sums, grads, self.chosen, start)

        def empty(zero: Any) -> list[Any]:
            buffers = self._buffers(active, self.chosen, zero)
            buffers = [wanted[over[i]] if i in over else b for i, b in enumerate(buffers)]
            return [sums_of.get(i, b) for i, b in enumerate(buffers)]

        sums = self._over_chunks(body, empty, active, others, kept)
        return [s.astype(a.dtype) for s, a in zip(sums, active, strict=True)], None

    def _overwritten(
        self, active: list[Any], wanted: list[Any], axes: Sequence[int | None]
    ) -> dict[int, int]:
        """Arguments whose gradients are written over the cotangents of results, row by row."""
        over: dict[int, int] = {}
        for i, (a, axis) in enumerate(zip(active, self.chosen, strict=True)):
            for k, (ct, own) in enumerate(zip(wanted, axes, strict=True)):
                same = axis is not None and (a.shape, a.dtype, axis) == (ct.shape, ct.dtype, own)
                if same and i not in {*over, *self.passed} and k not in over.values():
                    over[i] = k
        return over

    def values_and_grads(self, active: list[Any], others: list[Any]) -> tuple[Any, Any]:
        """Return the results, and save the gradients of the number that is differentiated."""

        def body(start: Any, size: int, carry: Any, arrays: Any) -> Any:
            buffers, sums = carry
            found, vjp = self._linearized(start, size, *arrays, wrap=self.inner)
            grads = vjp([jnp.full_like(found[k], k == self.region.objective) for k in self.floats])
            return (
                self._put(buffers, found, self.out_axis, start),
                self._put(sums, grads, self.chosen, start),
            )

        def empty(zero: Any) -> Any:
            return self._empty(zero), self._buffers(active, self.chosen, zero)

        buffers, sums = self._over_chunks(body, empty, active, others)
        return (self._finished(buffers), []), (sums, [jnp.zeros((), a.dtype) for a in active])

    def scaled(self, saved: Any, given: Any) -> tuple[list[Any], None]:
        """Return the saved gradients, times the cotangent of the number."""
        (cotangents, _), (sums, like) = given, saved
        assert self.region.objective is not None
        ct = cotangents[self.region.objective]
        pairs = zip(sums, like, strict=True)
        return [(s * ct.astype(s.dtype)).astype(z.dtype) for s, z in pairs], None


def _after_one_another(tree: Any) -> Any:
    """A barrier for arrays. It would count as a use of a random key."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = [i for i, a in enumerate(leaves) if not jnp.issubdtype(a.dtype, jax.dtypes.extended)]
    for i, a in zip(chosen, jax.lax.optimization_barrier([leaves[i] for i in chosen]), strict=True):
        leaves[i] = a
    return jax.tree.unflatten(structure, leaves)


@jax.custom_jvp
def _in_place_of(made: Any, known: Any) -> Any:
    """An array that is known, with the derivative of the equation that makes it."""
    return known


_in_place_of.defjvp(lambda arrays, tangents: (arrays[1], tangents[0]))


def _without_unused(f: Callable[..., Any], *args: Any) -> Any:
    """Evaluate a function without what its results do not need, such as what is known."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    used, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    results = interpret(ClosedJaxpr(used, closed.consts), jax.tree.leaves(args), evaluate)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def cut(
    f: F,
    chunks: int,
    inner: Callable[[Chunk], Chunk] = lambda f: f,
    keep: int = 0,
    depth: int = MOST_REGIONS,
    made: tuple[int, int] = (0, 0),
) -> F:
    """Run the regions of a function in chunks.

    Args:
      f: A function of pytrees of arrays, differentiated with respect to the first argument.
      chunks: Number of chunks.
      inner: Wraps the function of a chunk of the largest region.
      keep: Number of arrays of rows that the backward pass does not compute again, the dearest.
      depth: As in `divide`.
      made: Bytes that the function makes outside of its regions and in them, where it was planned.
        Other arguments that cannot be cut run whole if they make no more than with one chunk.

    Returns:
      A function with the same arguments and values. Gradients are the same up to the order of sums.
    """

    def run(closed: ClosedJaxpr, leaves: list[Any], differentiated: list[bool]) -> list[Any]:
        division = divide(closed, differentiated, depth)
        if not division.regions:
            outside, inside = made
            if sum(map(made_bytes, closed.eqns)) <= outside + inside // chunks:
                return interpret(closed, leaves, evaluate)
            reasons = "; ".join(division.reasons) or "no array has an axis to cut"
            raise ValueError(
                "a loss that was planned to run in chunks (remat_to_fit, plan_step) cannot be cut "
                f"for arguments of these shapes: {reasons}; plan again for them"
            )
        return run_divided(closed, leaves, division, chunks, inner, keep)

    return evaluate_as(f, run)
