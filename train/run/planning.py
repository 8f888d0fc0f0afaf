"""From a config's memory section to a train step that keeps to it."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import fnet
from fnet import TrainState, memory
from fnet.memory import Candidate, Plan, RematReport
from fnet.memory.remat import policies_for
from fnet.memory.target import Target, shapes_on
from fnet.step import Executable, plan_step
from train.data import PREFETCHED_BATCHES
from train.errors import UserError
from train.run.process_memory import FRAGMENTATION, RUNTIME_OVERHEAD
from train.run.setup import Setup

Progress = Callable[[Candidate], None]


class Planned(NamedTuple):
    """A compiled train step, and why it is this one.

    Attributes:
      executable: the compiled step with its report.
      policy: a key of `fnet.memory.REMAT_POLICIES`.
      microbatches: how many a batch is split into.
      plan: what it was chosen from; None where the config leaves no choice.
      proof: that the policy reached the compiled program, where it recomputes.
    """

    executable: Executable
    policy: str
    microbatches: int
    plan: Plan | None
    proof: RematReport | None


def compile_step(
    run: Setup, *, target: Target | None = None, progress: Progress | None = None
) -> Planned:
    """The train step that ``config.memory`` asks for: planned where it names a budget.

    Args:
      run: the run.
      target: a device to compile for; this machine's by default.
      progress: called with each candidate of a plan once it is compiled.

    Raises:
      UserError: for a budget that nothing fits, or a policy that this device does not have.
    """
    wanted = run.config.memory
    if not wanted.budget:
        policy = "none" if wanted.policy == "auto" else wanted.policy
        microbatches = run.step.microbatches
        executable = _compile(run, policy, microbatches, target)
        proof = _proof(run, policy, microbatches, executable, target)
        return Planned(executable, policy, microbatches, None, proof)
    return choose(run, plan(run, target=target, progress=progress), target=target)


class StepCache:
    """The planned step, for batches of every length that comes.

    Another length than that planned for is compiled when it first comes, in the same
    way: there are at most as many as there are powers of two (`train.data.buckets`).

    Attributes:
      programs: how many were compiled.
    """

    def __init__(self, run: Setup, planned: Planned, say: Callable[[str], None]):
        self._run, self._planned, self._say = run, planned, say
        self._by_kind = {_kind(run.batch_shapes): planned.executable}

    @property
    def programs(self) -> int:
        """How many were compiled."""
        return len(self._by_kind)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The next state and the step's metrics."""
        kind = _kind(batch)
        if kind not in self._by_kind:
            began = time.perf_counter()
            self._by_kind[kind] = _compile(
                self._run.with_batch_shapes(jax.eval_shape(lambda b: b, batch)),
                self._planned.policy,
                self._planned.microbatches,
                None,
                self._planned.executable.report.compiler_options,
            )
            self._say(
                f"compiled again, in {time.perf_counter() - began:.1f} s: "
                f"{_difference(self._run.batch_shapes, batch)}; {self.programs} programs now"
            )
        return self._by_kind[kind](state, self._run.put(batch))


def _kind(batch: Any) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    return tuple((a.shape, a.dtype) for a in jax.tree.leaves(batch))


def _difference(first: Any, now: Any) -> str:
    """Which arrays are not of the shape and dtype that was compiled for first."""

    def kinds(batch: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        return {
            f"batch{jax.tree_util.keystr(path)}": f"{a.dtype}{list(a.shape)}" for path, a in leaves
        }

    was, is_ = kinds(first), kinds(now)
    names = sorted(n for n in was | is_ if was.get(n) != is_.get(n))
    return ", ".join(f"{n} was {was.get(n, 'absent')}, is {is_.get(n, 'absent')}" for n in names)


def check(run: Setup) -> None:
    """Refuses at once what the config asks for in vain, on this machine.

    Raises:
      UserError: for a policy that this device does not have, or a batch that cannot be split.
    """
    wanted = run.config.memory
    here = policies_for(jax.default_backend())
    if wanted.policy not in ("auto", *here):
        raise UserError(
            f"memory.policy: {wanted.policy} does not work on {jax.default_backend()}: "
            f"expected one of auto, {', '.join(here)}"
        )
    rows = jax.tree.leaves(run.batch_shapes)[0].shape[0]
    microbatches = run.step.microbatches
    if rows % (microbatches * run.devices):
        on = f" on {run.devices} devices" if run.devices > 1 else ""
        raise UserError(
            f"grad.microbatches: {microbatches}{on} do not divide data.batch_size {rows}"
        )


def choose(run: Setup, found: Plan, *, target: Target | None = None) -> Planned:
    """Compiles what a plan has chosen."""
    c = found.chosen
    executable = _compile(run, c.policy, c.microbatches, target, c.compiler_options)
    proof = _proof(run, c.policy, c.microbatches, executable, target)
    return Planned(executable, c.policy, c.microbatches, found, proof)


def plan(run: Setup, *, target: Target | None = None, progress: Progress | None = None) -> Plan:
    """The candidates for ``config.memory``, compiled and not run; all policies without a budget.

    Raises:
      UserError: as `compile_step`.
    """
    wanted = run.config.memory
    try:
        return plan_step(
            run.step,
            run.state_shapes,
            run.batch_shapes,
            wanted.budget,
            policies=None if wanted.policy == "auto" else (wanted.policy,),
            microbatch_choices=_microbatch_choices(run),
            reserve=reserve(run, target),
            target=target,
            progress=progress,
        )
    except ValueError as error:
        raise UserError(f"memory: {error}") from error


def largest_batch(
    run: Setup,
    candidate: Candidate,
    limit: int,
    *,
    target: Target | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int | None:
    """The most examples a step can take within ``limit`` bytes, trained as ``candidate`` says.

    Args:
      run: the run; its batch size is where the search begins.
      candidate: policy, microbatches and compiler options; its peak does not count.
      limit: bytes of the compiled step.
      target: a device to compile for; this machine's by default.
      progress: called with each size tried and its peak.

    Returns:
      How many examples; None where not even the fewest that the network takes fit.
    """
    parts = candidate.microbatches * run.devices

    def peak(microbatch: int) -> int:
        sized = run.with_batch_size(microbatch * parts)
        step = run.step.replace(remat=candidate.policy, microbatches=candidate.microbatches)
        traced = step.trace(*_arguments(sized, target))
        found = memory.estimate_peak(traced.lower(), candidate.compiler_options, target).total
        found += reserve(sized, target) - reserve(run, target)
        if progress:
            progress(microbatch * parts, found)
        return found

    start = max(run.config.data.batch_size // parts, 1)
    try:
        found = memory.largest_size(peak, limit, start)
    except ValueError:  # fewer examples than the network's norms take; twice as many do not fit
        return None
    return None if found is None else found * parts


def limit(run: Setup, target: Target | None = None) -> int | None:
    """Bytes that a compiled step may take: of the budget, or else of the target."""
    if run.config.memory.budget:
        return memory.parse_bytes(run.config.memory.budget) - reserve(run, target)
    return target.usable if target else None


def reserve(run: Setup, target: Target | None = None) -> int:
    """Bytes of a budget that are not the compiled step's: on CPU, where all lies in the same
    memory, the batches that are read ahead, and what checkpoints and the allocator take.
    """
    if target or jax.default_backend() != "cpu":
        return 0
    holes = int(FRAGMENTATION * memory.tree_bytes(run.state_shapes))
    return RUNTIME_OVERHEAD + holes + (PREFETCHED_BATCHES + 3) * memory.tree_bytes(run.batch_shapes)


def _microbatch_choices(run: Setup) -> tuple[int, ...] | None:
    """Numbers of microbatches to choose from, each of which every device has its share of."""
    choices = run.microbatch_choices
    if choices or run.devices == 1 or not run.config.memory.budget:
        return choices
    share = jax.tree.leaves(run.batch_shapes)[0].shape[0] // run.devices
    return tuple(2**i for i in range(share.bit_length()) if share % 2**i == 0)


def _arguments(run: Setup, target: Target | None) -> tuple[Any, Any]:
    shapes = (run.state_shapes, run.batch_shapes)
    return shapes_on(target, shapes) if target else shapes


def _compile(
    run: Setup,
    policy: str,
    microbatches: int,
    target: Target | None,
    compiler_options: dict[str, Any] | None = None,
) -> Executable:
    if compiler_options is None and target:
        compiler_options = target.compiler_options
    try:
        step = run.step.replace(remat=policy, microbatches=microbatches)
        return fnet.compile_step(step, *_arguments(run, target), compiler_options=compiler_options)
    except memory.DonationError:
        raise
    except ValueError as error:  # a batch that cannot be split, a policy of another device
        raise UserError(f"memory: {error}") from error


def _proof(
    run: Setup, policy: str, microbatches: int, executable: Executable, target: Target | None
) -> RematReport | None:
    """Compares with the policy that keeps all, compiled in the same way."""
    if policy == "none":
        return None
    options = executable.report.compiler_options
    plain = _compile(run, "none", microbatches, target, options)
    try:
        return memory.check_remat(plain.compiled, executable.compiled)
    except memory.RematError as error:
        if run.config.memory.policy == "auto":  # it was chosen because it fits
            return None
        raise UserError(f"memory.policy: {policy}: {error}") from error
