"""Compile the programs of a run within its memory budget, here or for other devices."""

import gc
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from rich.console import Console

import fnet
from fnet import TrainState, memory
from fnet.cpu.options import WITHOUT_OPTIMIZED_CODE
from fnet.memory import REMAT_POLICIES, LayerResiduals, Plan, Policy, roofline
from fnet.memory.remat import policies_for
from fnet.memory.target import Target, describe, from_text, platform_of, shapes_on
from fnet.step import Executable, plan_step
from train.data import PREFETCHED_BATCHES
from train.data.unreadable import UnreadableFiles
from train.errors import UserError
from train.output.memory_tables import describe_candidate
from train.output.progress import line_printer, showing
from train.output.tables import Table
from train.run import process_memory
from train.run.checkpoints import compile_checksums, without_frozen
from train.run.evaluation import Evaluator
from train.run.mesh import layout
from train.run.metrics import best_metric, score_of
from train.run.process_memory import FirstApart, Overhead
from train.run.run_folder import describe_changes
from train.run.setup import Setup
from train.run.weight_files import InitialWeights

Progress = Callable[[str], None]
"""Called with a line about each compiled program of a search."""

_MAX_LAYERS = 20
"""Largest number of rows in a table and of bars in a plot."""
_NO_SAVING = 0.99
"""A compiler moves this share of the temporaries by itself."""


class Planned(NamedTuple):
    """A compiled train step.

    Attributes:
      policy: Remat policy: a key of `fnet.memory.REMAT_POLICIES`, or one that was planned.
      plan: Plan it was chosen from; None if the config leaves no choice.
      temporaries_without_remat: Bytes of the same step without the policy; None if it has none.
      target: Device that it is compiled for; None for this machine.
      limit: Bytes that it may use; None without a budget.
      estimate: Estimated time of a step; None on this machine and on GPUs of unknown rates.
      utilization: Estimated share of the device's peak (MFU); None without an estimate.
    """

    run: Setup
    executable: Executable
    policy: str | Policy
    microbatches: int
    plan: Plan | None = None
    temporaries_without_remat: int | None = None
    target: Target | None = None
    limit: int | None = None
    estimate: roofline.Estimate | None = None
    utilization: float | None = None

    @property
    def peak(self) -> memory.Peak:
        """Peak memory of the step per device."""
        return self.executable.report.peak

    @property
    def fits(self) -> bool:
        """Whether the step fits the limit."""
        return self.limit is None or self.peak.total <= self.limit

    @property
    def unit(self) -> str:
        """Unit of a batch: tokens, images or examples."""
        names = (name for name in ("tokens", "image") if name in self.run.batch_shapes)
        return {"tokens": "tokens", "image": "images"}.get(next(names, ""), "examples")

    @property
    def per_second(self) -> float | None:
        """Tokens, images or examples per second of all devices together."""
        if self.estimate is None:
            return None
        rows = self.run.config.data.batch_size
        if self.unit == "tokens":  # the last token of a row is only a target
            rows *= self.run.batch_shapes["tokens"].shape[-1] - 1
        return rows / self.estimate.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return memory and time for memory.json."""
        e = self.estimate
        return {
            "target": self.target.name if self.target else None,
            "devices": self.run.devices,
            "fits": self.fits,
            "limit": self.limit,
            "batch_size": self.run.config.data.batch_size,
            "policy": str(self.policy),
            "microbatches": self.microbatches,
            "peak": self.peak.as_dict(),
            "seconds_per_step": e.seconds if e else None,
            f"{self.unit}_per_second": self.per_second,
            "utilization": self.utilization,
            "flops": e.total_flops if e else None,
            "bytes": e.bytes if e else None,
            "link_bytes": e.link_bytes if e else None,
            "time_share": e.share if e else None,
        }


def compile_step(run: Setup, *, progress: Progress | None = None) -> Planned:
    """Compile the train step of a config, planned if ``config.memory`` has a budget."""
    if not run.config.memory.budget:
        options = memory.CANDIDATE_OPTIONS.get(jax.default_backend(), ({},))[-1:]
        if any(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(run.state_shapes)):
            options = ()  # there, each may give the smallest program
        # In float32 the last one does, and the others would double the time to the first step.
        return _with_remat(_compile(run, _policy(run), run.step.microbatches, None, *options))
    chosen = plan(run, progress=progress)
    c = chosen.chosen
    compiled = _compile(run, c.policy, c.microbatches, None, c.compiler_options)
    return _with_remat(compiled._replace(plan=chosen))


class StepCache:
    """The planned step, compiled for each shape of batch that comes.

    The number of shapes is limited: lengths of text are powers of two (`train.data.buckets`).
    """

    def __init__(self, planned: Planned, log: Callable[[str], None]):
        self._run, self._planned, self._log = planned.run, planned, log
        self.executables = {_signature(planned.run.batch_shapes): FirstApart(planned.executable)}

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the next state and the step's metrics."""
        signature = _signature(batch)
        if signature not in self.executables:
            start = time.perf_counter()
            compiled = _compile(
                self._run.with_batch_shapes(jax.eval_shape(lambda b: b, batch)),
                self._planned.policy,
                self._planned.microbatches,
                None,
                self._planned.executable.report.compiler_options,
            )
            self.executables[signature] = FirstApart(compiled.executable)
            changes = describe_changes(_shapes(self._run.batch_shapes), _shapes(batch))
            self._log(
                f"compiled again in {time.perf_counter() - start:.1f} s "
                f"({len(self.executables)} programs): {changes}"
            )
        stepped: tuple[TrainState, dict[str, jax.Array]]
        stepped = self.executables[signature](state, self._run.put(batch))
        return stepped


def _signature(batch: Any) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    return tuple((a.shape, a.dtype) for a in jax.tree.leaves(batch))


def _shapes(batch: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    return {f"batch{jax.tree_util.keystr(p)}": f"{a.dtype}{list(a.shape)}" for p, a in leaves}


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


def plan(run: Setup, *, target: Target | None = None, progress: Progress | None = None) -> Plan:
    """Compile the candidates for ``config.memory`` without running them."""
    section = run.config.memory
    numbers, most = itertools.count(1), limit(run, target)
    show = progress or (lambda line: None)
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
            progress=lambda c: show(describe_candidate(next(numbers), c, most)),
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
    if limit is None or first.peak.total <= limit:
        return _with_remat(first)
    section = run.config.memory.replace(budget=f"{limit + reserve(run, target)}B")
    limited = run._replace(config=run.config.replace(memory=section))
    chosen = plan(limited, target=target, progress=progress)
    c = chosen.chosen
    fitting = analyze(run, c.policy, target, c.microbatches, c.compiler_options)
    return fitting._replace(plan=chosen)


def largest_batch(
    run: Setup, limit: int, *, target: Target | None = None, progress: Progress | None = None
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
        analyzed = (analyze(resized, p, target) for p in policies)
        compiled[size] = smallest = min(analyzed, key=lambda planned: planned.peak.total)
        policies[:] = [smallest.policy]
        if progress:
            needs = memory.format_bytes(smallest.peak.total)
            progress(f"searching the largest batch size: {size * parts} needs {needs}")
        return smallest.peak.total + reserve(resized, target) - reserve(run, target)

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


def _compile(
    run: Setup,
    policy: str | Policy,
    microbatches: int,
    target: Target | None = None,
    *compiler_options: dict[str, Any],
) -> Planned:
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
        smallest = min(executables, key=lambda executable: executable.report.peak.total)
        return Planned(run, smallest, policy, microbatches, target=target)
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
    platform = platform_of(target)
    candidates: Any = memory.CANDIDATE_OPTIONS.get(platform, ({},))
    if compiler_options is not None:
        candidates = (compiler_options,)
    elif target:
        candidates = (target.compiler_options,)
    microbatches = microbatches or run.step.microbatches
    unoptimized = WITHOUT_OPTIMIZED_CODE if platform == "cpu" else {}
    return _compile(run, policy, microbatches, target, *(o | unoptimized for o in candidates))


def _with_remat(planned: Planned) -> Planned:
    """Compare with the step without the policy, and refuse a chosen one that saves nothing."""
    if str(planned.policy) == "none":
        return planned
    options = planned.executable.report.compiler_options
    baseline = _compile(planned.run, "none", planned.microbatches, planned.target, options)
    before, after = baseline.peak.temporaries, planned.peak.temporaries
    is_own = planned.run.config.memory.policy != "auto"  # others are chosen to fit
    if is_own and after >= _NO_SAVING * before:
        raise UserError(
            f"memory.policy: {planned.policy}: the policy saves no memory: temporaries {before:,} "
            f"bytes before, {after:,} after. The step has no residuals that it drops, or XLA "
            "merged what is rematerialized with the first run."
        )
    return planned._replace(temporaries_without_remat=before)


def memory_report(planned: Planned) -> dict[str, Any]:
    """Return the contents of memory.json.

    ``live_bytes`` and ``largest_at_peak`` are empty if the compiler does not report the schedule,
    and ``residuals`` are of one microbatch if there are several.
    """
    policy, timeline = str(planned.policy), None
    with suppress(ValueError):
        timeline = planned.peak.timeline
    residuals = residuals_by_layer(planned.run, planned.policy, planned.microbatches)
    return planned.executable.report.as_dict() | {
        "policy": policy,
        "saves": REMAT_POLICIES[policy].saves if policy in REMAT_POLICIES else None,
        "microbatches": planned.microbatches,
        "temporaries_without_remat": planned.temporaries_without_remat,
        "plan": _plan_as_dict(planned.plan) if planned.plan else None,
        "residuals": [layer._asdict() for layer in residuals],
        "largest_at_peak": [b._asdict() for b in timeline.largest] if timeline else [],
        "live_bytes": timeline.live_bytes if timeline else None,
        "peak_phase": timeline.peak_phase if timeline else "",
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
        parts = {"cost": c.cost._asdict(), "peak": c.peak.as_dict()}
        return c._asdict() | {"policy": str(c.policy)} | parts

    return {
        "budget": plan.budget,
        "chosen": as_dict(plan.chosen),
        "smaller": as_dict(plan.smaller) if plan.smaller else None,
        "candidates": [as_dict(c) for c in plan.candidates],
    }


def predict_on(
    run: Setup, target: Target | None, *, largest: bool = False, progress: Progress | None = None
) -> Planned:
    """Compile the step of a config for a device, by default this machine, and estimate its time.

    With ``largest``, the largest batch that fits is found.
    """
    run = run.on(layout(run.config, target.devices if target else None))
    most = limit(run, target)
    if largest:
        if most is None:
            raise UserError("--batch-size auto: needs --budget or --target")
        found = largest_batch(run, most, target=target, progress=progress)
        if found is None:
            on = f" of {target.name}" if target else ""
            available = memory.format_bytes(max(most, 0))
            raise UserError(f"not even the smallest batch fits in {available}{on}")
        planned = found
    else:
        within = most if run.config.memory.budget or run.config.memory.policy == "auto" else None
        try:
            planned = predict(run, within, target=target, progress=progress)
        except UserError:
            if run.config.memory.budget:
                raise
            planned = predict(run, target=target)  # shows by how much it is too large
    planned = planned._replace(limit=most)
    if not (target and target.peaks):
        return planned
    estimate = roofline.estimate(planned.executable, target.peaks)
    flops = estimate.total_flops / _extra_flops(planned)
    share = roofline.utilization(flops, estimate.seconds, estimate, target.peaks)
    return planned._replace(estimate=estimate, utilization=share)


def devices_table(predictions: list[Planned]) -> Table:
    """Return what a step takes on each device, with its estimated time."""
    devices, unit = predictions[0].run.devices, predictions[0].unit
    links = ("sent",) if devices > 1 else ()

    def row(p: Planned) -> tuple[str, ...]:
        e, split = p.estimate, f" / {p.microbatches}" if p.microbatches > 1 else ""
        known = (
            p.target.name if p.target else "this machine",
            f"{p.policy}{split}",
            f"{p.run.config.data.batch_size:,}",
            memory.format_bytes(p.peak.total) + ("" if p.fits else " too large"),
        )
        if e is None or p.utilization is None:
            return *known, "?", "?", "?", "rates unknown", *["?" for _ in links]
        limit = max(e.share, key=lambda name: e.share[name])
        rates = f"{e.seconds:.3g}", f"{p.per_second:,.0f}", f"{p.utilization:.0%}", limit
        return *known, *rates, *[memory.format_bytes(int(e.link_bytes)) for _ in links]

    return Table(
        f"Estimate{f' on {devices} devices' if links else ''}, at the rates of the data sheets",
        ("device", "remat", "batch", "peak", "s / step", f"{unit} / s", "MFU", "limit", *links),
        [row(p) for p in predictions],
        texts=2,
        caption=(
            "Bytes are per device. The time is a lower bound: a roofline over the compiled "
            "program. Kernels seldom reach the rates of a data sheet."
        ),
        styles=["" if p.fits else "dim" for p in predictions],
        is_wide=True,
    )


def target_of(given: str, count: int = 1) -> Target:
    """Return ``count`` known devices, or devices that a file describes."""
    path = Path(given)
    try:
        if path.is_file():
            return from_text(path.stem, path.read_text(), count)
        return describe(given, count)
    except (ValueError, RuntimeError, OSError) as error:
        message = str(error).removeprefix("describe: ").removeprefix("from_text: ")
        raise UserError(f"--target: {message}") from error


def _extra_flops(planned: Planned) -> float:
    if str(planned.policy) == "none":
        return 1.0

    def flops(policy: Any) -> int:
        step = planned.run.step.replace(remat=policy, microbatches=planned.microbatches)
        traced = step.trace(planned.run.state_shapes, planned.run.batch_shapes)
        return memory.estimate_cost(traced.jaxpr).flops

    return flops(planned.policy) / max(flops("none"), 1)


class Programs(NamedTuple):
    """Compiled programs of a run.

    Attributes:
      learning_rate: Function ``number of updates -> learning rate``.
      predicted_bytes: Predicted peak memory of the run, per device, before it evaluates.
    """

    planned: Planned
    take_step: StepCache
    evaluate: Evaluator
    init: Callable[[Array], TrainState]
    learning_rate: Callable[[int], float]
    predicted_bytes: int

    def finish(self) -> dict[str, Any]:
        """Compile the checksums of checkpoints, and return the contents of memory.json."""
        compile_checksums(without_frozen(self.planned.run.state_shapes))
        return memory_report(self.planned)


def compile_programs(
    run: Setup, weights: InitialWeights | None, unreadable: UnreadableFiles, console: Console
) -> Programs:
    """Compile the programs of a run, which begins with pretrained weights if they are given.

    Raises:
      UserError: for a metric that the evaluation has not or that is undefined, a budget that
        nothing fits, or a policy that this device does not support.
      DonationError: if the step would not update the state in place.
    """
    what = "compiling 2 programs, train step and initial values; a large network takes minutes"
    with showing(console, what) as show, ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        stack.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(50_000, 2, 2)  # traces stay: a tenth of a second start looked for garbage

        def evaluation(microbatches: int) -> Evaluator:
            # With several crops per image, fewer images make a batch of the size of a microbatch.
            images = run.config.data.batch_size // microbatches // run.config.data.crops
            return run.evaluation(unreadable, images)

        # A wrong name costs a trace, not a compilation.
        metric = best_metric(run.config)
        if score_of(evaluation(run.step.microbatches).trial(), metric) is None:
            raise UserError(
                f"checkpoint.metric: {metric} is undefined on these test examples, whose labels do "
                "not differ; give another metric, or other splits"
            )
        # The compiler mostly takes one CPU: the initial values are ready before the step.
        init = run.compile_init(weights.variables if weights else None, threads)
        planned = compile_step(run, progress=show)
        schedule = jax.jit(run.schedule).lower(jax.ShapeDtypeStruct((), np.int32)).compile()
        state_bytes = memory.tree_bytes(run.state_shapes) // run.devices
        return Programs(
            planned,
            StepCache(planned, line_printer(console)),
            evaluation(planned.microbatches),
            init,
            lambda step: float(schedule(np.int32(step))),
            overhead(run).peak(state_bytes, planned.peak.total),
        )
