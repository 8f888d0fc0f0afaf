"""Plans: the fastest way to train within a memory budget, found by compiling without running."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from fnet.cpu.options import WITHOUT_OPTIMIZED_CODE
from fnet.memory.cost import Cost, estimate_cost
from fnet.memory.graph import analyze
from fnet.memory.peak import CANDIDATE_OPTIONS, Peak, peak
from fnet.memory.proposals import Offloads, Planner, Proposal
from fnet.memory.remat import REMAT_POLICIES, Policy, planned, policies_for
from fnet.memory.sizes import format_bytes, parse_bytes
from fnet.memory.target import Target
from fnet.memory.windows import trace_inlined

Build = Callable[[Policy, int], jax.stages.Traced]
"""``build(policy, microbatches) -> jitted.trace(...)``: traces a candidate."""

F = TypeVar("F", bound=Callable[..., Any])

MOST_PROGRAMS = 10
"""Largest number of programs that a plan within a budget compiles."""

# A plan that fits is improved while the next proposal is so much faster.
_WORTH_COMPILING = 0.005
# XLA's GPU compiler (jaxlib 0.10) completes the copy of an array to the host when the backward pass
# reads it. Until then the array is on the device too. In a loop the copy completes per iteration.
_OFFLOADS: dict[str, Offloads] = {"tpu": "all"}
# The smallest proposals: bytes relative to the bound of the linear program, and whether windows may
# save all their residuals.
_SMALLEST = ((1.05, True), (1.05, False), (1.01, False))
# After a peak above the budget, the next proposal is smaller by this share, then by twice as much.
_STEP = 0.01


class Candidate(NamedTuple):
    """A compiled combination of remat policy, microbatches and compiler options.

    Attributes:
      policy: Remat policy: one of `REMAT_POLICIES`, or ``planned``.
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
        return f"{self.policy.name}{split}"


class Plan(NamedTuple):
    """The candidates that were compiled, and the chosen one, which ``print(plan)`` describes.

    Attributes:
      budget: Budget in bytes, or None.
      chosen: Fastest candidate that fits. Without a budget, the fastest.
      smaller: Fastest candidate with a lower peak than ``chosen``, for a tighter budget. None if
        there is none.
      candidates: All candidates that were compiled, the fastest first.
      predicted: Predicted peak and cost along the Pareto front of planned policies, without
        microbatches. Empty if policies are given.
      reserve: Bytes of the budget that the program may not use, such as ``held`` of
        `remat_to_fit`.
      note: How the choice changes the result, in one line; "" if it does not.
    """

    budget: int | None
    chosen: Candidate
    smaller: Candidate | None
    candidates: tuple[Candidate, ...]
    predicted: tuple[tuple[int, Cost], ...] = ()
    reserve: int = 0
    note: str = ""

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
        rows += [("note", self.note)] if self.note else []
        return "\n".join(f"{name:7} {value}" for name, value in rows)

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Candidates that no other one beats in both peak and estimated time, fastest first."""
        front: list[Candidate] = []
        for c in sorted(self.candidates, key=lambda c: (c.cost.time, c.peak.total)):
            if not front or c.peak.total < front[-1].peak.total:
                front.append(c)
        return tuple(front)


def _way(c: Candidate) -> str:
    """Describe policy and microbatches."""
    if c.policy.name != "none":
        return str(c).replace("planned", "planned rematerialization", 1)
    if c.microbatches > 1:
        return f"{c.microbatches} microbatches"
    options = "compiler options (plan.chosen.compiler_options)"
    return options if c.compiler_options else "no change"


class BudgetError(ValueError):
    """No candidate fits the budget.

    Example:
      >>> from fnet import memory
      >>> try:
      ...     memory.plan(lambda policy, microbatches: None, "1KiB", state_bytes=4096)
      ... except memory.BudgetError as error:
      ...     print(error)
      a budget of 1.00 KiB is too small: the train state takes 4.00 KiB. Give more than 4.00 KiB.
    """


def plan(
    build: Build,
    budget: float | str | None = None,
    *,
    policies: Sequence[str | Policy] | None = None,
    microbatches: Iterable[int] = (1,),
    couples_batch: bool = False,
    why_whole: str = "",
    state_bytes: int = 0,
    reserve: int = 0,
    target: Target | None = None,
    progress: Callable[[Candidate], None] | None = None,
) -> Plan:
    """Choose what to save, microbatches and compiler options without running a step.

    An integer program decides for each array of the loss whether the backward pass saves it,
    rematerializes it or, on devices with host memory, moves it there. It minimizes the estimated
    time within the budget. The proposal is compiled, and the peak of the compiled program corrects
    the next proposal. Candidates are compiled in order of estimated time, at most ten. The chosen
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
      budget: Bytes, or text for `parse_bytes`. None for no limit.
      policies: Restricts the choice to these keys of `REMAT_POLICIES`. By default every array is
        planned.
      microbatches: Numbers of microbatches, each a multiple of the one before.
      couples_batch: Whether splitting the batch changes the result, as with batch statistics.
        Splitting is then the last resort.
      why_whole: Why there are no more microbatches to choose from, for the error if nothing fits.
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
      >>> plan = memory.plan(build, "40KiB", policies=("none", "segments"))
      >>> plan.chosen.policy.name, plan.chosen.peak.total <= 40 * 1024
      ('segments', True)

    References:
      Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
      2020.
    """
    limit = None if budget is None else parse_bytes(budget)
    reserved = f", plus {format_bytes(reserve)} outside of the program" if reserve else ""
    if limit is not None and limit < state_bytes + reserve:
        small = f"a budget of {format_bytes(limit)} is too small"
        state = f"the train state takes {format_bytes(state_bytes)}"
        process = f"the process takes {format_bytes(reserve)} besides the step"
        more = f"Give more than {format_bytes(state_bytes + reserve)}."
        if not state_bytes:
            stays = f"{format_bytes(reserve)} that stay in memory outside of the program"
            raise BudgetError(f"{small} for {stays}.")
        if not reserve:
            raise BudgetError(f"{small}: {state}. {more}")
        parts = f"{process} (runtime, batches, checkpoints)", state
        larger, other = parts if reserve > state_bytes else parts[::-1]
        raise BudgetError(f"{small}: {larger}, and {other}. {more}")
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
    options = (target.compiler_options,) if target else CANDIDATE_OPTIONS.get(platform, ({},))
    search = _Search(
        build=build,
        limit=None if limit is None else limit - reserve,
        choices=choices,
        couples_batch=couples_batch,
        state_bytes=state_bytes,
        target=target,
        offloads=_OFFLOADS.get(platform, "loops" if "offload" in supported else "nothing"),
        options=options,
        progress=progress,
    )
    predicted = search.run([REMAT_POLICIES[n] for n in named], planner=policies is None)
    ranked = tuple(sorted(search.candidates, key=search.order))
    least = min(ranked, key=lambda c: c.peak.total)
    if not search.fits(least.peak.total):
        raise BudgetError(
            f"no policy fits a budget of {format_bytes(limit or 0)}: the lowest peak found is "
            f"{format_bytes(least.peak.total)}, by {_way(least)}{reserved}. Raise the budget, or "
            f"use a smaller batch, a smaller optimizer state or more devices.{why_whole and ' '}"
            f"{why_whole}"
        )
    if limit is None:  # the smallest of equally fast ones
        chosen = min(ranked, key=lambda c: (search.order(c), c.peak.total))
    else:
        chosen = next(c for c in ranked if search.fits(c.peak.total))
    smaller = next((c for c in ranked if c.peak.total < chosen.peak.total), None)
    return Plan(limit, chosen, smaller, ranked, predicted, reserve)


class _Attempt(NamedTuple):
    """A program to compile next.

    Attributes:
      source: Where it comes from, which learns its peak.
      policy: Remat policy.
      microbatches: Number of microbatches.
      time: Estimated time, which orders attempts.
      bytes: Predicted bytes of its planned arrays; 0 for a named policy.
    """

    source: "_Named | _Planned"
    policy: Policy
    microbatches: int
    time: float
    bytes: int = 0


@dataclasses.dataclass
class _Search:
    """Best-first search: compile the fastest attempt that may fit, and learn from its peak."""

    build: Build
    limit: int | None
    choices: Sequence[int]
    couples_batch: bool
    state_bytes: int
    target: Target | None
    offloads: Offloads
    options: Sequence[Mapping[str, Any]]
    progress: Callable[[Candidate], None] | None
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    fitting: list[_Attempt] = dataclasses.field(default_factory=list)

    def order(self, c: Candidate | _Attempt) -> tuple[bool, float]:
        """Fastest first. Microbatches that change the result come last."""
        time = c.time if isinstance(c, _Attempt) else c.cost.time
        return self.couples_batch and c.microbatches > 1, time

    def fits(self, bytes_: int) -> bool:
        """Whether a peak is within the budget."""
        return self.limit is None or bytes_ <= self.limit

    def run(self, policies: Sequence[Policy], planner: bool) -> tuple[tuple[int, Cost], ...]:
        """Compile candidates until the fastest one that fits is found.

        Returns:
          The predicted front.
        """
        named = [_Named(self, p) for p in policies]
        sources: list[_Named | _Planned] = list(named)
        first: _Planned | None = None
        for source in named:
            made = self.compile(source.first(), self.options)
            if planner and made and made[0].loss:
                first = _Planned(self, made[0])
                sources.append(first)
        # Rematerialization may need another option than the plain step.
        options = self.options
        if self.limit is None:
            for attempt in first.spread() if first else ():
                options = self._best_options(self.compile(attempt, options))
        while self.limit is not None and len(self.candidates) < MOST_PROGRAMS:
            attempts = [a for source in sources if (a := source.next())]
            best = min(map(self.order, self.fitting), default=(True, float("inf")))
            if not attempts and not self.fitting and (last := named[0].last()):
                attempts = [last]  # a plan of the most microbatches is the smallest
            if not attempts:
                break
            attempt = min(attempts, key=self.order)
            faster = attempt._replace(time=(1 + _WORTH_COMPILING) * attempt.time)
            if self.order(faster) >= best:
                break
            made = self.compile(attempt, options)
            if isinstance(attempt.source, _Planned):
                options = self._best_options(made)
            if planner and made and isinstance(attempt.source, _Named) and made[0].loss:
                sources.append(_Planned(self, made[0]))
        return first.front() if first and self.limit is None else ()

    def _best_options(self, made: "list[_Compiled]") -> Sequence[Mapping[str, Any]]:
        return (min(made, key=lambda c: c.candidate.peak.total).candidate.compiler_options,)

    def compile(self, attempt: _Attempt, options: Sequence[Mapping[str, Any]]) -> "list[_Compiled]":
        """Compile a program with several options, and report it to its source."""
        losses: list[_Loss] = []
        policy = _recording(attempt.policy, losses) if attempt.bytes == 0 else attempt.policy
        try:
            traced = self.build(policy, attempt.microbatches)
        except ValueError:  # microbatches that are too small for a norm
            if attempt.microbatches == self.choices[0]:
                raise
            attempt.source.learn(attempt, None)
            return []
        lowered, cost = traced.lower(), estimate_cost(traced.jaxpr)

        def compile_one(given: Mapping[str, Any]) -> Candidate:
            estimate = estimate_peak(lowered, given, self.target)
            return Candidate(attempt.policy, attempt.microbatches, cost, estimate, dict(given))

        made = []
        # XLA compiles without holding Python's lock.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for candidate in pool.map(compile_one, options):
                made.append(candidate)
                if self.progress:  # on the caller's thread
                    self.progress(candidate)
        self.candidates += made
        smallest = min(made, key=lambda c: c.peak.total)
        if self.fits(smallest.peak.total):
            self.fitting.append(attempt._replace(time=attempt.time or cost.time))
        attempt.source.learn(attempt, smallest)
        return [_Compiled(c, losses[0] if losses else None) for c in made]


class _Loss(NamedTuple):
    """A traced loss."""

    closed: ClosedJaxpr
    differentiated: list[bool]
    objective: list[bool]


class _Compiled(NamedTuple):
    """A candidate without remat, and its loss."""

    candidate: Candidate
    loss: _Loss | None


def _recording(policy: Policy, losses: list[_Loss]) -> Policy:
    """The same policy, which records the loss that it is applied to."""

    def apply(f: F) -> F:
        applied = policy.apply(f)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not losses and policy.name == "none":
                closed, leaves, structure = trace_inlined(f, args, kwargs)
                result = jax.tree.unflatten(structure, [True] * structure.num_leaves)
                losses.append(
                    _Loss(
                        closed,
                        [i < len(jax.tree.leaves(args[:1])) for i in range(len(leaves))],
                        jax.tree.leaves(_objective(result)),
                    )
                )
            return applied(*args, **kwargs)

        return run  # type: ignore[return-value]

    return policy._replace(apply=apply)


def _objective(result: Any) -> Any:
    """Mark the differentiated leaves: all, or the first of ``(value, aux)``."""
    if not isinstance(result, tuple) or len(result) != 2:
        return result
    return result[0], jax.tree.map(lambda _: False, result[1])


class _Named:
    """Attempts with a named policy: the whole batch, then more microbatches."""

    def __init__(self, search: _Search, policy: Policy):
        self._search, self._policy = search, policy
        self._peaks: list[Peak] = []
        self._time = 0.0
        self._tried: set[int] = set()
        self._compiled = 0

    def first(self) -> _Attempt:
        """The attempt with the fewest microbatches."""
        return _Attempt(self, self._policy, self._search.choices[0], 0.0)

    def next(self) -> _Attempt | None:
        """The next attempt, or None if none can fit."""
        search = self._search
        if self._peaks and search.fits(self._peaks[-1].total):
            return None
        larger = [n for n in search.choices if n > max(self._tried)]
        fitting = [
            n for n in larger if search.fits(_lower_bound(self._peaks, n // search.choices[0]))
        ]
        return self._attempt(fitting[0]) if fitting else None

    def last(self) -> _Attempt | None:
        """The most microbatches that are possible, or None if they were compiled."""
        larger = [n for n in self._search.choices if n > self._compiled and n not in self._tried]
        return self._attempt(larger[-1]) if larger else None

    def _attempt(self, n: int) -> _Attempt:
        # The state is read once per microbatch.
        return _Attempt(self, self._policy, n, self._time + (n - 1) * self._search.state_bytes)

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        """Take the peak of an attempt, or None if it was impossible."""
        self._tried.add(attempt.microbatches)
        if candidate:
            self._compiled = max(self._compiled, attempt.microbatches)
            self._peaks.append(candidate.peak)
            self._time = self._time or candidate.cost.time


class _Planned:
    """Attempts that save, move or rematerialize each array, for one number of microbatches."""

    def __init__(self, search: _Search, plain: _Compiled):
        assert plain.loss is not None
        self._search, self._plain = search, plain.candidate
        self._planner = Planner(analyze(*plain.loss), search.offloads)
        self._equations = self._planner.graph.equations
        self._tried: set[Any] = set()
        self._fitting, self._too_large = 0, float("inf")
        self._step = _STEP
        # The program needs the planned bytes times a scale, plus an offset.
        peak, planned_bytes = self._plain.peak, max(self._planner.plain_bytes, 1)
        temporaries = peak.temporaries + peak.workspace
        self._scale = min(1.0, temporaries / planned_bytes)
        self._offset = peak.total - self._scale * planned_bytes

    def _attempt(self, proposal: Proposal) -> _Attempt:
        self._tried.add(proposal.windows)
        policy = planned(proposal.windows, self._equations)
        time = self._plain.cost.time + proposal.time
        return _Attempt(self, policy, self._plain.microbatches, time, proposal.bytes)

    def next(self) -> _Attempt | None:
        """The fastest proposal that is predicted to fit and was not tried."""
        assert self._search.limit is not None
        if self._fitting > 0.95 * self._too_large:
            return None
        smallest = self._planner.smallest
        target = (self._search.limit - self._offset) / self._scale
        target = min(target, (1 - self._step) * self._too_large)
        if self._fitting and target < self._fitting:
            target = (self._fitting + self._too_large) / 2
        if target >= smallest and (proposal := self._planner.solve(int(target))):
            return None if proposal.windows in self._tried else self._attempt(proposal)
        for share, plain in () if self._fitting else _SMALLEST:
            proposal = self._planner.solve(int(share * smallest), plain)
            if proposal and proposal.windows not in self._tried:
                return self._attempt(proposal)
        return None

    def spread(self) -> Iterable[_Attempt]:
        """Attempts between the plain loss and the smallest proposal."""
        most, least = self._planner.plain_bytes, self._planner.smallest
        for share in (0.6, 0.3, 0.05):
            proposal = self._planner.solve(int(least + share * (most - least)))
            if proposal and proposal.windows not in self._tried:
                yield self._attempt(proposal)

    def learn(self, attempt: _Attempt, candidate: Candidate | None) -> None:
        """Correct the offset by the peak of an attempt."""
        if candidate is None:
            return
        total = candidate.peak.total
        self._offset = total - self._scale * attempt.bytes
        if self._search.fits(total):
            self._step = _STEP
            self._fitting = max(self._fitting, attempt.bytes)
        else:
            self._step = min(2 * self._step, 0.2)
            self._too_large = min(self._too_large, attempt.bytes)

    def front(self) -> tuple[tuple[int, Cost], ...]:
        """Predicted peak and cost from the plain loss to the smallest proposal."""
        cost = self._plain.cost
        return tuple(
            (
                int(self._offset + self._scale * bytes_),
                Cost(cost.flops + more.flops, cost.bytes + more.bytes),
            )
            for bytes_, more in self._planner.front()
        )


def _lower_bound(peaks: Sequence[Peak], times: int) -> int:
    """A lower bound on the peak with ``times`` as many microbatches as in the first peak.

    At best all temporaries shrink with the microbatch. With an accumulator in place, doubling the
    number saves at most half of what the doubling before saved.
    """
    whole = peaks[0]
    shrinking = whole.temporaries + whole.workspace
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
        return Peak(*peak(lowered.compile(compiler_options=options)))
    except jax.errors.JaxRuntimeError as error:
        # XLA gives the size in the message alone: "Used 20.06G of 15.75G hbm" or
        # "... (512.00G) exceeds available HBM (15.75G)".
        size = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of|\) exceeds)", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not size:
            raise
        return Peak(0, 0, 0, int(float(size[1]) * 2 ** (10 * " KMGT".index(size[2]))))


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
