"""The fastest way to train within a budget: candidates are compiled, never run."""

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fnet import jaxprs
from fnet.memory.peak import CANDIDATE_OPTIONS, Peak, peak
from fnet.memory.remat import policies_for
from fnet.memory.sizes import format_bytes, parse_bytes
from fnet.memory.target import Target


class Cost(NamedTuple):
    """What a program computes and moves.

    Attributes:
      flops: floating-point operations: 2 a multiply-add of matrix products and
        convolutions, 1 an element of every other result.
      bytes: read and written: operands and results of matrix products and
        convolutions, results alone of everything else, which is taken to be fused
        with what reads it.
    """

    flops: int
    bytes: int

    @property
    def time(self) -> float:
        """A relative time: `FLOPS_PER_BYTE` operations take as long as moving one byte."""
        return self.flops / FLOPS_PER_BYTE + self.bytes


FLOPS_PER_BYTE = 20.0
"""The balance of arithmetic and bandwidth that candidates are ranked by: an H100's in float32."""


def estimate_cost(program: ClosedJaxpr | Jaxpr) -> Cost:
    """Counts a program's work as traced, so before any compiler, the same for every device.

    A ``scan`` counts as often as it goes round, a ``while`` loop once, of a
    ``cond`` the largest branch. Recomputation under `jax.checkpoint` counts.

    Args:
      program: ``jitted.trace(...).jaxpr`` or ``jax.make_jaxpr(f)(...)``.

    Returns:
      Operations and bytes of one run.
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    total = Cost(0, 0)
    for equation in jaxpr.eqns:
        work = _of_equation(equation)
        total = Cost(total.flops + work.flops, total.bytes + work.bytes)
    return total


def _of_equation(equation: JaxprEqn) -> Cost:
    # A scatter's or a reduction's own little program is what it does to two numbers.
    combines = equation.primitive.name.startswith(("scatter", "reduce", "select_and"))
    inner = [] if combines else [estimate_cost(j) for j in _programs(equation.params.values())]
    if equation.primitive.name == "cond":
        return max(inner)
    if inner:
        rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
        return Cost(
            rounds * sum(work.flops for work in inner), rounds * sum(work.bytes for work in inner)
        )
    given, made = (sum(map(jaxprs.nbytes, a)) for a in (equation.invars, equation.outvars))
    elements = sum(math.prod(_shape(v)) for v in equation.outvars)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = _shape(equation.invars[0])
        return Cost(2 * elements * math.prod(shape[i] for i in contracted), given + made)
    if equation.primitive.name == "conv_general_dilated":
        return Cost(2 * elements * _window(equation), given + made)
    return Cost(elements, made)


def _window(convolution: JaxprEqn) -> int:
    """Multiply-adds an element of a convolution's result takes, dilated zeros left out."""
    kernel = _shape(convolution.invars[1])
    out_channels = kernel[convolution.params["dimension_numbers"].rhs_spec[0]]
    # A gradient with respect to the input of a strided convolution dilates its
    # argument: most of what the window sees there is zero.
    zeros = math.prod(convolution.params["lhs_dilation"])
    work: int = max(math.prod(kernel) // out_channels // zeros, 1)
    return work


def _programs(values: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


_TOLERANCE = 0.02


def largest_size(peak: Callable[[int], int], limit: int, start: int) -> int | None:
    """The largest ``n`` with ``peak(n) <= limit``, to within 2 % of it.

    ``peak`` is assumed to grow with ``n``, about linearly: each probe is where the
    line through the two nearest measurements meets the limit.

    Args:
      peak: bytes at size n, for example of a step compiled for a batch of n.
      limit: bytes.
      start: a size to begin with, >= 1.

    Returns:
      The size, or None where not even 1 fits.

    Raises:
      ValueError: if ``start < 1``, from where doubling leads nowhere.
    """
    if start < 1:
        raise ValueError(f"largest: start must be at least 1, got {start}")
    fitting: tuple[int, int] | None = None
    too_large: tuple[int, int] | None = None
    n = start
    while True:
        bytes_ = peak(n)
        if bytes_ <= limit:
            fitting = (n, bytes_)
        else:
            too_large = (n, bytes_)
        if too_large is None:
            n *= 2
        elif fitting is None:
            if n == 1:
                return None
            n //= 2
        else:
            (low, least), (high, most) = fitting, too_large
            if high - low <= max(1, _TOLERANCE * low):
                return low
            meets = low + (high - low) * (limit - least) / (most - least)
            # A little above the line, then a little below: the bracket closes from both sides.
            aim = meets * (1 + _TOLERANCE / 4) if n == low else meets * (1 - _TOLERANCE / 4)
            n = min(max(int(aim), low + 1), high - 1)


Build = Callable[[str, int], jax.stages.Traced]
"""``build(policy, microbatches) -> jitted.trace(...)`` of the train step that they make."""


# Buffers are assigned before code is made of them.
_WITHOUT_OPTIMISED_CODE = {"cpu": {"xla_backend_optimization_level": 0}}


class Candidate(NamedTuple):
    """A way to train, compiled.

    Attributes:
      policy: what the backward pass keeps; a key of `REMAT_POLICIES`.
      microbatches: how many the batch is split into.
      cost: FLOPs and bytes moved per step, by which candidates are ranked.
      peak: of the compiled step.
      compiler_options: it was compiled with.
    """

    policy: str
    microbatches: int
    cost: Cost
    peak: Peak
    compiler_options: dict[str, Any]

    def __str__(self) -> str:
        split = f" in {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return f"{self.policy}{split}"


class Plan(NamedTuple):
    """What was found.

    Attributes:
      budget: bytes, or None.
      chosen: the fastest that fits; without a budget, the fastest.
      smaller: the fastest of those compiled that need less than ``chosen``: what
        a tighter budget would take; None if there is none.
      candidates: all that were compiled, the fastest first.
    """

    budget: int | None
    chosen: Candidate
    smaller: Candidate | None
    candidates: tuple[Candidate, ...]


class BudgetError(ValueError):
    """No candidate fits the budget."""


def plan(
    build: Build,
    budget: int | str | None = None,
    *,
    policies: Sequence[str] | None = None,
    microbatches: Iterable[int] = (1,),
    couples_batch: bool = False,
    state_bytes: int = 0,
    reserve: int = 0,
    target: Target | None = None,
    progress: Callable[[Candidate], None] | None = None,
) -> Plan:
    """Chooses policy, microbatches and compiler options, without running a step.

    Every policy is compiled once with the whole batch, then candidates with more
    microbatches in the order of their work, until one fits. Code is not
    generated where buffers can be assigned without; compile the one chosen again.
    JAX's compilation cache, where it is on, makes a second call fast.

    Args:
      build: the traced train step for a policy and a number of microbatches. A ValueError for
        more than the first number says that the batch cannot be split so far.
      budget: bytes, or as `parse_bytes` reads them; None for no limit.
      policies: keys of `REMAT_POLICIES`; all that work on the device by default.
      microbatches: numbers to choose from, each a multiple of the one before.
      couples_batch: whether splitting the batch changes the result (batch
        statistics): it is then the last resort.
      state_bytes: of the train state; a budget without room for it is refused at once.
      reserve: bytes of the budget that others need, beside the compiled step.
      target: a device to compile for; this machine's by default.
      progress: called with each candidate once it is compiled.

    Returns:
      The plan: the fastest candidate that fits, the next smaller one, and all of them.

    Raises:
      BudgetError: for a budget below the state's size, and where nothing fits;
        the message says what is the least, and by which policy.
      ValueError: for a budget that cannot be read, an unknown policy, or nothing to choose from.
    """
    limit = None if budget is None else parse_bytes(budget)
    beside = f", and {format_bytes(reserve)} is taken beside it" if reserve else ""
    if limit is not None and limit < state_bytes + reserve:
        raise BudgetError(
            f"a budget of {format_bytes(limit)} has no room for the train state, which alone takes "
            f"{format_bytes(state_bytes)}{beside}"
        )

    def order(c: Candidate | _Way) -> tuple[bool, float]:
        return couples_batch and c.microbatches > 1, c.cost.time

    def fits(peak_: int) -> bool:
        return limit is None or peak_ + reserve <= limit

    platform = _platform(target)
    names = tuple(policies_for(platform) if policies is None else policies)
    if unknown := [n for n in names if n not in policies_for(platform)]:
        raise ValueError(
            f"plan: expected policies for {platform} of {policies_for(platform)}, "
            f"got {unknown[0]!r}"
        )
    splits = sorted(set(microbatches))
    if not names or not splits or splits[0] < 1:
        raise ValueError(f"plan: needs a policy and microbatches >= 1, got {names} and {splits}")
    options = (target.compiler_options,) if target else CANDIDATE_OPTIONS.get(platform, ({},))
    compile_ = functools.partial(_compile, options=options, target=target, progress=progress)
    found = _search(build, names, splits, compile_, order, fits)
    ranked = tuple(sorted(found, key=order))
    least = min(ranked, key=lambda c: c.peak.total)
    if not fits(least.peak.total):
        raise BudgetError(
            f"no policy fits a budget of {format_bytes(limit)}: the least is "
            f"{format_bytes(least.peak.total)}, by {least}{beside}"
        )
    if limit is None:  # of equally fast ones, the smallest
        chosen = min(ranked, key=lambda c: (order(c), c.peak.total))
    else:
        chosen = next(c for c in ranked if fits(c.peak.total))
    smaller = next((c for c in ranked if c.peak.total < chosen.peak.total), None)
    return Plan(limit, chosen, smaller, ranked)


def _platform(target: Target | None) -> str:
    return target.device.platform if target else jax.default_backend()


class _Way(NamedTuple):
    """A policy with a number of microbatches, traced."""

    policy: str
    microbatches: int
    lowered: jax.stages.Lowered
    cost: Cost


def _search(
    build: Build,
    policies: Sequence[str],
    microbatches: Sequence[int],
    compile_: Callable[[Sequence[_Way]], list[Candidate]],
    order: Callable[[Any], tuple[bool, float]],
    fits: Callable[[int], bool],
) -> list[Candidate]:
    """Best first: splitting the batch further only adds work."""

    def trace(policy: str, split: int) -> _Way:
        traced = build(policy, split)
        return _Way(policy, split, traced.lower(), estimate_cost(traced.jaxpr))

    def further(policy: str, split: int) -> list[_Way]:
        try:
            return [trace(policy, split)]
        except ValueError:  # parts of fewer examples than a norm takes
            return []

    found: list[Candidate] = []
    peaks: dict[str, list[Peak]] = {name: [] for name in policies}
    best = (True, math.inf)
    compiling = [trace(name, microbatches[0]) for name in policies]  # side by side
    waiting: list[_Way] = []
    while compiling:
        candidates = compile_(compiling)
        found += candidates
        for way in compiling:
            seen = peaks[way.policy]
            mine = [c.peak for c in candidates if c.policy == way.policy]
            seen.append(min(mine, key=lambda p: p.total))
            if fits(seen[-1].total):
                best = min(best, order(way))
                continue
            more = [
                m
                for m in microbatches
                if m > way.microbatches and fits(_least(seen, m // microbatches[0]))
            ]
            if more:
                waiting += further(way.policy, more[0])
        waiting.sort(key=order, reverse=True)
        compiling = [waiting.pop()] if waiting and order(waiting[-1]) < best else []
    return found


def _least(peaks: Sequence[Peak], times: int) -> int:
    """A lower bound on the peak with so many times the first number of microbatches.

    At best all temporaries and workspace shrink with the microbatch; and once the accumulator is
    there, doubling saves at most half of what the doubling before saved.
    """
    whole = peaks[0]
    shrinking = whole.temporaries + whole.workspace
    least = whole.total - shrinking + shrinking // times
    if len(peaks) > 2:
        saved = max(peaks[-2].total - peaks[-1].total, 0)
        least = max(least, peaks[-1].total - saved)
    return least


def _compile(
    ways: Sequence[_Way],
    *,
    options: Sequence[Mapping[str, Any]],
    target: Target | None,
    progress: Callable[[Candidate], None] | None,
) -> list[Candidate]:
    def one(way: _Way, chosen: Mapping[str, Any]) -> Candidate:
        found = estimate_peak(way.lowered, chosen, target)
        return Candidate(way.policy, way.microbatches, way.cost, found, dict(chosen))

    # Compiling lets go of Python's lock.
    candidates = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for made in pool.map(lambda job: one(*job), itertools.product(ways, options)):
            candidates.append(made)
            if progress:  # called here, so never by two threads at once
                progress(made)
    return candidates


def estimate_peak(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any], target: Target | None = None
) -> Peak:
    """The peak of a program, compiled only as far as that takes.

    Args:
      lowered: ``jax.jit(f).lower(...)``.
      compiler_options: to compile with.
      target: what it was lowered for; this machine's device by default.

    Returns:
      What `peak` says of the compiled program; of one that a TPU's compiler
      refuses as too large, its own account of it, all as temporaries.
    """
    options = _WITHOUT_OPTIMISED_CODE.get(_platform(target), {}) | dict(compiler_options)
    try:
        # The numbers alone: a Peak that can tell more would keep every program.
        return Peak(*peak(lowered.compile(compiler_options=options)))
    except jax.errors.JaxRuntimeError as error:
        # "Used 20.06G of 15.75G hbm", "... (512.00G) exceeds available HBM (15.75G)"
        size = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of|\) exceeds)", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not size:
            raise
        return Peak(0, 0, 0, int(float(size[1]) * 2 ** (10 * " KMGT".index(size[2]))))
