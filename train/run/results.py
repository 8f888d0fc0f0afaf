"""Printed before a run's first step, and printed and written after its last one."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fnet.memory import REMAT_POLICIES, format_bytes, parse_bytes, tree_bytes
from fnet.privacy.audit import Audit, audit_epsilon
from fnet.privacy.canaries import GradientCanaries
from train.data import num_examples
from train.data.canaries import draw_included
from train.data.columns import is_named
from train.errors import UserError, at_most, shorten
from train.networks.published.network import FROZEN
from train.output.curves import describe
from train.output.formats import duration, number
from train.output.logged import NOT_PRIVATE, Summary, input_wait, noise_scale, throughput
from train.output.memory_tables import describe_errors, plan_summary
from train.output.progress import line_printer
from train.privacy import Privacy
from train.run.evaluation import Evaluation
from train.run.planning import Programs, overhead, reserve
from train.run.run_folder import RunFolder, quote
from train.run.same_data import versions
from train.run.seeds import needs_secret
from train.run.setup import Setup
from train.tasks import kind_of


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Print names with texts. A terminal breaks long texts between words, a log does not."""
    log, indent = line_printer(console), " " * 12
    for name, text in facts.items():
        line = f"  {name:<10}{text}"
        width = console.width if console.is_terminal else len(line)
        for part in textwrap.wrap(line, width, subsequent_indent=indent):
            log(part)


def before_training(programs: Programs, lines: list[dict[str, Any]]) -> dict[str, str]:
    """Summarize a run whose step is compiled: data, network, memory, steps and time.

    ``lines`` are from metrics.jsonl of an earlier part of the run.
    """
    planned = programs.planned
    run, report = planned.run, planned.executable.report
    config, dataset = run.config, run.task.dataset
    path = config.data.path or ""
    path = path if isinstance(path, str) else shorten(path)
    num_train = num_examples(dataset.train) - dataset.canaries
    classes = f", {len(dataset.classes):,} classes" if dataset.classes else ""
    classes += f": {shorten(dataset.classes)}" if is_named(dataset.classes) else ""
    if config.data.targets != "class":
        classes = f", {config.data.targets} {shorten(dataset.classes)}"
    frozen = jax.tree.leaves(run.state_shapes.model_state.get(FROZEN, ()))
    per_device = " per device" if run.devices > 1 else ""
    memory = f"{format_bytes(programs.predicted_bytes)}{per_device} predicted"
    if jax.default_backend() == "cpu":
        memory += f"{_of_process(run)}, {format_bytes(report.peak.total)} of it for a step"
    if config.memory.budget:
        memory += f"; budget {config.memory.budget}"
    split = f" in {planned.microbatches:,} microbatches" if planned.microbatches > 1 else ""
    policy = REMAT_POLICIES[planned.policy]
    device = jax.local_devices()[0].device_kind
    on = f"{run.devices} devices ({device})" if run.devices > 1 else device
    facts = {
        "data": f"{config.data.source}{path and ' ' + path}: {num_train:,} training and "
        f"{num_examples(dataset.test):,} test {dataset.rows}{classes}",
        "network": f"{config.model.name}: {report.parameters:,} parameters to train"
        + (f", {format_bytes(sum(map(tree_bytes, frozen)))} of frozen ones" if frozen else ""),
        "state": f"{format_bytes(report.state_bytes)}{per_device}, updated in place",
        "memory": memory,
        "policy": f"{policy}: saves {policy.saves}; {config.data.batch_size:,} {dataset.rows} "
        f"a step{split}",
    }
    if planned.plan:
        facts["plan"] = " ".join(plan_summary(planned.plan, reserve(run)).splitlines())
    epochs = number(run.steps / run.steps_per_epoch)
    facts["steps"] = f"{run.steps:,} ({epochs} epochs) on {on}"
    facts["time"] = "estimated once the first steps are measured"
    if len(lines) > 1:  # the time until the first line includes compilation
        (first, then), (last, now) = (
            (x["step"], x.get("seconds", 0.0)) for x in lines[:: len(lines) - 1]
        )
        rest = max(run.steps - last, 0)
        seconds = (now - then) / max(last - first, 1) * rest
        facts["time"] = f"about {duration(seconds)} for {rest:,} steps, as fast as before"
    return facts


def unreadable_name(run: Setup) -> str:
    """Return the name in metrics.jsonl of the number of unreadable files."""
    return f"{NOT_PRIVATE}/unreadable_files" if run.privacy else "unreadable_files"


def summary_of(
    run: Setup, lines: list[dict[str, Any]], programs: Programs, evaluation: Evaluation
) -> dict[str, Any]:
    """Return the contents of summary.json, but what only training can measure."""
    planned, secret = programs.planned, {"secret_noise": needs_secret(run.config)}
    report = planned.executable.report
    return {
        "metrics": evaluation.test_metrics,
        "privacy": run.privacy.as_dict(run.steps) | secret if run.privacy else None,
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
        "versions": versions(),
    }


def audit(
    run: Setup, canaries: GradientCanaries, params: Any, seed: int, *, initial_known: bool = True
) -> Audit:
    """Compute a lower bound on epsilon from canaries.

    If the initial parameters do not follow from the config, scores are less precise, but the bound
    holds.
    """
    replicated = run.layout.replicated if run.layout else None
    values = jax.device_get(jax.jit(canaries.values, out_shardings=replicated)(params))
    initial = np.zeros_like(values)
    if initial_known:
        key = jax.random.key(run.config.train.seed)
        initial = jax.device_get(jax.jit(lambda key: canaries.values(run.init(key).params))(key))
    scores = np.nan_to_num(initial - values, nan=-np.inf)
    return audit_epsilon(scores, draw_included(len(scores), seed), run.config.grad.delta or 0.0)


def describe_audit(result: Audit, privacy: Privacy | None, steps: int) -> str:
    """Describe both bounds on epsilon in one line."""
    upper = f"at most {at_most(privacy.epsilon(steps))}" if privacy else "unbounded without noise"
    text = (
        f"audit: epsilon is at least {result.epsilon:.3g} with {result.confidence:.0%} confidence, "
        f"and {upper} ({result.correct} of {result.guesses} guesses about {result.canaries} "
        "canaries right)"
    )
    if privacy and result.epsilon > privacy.epsilon(steps):
        text += "; THE GUARANTEE IS BROKEN, unless this is one of the rare wrong bounds"
    return text


def measured_before(folder: RunFolder, step: int) -> dict[str, Any]:
    """Return what only training can measure, from the summary of a run that ended at ``step``."""
    try:
        summary = folder.read(Summary, folder.summary)
    except UserError:  # it is written again
        return {}
    if summary is None or summary.steps != step:
        return {}  # the run was killed between its last checkpoint and its summary
    measured = {"seconds", "unreadable_files", "peak_bytes_seen"}
    return summary.model_dump(include=measured, exclude_unset=True)


def _of_process(run: Setup) -> str:
    return " with the runtime" if run.devices > 1 else " for the process"


def describe_results(run: Setup, summary: Mapping[str, Any]) -> list[str]:
    """Describe the results of a finished run in lines, from the contents of summary.json."""
    predicted, measured = summary["peak_bytes_predicted"], summary["peak_bytes_seen"]
    memory = f"peak memory {format_bytes(measured)}, predicted {format_bytes(predicted)}"
    memory += " per device" * (run.devices > 1)
    if jax.default_backend() == "cpu":
        estimate = format_bytes(overhead(run).always)
        memory += f"{_of_process(run)}, {estimate} of it an estimate of all but the step's arrays"
    if budget := run.config.memory.budget:
        memory += f", budget {budget}"
    rate = summary["examples_per_second"]
    speed = f", {number(rate)} examples/s" if rate else ""
    lines = [
        f"result: {describe_metrics(summary['metrics'])}",
        f"  {summary['steps']:,} steps in {duration(summary['seconds'])}{speed}",
        f"  {memory}",
    ]
    if budget and measured and (over := measured - parse_bytes(budget)) > 0:
        size = format_bytes(over)
        lines.append(
            f"  warning: the measured peak is {size} above the budget; "
            f"to stay within {budget}, lower --memory.budget by {size}"
        )
    if errors := summary["quantization_errors"]:
        lines.append(f"  quantized weights: {describe_errors(errors)}")
    return lines


def what_next(run: Setup, folder: RunFolder, written: Sequence[Path]) -> list[str]:
    """Return lines with the files that show the results, and with commands to try next."""
    path = quote(folder.path)
    chat = " --chat" if run.task.dataset.is_chat else ""
    kind = kind_of(run.config)
    command = f"sample {path}{chat}" if kind.generates else f"eval {path}"
    if kind.predicts:
        command += f", fnet predict {path} {'IMAGE' if kind.labels_images else 'TEXTS.jsonl'}"
    lines = [
        f"files in {folder.path}: {', '.join(str(p.relative_to(folder.path)) for p in written)}",
        f"next: fnet report {path}, fnet {command}",
    ]
    if run.config.model.is_published:
        lines[-1] += f", fnet export {path}"
    return lines


def describe_metrics(metrics: Mapping[str, float | None]) -> str:
    """Write metrics with their names: ``test accuracy 0.9972, test loss 0.006642``."""

    def name(key: str) -> str:
        part, _, metric = key.partition("/")
        return f"{part} {describe(metric)[0]}"

    texts = {key: "undefined" if v is None else number(v) for key, v in metrics.items()}
    return ", ".join(f"{name(key)} {text}" for key, text in texts.items())
