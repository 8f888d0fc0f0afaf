"""What a report says first: how each run went, in figures."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fnet.memory import format_bytes
from train.config import Clipped, DeepLab, Denoiser, LanguageModel
from train.output.report.curves import Metric, known
from train.output.report.html import Html, element, joined
from train.output.report.runs import Run
from train.output.report.scales import duration, number
from train.output.report.tables import below_each_other, label, notes

_LOWER_IS_BETTER = frozenset({"loss"})
_HIGHER_IS_BETTER = frozenset({"accuracy", "mean_iou", "pixel_accuracy", "class_accuracy", "top5"})


class Figure(NamedTuple):
    """A number of a run.

    Attributes:
      words: the number.
      beside: what else there is to say, smaller.
      rank: the least of several runs is the best; None where none is better.
    """

    words: str
    beside: str = ""
    rank: float | None = None


def overview(runs: Sequence[Run], scores: Sequence[Metric], now: float) -> Html:
    """Title, state and figures of the runs.

    Args:
      runs: at least one.
      scores: their metrics that say how well they do.
      now: seconds since 1970.
    """
    found = [_figures(run, i, scores) for i, run in enumerate(runs)]
    if len(runs) == 1:
        run = runs[0]
        return joined(
            [
                element("h1", run.label),
                element("p", f"{run.config.name}: {_what(run)}", class_="muted"),
                _state(run, now),
                notes(run.notes),
                element("dl", [_tile(n, f) for n, f in found[0].items()], class_="figures"),
            ]
        )
    states = [
        element("li", label(run, i), f": {_what(run)}; {_state_words(run, now)}")
        for i, run in enumerate(runs)
    ]
    damaged = [f"{run.label}: {note}" for run in runs for note in run.notes]
    return joined(
        [
            element("h1", f"{len(runs)} runs"),
            element("ul", states, class_="states"),
            notes(damaged),
            _ranking(runs, found),
        ]
    )


def title(runs: Sequence[Run]) -> str:
    """Of the window."""
    return ", ".join(run.label for run in runs[:4]) + (", ..." if len(runs) > 4 else "")


def _what(run: Run) -> str:
    c = run.config
    parameters = (run.summary and run.summary.parameters) or (run.memory and run.memory.parameters)
    size = f", {parameters:,} parameters" if parameters else ""
    return f"{c.model.name} on {c.data.source}{size}, in {run.folder.path}"


def _state(run: Run, now: float) -> Html:
    return element("p", _state_words(run, now), class_=None if run.ended else "unfinished")


def _state_words(run: Run, now: float) -> str:
    if run.ended:
        assert run.summary is not None
        return f"ended after {run.summary.steps:,} steps"
    planned = run.planned
    of = f" of {planned:,} ({run.step / planned:.0%})" if planned else ""
    words = [f"not ended: at step {run.step:,}{of}"]
    if planned and run.step >= planned and not run.summary:
        words = [f"all {run.step:,} steps are taken, but there is no summary.json of them"]
    if run.written is None:
        words = ["not ended: there is no line of metrics yet"]
    elif run.lines:
        ago = duration(max(now - run.written, 0.0))
        words.append(f"the last line was written {ago} before this page was made")
        if run.training_seconds and planned and planned > run.step:
            left = run.training_seconds * (planned - run.step) / run.step
            words.append(f"about {duration(left)} of training steps are left")
    words.append(
        f"{run.owner} writes into its folder, unless it was killed"
        if run.owner
        else "no process writes into its folder"
    )
    if run.checkpoints:
        words.append(f"the newest checkpoint is of step {run.checkpoints[-1]:,}")
    if run.summary:
        words.append(f"its summary is of step {run.summary.steps:,}, before it was continued")
    return "; ".join(words)


def _figures(run: Run, i: int, scores: Sequence[Metric]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for metric in scores:
        if figure := _score(metric, run, i, "test"):
            found[f"test {metric.title}"] = figure
    if not found and run.summary:  # the lines are gone
        for name, value in run.summary.metrics.items():
            words, kind = known(name.removeprefix("test/"))
            found[f"test {words}"] = Figure(kind.words(value))
    for metric in scores:
        if metric.name == "loss" and (figure := _score(metric, run, i, "train")):
            found[f"train {metric.title}"] = figure
    if run.lines:
        epochs = "" if run.epoch is None else f"{number(run.epoch)}\N{NO-BREAK SPACE}epochs"
        found["steps"] = Figure(f"{run.step:,}", epochs)
    if seconds := run.training_seconds:
        whole = run.summary.seconds if run.summary and run.ended else 0.0
        beside = f"{duration(whole)} with all else" if whole >= seconds else ""
        found["training steps took"] = Figure(duration(seconds), beside)
        rate = run.step * run.config.data.batch_size / seconds
        found["examples a second"] = Figure(number(rate))
    if peak := _peak(run):
        found["peak memory"] = peak
    if privacy := _privacy(run):
        found["privacy, epsilon"] = privacy
    if run.summary and run.summary.noise_scale is not None:
        found["noise scale, examples"] = Figure(number(run.summary.noise_scale))
    if run.bad_steps:
        found["steps left out"] = Figure(f"{len(run.bad_steps):,}")
    if unreadable := _last(run, "unreadable_files"):
        found["unreadable files"] = Figure(number(unreadable))
    return found


def _score(metric: Metric, run: Run, i: int, part: str) -> Figure | None:
    course = metric.courses.get((i, part))
    if course is None:
        return None
    values, last = course.values, float(course.values[-1])
    if metric.name not in _LOWER_IS_BETTER | _HIGHER_IS_BETTER or part != "test":
        return Figure(metric.kind.words(last))
    sign = 1 if metric.name in _LOWER_IS_BETTER else -1
    beside = []
    if metric.name == "loss" and isinstance(run.config.model, LanguageModel) and last < 50:
        beside.append(f"perplexity {number(math.exp(last))}")
    best = int(np.argmin(sign * values))
    if sign * values[best] < sign * last:
        beside.append(f"best {metric.kind.words(values[best])} at step {course.steps[best]:,.0f}")
    return Figure(metric.kind.words(last), "; ".join(beside), sign * last)


def _peak(run: Run) -> Figure | None:
    predicted = run.memory.peak.total if run.memory else None
    if run.summary and run.summary.peak_bytes_predicted is not None:
        predicted = run.summary.peak_bytes_predicted
    if predicted is None:
        return None
    seen = run.summary.peak_bytes_seen if run.summary else None
    beside = "predicted" if seen is None else f"predicted; seen {format_bytes(seen)}"
    return Figure(format_bytes(predicted), beside)


def _privacy(run: Run) -> Figure | None:
    spent = _last(run, "privacy/epsilon")
    grad = run.config.grad
    if spent is None or not isinstance(grad, Clipped) or grad.delta is None:
        return None
    return Figure(number(spent), f"at delta {grad.delta:g}")


def _last(run: Run, key: str) -> float | None:
    course = run.courses.get(key)
    return float(course.values[-1]) if course and len(course.values) else None


def _tile(name: str, figure: Figure) -> Html:
    small = element("small", figure.beside) if figure.beside else None
    return element("div", element("dt", name), element("dd", figure.words, small))


def _ranking(runs: Sequence[Run], found: Sequence[dict[str, Figure]]) -> Html:
    fullest_first = sorted(found, key=len, reverse=True)
    names = list(dict.fromkeys(name for figures in fullest_first for name in figures))
    names.sort(key=lambda name: not name.startswith("test "))
    best: dict[str, float | None] = dict.fromkeys(names)
    alike = len({_task(run) for run in runs}) == 1
    for name in names if alike else ():
        ranks = [f[name].rank for f in found if name in f]
        there = [rank for rank in ranks if rank is not None]
        best[name] = min(there) if len(there) > 1 else None

    def cell(name: str, figures: dict[str, Figure]) -> Html | None:
        if name not in figures:
            return None
        figure = figures[name]
        is_best = best[name] is not None and figure.rank == best[name]
        small = element("small", figure.beside) if figure.beside else None
        words = element("span", figure.words, class_="best") if is_best else figure.words
        return joined([words, small])

    rows = [
        (label(run, i), [cell(name, figures) for name in names])
        for i, (run, figures) in enumerate(zip(runs, found, strict=True))
    ]
    about = "Figures of each run" + ("; of test scores the best is bold" if alike else "")
    return below_each_other(names, rows, about, "run")


def _task(run: Run) -> tuple[object, ...]:
    """Runs of another task, or on other data, have other losses."""
    data, model = run.config.data, run.config.model
    other = isinstance(model, LanguageModel | Denoiser | DeepLab)
    where = (getattr(data, name, None) for name in ("path", "subset", "tokenizer"))
    return data.source, *where, model.name if other else "classification"
