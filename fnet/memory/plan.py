"""Plans: the fastest way to train within a memory budget, found by compiling without running."""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from fnet import measured
from fnet.cpu.options import WITHOUT_OPTIMIZED_CODE
from fnet.cpu.tracing import traced_for
from fnet.jaxpr import nbytes, place
from fnet.jaxpr.primitives import made_bytes
from fnet.memory.cost import Cost, estimate_cost
from fnet.memory.devices import is_on_devices, on_devices
from fnet.memory.floor import Floor, find_floor
from fnet.memory.graph import analyze
from fnet.memory.loops import loop_policies
from fnet.memory.peak import CANDIDATE_OPTIONS, Peak, peak
from fnet.memory.proposals import KeptRows, Offloads, Planner
from fnet.memory.regions import MOST_REGIONS, NOTHING, ONE_ROW, Division, Kept, divide
from fnet.memory.remat import REMAT_POLICIES, Policy, in_chunks, planned, policies_for
from fnet.memory.rows import rule_of_this_trace
from fnet.memory.sizes import format_bytes, parse_bytes
from fnet.memory.target import Target, compile_lowered
from fnet.memory.windows import Window, trace_inlined

Build = Callable[[Policy, int], jax.stages.Traced]
"""``build(policy, microbatches) -> jitted.trace(...)``: traces a candidate."""

F = TypeVar("F", bound=Callable[..., Any])

MOST_PROGRAMS = 10
"""Largest number of programs that a plan within a budget compiles."""

# XLA's GPU compiler (jaxlib 0.10) completes the copy of an array to the host when the backward pass
# reads it. Until then the array is on the device too. In a loop the copy completes per iteration.
_OFFLOADS: dict[str, Offloads] = {"tpu": "all"}


class Candidate(NamedTuple):
    """A compiled combination of remat policy, microbatches and compiler options.

    Attributes:
      policy: Remat policy: one of `REMAT_POLICIES`, ``planned`` or ``chunked loops``.
      microbatches: Number of microbatches.
      cost: FLOPs and bytes moved per step, which rank the candidates.
      peak: Peak memory of the compiled step.
      compiler_options: XLA options it was compiled with.
    """

    policy: Policy
    microbatches: int
    cost: Cost
    peak: Peak
    compiler_options: dict[str, Any]

    def __str__(self) -> str:
        split = f" in {self.microbatches} microbatches" if self.microbatches > 1 else ""
        chunks = f" in {self.policy.chunks} chunks" if self.policy.chunks > 1 else ""
        return f"{self.policy.name}{split}{chunks}"


class Plan(NamedTuple):
    """The candidates that were compiled, and the chosen one, which ``print(plan)`` describes.

    Attributes:
      budget: Budget in bytes, or None.
      chosen: Fastest candidate that fits. Without a budget, the fastest.
      smaller: Fastest candidate with a lower peak than ``chosen``, for a tighter budget. None if
        there is none.
      candidates: All candidates that were compiled, the fastest first.
      reserve: Bytes of the budget that the program may not use, such as ``held`` of
        `remat_to_fit`.
    """

    budget: int | None
    chosen: Candidate
    smaller: Candidate | None
    candidates: tuple[Candidate, ...]
    reserve: int = 0

    def __str__(self) -> str:
        held = f" + {format_bytes(self.reserve)} held" if self.reserve else ""
        plain = next((c for c in self.candidates if str(c) == "none"), None)
        flops = ""
        if plain and plain.cost.flops:
            ratio = self.chosen.cost.flops / plain.cost.flops
            flops = f", {ratio:.2f} times the plain FLOPs"
        rows = [("chosen", f"{format_bytes(self.chosen.peak.total)}{held}{flops}")]
        if self.budget is not None:
            rows.insert(0, ("budget", format_bytes(self.budget)))
        rows.append(("by", _way(self.chosen)))
        return "\n".join(f"{name:7} {value}" for name, value in rows)

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Candidates that no other one beats in both peak and estimated time, fastest first."""
        front: list[Candidate] = []
        for c in sorted(self.candidates, key=lambda c: (c.cost.time, c.peak.total)):
            if not front or c.peak.total < front[-1].peak.total:
                front.append(c)
        return tuple(front)


def _explain_least(state_bytes: int, reserve: int) -> str:
    if not state_bytes:
        return f" for {format_bytes(reserve)} that stay in memory outside of the program."
    parts = [
        (state_bytes, f"the train state takes {format_bytes(state_bytes)}"),
        (
            reserve,
            f"the process takes {format_bytes(reserve)} besides the step "
            "(runtime, batches, checkpoints)",
        ),
    ]
    taken = ", and ".join(text for size, text in sorted(parts, reverse=True) if size)
    return f": {taken}. Give more than {format_bytes(state_bytes + reserve)}."


def _explain_floor(fixed: int, floor: Floor | None) -> str:
    if floor is None:
        return ""
    place = f", and {format_bytes(floor.bytes)} for {floor.place}" if floor.bytes else ""
    return (
        f"Every plan needs at least {format_bytes(fixed + floor.bytes)}: {format_bytes(fixed)} for "
        f"arguments, results and constants{place}. "
    )


def _way(c: Candidate) -> str:
    if c.policy.name != "none":
        return str(c).replace("planned", "planned rematerialization", 1)
    if c.microbatches > 1 or c.policy.chunks > 1:
        return str(c).removeprefix("none in ")
    options = "compiler options (plan.chosen.compiler_options)"
    return options if c.compiler_options else "no change"


class BudgetError(ValueError):
    """No candidate fits the budget.

    Attributes:
      floor: Bytes that the step holds under every plan, such as its state. It may be far lower than
        what a plan reaches. None if the loss was not analyzed.

    Example:
      >>> from fnet import memory
      >>> try:
      ...     memory.plan(lambda policy, microbatches: None, "1KiB", state_bytes=4096)
      ... except memory.BudgetError as error:
      ...     print(error)
      a budget of 1.00 KiB is too small: the train state takes 4.00 KiB. Give more than 4.00 KiB.
    """

    floor: int | None

    def __init__(self, message: str, floor: int | None = None) -> None:
        super().__init__(message)
        self.floor = floor


def plan(
    build: Build,
    budget: float | str | None = None,
    *,
    policies: Sequence[str | Policy] | None = None,
    microbatches: Iterable[int] = (1,),
    regions: bool = True,
    state_bytes: int = 0,
    reserve: int = 0,
    target: Target | None = None,
    progress: Callable[[Candidate], None] | None = None,
) -> Plan:
    """Choose what to save, microbatches and compiler options without running a step.

    An integer program decides for each array of the loss whether the backward pass saves it,
    rematerializes it or, on devices with host memory, moves it there. It minimizes the estimated
    time within the budget. The proposal is compiled, and the peak of the compiled program corrects
    the next proposal. A `jax.lax.scan` may also run in chunks (`fnet.memory.loops`), and what is
    outside of it is planned as before. Candidates are compiled in order of estimated time, at most
    ten. If none of them fits, the smallest are compiled, and at most five more between. The chosen
    candidate was compiled and fits.

    `fnet.compile_step` with a budget and `fnet.step.plan_step` are `plan` for train steps. The
    integer program follows Jain et al. 2020, with fixed windows: the arrays of a window are
    rematerialized when the backward pass reaches it.

    If the backend allows it, candidates are compiled without generating optimized code, so
    compile the chosen one again. JAX's compilation cache makes a second call fast.

    Args:
      build: ``build(policy, microbatches)`` traces the train step, with
        ``policy.apply(loss)`` in place of the loss. It may raise ValueError for a number of
        microbatches that the batch cannot be split into, except the smallest number.
      budget: Bytes, or text for `parse_bytes`. ``"50%"`` is a share of the plain step's peak with
        the compiler's default options, plus ``reserve``. None for no limit.
      policies: Restricts the choice to these keys of `REMAT_POLICIES`. By default every array is
        planned.
      microbatches: Numbers of microbatches, each a multiple of the one before.
      regions: Whether regions of the loss may run in chunks; see `fnet.memory.regions`. This needs
        a loss that ``build`` differentiates in reverse mode with respect to its first argument.
      state_bytes: Bytes of the train state. A budget below them fails at once.
      reserve: Bytes of the budget that are needed outside of the compiled step.
      target: A device to compile for. By default this machine's.
      progress: Called with each candidate after it is compiled.

    Returns:
      The chosen candidate, the next smaller one, and all that were compiled. Without a budget, the
      candidates span the Pareto front of peak and estimated time.

    Raises:
      BudgetError: If the budget is below the state's size, or nothing fits. The message gives the
        lowest peak and its policy.
      ValueError: If the budget cannot be read, a policy is unknown, or there is nothing to choose
        from.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> def loss(w, x):
      ...     for _ in range(4):
      ...         x = jnp.tanh(jnp.tanh(x @ w) * x)
      ...     return x.sum()
      >>> def build(policy, microbatches):
      ...     f = policy.apply(loss)
      ...     return jax.jit(jax.grad(f)).trace(
      ...         jnp.zeros((16, 16)), jnp.zeros((64, 16))
      ...     )
      >>> plan = memory.plan(build, "40KiB")
      >>> str(plan.chosen), plan.chosen.peak.total <= 40 * 1024
      ('none in 2 chunks', True)

    References:
      Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
      2020.
    """
    reserved = f", plus {format_bytes(reserve)} outside of the program" if reserve else ""
    platform = target.device.platform if target else jax.default_backend()
    named: Sequence[str | Policy] = ("none",) if policies is None else tuple(policies)
    supported = policies_for(platform)
    if unknown := [n for n in named if isinstance(n, str) and n not in supported]:
        raise ValueError(
            f"plan: expected policies for {platform} of {supported}, got {unknown[0]!r}."
        )
    choices = sorted(set(microbatches))
    if not named or not choices or choices[0] < 1:
        raise ValueError(
            f"plan: needs a policy and microbatches >= 1, got {list(named)} and {choices}."
        )
    build = traced_for(target and platform)(build)

    def plain() -> int:
        lowered = build(REMAT_POLICIES["none"], choices[0]).lower()
        given = target.compiler_options if target else {}
        return reserve + estimate_peak(lowered, given, target).total

    limit = None if budget is None else parse_bytes(budget, "budget", plain)
    if limit is not None and limit < state_bytes + reserve:
        raise BudgetError(
            f"a budget of {format_bytes(limit)} is too small{_explain_least(state_bytes, reserve)}"
        )
    options = (target.compiler_options,) if target else CANDIDATE_OPTIONS.get(platform, ({},))
    on_host: Offloads = "loops" if "offload" in supported else "nothing"
    search = _Search(
        build=build,
        limit=None if limit is None else limit - reserve,
        choices=choices,
        regions=regions,
        state_bytes=state_bytes,
        target=target,
        offloads=None if policies is not None else _OFFLOADS.get(platform, on_host),
        options=options,
        progress=progress,
    )
    search.run([REMAT_POLICIES[n] for n in named])
    ranked = tuple(sorted(search.candidates, key=search.order))
    least = min(ranked, key=lambda c: c.peak.total)
    if not search.fits(least.peak.total):
        fixed = least.peak.total - least.peak.temporaries - least.peak.workspace
        floor = fixed + search.floor.bytes + reserve if search.floor else None
        enough = format_bytes(math.ceil(1.01 * (least.peak.total + reserve)))
        raise BudgetError(
            f"no policy fits a budget of {format_bytes(limit or 0)}: the lowest peak found is "
            f"{format_bytes(least.peak.total)}, by {_way(least)}{reserved}. "
            f"{_explain_floor(fixed, search.floor)}Raise the budget to {enough}, or use a smaller "
            f"batch, a smaller optimizer state or more devices{search.reason}",
            floor,
        )
    if limit is None:  # the smallest of equally fast ones
        chosen = min(ranked, key=lambda c: (search.order(c), c.peak.total))
    else:
        chosen = next(c for c in ranked if search.fits(c.peak.total))
    smaller = next((c for c in ranked if c.peak.total < chosen.peak.total), None)
    return Plan(limit, chosen, smaller, ranked, reserve)


class _Attempt(NamedTuple):
    """A program to compile next.

    Attributes:
      inner: Remat policy, without chunks of regions.
      time: Estimated time, which orders attempts.
      bytes: Predicted bytes of its planned arrays or of its loops; 0 for a named policy.
      depth: Which regions; see `fnet.memory.regions.divide`.
      made: Bytes that the loss makes outside of the regions and in them.
    """

    source: "_Source"
    inner: Policy
    microbatches: int
    time: float
    bytes: int = 0
    windows: tuple[Window, ...] = ()
    chunks: int = 1
    kept: Kept = NOTHING
    depth: int = MOST_REGIONS
    made: tuple[int, int] = (0, 0)

    @property
    def policy(self) -> Policy:
        policy = in_chunks(self.chunks, self.inner, self.kept, self.depth, self.made)
        if not self.source.search.is_on_devices or policy is REMAT_POLICIES["none"]:
            return policy
        return policy._replace(apply=lambda f: on_devices(f, policy.apply))

    def recording(self, losses: "list[_Loss]") -> Policy:
        """The policy, which appends what it makes of the loss, or of a chunk of it."""
        divides = self.source.search.is_on_devices
        inner = self.inner._replace(
            apply=lambda f: _recorded(self.inner.apply(f), losses, divides=divides)
        )
        return self._replace(inner=inner).policy


_LEAST_SAVED = 0.02
"""Programs that may save a smaller share of the peak are not compiled."""


@dataclasses.dataclass
class _Search:
    """Best-first search: compile the fastest attempt that may fit, and learn from its peak."""

    build: Build
    limit: int | None
    choices: Sequence[int]
    regions: bool
    state_bytes: int
    target: Target | None
    offloads: Offloads | None  # None: no array is planned
    options: Sequence[Mapping[str, Any]]
    progress: Callable[[Candidate], None] | None
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    compiled: list[tuple[_Attempt, Candidate]] = dataclasses.field(default_factory=list)
    sources: "list[_Source]" = dataclasses.field(default_factory=list)
    inside: "list[tuple[_Attempt, Candidate, _Loss | None]]" = dataclasses.field(
        default_factory=list
    )
    reason: str = ""
    floor: Floor | None = None
    is_on_devices: bool = False  # whether it plans what is inside of a `jax.shard_map`

    def order(self, c: Candidate | _Attempt) -> float:
        return c.time if isinstance(c, _Attempt) else c.cost.time

    def fits(self, bytes_: int) -> bool:
        return self.limit is None or bytes_ <= self.limit

    @property
    def fitting(self) -> list[_Attempt]:
        return [attempt for attempt, c in self.compiled if self.fits(c.peak.total)]

    def run(self, policies: Sequence[Policy]) -> None:
        """Compile the named policies, then candidates until the fastest one that fits is found."""
        named = [_Named(self, p) for p in policies]
        self.sources += named
        for source in named:
            self.compile(source.first())
        self._plan_inside()
        if self.limit is None:
            planned = [s for s in self.sources if isinstance(s, _Planned)]
            for attempt in planned[0].spread() if planned else ():
                self.compile(attempt)
            return
        most = MOST_PROGRAMS if len(self.compiled) < 2 else len(self.candidates) + MOST_PROGRAMS
        self._compile_fastest(most)
        for other in () if self.fitting else tuple(self.sources):
            for smallest in () if self.fitting else other.left[-1:]:
                self.compile(smallest)
        if len(self.candidates) > most and self.fitting:  # what is between may be much faster
            self._compile_fastest(len(self.candidates) + MOST_PROGRAMS // 2)

    def _compile_fastest(self, most: int) -> None:
        while len(self.candidates) < most:
            self._plan_inside()
            attempts = [a for source in self.sources if (a := source.next())]
            if not attempts and not self.fitting:  # the smallest ones may fit all the same
                attempts = [a for source in self.sources if (a := source.small())]
            if not attempts:
                break
            attempt = min(attempts, key=self.order)
            faster = attempt._replace(time=(1 + measured.WORTH_COMPILING) * attempt.time)
            if any(self.order(faster) >= self.order(a) for a in self.fitting):
                break
            self.compile(attempt)

    def compile(self, attempt: _Attempt) -> None:
        losses: list[_Loss] = []
        is_named = isinstance(attempt.source, _Named)
        policy = attempt.recording(losses) if is_named else attempt.policy
        try:
            traced = self.build(policy, attempt.microbatches)
        except ValueError as error:  # microbatches that are too small for a norm
            is_chunk = self.is_on_devices and not is_named
            if attempt.microbatches == self.choices[0] and not is_chunk:
                raise
            if is_chunk:  # JAX refuses some programs whose values vary over fewer axes than chunks
                self.reason = f"; what devices compute does not run in chunks: {error}"
            attempt.source.learn(attempt, None)
            return
        lowered, cost = traced.lower(), estimate_cost(traced.jaxpr)

        def compile_one(given: Mapping[str, Any]) -> Candidate:
            estimate = estimate_peak(lowered, given, self.target)
            return Candidate(attempt.policy, attempt.microbatches, cost, estimate, dict(given))

        made = []
        # XLA compiles without holding Python's lock.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for candidate in pool.map(compile_one, attempt.source.options or self.options):
                made.append(candidate)
                if self.progress:  # on the caller's thread
                    self.progress(candidate)
        self.candidates += made
        smallest = min(made, key=lambda c: c.peak.total)
        timed = attempt._replace(time=attempt.time or cost.time)
        self.compiled.append((timed, smallest))
        attempt.source.learn(attempt, smallest)
        if losses and is_named and is_on_devices(losses[0].closed):
            # What is traced apart from the devices does not know their axes, so rows alone are cut.
            self.is_on_devices, self.offloads = True, None
            losses = []
            self.build(attempt.recording(losses), attempt.microbatches)
        if losses and not self.is_on_devices and (rule := rule_of_this_trace(*losses[0][:2])):
            self.reason = (
                f"; nothing is planned, because the derivative rule of {place(rule)} reads "
                "traced arrays that are not its arguments"
            )
            losses = []
        if not is_named:  # each kind of program may need another option than the plain step
            attempt.source.options = (smallest.compiler_options,)
        if losses and self.regions:
            self._find_regions(attempt, made[0], losses[0])
        if losses and self.offloads is not None:
            self.inside.append((attempt, made[0], losses[0]))
        if isinstance(attempt.source, _Cut | _Loops) and self.offloads is not None:
            self.inside.append((attempt, smallest, None))
        if isinstance(attempt.source, _Cut) and self.offloads is not None:
            whole = attempt._replace(inner=attempt.policy, chunks=1)
            self.inside.append((whole, smallest, None))

    def _find_regions(self, attempt: _Attempt, candidate: Candidate, loss: "_Loss") -> None:
        divisions = loss.divisions or _divided(loss.closed, loss.differentiated)
        division = divisions[MOST_REGIONS]
        for depth, some in divisions.items() if division.regions else ():
            rows = None if self.is_on_devices else KeptRows(some.graph)
            made = sum(map(made_bytes, loss.closed.eqns))
            chosen = attempt._replace(depth=depth, made=(made - some.made, some.made))
            cut = _Cut(self, chosen, candidate, some, loss.closed, rows)
            self.sources.append(cut)
            if rows and self.offloads is not None and some.repeated:
                self.sources.append(_Kept(self, cut, rows))
        if division.reasons:
            kind = "a part" if division.regions else "the loss"
            self.reason = f"; {kind} is not computed in chunks, because {division.reasons[0]}"
        if not division.regions and self.reason and division.reasons[0] != ONE_ROW:
            self.reason += (
                ": fnet.make_step(..., microbatches=n) splits the batch, and statistics with it"
            )
        if len(self.choices) == 1 and not self.is_on_devices:
            self.floor = find_floor(loss.closed, loss.differentiated, division)

    def _plan_inside(self) -> None:
        for known in tuple(self.inside):
            attempt, candidate, loss = known
            source = attempt.source
            more_chunks = isinstance(source, _Cut) and (
                source.next() or attempt.policy.chunks < source.most
            )
            if more_chunks or (self.limit is not None and self.fits(candidate.peak.total)):
                continue
            self.inside.remove(known)
            # Equations outside of the loops, or of the chunks.
            is_outside = isinstance(source, _Loops) or attempt.chunks < attempt.policy.chunks
            base = attempt.inner if is_outside else REMAT_POLICIES["none"]
            if loss is None:  # traced when it is needed, because most programs fit
                losses: list[_Loss] = []
                self.build(attempt.recording(losses), attempt.microbatches)
                if not losses:  # no region is differentiated
                    continue
                (loss,) = losses
            planned = _Planned(self, attempt, candidate, loss, base)
            if planned.saved < _LEAST_SAVED * candidate.peak.total:
                continue
            self.sources.append(planned)
            if not is_outside:
                self.sources.append(_Loops(self, attempt, candidate, loss))


class _Loss(NamedTuple):
    """A traced loss: the arguments of `analyze`, and its divisions if they are known."""

    closed: ClosedJaxpr
    differentiated: list[bool]
    objective: list[bool]
    divisions: dict[int, Division] | None = None


def _divided(closed: ClosedJaxpr, differentiated: list[bool]) -> dict[int, Division]:
    """The divisions of a loss, by depth."""
    division = divide(closed, differentiated)
    found = {MOST_REGIONS: division}
    if len(division.regions) > 1:
        found[1] = divide(closed, differentiated, 1)
    return found


def _recorded(f: F, losses: list[_Loss], *, divides: bool) -> F:
    """The same loss, which appends itself to ``losses`` when it is traced.

    What devices compute is divided where it is traced, because rules of it need their axes.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not losses:
            closed, leaves, structure = trace_inlined(f, args, kwargs)
            count = len(jax.tree.leaves(args[:1]))
            # All results are differentiated, or the first of ``(value, aux)``.
            objective = [True] * structure.num_leaves
            children = structure.children()
            if structure.node_data() == (tuple, None) and len(children) == 2:
                objective = [i < children[0].num_leaves for i in range(len(objective))]
            differentiated = [i < count for i in range(len(leaves))]
            divisions = _divided(closed, differentiated) if divides else None
            losses.append(_Loss(closed, differentiated, objective, divisions))
        return f(*args, **kwargs)

    return run  # type: ignore[return-value]


class _Source:
    """A source of attempts.

    Attributes:
      left: Attempts that may be compiled even if they are not predicted to fit, the smallest last.
      options: Compiler options of the last attempt that were best; None before.
    """

    search: "_Search"
    left: Sequence[_Attempt] = ()
    options: Sequence[Mapping[str, Any]] | None = None

    def next(self) -> _Attempt | None:
        """The fastest attempt that is predicted to fit, or None."""
        raise NotImplementedError

    def small(self) -> _Attempt | None:
        return next(iter(self.left), None)

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        """Take the result of an attempt, or None if it was impossible."""
        raise NotImplementedError


class _Named(_Source):
    """Attempts with a named policy: the whole batch, then more microbatches."""

    def __init__(self, search: _Search, policy: Policy):
        self.search, self._policy = search, policy
        self._peaks: list[Peak] = []
        self._time = 0.0
        self._tried: set[int] = set()
        self._compiled = 0

    def first(self) -> _Attempt:
        return _Attempt(self, self._policy, self.search.choices[0], 0.0)

    def next(self) -> _Attempt | None:
        search = self.search
        if any(search.fits(p.total) for p in self._peaks):
            return None
        for n in search.choices:
            bound = _lower_bound(self._peaks, n // search.choices[0])
            if n > max(self._tried) and search.fits(bound):
                return self._attempt(n)
        return None

    @property
    def left(self) -> Sequence[_Attempt]:  # type: ignore[override]
        larger = [n for n in self.search.choices if n > self._compiled and n not in self._tried]
        return [self._attempt(n) for n in larger[-1:]]

    def _attempt(self, n: int) -> _Attempt:
        # The state is read once per microbatch.
        return _Attempt(self, self._policy, n, self._time + (n - 1) * self.search.state_bytes)

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        self._tried.add(attempt.microbatches)
        if candidate:
            self._compiled = max(self._compiled, attempt.microbatches)
            self._peaks.append(candidate.peak)
            self._time = self._time or candidate.cost.time


class _Cut(_Source):
    def __init__(
        self,
        search: _Search,
        attempt: _Attempt,
        plain: Candidate,
        division: Division,
        closed: ClosedJaxpr,
        rows: KeptRows | None,
    ):
        self.search, self.first = search, attempt
        self._peaks = {1: plain.peak}  # by number of chunks
        self.largest = max(region.size for region in division.regions)
        # A bound counts all that may shrink. For a single region it is a prediction.
        some = division.made / max(sum(map(made_bytes, closed.eqns)), 1)
        self._share = min(some, 1.0) if attempt.depth == 1 else 1.0
        # Equations of several parts run in both passes of each.
        twice = max(division.time - estimate_cost(closed).time, 0.0)
        self._time, self._rows = plain.cost.time + 3 * twice, rows
        self._repeated = sum(estimate_cost(r.jaxpr).time for r in division.repeated.values())
        wholes = {v for r in division.regions for v in r.jaxpr.invars[len(r.axes[0]) :]}
        self._reads = 3 * sum(map(nbytes, wholes))  # in both passes, and of the gradient

    def next(self) -> _Attempt | None:
        fits = self.search.fits
        enough = [n for n in self._peaks if fits(self.least(n))]
        too_few = max((n for n in self._peaks if n not in enough), default=1)
        n = 2 * too_few
        while n < min(enough, default=self.largest + 1):
            if fits(self.least(n)):
                return None if n in self._peaks else self._attempt(n)
            n *= 2
        return None

    def least(self, n: int) -> int:
        """The peak with ``n`` chunks, or a lower bound on it."""
        if n in self._peaks:
            return self._peaks[n].total
        peaks = [self._peaks[k] for k in sorted(self._peaks) if k < n]
        return max(_lower_bound(p, n, self._share) for p in (peaks[:1], peaks))

    @property
    def most(self) -> int:
        return max(self._peaks)

    @property
    def left(self) -> Sequence[_Attempt]:  # type: ignore[override]
        *_, before, last = [0, 0, *(self._peaks[n].total for n in sorted(self._peaks))]
        # As for `_lower_bound`: more chunks save at most what the last doubling saved.
        is_useless = before - last < _LEAST_SAVED * last and len(self._peaks) > 2
        return (
            [] if is_useless or max(self._peaks) == self.largest else [self._attempt(self.largest)]
        )

    def _attempt(self, n: int) -> _Attempt:
        return self.first._replace(source=self, time=self.time(n), chunks=n)

    def time(self, n: int, again: float | None = None) -> float:
        """Estimated time of a number of chunks, with what runs again in the backward pass."""
        if again is None:
            again = self._rows.again if self._rows else self._repeated
        return self._time + again + (n - 1) * self._reads

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        if candidate:
            self._peaks[attempt.chunks] = candidate.peak
        else:
            self.search.sources.remove(self)


class _Kept(_Source):
    """Attempts that run regions in chunks, and keep rows for the backward pass in what is free."""

    def __init__(self, search: _Search, cut: _Cut, rows: KeptRows):
        self.search, self._cut, self._rows = search, cut, rows
        self._known: dict[int, list[tuple[int, int]]] = {}  # kept bytes and peaks, by chunks
        self._tried: set[tuple[int, Kept]] = set()

    def next(self) -> _Attempt | None:
        if self.search.fits(self._cut.least(1)):
            return None  # The plain step fits, and runs nothing again.
        numbers = (2**k for k in range(1, self._cut.largest.bit_length()))
        free = ((n, self._free(n)) for n in numbers)
        some = itertools.islice(((n, bytes_) for n, bytes_ in free if bytes_ > 0), 3)
        attempts = (self._attempt(n, bytes_) for n, bytes_ in some)
        found = [a for a in attempts if a and (a.chunks, a.kept) not in self._tried]
        return min(found, key=self.search.order, default=None)

    def _free(self, n: int) -> int:
        assert self.search.limit is not None
        known = self._known.get(n, [])
        base = max((peak - bytes_ for bytes_, peak in known), default=self._cut.least(n))
        free = self.search.limit - base
        failed = [bytes_ for bytes_, peak in known if not self.search.fits(peak)]
        if failed:  # a bound, even if the prediction says otherwise
            free = min(free, int((1 - min(measured.STEP * 2 ** len(failed), 0.5)) * min(failed)))
        return free

    def _attempt(self, n: int, free: int) -> _Attempt | None:
        proposal = self._rows.solve(free)
        if proposal is None:
            return None
        kept = Kept(proposal.names, self._rows.graph.equations)
        time = self._cut.time(n, proposal.time)
        return self._cut.first._replace(
            source=self, time=time, bytes=proposal.bytes, chunks=n, kept=kept
        )

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        self._tried.add((attempt.chunks, attempt.kept))
        if candidate:
            known = self._known.setdefault(attempt.chunks, [])
            known.append((attempt.bytes, candidate.peak.total))


class _Planned(_Source):
    """Attempts that save, move or rematerialize each array of a loss, or of a chunk of it.

    The integer program predicts bytes of arrays, the compiled program has a peak. The two differ by
    a scale, which stays, and by an offset, which each compiled program corrects. So the search is
    for the number of planned bytes whose peak meets the budget. It stays between the most that fit
    and the fewest that are too large.
    """

    def __init__(
        self,
        search: _Search,
        attempt: _Attempt,
        plain: Candidate,
        loss: _Loss,
        base: Policy = REMAT_POLICIES["none"],
    ):
        self.search, self._plain, self._base = search, plain, base
        self._first = attempt
        self._planner = Planner(analyze(*loss[:3]), search.offloads or "nothing")
        self._equations = self._planner.graph.equations
        self._tried: set[Any] = set()
        self._known: list[tuple[int, int]] = []  # planned bytes and peaks
        # At most the planned bytes are temporaries of the plain program: XLA fuses some away.
        planned_bytes = max(self._planner.plain_bytes, 1)
        temporaries = max(plain.peak.temporaries + plain.peak.workspace, 1)
        self._scale = min(1.0, temporaries / planned_bytes)
        self._offset = plain.peak.total - self._scale * planned_bytes

    @property
    def saved(self) -> int:
        return self._planner.plain_bytes

    def _attempts(self, limits: Iterable[tuple[float, bool]]) -> Iterator[_Attempt]:
        """Solve for numbers of bytes, and yield the proposals that were not compiled."""
        for bytes_, plain in limits:
            proposal = self._planner.solve(int(bytes_), plain)
            if proposal and proposal.windows not in self._tried:
                windows = planned(proposal.windows, self._equations)
                yield _Attempt(
                    self,
                    windows.after(self._base),
                    self._first.microbatches,
                    self._plain.cost.time + self._first.chunks * proposal.time,
                    proposal.bytes,
                    proposal.windows,
                    self._first.chunks,
                )

    def next(self) -> _Attempt | None:
        assert self.search.limit is not None
        fits = self.search.fits
        fitting = max((b for b, total in self._known if fits(total)), default=0)
        too_large = min((b for b, total in self._known if not fits(total)), default=float("inf"))
        if fitting > 0.95 * too_large:
            return None
        # The offset of the program that is nearest to the budget.
        limit = self.search.limit
        near = min(self._known, key=lambda k: abs(k[1] - limit), default=None)
        offset = self._offset if near is None else near[1] - self._scale * near[0]
        bytes_ = (limit - offset) / self._scale
        # A plan that was too large is a bound, even if the offset says otherwise.
        failed = [fits(total) for _, total in self._known][::-1]
        times = failed.index(True) if True in failed else len(failed)
        bytes_ = min(bytes_, (1 - min(measured.STEP * 2**times, 0.2)) * too_large)
        if fitting and bytes_ < fitting:
            bytes_ = (fitting + min(too_large, self.saved)) / 2
        smallest = self._planner.smallest
        limits = [(bytes_, True)] if bytes_ >= smallest else []
        if not fitting:
            # The smallest bound is of a linear program. Whole arrays may need more.
            limits += [(share * smallest, plain) for share, plain in measured.SMALLEST]
        return next(self._attempts(limits), None)

    def spread(self) -> Iterator[_Attempt]:
        most, least = self._planner.plain_bytes, self._planner.smallest
        return self._attempts((least + share * (most - least), True) for share in (0.6, 0.3, 0.05))

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        self._tried.add(attempt.windows)
        if candidate is None:
            return
        self._known.append((attempt.bytes, candidate.peak.total))


class _Loops(_Source):
    """Attempts that run the loops of a loss, or of a chunk of it, in chunks of iterations."""

    def __init__(self, search: _Search, attempt: _Attempt, plain: Candidate, loss: _Loss):
        self.search = search
        (first, *policies) = loop_policies(loss.closed, loss.differentiated)
        temporaries = plain.peak.temporaries + plain.peak.workspace
        self._scale = min(1.0, temporaries / max(first.bytes, 1))
        self._offset = plain.peak.total - self._scale * first.bytes
        self._all = [
            attempt._replace(
                source=self,
                inner=p.policy,
                time=plain.cost.time + attempt.chunks * p.cost.time,
                bytes=p.bytes,
            )
            for p in policies
        ]
        self._known: list[tuple[_Attempt, int]] = []  # attempts and peaks

    @property
    def left(self) -> Sequence[_Attempt]:  # type: ignore[override]
        """Attempts with more FLOPs than those that are too large, the fewest FLOPs first."""
        too_large = (a.time for a, total in self._known if not self.search.fits(total))
        least, known = max(too_large, default=0.0), [a for a, _ in self._known]
        return [a for a in self._all if a.time > least and a not in known]

    def next(self) -> _Attempt | None:
        return next((a for a in self.left if self.search.fits(self.predict(a))), None)

    def predict(self, attempt: _Attempt) -> int:
        return int(self._offset + self._scale * attempt.bytes)

    def small(self) -> _Attempt | None:
        """The fewest FLOPs with most of the budget left for what is outside of the loops."""
        some = [a for a in self.left if self.search.fits(4 * a.bytes)]
        return next(iter(some or self.left[-1:]), None)

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        if candidate:
            self._known.append((attempt, candidate.peak.total))
            self._offset = candidate.peak.total - self._scale * attempt.bytes


def _lower_bound(peaks: Sequence[Peak], times: int, share: float = 1.0) -> int:
    """A lower bound on the peak with ``times`` as many microbatches as in the first peak.

    At best this share of the temporaries shrinks with the microbatch. With an accumulator in
    place, doubling the number saves at most half of what the doubling before saved.
    """
    whole = peaks[0]
    shrinking = int(share * (whole.temporaries + whole.workspace))
    bound = whole.total - shrinking + shrinking // times
    if len(peaks) > 2:
        saved = max(peaks[-2].total - peaks[-1].total, 0)
        bound = max(bound, peaks[-1].total - saved)
    return bound


def estimate_peak(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any], target: Target | None = None
) -> Peak:
    """Compile a program only as far as its peak requires.

    Args:
      lowered: The lowered program, ``jax.jit(f).lower(...)``.
      compiler_options: XLA options to compile with.
      target: The device that it was lowered for. By default this machine's.

    Returns:
      The numbers of `peak` for the compiled program. For a program that a TPU compiler rejects as
      too large, the size in its message, as temporaries.

    Raises:
      jax.errors.JaxRuntimeError: If XLA fails for another reason.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> lowered = jax.jit(lambda x: jnp.sort(x) @ x).lower(jnp.zeros((64, 64)))
      >>> memory.estimate_peak(lowered, {}).total
      49152
    """
    platform = target.device.platform if target else jax.default_backend()
    fast: Mapping[str, Any] = WITHOUT_OPTIMIZED_CODE if platform == "cpu" else {}
    options = {**fast, **compiler_options}
    try:
        # Numbers alone, because a Peak with a timeline keeps the program alive.
        return Peak(*peak(compile_lowered(lowered, options)))
    except jax.errors.JaxRuntimeError as error:
        if (size := _rejected_bytes(error)) is None:
            raise
        return Peak(0, 0, 0, size)


def _rejected_bytes(error: jax.errors.JaxRuntimeError) -> int | None:
    """Bytes of a program that a TPU compiler rejects as too large; None for another error.

    XLA gives the size in the message alone: "Used 20.06G of 15.75G hbm" or "... (512.00G) exceeds
    available HBM (15.75G)".
    """
    if error.error_code_string != "RESOURCE_EXHAUSTED":
        return None
    size = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of|\) exceeds)", str(error))
    return int(float(size[1]) * 2 ** (10 * " KMGT".index(size[2]))) if size else None


_TOLERANCE = 0.02


def largest_size(peak: Callable[[int], int], limit: int, start: int) -> int | None:
    """Find the largest ``n`` with ``peak(n) <= limit``, to within 2 %, in few calls.

    ``peak`` must grow with ``n``, about linearly. The first two calls give a line, and the third
    is where it meets the limit. Further calls follow only if that size is too large, or if the
    line through it leaves room for more than 2 %.

    Args:
      peak: Bytes at size n, for example of a step compiled for a batch of n.
      limit: Bytes.
      start: First size to try, >= 1.

    Returns:
      The size, or None if not even 1 fits.

    Raises:
      ValueError: If ``start`` is less than 1.

    Example:
      >>> from fnet import memory
      >>> memory.largest_size(lambda n: 1000 + 37 * n, limit=100_000, start=16)
      2668
    """
    if start < 1:
        raise ValueError(f"largest_size: start must be at least 1, got {start}.")
    low, high = 0, None
    n, bytes_ = start, peak(start)
    # With a fixed part, a line through zero is too steep: the second size is on the same side.
    before, before_bytes = 0, 0
    while True:
        if bytes_ <= limit:
            low = max(low, n)
        else:
            high = n if high is None else min(high, n)
        if high is not None and high - low <= max(1, _TOLERANCE * low):
            return low or None
        slope = max((bytes_ - before_bytes) / (n - before), limit * 1e-12, 1e-12)
        crossing = n + (limit - bytes_) / slope
        if before and n == low and crossing <= low * (1 + _TOLERANCE / 4) + 1:
            return low
        # Stay below the line, so that the size fits if memory is a little more than linear.
        aim = int(crossing * (1 - _TOLERANCE / 8))
        if not before and aim == n:
            aim = n + 1 if high is None else n - 1
        top = high - 1 if high is not None else max(aim, low + 1)
        aim = min(max(aim, low + 1), top)
        before, before_bytes = n, bytes_
        n, bytes_ = aim, peak(aim)
