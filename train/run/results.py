"""What a finished run writes: evaluation, pictures, audit and summary.json."""

import contextlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import fnet
from fnet import TrainState
from train.output.logged import NOT_PRIVATE, input_wait, noise_scale, read_metrics, throughput
from train.run import examples
from train.run.audit import audit
from train.run.audit import describe as describe_audit
from train.run.evaluation import Evaluation
from train.run.programs import Programs
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.run.seeds import Seeds, describe_seeds, needs_secret
from train.run.setup import Setup
from train.run.summary import describe_results, what_next


def write_results(
    run: Setup,
    folder: RunFolder,
    programs: Programs,
    state: TrainState,
    evaluation: Evaluation | None,
    seeds: Seeds,
    log: Callable[[str], None],
    *,
    is_trained: bool,
    start_time: float,
    measured: dict[str, Any],
) -> None:
    """Write the summary and the pictures of a finished run, and print its results.

    Args:
      run: setup of the run.
      folder: folder of the run.
      programs: compiled programs of the run.
      state: train state after the last step.
      evaluation: evaluation of the state; None if the run was resumed after its last step.
      seeds: seeds of the run.
      log: prints a line.
      is_trained: whether this process took a step.
      start_time: time of its start by `time.perf_counter`, less the time of earlier processes.
      measured: fields of summary.json that only training can measure.
    """
    evaluation = evaluation or programs.evaluate(state)
    written = [folder.summary, folder.curves, folder.memory_picture]
    pictures = folder.confusion, folder.examples
    title = f"{run.config.name}, step {run.steps}"
    written += examples.draw_results(run, programs.evaluate, state, evaluation, title, *pictures)
    audited = None
    if run.canaries:
        # Pretrained weights have other initial values.
        known = not folder.imported.exists()
        audited = audit(run, run.canaries, state.params, seeds.data, initial_known=known)
    measured |= {"seconds": time.perf_counter() - start_time}
    if not is_trained:
        measured |= _measured_before(folder.summary, run.steps)
    results = {"audit": audited._asdict() if audited else None} | measured
    summary = _summary(run, read_metrics(folder.metrics), programs, evaluation) | results
    atomic_write(folder.summary, as_json(summary))
    for text in describe_results(run, summary):
        log(text)
    if run.privacy:
        log(f"privacy: {run.privacy.describe(run.steps)}")
        log(describe_seeds(folder, run.config))
    if audited:
        log(describe_audit(audited, run.privacy, run.steps))
    for text in what_next(run, folder, written):
        log(text)


def test_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation by their names in metrics.jsonl."""
    return {f"test/{name}": value for name, value in metrics.items()}


def unreadable_name(run: Setup) -> str:
    """Return the name in metrics.jsonl of the number of unreadable files."""
    return f"{NOT_PRIVATE}/unreadable_files" if run.privacy else "unreadable_files"


def _summary(
    run: Setup, lines: list[dict[str, Any]], programs: Programs, evaluation: Evaluation
) -> dict[str, Any]:
    """Return what summary.json holds besides what was measured."""
    planned, privacy = programs.planned, None
    report = planned.executable.report
    if run.privacy:
        privacy = run.privacy.as_dict(run.steps) | {"secret_noise": needs_secret(run.config)}
    return {
        "metrics": test_metrics(evaluation.metrics),
        "privacy": privacy,
        "noise_scale": noise_scale(lines),
        "steps": run.steps,
        "examples_per_second": throughput(lines),
        "input_wait": input_wait(lines),
        "parameters": report.parameters,
        "state_bytes": report.state_bytes,
        "donated_bytes": report.donation.aliased_bytes,
        "quantization_errors": dict(getattr(run.task.model, "errors", dict)()),
        "policy": str(planned.policy),
        "microbatches": planned.microbatches,
        "budget_bytes": planned.plan.budget if planned.plan else None,
        "peak_bytes_predicted": programs.predicted_bytes,
        "versions": _versions(),
    }


def _measured_before(path: Path, step: int) -> dict[str, Any]:
    """Return what only training can measure, from the summary of a run that ended at ``step``."""
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):  # absent or damaged
        return {}
    if not isinstance(summary, dict) or summary.get("steps") != step:
        return {}  # the run was killed between its last checkpoint and its summary
    names = "seconds", "unreadable_files", "peak_bytes_seen"
    return {name: summary[name] for name in names if name in summary}


def _versions() -> dict[str, str]:
    """Return the versions of fnet, Python and libraries, and the device."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    installed = {name: importlib.metadata.version(name) for name in packages}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed["dp-accounting"] = importlib.metadata.version("dp-accounting")
    return {
        "fnet": fnet.__version__,
        "python": platform.python_version(),
        "device": jax.local_devices()[0].device_kind,
    } | installed
