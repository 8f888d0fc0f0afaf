"""The training loop, from a config to a trained network, readable top to bottom."""

import contextlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array
from rich.console import Console

import fnet
from fnet import TrainState
from fnet.memory import format_bytes
from train.config import Config
from train.data.unreadable import UnreadableFiles
from train.output import curves, examples, plots
from train.output.memory_tables import memory_tables, plan_summary, plan_table
from train.output.progress import Screen, line_printer
from train.run import distributed, tracking
from train.run.checkpoints import Checkpoints
from train.run.class_names import check_classes, write_classes
from train.run.evaluation import Evaluate, Evaluation
from train.run.interruption import Interruption
from train.run.memory_report import MemoryReport, memory_report
from train.run.mesh import layout
from train.run.metrics import Meter, noise_scale, score
from train.run.planning import StepCache, check, compile_step, reserve
from train.run.process_memory import HighWater
from train.run.profiling import Profile
from train.run.run_folder import RunFolder, as_json, atomic_write, quote, read_metrics
from train.run.setup import Setup, check_resumed, setup
from train.run.skipped_steps import Guard


def train(config: Config, out: Path, *, resume: bool, console: Console, profile: int = 0) -> None:
    """Trains what ``config`` describes and leaves everything about it in ``out``.

    Args:
      config: the whole run.
      out: the run's folder; `RunFolder` says what lies where.
      resume: continue the run that is there; the end is bit for bit that of a run
        that was never interrupted.
      console: where it is shown.
      profile: how many steps are traced for a profiler.

    Raises:
      UserError: for a mistake in config or folder, before any result is written, and where too
        many files cannot be read.
      TrainingError: if the loss is no longer finite, or a checkpoint cannot be written.
      DonationError: if the state would not be renewed in place.
    """
    began = time.perf_counter()
    # What is learned, from which batches; what it costs is known before it runs.
    run = setup(config)
    run = run.on(layout(config))
    check(run)
    tracking.check(config)

    def begin(folder: RunFolder) -> None:
        if resume and folder.config.is_file():
            check_resumed(run, folder.read_config())
            check_classes(folder, run.task.dataset.classes)
            folder.resume(config)
            return
        if resume:
            line_printer(console)(f"no run in {folder.path} yet: starting a new one")
        folder.create()
        folder.write_config(config)

    with distributed.run_folder(out, begin) as folder:
        write_classes(folder, run.task.dataset.classes)
        unreadable = UnreadableFiles(run.task.dataset, line_printer(console))
        programs = _compile(run, unreadable, console)
        _show_costs(run, programs.costs, folder, console)
        ended = _take_steps(run, programs, folder, unreadable, resume, profile, console, began)
        _conclude(run, programs, folder, unreadable, ended, line_printer(console))


class _Programs(NamedTuple):
    """What a run computes with, compiled before its first step.

    Attributes:
      take_step: the train step.
      evaluate: on the test examples.
      init: ``key -> TrainState``.
      learning_rate: by step.
      costs: where the train step's memory goes, and why it is this one.
    """

    take_step: StepCache
    evaluate: Evaluate
    init: Callable[[Array], TrainState]
    learning_rate: Callable[[int], float]
    costs: MemoryReport

    @property
    def predicted(self) -> int:
        """Bytes that training holds at most."""
        return max(self.costs.planned.executable.report.peak.total, self.evaluate.peak)


def _compile(run: Setup, unreadable: UnreadableFiles, console: Console) -> _Programs:
    with console.status("compiling") as status:
        planned = compile_step(run, progress=lambda c: status.update(f"compiling: {c}"))
        # A microbatch, or in private training, where it has more rows, its share of the mean batch.
        rows = run.config.data.batch_size // planned.microbatches // run.crops
        size = max(rows // run.devices, 1) * run.devices
        return _Programs(
            take_step=StepCache(run, planned, line_printer(console)),
            evaluate=run.compile_evaluation(unreadable, size),
            init=run.compile_init(),
            learning_rate=run.compile_schedule(),
            costs=memory_report(run, planned),
        )


def _show_costs(run: Setup, costs: MemoryReport, folder: RunFolder, console: Console) -> None:
    say, plan = line_printer(console), costs.planned.plan
    if plan:
        console.print(plan_table(plan, reserve(run)))
        say(plan_summary(plan, reserve(run)))
    console.print(*memory_tables(costs), sep="\n")
    atomic_write(folder.memory, as_json(costs.as_dict()))
    plots.memory(costs, f"{run.config.name}: memory of a train step", folder.memory_picture)
    if run.privacy:
        say(f"private: {run.privacy.in_words(run.steps)}")


class _Ended(NamedTuple):
    """How far a run came.

    Attributes:
      start: the step that it went on after.
      step: the last one there is.
      state: after it.
      tested: the last evaluation; of the last step where the run is at its end.
      meter: of the steps that were taken.
      seen: most bytes that were held.
      began: on `time.perf_counter`, as if it had never been interrupted.
      interrupted: by which signal; None where this process was not.
    """

    start: int
    step: int
    state: TrainState
    tested: Evaluation | None
    meter: Meter
    seen: int | None
    began: float
    interrupted: str | None


def _take_steps(
    run: Setup,
    programs: _Programs,
    folder: RunFolder,
    unreadable: UnreadableFiles,
    resume: bool,
    profile: int,
    console: Console,
    began: float,
) -> _Ended:
    """The steps that are left, with what is logged, tested and saved on the way."""
    config, say = run.config, line_printer(console)
    batches = unreadable.watch(run.training_batches())
    memory = HighWater(run.devices // jax.process_count())

    saving = config.checkpoint
    with Checkpoints(
        folder.checkpoints, saving.keep, say, shapes=run.state_shapes, keep_best=saving.best
    ) as checkpoints:
        restored = checkpoints.restore(run.state_shapes) if resume else None
        if restored:
            start, state = restored.step, restored.state
            batches.set_state(restored.position)
            say(f"resumed after step {start} of {run.steps}")
        else:
            start, state = 0, programs.init(jax.random.key(config.train.seed))
        folder.drop_metrics_after(start)
        began -= folder.seconds_spent()

        step, tested, best = start, None, checkpoints.best_score
        meter = Meter(config.data.batch_size)
        guard = Guard(run, folder.bad_steps, say)
        left_out = len(read_metrics(folder.bad_steps))
        eval_every = config.train.eval_every or max(round(run.steps_per_epoch), 1)
        with (
            Interruption() as interruption,
            Screen(console, run.steps) as screen,
            folder.metrics.open("a", buffering=1) as metrics_file,
            tracking.tracking(config, folder.path, start) as track,
            contextlib.closing(Profile(profile, folder.profile, start, say)) as traced,
        ):
            for step in range(start + 1, run.steps + 1):
                with traced.step(step, state):
                    batch = meter.take(batches)
                    guard.look(state)
                    state, metrics = programs.take_step(state, batch)
                guard.add(step, batch, metrics)
                meter.add(metrics)
                screen.advance(step)

                logging = step % config.train.log_every == 0
                stop = interruption.requested is not None
                if distributed.several():  # all must end at the same step: they ask each other
                    stop = logging and distributed.any_process(stop)
                last = step == run.steps
                evaluating, reached = step % eval_every == 0 or last, None
                if logging or evaluating or stop:
                    # Reckoned while the device still works on the steps before.
                    spent = {"privacy/epsilon": run.privacy.epsilon(step)} if run.privacy else {}
                    line = {"step": step, "epoch": step / run.steps_per_epoch}
                    line["seconds"] = time.perf_counter() - began
                    line |= meter.means(step) | spent
                    left_out += int(line.get("train/skipped", 0))  # not counted by the optimizer
                    updates = max(step - 1 - left_out, 0)
                    line["train/learning_rate"] = programs.learning_rate(updates)
                    if unreadable.count:
                        line["unreadable_files"] = unreadable.count
                    if evaluating:
                        tested = programs.evaluate(state)
                        reached = score(tested.metrics)
                        line |= {f"test/{name}": value for name, value in tested.metrics.items()}
                    metrics_file.write(json.dumps(line) + "\n")
                    track(step, line)
                    screen.log(step, line, programs.predicted, memory.bytes())
                    meter.restart()
                better = saving.best and reached is not None and reached > best
                if step % saving.every == 0 or better or last or stop:
                    guard.look(state, wait=True)
                    meter.check(step)  # without a guard, or with privacy's noise, nothing else does
                    if not guard.in_a_row or last or stop:
                        with meter.paused():
                            checkpoints.save(step, state, batches.get_state(), reached)
                        best = best if reached is None else max(best, reached)
                if stop:
                    break
        checkpoints.wait()
    seen = memory.bytes()  # before pictures are drawn, which is not training
    return _Ended(start, step, state, tested, meter, seen, began, interruption.requested)


def _conclude(
    run: Setup,
    programs: _Programs,
    folder: RunFolder,
    unreadable: UnreadableFiles,
    ended: _Ended,
    say: Callable[[str], None],
) -> None:
    """The pictures and the summary of a run, or how an interrupted one goes on."""
    planned, step = programs.costs.planned, ended.step
    report, name = planned.executable.report, run.config.name
    lines = read_metrics(folder.metrics)
    curves.save(lines, f"{name}: {report.parameters:,} parameters, {step} steps", folder.curves)
    if step < run.steps:
        why = ended.interrupted or "another process was interrupted"
        say(
            f"{why}: saved after step {step} of {run.steps}; continue with\n"
            f"  fnet train {quote(folder.config)} --resume"
        )
        return
    tested, meter = ended.tested or programs.evaluate(ended.state), ended.meter
    if tested.confusion is not None:
        classes = run.task.dataset.classes
        plots.confusion_matrix(tested.confusion, classes, f"{name}, step {step}", folder.confusion)
        examples.draw(run, programs.evaluate, ended.state, folder.examples)
    summary = {
        "metrics": {f"test/{name}": value for name, value in tested.metrics.items()},
        "privacy": run.privacy.as_dict(step) if run.privacy else None,
        "noise_scale": noise_scale(lines),
        "unreadable_files": max([unreadable.count, *(n.get("unreadable_files", 0) for n in lines)]),
        "steps": step,
        "seconds": time.perf_counter() - ended.began,
        "examples_per_second": meter.examples / meter.seconds if meter.examples else None,
        "parameters": report.parameters,
        "state_bytes": report.state_bytes,
        "donated_bytes": report.donation.aliased_bytes,
        "policy": planned.policy,
        "microbatches": planned.microbatches,
        "budget_bytes": planned.plan.budget if planned.plan else None,
        "peak_bytes_predicted": programs.predicted,
        "peak_bytes_seen": ended.seen,
        "versions": versions(),
    }
    if step == ended.start:
        summary |= _told_before(folder.summary, step)
    atomic_write(folder.summary, as_json(summary))
    words = summary_lines(summary, folder)
    if tested.confusion is not None:
        words += f"\nconfusion: {folder.confusion}\nexamples: {folder.examples}"
    if run.privacy:
        words += f"\nprivate: {run.privacy.in_words(step)}"
    say(words)


def _told_before(path: Path, step: int) -> dict[str, Any]:
    """What training alone can tell, of the summary of a run that had ended at this step."""
    try:
        before = json.loads(path.read_bytes())
    except (OSError, ValueError):  # there is none, or a damaged one, which is written anew
        return {}
    if not isinstance(before, dict) or before.get("steps") != step:
        return {}  # killed between its last checkpoint and its summary
    names = "seconds", "examples_per_second", "unreadable_files", "peak_bytes_seen"
    return {name: before[name] for name in names if name in before}


def summary_lines(summary: dict[str, Any], folder: RunFolder) -> str:
    """The end of a run, in words."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items())
    seen, predicted = summary["peak_bytes_seen"], summary["peak_bytes_predicted"]
    budget = summary["budget_bytes"]
    of = f" of {format_bytes(budget)}" if budget else ""
    return (
        f"{metrics}  after {summary['steps']} steps, {summary['seconds']:.1f} s\n"
        f"peak memory: predicted {format_bytes(predicted)}, seen {format_bytes(seen)}{of}\n"
        f"curves: {folder.curves}\nmemory: {folder.memory_picture}\nsummary: {folder.summary}"
    )


def versions() -> dict[str, str]:
    """What the run was made with."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["dp-accounting"] = importlib.metadata.version("dp-accounting")
    device = jax.local_devices()[0]
    return {
        "fnet": fnet.__version__,
        "python": platform.python_version(),
        "device": device.device_kind,
    } | found
