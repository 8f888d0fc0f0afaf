"""Plans: the fastest way to train within a memory budget, found by compiling without running."""

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fnet.jaxpr import aval, inner_jaxprs, nbytes
from fnet.memory.peak import CANDIDATE_OPTIONS, Peak, peak
from fnet.memory.remat import policies_for
from fnet.memory.sizes import format_bytes, parse_bytes
from fnet.memory.target import Target

Build = Callable[[str, int], jax.stages.Traced]
"""``build(policy, microbatches) -> jitted.trace(...)``: traces a candidate."""

FLOPS_PER_BYTE = 20.0
"""Compute divided by memory bandwidth, to rank candidates: the ratio of an H100 in float32."""

# XLA assigns buffers before it generates code, so the peak needs no optimized code.
_WITHOUT_OPTIMIZED_CODE = {"cpu": {"xla_backend_optimization_level": 0}}


class Cost(NamedTuple):
    """Compute and memory traffic of a program, before any compiler.

    Attributes:
      flops: Floating-point operations: 2 per multiply-add of matrix products and convolutions, 1
        per element of every other result.
      bytes: Bytes read and written: operands and results of matrix products and convolutions,
        results alone of other operations, which XLA fuses with their readers.
    """

    flops: int
    bytes: int

    @property
    def time(self) -> float:
        """Relative time. Moving a byte takes as long as `FLOPS_PER_BYTE` operations."""
        return self.flops / FLOPS_PER_BYTE + self.bytes


class Candidate(NamedTuple):
    """A compiled combination of remat policy, microbatches and compiler options.

    Attributes:
      policy: Remat policy, a key of `REMAT_POLICIES`.
      microbatches: Number of microbatches.
      cost: FLOPs and bytes moved per step, which rank the candidates.
      peak: Peak memory of the compiled step.
      compiler_options: XLA options it was compiled with.
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
    """The candidates that were compiled, and the chosen one.

    Attributes:
      budget: Budget in bytes, or None.
      chosen: Fastest candidate that fits. Without a budget, the fastest.
      smaller: Fastest candidate with a lower peak than ``chosen``, for a tighter budget. None if
        there is none.
      candidates: All candidates that were compiled, the fastest first.
    """

    budget: int | None
    chosen: Candidate
    smaller: Candidate | None
    candidates: tuple[Candidate, ...]


class BudgetError(ValueError):
    """No candidate fits the budget.

    Example:
      >>> from fnet import memory
      >>> try:
      ...     memory.plan(lambda policy, microbatches: None, "1KiB", state_bytes=4096)
      ... except memory.BudgetError as error:
      ...     print(error)
      a budget of 1.00 KiB is too small for the train state, which alone takes 4.00 KiB.
    """


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
    """Choose remat policy, microbatches and compiler options without running a step.

    Each policy is compiled with the smallest number of microbatches. Candidates with more
    microbatches follow in order of estimated time, until one fits. `fnet.compile_step` with a
    budget and `fnet.step.plan_step` are `plan` for train steps.

    If the backend allows it, candidates are compiled without generating optimized code, so
    compile the chosen one again. JAX's compilation cache makes a second call fast.

    Args:
      build: ``build(policy, microbatches)`` traces the train step. It may raise ValueError for a
        number of microbatches that the batch cannot be split into, except the smallest number.
      budget: Bytes, or text for `parse_bytes`. None for no limit.
      policies: Keys of `REMAT_POLICIES`. By default all that work on the device.
      microbatches: Numbers of microbatches, each a multiple of the one before.
      couples_batch: Whether splitting the batch changes the result, as with batch statistics.
        Splitting is then the last resort.
      state_bytes: Bytes of the train state. A budget below them fails at once.
      reserve: Bytes of the budget that are needed outside of the compiled step.
      target: A device to compile for. By default this machine's.
      progress: Called with each candidate after it is compiled.

    Returns:
      The chosen candidate, the next smaller one, and all that were compiled.

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
      ...     f = memory.REMAT_POLICIES[policy].apply(loss)
      ...     return jax.jit(jax.grad(f)).trace(jnp.zeros((16, 16)), jnp.zeros((64, 16)))
      >>> plan = memory.plan(build, "40KiB", policies=("none", "segments"))
      >>> plan.chosen.policy, plan.chosen.peak.total <= 40 * 1024
      ('segments', True)
    """
    limit = None if budget is None else parse_bytes(budget)
    reserved = f", and {format_bytes(reserve)} is reserved" if reserve else ""
    if limit is not None and limit < state_bytes + reserve:
        raise BudgetError(
            f"a budget of {format_bytes(limit)} is too small for the train state, which alone "
            f"takes {format_bytes(state_bytes)}{reserved}."
        )

    def order(c: Candidate | _Traced) -> tuple[bool, float]:
        return couples_batch and c.microbatches > 1, c.cost.time

    def fits(bytes_: int) -> bool:
        return limit is None or bytes_ + reserve <= limit

    platform = _platform(target)
    names = tuple(policies_for(platform) if policies is None else policies)
    if unknown := [n for n in names if n not in policies_for(platform)]:
        raise ValueError(
            f"plan: expected policies for {platform} of {policies_for(platform)}, "
            f"got {unknown[0]!r}."
        )
    choices = sorted(set(microbatches))
    if not names or not choices or choices[0] < 1:
        raise ValueError(f"plan: needs a policy and microbatches >= 1, got {names} and {choices}.")
    options = (target.compiler_options,) if target else CANDIDATE_OPTIONS.get(platform, ({},))
    compile_all = functools.partial(_compile, options=options, target=target, progress=progress)
    compiled = _search(build, names, choices, compile_all, order, fits)
    ranked = tuple(sorted(compiled, key=order))
    least = min(ranked, key=lambda c: c.peak.total)
    if not fits(least.peak.total):
        raise BudgetError(
            f"no policy fits a budget of {format_bytes(limit)}: the lowest peak is "
            f"{format_bytes(least.peak.total)}, by {least}{reserved}."
        )
    if limit is None:  # the smallest of equally fast ones
        chosen = min(ranked, key=lambda c: (order(c), c.peak.total))
    else:
        chosen = next(c for c in ranked if fits(c.peak.total))
    smaller = next((c for c in ranked if c.peak.total < chosen.peak.total), None)
    return Plan(limit, chosen, smaller, ranked)


def _platform(target: Target | None) -> str:
    return target.device.platform if target else jax.default_backend()


class _Traced(NamedTuple):
    """A remat policy with a number of microbatches, traced and lowered."""

    policy: str
    microbatches: int
    lowered: jax.stages.Lowered
    cost: Cost


def _search(
    build: Build,
    policies: Sequence[str],
    choices: Sequence[int],
    compile_all: Callable[[Sequence[_Traced]], list[Candidate]],
    order: Callable[[Any], tuple[bool, float]],
    fits: Callable[[int], bool],
) -> list[Candidate]:
    """Best-first search. It relies on the cost growing with the number of microbatches."""

    def trace(policy: str, microbatches: int) -> _Traced:
        traced = build(policy, microbatches)
        return _Traced(policy, microbatches, traced.lower(), estimate_cost(traced.jaxpr))

    def trace_if_possible(policy: str, microbatches: int) -> list[_Traced]:
        try:
            return [trace(policy, microbatches)]
        except ValueError:  # microbatches that are too small for a norm
            return []

    candidates: list[Candidate] = []
    peaks: dict[str, list[Peak]] = {name: [] for name in policies}
    best = (True, math.inf)
    compiling = [trace(name, choices[0]) for name in policies]
    waiting: list[_Traced] = []
    while compiling:
        compiled = compile_all(compiling)
        candidates += compiled
        for traced in compiling:
            so_far = peaks[traced.policy]
            new = [c.peak for c in compiled if c.policy == traced.policy]
            so_far.append(min(new, key=lambda p: p.total))
            if fits(so_far[-1].total):
                best = min(best, order(traced))
                continue
            more = [
                n
                for n in choices
                if n > traced.microbatches and fits(_lower_bound(so_far, n // choices[0]))
            ]
            if more:
                waiting += trace_if_possible(traced.policy, more[0])
        waiting.sort(key=order, reverse=True)
        compiling = [waiting.pop()] if waiting and order(waiting[-1]) < best else []
    return candidates


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


def _compile(
    programs: Sequence[_Traced],
    *,
    options: Sequence[Mapping[str, Any]],
    target: Target | None,
    progress: Callable[[Candidate], None] | None,
) -> list[Candidate]:
    def compile_one(job: tuple[_Traced, Mapping[str, Any]]) -> Candidate:
        program, compiler_options = job
        estimate = estimate_peak(program.lowered, compiler_options, target)
        return Candidate(
            program.policy, program.microbatches, program.cost, estimate, dict(compiler_options)
        )

    # XLA compiles without holding Python's lock.
    candidates = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for candidate in pool.map(compile_one, itertools.product(programs, options)):
            candidates.append(candidate)
            if progress:  # on the caller's thread
                progress(candidate)
    return candidates


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
    options = _WITHOUT_OPTIMIZED_CODE.get(_platform(target), {}) | dict(compiler_options)
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


def estimate_cost(program: ClosedJaxpr | Jaxpr) -> Cost:
    """Count FLOPs and bytes of a traced program, the same for every device.

    A ``scan`` counts every iteration, a ``while`` loop one, and a ``cond`` its largest branch.
    Rematerialization under `jax.checkpoint` counts.

    Args:
      program: A jaxpr: ``jitted.trace(...).jaxpr`` or ``jax.make_jaxpr(f)(...)``.

    Returns:
      FLOPs and bytes of one run.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet import memory
      >>> f = lambda a, b: a @ b
      >>> memory.estimate_cost(jax.make_jaxpr(f)(jnp.zeros((3, 5)), jnp.zeros((5, 7))))
      Cost(flops=210, bytes=284)
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    costs = [_equation_cost(eqn) for eqn in jaxpr.eqns]
    return Cost(sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs))


def _equation_cost(eqn: JaxprEqn) -> Cost:
    name = eqn.primitive.name
    # The inner jaxpr of a scatter or a reduction combines two numbers.
    combines = name.startswith(("scatter", "reduce", "select_and"))
    inner = [] if combines else [estimate_cost(jaxpr) for jaxpr in inner_jaxprs(eqn)]
    if name == "cond":
        return max(inner)
    if inner:
        iterations = eqn.params["length"] if name == "scan" else 1
        return Cost(
            iterations * sum(cost.flops for cost in inner),
            iterations * sum(cost.bytes for cost in inner),
        )
    input_bytes, output_bytes = (sum(map(nbytes, a)) for a in (eqn.invars, eqn.outvars))
    elements = sum(math.prod(_shape(v)) for v in eqn.outvars)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = _shape(eqn.invars[0])
        products = math.prod(shape[i] for i in contracted)
    elif name == "conv_general_dilated":
        products = _window_size(eqn)
    else:
        return Cost(elements, output_bytes)
    return Cost(2 * elements * products, input_bytes + output_bytes)


def _window_size(convolution: JaxprEqn) -> int:
    """Multiply-adds per element of a convolution's result."""
    kernel = _shape(convolution.invars[1])
    out_channels = kernel[convolution.params["dimension_numbers"].rhs_spec[0]]
    # The gradient of a strided convolution dilates its argument with zeros, which XLA skips.
    dilation = math.prod(convolution.params["lhs_dilation"])
    return int(max(math.prod(kernel) // out_channels // dilation, 1))


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(aval(atom), "shape", ())


_TOLERANCE = 0.02


def largest_size(peak: Callable[[int], int], limit: int, start: int) -> int | None:
    """Find the largest ``n`` with ``peak(n) <= limit``, to within 2 %, in few calls.

    ``peak`` must grow with ``n``, about linearly. Each call is where the line through the two
    nearest measurements meets the limit.

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
      2662
    """
    if start < 1:
        raise ValueError(f"largest_size: start must be at least 1, got {start}.")
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
            (low, low_bytes), (high, high_bytes) = fitting, too_large
            if high - low <= max(1, _TOLERANCE * low):
                return low
            crossing = low + (high - low) * (limit - low_bytes) / (high_bytes - low_bytes)
            # Aim above the line, then below it, so that the bracket closes from both sides.
            aim = crossing * (1 + _TOLERANCE / 4 if n == low else 1 - _TOLERANCE / 4)
            n = min(max(int(aim), low + 1), high - 1)
