"""The training loop, from a config to a trained network, readable top to bottom."""

import contextlib
import importlib.metadata
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import fnet
from fnet.memory import in_words
from train import distributed, examples, plots, tracking
from train.account import account
from train.checkpoint import Checkpoints
from train.class_names import check_classes, write_classes
from train.config import Config
from train.data.unreadable import UnreadableFiles
from train.guard import Guard
from train.interruption import Interruption
from train.memory_tables import plan_table, plan_words, tables
from train.mesh import layout
from train.metrics import Meter, noise_scale, score
from train.planning import StepBySize, check, compile_step, reserve
from train.process_memory import HighWater
from train.profiling import Profile
from train.run_folder import RunFolder, as_json, quote, read_metrics, write_whole
from train.screen import Screen, plain
from train.setup import Setup, check_resumed, setup


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
      UserError: for a mistake in config or folder, before any result is written.
      TrainingError: if the loss is no longer finite.
      DonationError: if the state would not be renewed in place.
    """
    began = time.perf_counter()
    # What is learned, from which batches; what it costs is known before it runs.
    run = setup(config)
    run = run.on(layout(config))
    check(run)
    tracking.check(config)

    def begin(folder: RunFolder) -> None:
        if not resume:
            folder.begin(config)
            return
        if folder.config.is_file():
            check_resumed(run, folder.read_config())
            check_classes(folder, run.task.dataset.classes)
        folder.resume(config)

    with distributed.run_folder(out, begin) as folder:
        _train(run, folder, resume, profile, console, began)


def _train(
    run: Setup, folder: RunFolder, resume: bool, profile: int, console: Console, began: float
) -> None:
    config, say = run.config, plain(console)
    write_classes(folder, run.task.dataset.classes)
    unreadable = UnreadableFiles(run.task.dataset, say)
    batches = unreadable.watch(run.training_batches())
    with console.status("compiling") as status:
        planned = compile_step(run, progress=lambda c: status.update(f"compiling: {c}"))
        report, take_step = planned.executable.report, StepBySize(run, planned, say)
        # A microbatch, or in private training, where it has more rows, its share of the mean batch.
        rows = config.data.batch_size // planned.microbatches // run.crops
        size = max(rows // run.devices, 1) * run.devices
        evaluate = run.compile_evaluation(unreadable, size)
        init = run.compile_init()
        learning_rate = run.compile_schedule()
        costs = account(run, planned)
    if planned.plan:
        console.print(plan_table(planned.plan, reserve(run)))
        say(plan_words(planned.plan, reserve(run)))
    console.print(*tables(costs), sep="\n")
    write_whole(folder.memory, as_json(costs.as_dict()))
    plots.memory(costs, f"{config.name}: memory of a train step", folder.memory_picture)
    predicted = max(report.peak.total, evaluate.peak)
    if run.privacy:
        say(f"private: {run.privacy.in_words(run.steps)}")
    memory = HighWater(run.devices // jax.process_count())

    saving = config.checkpoint
    with Checkpoints(folder.checkpoints, saving.keep, say, keep_best=saving.best) as checkpoints:
        restored = checkpoints.restore(run.state_shapes) if resume else None
        if restored:
            start, state = restored.step, restored.state
            batches.set_state(restored.position)
            say(f"resumed after step {start} of {run.steps}")
        else:
            start, state = 0, init(jax.random.key(config.train.seed))
        folder.forget_metrics_after(start)
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
                    state, metrics = take_step(state, batch)
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
                    line["train/learning_rate"] = learning_rate(max(step - 1 - left_out, 0))
                    if unreadable.count:
                        line["unreadable_files"] = unreadable.count
                    if evaluating:
                        tested = evaluate(state)
                        reached = score(tested.metrics)
                        line |= {f"test/{name}": value for name, value in tested.metrics.items()}
                    metrics_file.write(json.dumps(line) + "\n")
                    track(step, line)
                    screen.log(step, line, predicted, memory.bytes())
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
    title = f"{config.name}: {report.parameters:,} parameters, {step} steps"
    lines = read_metrics(folder.metrics)
    plots.curves(lines, title, folder.curves)
    if step < run.steps:
        why = interruption.requested or "another process was interrupted"
        say(
            f"{why}: saved after step {step} of {run.steps}; continue with\n"
            f"  fnet train {quote(folder.config)} --resume"
        )
        return
    tested = tested or evaluate(state)
    if tested.confusion is not None:
        classes = run.task.dataset.classes
        plots.confusion(tested.confusion, classes, f"{config.name}, step {step}", folder.confusion)
        examples.draw(run, evaluate, state, folder.examples)
    summary = {
        "metrics": {f"test/{name}": value for name, value in tested.metrics.items()},
        "privacy": run.privacy.as_dict(step) if run.privacy else None,
        "noise_scale": noise_scale(lines),
        "unreadable_files": unreadable.count,
        "steps": step,
        "seconds": time.perf_counter() - began,
        "examples_per_second": meter.examples / meter.seconds if meter.examples else None,
        "parameters": report.parameters,
        "state_bytes": report.state_bytes,
        "donated_bytes": report.donation.aliased_bytes,
        "policy": planned.policy,
        "microbatches": planned.microbatches,
        "budget_bytes": planned.plan.budget if planned.plan else None,
        "peak_bytes_predicted": predicted,
        "peak_bytes_seen": seen,
        "versions": versions(),
    }
    if step == start and folder.summary.is_file():  # the run had ended
        ended = json.loads(folder.summary.read_text())
        same = "seconds", "examples_per_second", "unreadable_files", "peak_bytes_seen"
        summary |= {name: ended[name] for name in same if name in ended}
    write_whole(folder.summary, as_json(summary))
    words = summary_lines(summary, folder)
    if tested.confusion is not None:
        words += f"\nconfusion: {folder.confusion}\nexamples: {folder.examples}"
    if run.privacy:
        words += f"\nprivate: {run.privacy.in_words(step)}"
    say(words)


def summary_lines(summary: dict[str, Any], folder: RunFolder) -> str:
    """The end of a run, in words."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items())
    seen, predicted = summary["peak_bytes_seen"], summary["peak_bytes_predicted"]
    budget = summary["budget_bytes"]
    of = f" of {in_words(budget)}" if budget else ""
    return (
        f"{metrics}  after {summary['steps']} steps, {summary['seconds']:.1f} s\n"
        f"peak memory: predicted {in_words(predicted)}, seen {in_words(seen)}{of}\n"
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
