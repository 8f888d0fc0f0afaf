"""How each run went: its state and its figures, as the head of a report."""

import math
from collections.abc import Sequence

import numpy as np

from fnet.memory import format_bytes
from train.errors import at_most
from train.output.curves import LOWER_IS_BETTER, SCORES, Metric, describe
from train.output.formats import duration, number
from train.output.logged import NOT_PRIVATE
from train.output.tables import Cell, Table
from train.report.runs import Run


def describe_run(run: Run) -> str:
    """Describe model, data and folder of a run."""
    count = (run.summary and run.summary.parameters) or (run.memory and run.memory.parameters)
    size = f" with {count:,} parameters" if count else ""
    return f"{run.config.model.name}{size} on {run.config.data.source}, in {run.folder.path}"


def describe_state(run: Run, now: float) -> str:
    """Describe how far a run has come, at a time in seconds since 1970."""
    if run.finished and run.summary:
        return f"Finished after {run.summary.steps:,} steps."
    total = run.total_steps
    share = f" of {total:,} ({run.step / total:.0%})" if total else ""
    sentences = [f"Not finished: step {run.step:,}{share}."]
    if total and run.step >= total and not run.summary:
        sentences = [f"All {run.step:,} steps are done, but there is no summary.json."]
    if run.written is None:
        sentences = ["Not finished: no metrics are logged yet."]
    elif run.lines:
        ago = duration(max(now - run.written, 0.0))
        sentences.append(f"Last logged {ago} before this page was written.")
        if run.training_seconds and total and total > run.step:
            left = run.training_seconds * (total - run.step) / run.step
            sentences.append(f"About {duration(left)} of training left.")
    if run.owner:
        sentences.append(f"In use by {run.owner}, unless that process was killed.")
    else:
        sentences.append("No process is using its folder.")
    if run.checkpoints:
        sentences.append(f"Newest checkpoint: step {run.checkpoints[-1]:,}.")
    if run.summary:
        sentences.append(f"Its summary is of step {run.summary.steps:,}, before it was resumed.")
    return " ".join(sentences)


def figures_of(run: Run, index: int, metrics: Sequence[Metric]) -> dict[str, Cell]:
    """Return the figures by name of the run that has this index in the metrics."""
    tested = [metric for metric in metrics if (index, "test") in metric.curves]
    figures = {f"test {metric.title}": _test_score(metric, run, index) for metric in tested}
    if not figures and run.summary:  # metrics.jsonl may be gone
        for name, value in run.summary.metrics.items():
            title, scale = describe(name.removeprefix("test/"))
            figures[f"test {title}"] = Cell("undefined" if value is None else scale.text(value))
    for part, note in (("train", ""), (NOT_PRIVATE, "not private")):
        if (loss := run.last(f"{part}/loss")) is not None:
            figures["train loss"] = Cell(number(loss), note)
    if run.lines:
        epochs = "" if math.isnan(run.epoch) else f"{number(run.epoch)} epochs"
        figures["steps"] = Cell(f"{run.step:,}", epochs)
    if seconds := run.training_seconds:
        whole = run.summary.seconds if run.summary and run.finished else 0.0
        note = f"{duration(whole)} in total" if whole >= seconds else ""
        figures["training time"] = Cell(duration(seconds), note)
        figures["examples per second"] = Cell(number(run.rate or 0.0))
    predicted, measured = run.memory.peak.total if run.memory else None, None
    if run.summary and run.summary.peak_bytes_predicted is not None:
        predicted, measured = run.summary.peak_bytes_predicted, run.summary.peak_bytes_seen
    if predicted is not None:
        note = "" if measured is None else f"measured {format_bytes(measured)}"
        figures["predicted peak"] = Cell(format_bytes(predicted), note)
    epsilon, delta = run.last("privacy/epsilon"), run.config.grad.delta
    if epsilon is not None and delta is not None:
        figures["epsilon"] = Cell(at_most(epsilon), f"at delta {delta:g}")
    if run.summary and (audit := run.summary.audit):
        guesses = f"{audit.correct} of {audit.guesses} guesses right"
        note = f"{audit.confidence:.0%} confidence, {guesses}"
        figures["epsilon, at least"] = Cell(number(audit.epsilon), note)
    if run.summary and run.summary.noise_scale is not None:
        figures["gradient noise scale"] = Cell(number(run.summary.noise_scale), "examples")
    if run.bad_steps:
        figures["skipped steps"] = Cell(f"{len(run.bad_steps):,}")
    unreadable = run.last("unreadable_files") or run.last(f"{NOT_PRIVATE}/unreadable_files")
    if unreadable:
        figures["unreadable files"] = Cell(number(unreadable))
    return figures


def _test_score(metric: Metric, run: Run, index: int) -> Cell:
    curve = metric.curves[index, "test"]
    last, text = float(curve.values[-1]), metric.scale.text
    if metric.name not in SCORES:
        return Cell(text(last))
    sign = 1 if metric.name in LOWER_IS_BETTER else -1
    notes = []
    if metric.name == "loss" and run.has_text and last < 50:
        notes.append(f"perplexity {number(math.exp(last))}")
    best = int(np.argmin(sign * curve.values))
    if sign * curve.values[best] < sign * last:
        notes.append(f"best {text(curve.values[best])} at step {curve.steps[best]:,.0f}")
    return Cell(text(last), "; ".join(notes), rank=sign * last)


def ranking(runs: Sequence[Run], figures: Sequence[dict[str, Cell]]) -> Table:
    """Return the figures of several runs, with the best test scores in bold."""
    fullest_first = sorted(figures, key=len, reverse=True)
    names = list(dict.fromkeys(name for by_name in fullest_first for name in by_name))
    names.sort(key=lambda name: not name.startswith("test "))
    # Losses of different tasks or data cannot be compared.
    configs = [(run.config.model, run.config.data) for run in runs]
    comparable = len({(*data.identity, model.task_for(data)) for model, data in configs}) == 1
    rows: list[list[Cell | None]] = [[Cell(run.label, run=i)] for i, run in enumerate(runs)]
    for name in names:
        cells = [by_name.get(name) for by_name in figures]
        ranks = [cell.rank for cell in cells if cell and cell.rank is not None]
        best = min(ranks) if comparable and len(ranks) > 1 else math.nan
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell and cell._replace(strong=cell.rank == best))
    title = "Results, with the best test scores in bold" if comparable else "Results"
    return Table(title, ["run", *names], rows)
