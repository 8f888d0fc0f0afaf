"""Compile a train step within the config's memory budget, and report its memory."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import fnet
from fnet import TrainState, memory
from fnet.cpu.options import WITHOUT_OPTIMIZED_CODE
from fnet.memory import Candidate, LayerResiduals, Plan, Policy, RematReport
from fnet.memory.remat import policies_for
from fnet.memory.target import Target, shapes_on
from fnet.step import Executable, plan_step
from train.data import PREFETCHED_BATCHES
from train.errors import UserError
from train.run import process_memory
from train.run.checkpoints import without_frozen
from train.run.process_memory import FirstApart, Overhead
from train.run.run_folder import describe_changes
from train.run.setup import Setup

Progress = Callable[[int, Candidate, int | None], None]
"""Called with the number of a plan's compiled program, the candidate, and the limit of `limit`."""
SizeProgress = Callable[[int, int], None]
"""Called with a batch size and the peak of its step."""

_MAX_LAYERS = 20
"""Largest number of rows in a table and of bars in a plot."""


class Planned(NamedTuple):
    """A compiled train step.

    Attributes:
      run: The run whose step it is.
      executable: Compiled step with its report.
      policy: Remat policy: a key of `fnet.memory.REMAT_POLICIES`, or one that was planned.
      microbatches: Number of microbatches.
      plan: Plan it was chosen from; None if the config leaves no choice.
      remat: Effect of the policy on the compiled program; None without remat.
    """

    run: Setup
    executable: Executable
    policy: str | Policy
    microbatches: int
    plan: Plan | None = None
    remat: RematReport | None = None


def compile_step(run: Setup, *, progress: Progress | None = None) -> Planned:
    """Compile the train step of a config, planned if ``config.memory`` has a budget."""
    if run.config.memory.budget:
        return compile_chosen(run, plan(run, progress=progress))
    policy, microbatches = _policy(run), run.step.microbatches
    planned = Planned(run, _compile(run, policy, microbatches, None), policy, microbatches)
    return _with_remat(planned, None)


class StepCache:
    """The planned step, compiled for each shape of batch that comes.

    The number of shapes is limited: lengths of text are powers of two (`train.data.buckets`).
    """

    def __init__(self, planned: Planned, log: Callable[[str], None]):
        self._run, self._planned, self._log = planned.run, planned, log
        first = FirstApart(planned.executable)
        self._executables = {_signature(planned.run.batch_shapes): first}

    @property
    def num_programs(self) -> int:
        """Number of compiled programs."""
        return len(self._executables)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the next state and the step's metrics."""
        signature = _signature(batch)
        if signature not in self._executables:
            start = time.perf_counter()
            compiled = _compile(
                self._run.with_batch_shapes(jax.eval_shape(lambda b: b, batch)),
                self._planned.policy,
                self._planned.microbatches,
                None,
                self._planned.executable.report.compiler_options,
            )
            self._executables[signature] = FirstApart(compiled)
            self._log(
                f"compiled again in {time.perf_counter() - start:.1f} s "
                f"({self.num_programs} programs): {_difference(self._run.batch_shapes, batch)}"
            )
        stepped: tuple[TrainState, dict[str, jax.Array]]
        stepped = self._executables[signature](state, self._run.put(batch))
        return stepped


def _signature(batch: Any) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    return tuple((a.shape, a.dtype) for a in jax.tree.leaves(batch))


def _difference(first: Any, other: Any) -> str:

    def describe(batch: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        return {
            f"batch{jax.tree_util.keystr(path)}": f"{a.dtype}{list(a.shape)}" for path, a in leaves
        }

    return describe_changes(describe(first), describe(other))


def check_memory_config(run: Setup) -> None:
    """Check that this machine supports the policy, and that batches can be split."""
    for option in ("jax_debug_nans", "jax_debug_infs"):
        if getattr(jax.config, option):
            raise UserError(
                f"{option.upper()}: turns donation off, on which training in place depends; unset "
                "it, because a run finds the operation that gives the first nan or inf by itself"
            )
    policy, backend = run.config.memory.policy, jax.default_backend()
    supported = policies_for(backend)
    if policy not in ("auto", *supported):
        raise UserError(
            f"memory.policy: {policy} does not work on {backend}: "
            f"expected one of auto, {', '.join(supported)}"
        )
    rows = jax.tree.leaves(run.batch_shapes)[0].shape[0]
    microbatches = run.step.microbatches
    if rows % (microbatches * run.devices):
        on = f" on {run.devices} devices" if run.devices > 1 else ""
        raise UserError(
            f"grad.microbatches: {microbatches}{on} do not divide data.batch_size {rows}"
        )


def compile_chosen(run: Setup, plan: Plan) -> Planned:
    """Compile the chosen candidate of a plan."""
    c = plan.chosen
    executable = _compile(run, c.policy, c.microbatches, None, c.compiler_options)
    return _with_remat(Planned(run, executable, c.policy, c.microbatches, plan), None)


def plan(run: Setup, *, target: Target | None = None, progress: Progress | None = None) -> Plan:
    """Compile the candidates for ``config.memory`` without running them."""
    section = run.config.memory
    numbers, most = itertools.count(1), limit(run, target)
    try:
        return plan_step(
            run.step,
            run.state_shapes,
            run.batch_shapes,
            section.budget,
            policies=None if section.policy == "auto" else (section.policy,),
            microbatch_choices=run.microbatch_choices,
            reserve=reserve(run, target),
            target=target,
            progress=None if progress is None else lambda c: progress(next(numbers), c, most),
        )
    except ValueError as error:
        raise UserError(f"memory: {error}") from error


def predict(
    run: Setup,
    limit: int | None = None,
    *,
    target: Target | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Compile the step of a config as far as its memory requires, as `compile_step` does.

    A plan is made only if the step takes more than ``limit`` bytes.
    """
    first = analyze(run, _policy(run), target)
    if limit is None or _peak(first) <= limit:
        return _with_remat(first, target)
    section = dataclasses.replace(run.config.memory, budget=f"{limit + reserve(run, target)}B")
    limited = run._replace(config=dataclasses.replace(run.config, memory=section))
    chosen = plan(limited, target=target, progress=progress)
    c = chosen.chosen
    fitting = analyze(run, c.policy, target, c.microbatches, c.compiler_options)
    return fitting._replace(plan=chosen)


def largest_batch(
    run: Setup,
    limit: int,
    *,
    target: Target | None = None,
    progress: SizeProgress | None = None,
) -> Planned | None:
    """Find the largest batch size whose step needs at most ``limit`` bytes; None if none fits.

    Two programs give a line, and a third verifies where it meets the limit. With the policy
    ``auto``, it is the policy that takes less at the config's batch size, of ``none`` and
    ``segments``.
    """
    policy = run.config.memory.policy
    policies: list[str | Policy] = [policy] if policy != "auto" else ["none", "segments"]
    microbatches = run.step.microbatches
    parts = microbatches * run.devices
    compiled: dict[int, Planned] = {}

    def peak(size: int) -> int:
        resized = run.with_batch_size(size * parts, microbatches)
        smallest = min((analyze(resized, p, target) for p in policies), key=_peak)
        policies[:] = [smallest.policy]
        compiled[size] = smallest
        if progress:
            progress(size * parts, _peak(smallest))
        return _peak(smallest) + reserve(resized, target) - reserve(run, target)

    start = max(run.config.data.batch_size // parts, 1)
    try:
        size = memory.largest_size(peak, limit, start)
    except UserError:  # too few examples for the network's norms, and twice as many do not fit
        return None
    return None if size is None else compiled[size]


def limit(run: Setup, target: Target | None = None) -> int | None:
    """Return the bytes that a compiled step may use: of the budget, or else of the target."""
    if run.config.memory.budget:
        return memory.parse_bytes(run.config.memory.budget) - reserve(run, target)
    return target.usable if target else None


def overhead(run: Setup, target: Target | None = None) -> Overhead:
    """Estimate the memory of the process in addition to its compiled programs."""
    if target or jax.default_backend() != "cpu":
        return Overhead()
    batches = PREFETCHED_BATCHES + 3
    written = without_frozen(run.state_shapes)
    return process_memory.overhead(written, run.batch_shapes, batches)


def reserve(run: Setup, target: Target | None = None) -> int:
    """Return the bytes of a budget that the compiled step may not use."""
    return overhead(run, target).always


def _policy(run: Setup) -> str:
    return "none" if run.config.memory.policy == "auto" else run.config.memory.policy


def _peak(planned: Planned) -> int:
    return planned.executable.report.peak.total


def _compile(
    run: Setup,
    policy: str | Policy,
    microbatches: int,
    target: Target | None,
    *compiler_options: dict[str, Any],
) -> Executable:
    """Compile a step with each of several options, and return the smallest program.

    By default, the options are the target's, or `fnet.compile_step`'s. The step is traced
    once: a network of many layers takes longer to trace than to compile.
    """
    options = compiler_options or (target.compiler_options if target else None,)
    try:
        step = run.step.replace(remat=policy, microbatches=microbatches)
        shapes = run.state_shapes, run.batch_shapes
        arguments = shapes_on(target, shapes) if target else shapes
        executables = [fnet.compile_step(step, *arguments, compiler_options=o) for o in options]
        return min(executables, key=lambda executable: executable.report.peak.total)
    except memory.DonationError:
        raise
    except ValueError as error:  # a batch that cannot be split, or an unsupported policy
        raise UserError(f"memory: {error}") from error


def analyze(
    run: Setup,
    policy: str | Policy,
    target: Target | None,
    microbatches: int | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Planned:
    """Compile a step to read its memory: the smallest of the backend's candidates."""
    platform = target.device.platform if target else jax.default_backend()
    candidates: Any = memory.CANDIDATE_OPTIONS.get(platform, ({},))
    if compiler_options is not None:
        candidates = (compiler_options,)
    elif target:
        candidates = (target.compiler_options,)
    microbatches = microbatches or run.step.microbatches
    unoptimized = WITHOUT_OPTIMIZED_CODE if platform == "cpu" else {}
    options = [o | unoptimized for o in candidates]
    smallest = _compile(run, policy, microbatches, target, *options)
    return Planned(run, smallest, policy, microbatches)


def _with_remat(planned: Planned, target: Target | None) -> Planned:
    if str(planned.policy) == "none":
        return planned
    options = planned.executable.report.compiler_options
    baseline = _compile(planned.run, "none", planned.microbatches, target, options)
    try:
        remat = memory.check_remat(baseline.compiled, planned.executable.compiled)
    except memory.RematError as error:
        if planned.run.config.memory.policy == "auto":  # chosen to fit, not for its savings
            return planned
        raise UserError(f"memory.policy: {planned.policy}: {error}") from error
    return planned._replace(remat=remat)


def memory_report(planned: Planned) -> dict[str, Any]:
    """Return the contents of memory.json.

    ``live_bytes`` and ``largest_at_peak`` are empty if the compiler does not report the schedule,
    and ``residuals`` are of one microbatch if there are several.
    """
    try:
        timeline = planned.executable.report.peak.timeline
    except ValueError:
        timeline = None
    residuals = residuals_by_layer(planned.run, planned.policy, planned.microbatches)
    return planned.executable.report.as_dict() | {
        "policy": str(planned.policy),
        "microbatches": planned.microbatches,
        "remat": planned.remat._asdict() if planned.remat else None,
        "plan": _plan_as_dict(planned.plan) if planned.plan else None,
        "residuals": [layer._asdict() for layer in residuals],
        "largest_at_peak": [b._asdict() for b in timeline.largest] if timeline else [],
        "live_bytes": timeline.live_bytes if timeline else None,
    }


def residuals_by_layer(run: Setup, policy: str | Policy, microbatches: int) -> list[LayerResiduals]:
    """Return the bytes that the loss saves for the backward pass, by layer in forward order.

    Layers are grouped by the first parts of their names, so that at most 20 rows remain.
    """
    state = run.state_shapes
    loss = memory.REMAT_POLICIES[policy].apply(run.task.loss)

    def mean_loss(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        losses, aux = loss(params, model_state, batch, key)
        return losses.mean(), aux

    def residuals(parts: int) -> list[memory.Residual]:
        batch = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((a.shape[0] // parts, *a.shape[1:]), a.dtype),
            run.batch_shapes,
        )
        return memory.residuals(
            mean_loss, state.params, state.model_state, batch, state.key, has_aux=True
        )

    try:
        per_device = residuals(microbatches * run.devices)
    except ValueError:  # one device has too few examples for a norm without the others
        everywhere = residuals(microbatches)
        per_device = [r._replace(bytes=r.bytes // run.devices) for r in everywhere]
    groupings = [memory.by_layer(per_device, depth) for depth in range(1, 9)]
    readable = (rows for rows in groupings if len(rows) <= _MAX_LAYERS)
    return max(readable, key=len, default=groupings[0])


def _plan_as_dict(plan: Plan) -> dict[str, Any]:
    def as_dict(c: memory.Candidate) -> dict[str, Any]:
        costs = {"cost": c.cost._asdict(), "peak": c.peak.as_dict()}
        return c._asdict() | {"policy": str(c.policy)} | costs

    return {
        "budget": plan.budget,
        "chosen": as_dict(plan.chosen),
        "smaller": as_dict(plan.smaller) if plan.smaller else None,
        "candidates": [as_dict(c) for c in plan.candidates],
    }
