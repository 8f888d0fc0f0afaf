"""Plans: the fastest way to train within a memory budget, found by compiling without running."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from fnet.cpu.options import WITHOUT_OPTIMIZED_CODE
from fnet.cpu.tracing import traced_for
from fnet.measured import OF_WINDOWS, STEP, TOO_HIGH, WORTH_COMPILING
from fnet.memory.cost import Cost, Rates, estimate_cost
from fnet.memory.peak import CANDIDATE_OPTIONS, Peak, peak
from fnet.memory.remat import REMAT_POLICIES, Policy, policies_for
from fnet.memory.search import Build, Option, Planner
from fnet.memory.sizes import format_bytes, parse_bytes
from fnet.memory.target import Target, compile_lowered, peaks_of, platform_of
from fnet.memory.tree import Blocks

MOST_TREES = 4
"""Trees that a plan within a budget compiles at most before it tries the smallest ones."""
MOST_PROGRAMS = 2 * MOST_TREES
_LEAST_OF_ESTIMATE = 0.5
"""A tree that does not fit at this share of its estimate is not compiled."""


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
      plain: Cost of the plain step, or None if it is not known.
    """

    budget: int | None
    chosen: Candidate
    smaller: Candidate | None
    candidates: tuple[Candidate, ...]
    reserve: int = 0
    plain: Cost | None = None

    def __str__(self) -> str:
        held = f" + {format_bytes(self.reserve)} held" if self.reserve else ""
        flops = ""
        if self.plain and self.plain.flops:
            ratio = self.chosen.cost.flops / self.plain.flops
            flops = f", {ratio:.2f} times the plain FLOPs"
        rows = [("chosen", f"{format_bytes(self.chosen.peak.total)}{held}{flops}")]
        if self.budget is not None:
            rows.insert(0, ("budget", format_bytes(self.budget)))
        options = "with plan.chosen.compiler_options" if self.chosen.compiler_options else "as is"
        rows += [("by", _way(self.chosen)), ("compile", options)]
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


def _way(c: Candidate) -> str:
    if c.policy.name != "none":
        return str(c).replace("planned", "planned rematerialization", 1)
    if c.microbatches > 1 or c.policy.chunks > 1:
        return str(c).removeprefix("none in ")
    return "compiler options" if c.compiler_options else "no change"


class BudgetError(ValueError):
    """No candidate fits the budget.

    Attributes:
      floor: Bytes that the step holds under every plan: its arguments, results and constants. It
        may be far lower than what a plan reaches. None if nothing was compiled.

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

    A plan is a tree (`fnet.memory.tree`): windows of the loss of which the backward pass saves what
    takes most FLOPs for its bytes, iterations of scans in chunks, and rows in chunks. Trees are
    estimated without a compiler (`fnet.memory.search`). The one with the least estimated time that
    fits is compiled, and its peak corrects the next one, at most four. If none of them fits, up to
    four of the smallest are compiled. The chosen candidate was compiled and fits.

    `fnet.compile_step` with a budget and `fnet.step.plan_step` are `plan` for train steps.

    If the backend allows it, candidates are compiled without generating optimized code, so
    compile the chosen one again. JAX's compilation cache makes a second call fast.

    Args:
      build: ``build(policy, microbatches)`` traces the train step, with
        ``policy.apply(loss)`` in place of the loss. It may raise ValueError for a number of
        microbatches that the batch cannot be split into, except the smallest number.
      budget: Bytes, or text for `parse_bytes`. ``"50%"`` is a share of the plain step's peak with
        the compiler's default options, plus ``reserve``. None for no limit.
      policies: Restricts the choice to these keys of `REMAT_POLICIES`, and rows in chunks.
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
    """
    reserved = f", plus {format_bytes(reserve)} outside of the program" if reserve else ""
    platform = platform_of(target)
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
    build = traced_for(target and target.device)(build)

    def plain() -> int:
        lowered = build(REMAT_POLICIES["none"], choices[0]).lower()
        given = target.compiler_options if target else {}
        return reserve + estimate_peak(lowered, given, target).total

    limit = None if budget is None else parse_bytes(budget, "budget", plain)
    if limit is not None and limit < state_bytes + reserve:
        raise BudgetError(
            f"a budget of {format_bytes(limit)} is too small{_explain_least(state_bytes, reserve)}"
        )
    search = _Search(
        planner=Planner(
            build,
            choices,
            None if policies is None else [REMAT_POLICIES[n] for n in named],
            regions,
            state_bytes,
            "offload" in supported,
            None if platform == "cpu" else Rates.of(peaks_of(target)),
        ),
        limit=None if limit is None else limit - reserve,
        target=target,
        options=(target.compiler_options,) if target else CANDIDATE_OPTIONS.get(platform, ({},)),
        progress=progress,
    )
    search.run()
    ranked = tuple(sorted(search.candidates, key=lambda c: c.cost.time))
    least = min(ranked, key=lambda c: c.peak.total)
    if not search.fits(least.peak.total):
        fixed = least.peak.total - least.peak.temporaries - least.peak.workspace
        enough = format_bytes(math.ceil(1.01 * (least.peak.total + reserve)))
        raise BudgetError(
            f"no policy fits a budget of {format_bytes(limit or 0)}: the lowest peak found is "
            f"{format_bytes(least.peak.total)}, by {_way(least)}{reserved}. "
            f"{format_bytes(fixed)} of it are arguments, results and constants, which every plan "
            f"needs. Raise the budget to {enough}, or use a smaller batch, a smaller optimizer "
            f"state or more devices{search.planner.reason}",
            fixed + reserve,
        )
    if limit is None:  # the smallest of equally fast ones
        chosen = min(ranked, key=lambda c: (c.cost.time, c.peak.total))
    else:
        chosen = next(c for c in ranked if search.fits(c.peak.total))
    smaller = next((c for c in ranked if c.peak.total < chosen.peak.total), None)
    return Plan(limit, chosen, smaller, ranked, reserve, search.planner.plain.option.cost)


@dataclasses.dataclass
class _Search:
    """Compiles the fastest option that is estimated to fit, and learns from its peak."""

    planner: Planner
    limit: int | None
    target: Target | None
    options: Sequence[Mapping[str, Any]]
    progress: Callable[[Candidate], None] | None
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    _peaks: dict[tuple[Any, int], Candidate] = dataclasses.field(default_factory=dict)
    _scales: dict[str, float] = dataclasses.field(default_factory=dict)
    _least: float = 1.0  # bytes of other trees, relative to the estimate, until one was compiled

    def fits(self, bytes_: int) -> bool:
        return self.limit is None or bytes_ <= self.limit

    def run(self) -> None:
        """Compile options until the fastest one that fits is found."""
        for traced in filter(None, map(self.planner.trace, self.planner.named or ())):
            self._compile(traced.option)
        if self.limit is None:
            self._spread()
            return
        if not self.planner.is_exact and not self.candidates:
            self._compile(self.planner.plain.option)
        best = self._improve(MOST_TREES)
        if best is None:
            for option in self.planner.smallest()[:MOST_TREES]:
                if self._peaks and not self.fits(int(_LEAST_OF_ESTIMATE * option.bytes)):
                    break
                if self.fits(self._compile(option).peak.total):
                    # It may be much slower than what its peak says of others.
                    self._improve(2)
                    break

    def _improve(self, most: int) -> Option | None:
        """Compile the best option again and again, with what was learned."""
        best: Option | None = None
        for _ in range(most):
            option = self.planner.best(self._is_promising)
            if option is None or (
                best and option.cost.time > (1 - WORTH_COMPILING) * best.cost.time
            ):
                break
            if (option.tree, option.microbatches) in self._peaks:
                return option
            if self.fits(self._compile(option).peak.total):
                best, self._least = option, TOO_HIGH
        return best

    def _spread(self) -> None:
        """Candidates on the front of bytes and time."""
        plain = self.planner.plain.option
        self._compile(plain)
        least = self.planner.windows(0) if self.planner.named is None else None
        for share in (0.6, 0.3, 0.0) if least else ():
            limit = least.bytes + share * (plain.bytes - least.bytes) if least else 0
            if option := self.planner.windows(int(limit)):
                self._compile(option)

    def _is_promising(self, option: Option) -> bool:
        if known := self._peaks.get((option.tree, option.microbatches)):
            return self.fits(known.peak.total)
        start = OF_WINDOWS if isinstance(option.tree, Blocks) else self._least
        # If the plain step was compiled, its error corrects the estimates of other trees.
        scale = self._scales.get(_kind(option.tree), start * self._scales.get("Tree", 1.0))
        return self.fits(int(self._fixed + scale * (option.bytes - self._fixed)))

    @property
    def _fixed(self) -> int:
        """Bytes that are known before anything is compiled."""
        return self.planner.plain.step.fixed if self.planner.is_exact else 0

    def _compile(self, option: Option) -> Candidate:
        key = option.tree, option.microbatches
        if key in self._peaks:
            return self._peaks[key]
        policy = self.planner.policy(option.tree)
        traced = self.planner.build(policy, option.microbatches)
        lowered, cost = traced.lower(), estimate_cost(traced.jaxpr)
        more = option.microbatches - self.planner.choices[0]
        size = cost.bytes + more * self.planner.state_bytes
        cost = Cost(cost.flops, size, option.cost.overhead)

        def compile_one(given: Mapping[str, Any]) -> Candidate:
            estimate = estimate_peak(lowered, given, self.target)
            return Candidate(policy, option.microbatches, cost, estimate, dict(given))

        made = []
        # XLA compiles without holding Python's lock.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for candidate in pool.map(compile_one, self.options):
                made.append(candidate)
                if self.progress:  # on the caller's thread
                    self.progress(candidate)
        self.candidates += made
        self._peaks[key] = smallest = min(made, key=lambda c: c.peak.total)
        self._learn(option, smallest.peak)
        return smallest

    def _learn(self, option: Option, peak: Peak) -> None:
        """Scale what is estimated besides the arguments by what was compiled."""
        scale = max(peak.total - self._fixed, 0) / max(option.bytes - self._fixed, 1)
        kind = _kind(option.tree)
        if not self.fits(peak.total):
            failed = sum(not self.fits(c.peak.total) for c in self._peaks.values())
            scale = max(scale, self._scales.get(kind, 0.0)) * (1 + STEP * 2 ** min(failed, 4))
        self._scales[kind] = scale


def _kind(tree: Any) -> str:
    """Trees whose estimates err alike."""
    inner = getattr(tree, "held", None)
    return type(tree).__name__ + (f"/{_kind(inner)}" if inner else "")


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
    platform = platform_of(target)
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
