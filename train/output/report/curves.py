"""The metrics of runs as charts: which there are, which share one, and as how many points."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from train.config import LanguageModel
from train.output.report.charts import Line, chart, style_of
from train.output.report.html import Html
from train.output.report.runs import Course, Run
from train.output.report.scales import (
    AMOUNT,
    SCORE,
    SHARE,
    SHARE_OF_TIME,
    Axis,
    Kind,
    axis,
    steps_axis,
)
from train.run.metrics import noise_scale_course

_KNOWN: dict[str, tuple[str, Kind]] = {
    "loss": ("loss", SCORE),
    "accuracy": ("accuracy", SHARE),
    "mean_iou": ("mean IoU", SHARE),
    "pixel_accuracy": ("pixel accuracy", SHARE),
    "class_accuracy": ("class accuracy", SHARE),
    "top5": ("top-5 accuracy", SHARE),
    "learning_rate": ("learning rate", AMOUNT),
    "grad_norm": ("gradient norm", SCORE),
    "noise_scale": ("simple noise scale, examples", SCORE),
    "privacy/epsilon": ("epsilon spent", AMOUNT),
    "clipped": ("gradients clipped", SHARE),
    "nonfinite": ("gradients not finite, a step", AMOUNT),
    "examples_per_second": ("examples a second", AMOUNT),
    "input_wait": ("input wait, of the time", SHARE_OF_TIME),
    "unreadable_files": ("unreadable files", AMOUNT),
}
"""Metrics in the order of their charts, with title and kind; others follow by name."""

_SCORES = ("loss", "accuracy", "mean_iou", "pixel_accuracy", "class_accuracy", "top5")
_NOT_DRAWN = frozenset({"skipped", "seconds"})
"""Steps that were left out are listed, and how long it took is told in words."""
_THROUGHPUT = ("examples_per_second", "input_wait")
_PARTS = ("train", "test", "averaged")

MOST_POINTS = 300
"""Of a curve: more than there are pixels across a chart on a phone."""
_FEWEST_POINTS = 60
_POINTS_OF_A_PAGE = 18_000
"""So that a page of many runs opens at once as well: about 1.3 MB of curves."""


class Metric(NamedTuple):
    """What is measured, of the training and the test examples, of every run.

    Attributes:
      name: ``"loss"``.
      title: in words.
      kind: of its values.
      courses: by number of the run and part: ``train``, ``test``, ``averaged``, or empty.
    """

    name: str
    title: str
    kind: Kind
    courses: dict[tuple[int, str], Course]

    @property
    def constant(self) -> float | None:
        """The value that it has wherever it was logged, if that is more than once; else None."""
        values = [course.values for course in self.courses.values()]
        first = values[0][0]
        many = max(map(len, values)) > 1
        return float(first) if many and all((v == first).all() for v in values) else None


class Thinned(NamedTuple):
    """A curve of so few points that each can be seen.

    Attributes:
      x: [M], means.
      y: [M], means.
      low: [M], least.
      high: [M], most.
      first: [M], index of the first value that a point stands for.
      last: [M], of the last.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    first: np.ndarray
    last: np.ndarray


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> Thinned:
    """Means, least and most of y [N] in ``most`` equal parts of the range of x; few stay whole.

    Args:
      x: [N], not falling.
      y: [N].
      most: points, at least 1.
    """
    if len(x) <= most or x[-1] <= x[0]:
        all_ = np.arange(len(x))
        return Thinned(x, y, y, y, all_, all_)
    part = np.minimum((x - x[0]) / (x[-1] - x[0]) * most, most - 1).astype(int)
    first = np.flatnonzero(np.diff(part, prepend=-1))
    last = np.append(first[1:], len(x)) - 1
    count = last - first + 1
    return Thinned(
        np.add.reduceat(x, first) / count,
        np.add.reduceat(y, first) / count,
        np.minimum.reduceat(y, first),
        np.maximum.reduceat(y, first),
        first,
        last,
    )


def metrics_of(runs: Sequence[Run]) -> dict[str, list[Metric]]:
    """The metrics of some runs, by section: ``scores``, ``training``, ``throughput``."""
    found: dict[str, dict[tuple[int, str], Course]] = {}
    for i, run in enumerate(runs):
        courses = dict(run.courses)
        if averaged := _averaged_noise_scale(run):
            courses["averaged/noise_scale"] = averaged
        for key, course in courses.items():
            part, _, rest = key.partition("/")
            name, part = (rest, part) if part in _PARTS and rest else (key, "")
            if len(course.values) and name not in _NOT_DRAWN:
                found.setdefault(name, {})[i, part] = course
    order = {name: i for i, name in enumerate(_KNOWN)}
    language = {isinstance(run.config.model, LanguageModel) for run in runs}
    sections: dict[str, list[Metric]] = {"scores": [], "training": [], "throughput": []}
    for name in sorted(found, key=lambda name: (order.get(name, len(order)), name)):
        title, kind = known(name)
        if name == "loss" and language == {True}:
            title = "loss, nats a token"
        of_runs = dict(sorted(found[name].items(), key=_run_then_part))
        tested = any(part == "test" for _, part in of_runs)
        section = "scores" if tested or name in _SCORES else "training"
        section = "throughput" if name in _THROUGHPUT else section
        sections[section].append(Metric(name, title, kind, of_runs))
    return sections


def known(name: str) -> tuple[str, Kind]:
    """Title and kind of a metric."""
    return _KNOWN.get(name, (name.replace("_", " "), SCORE))


def _run_then_part(item: tuple[tuple[int, str], Course]) -> tuple[int, int]:
    (run, part), _ = item
    return run, _PARTS.index(part) if part in _PARTS else -1


def _averaged_noise_scale(run: Run) -> Course | None:
    sq, var = (run.courses.get(f"train/{name}") for name in ("grad_sq", "grad_var"))
    if sq is None or var is None or not np.array_equal(sq.steps, var.steps):
        return None
    lines: list[dict[str, Any]] = [
        {"step": step, "train/grad_sq": a, "train/grad_var": b}
        for step, a, b in zip(*(a.tolist() for a in (sq.steps, sq.values, var.values)), strict=True)
    ]
    averaged = noise_scale_course(lines)
    if not averaged:
        return None
    steps, values = np.array(averaged, np.float64).T
    return Course(steps, np.interp(steps, sq.steps, sq.epochs), values)


class Along(NamedTuple):
    """What all charts of a report have as x.

    Attributes:
      name: step, or epoch where runs have batches of several sizes.
      axis: from the first to the last line of all runs.
    """

    name: str
    axis: Axis

    def x(self, course: Course) -> np.ndarray:
        """Where a course's values are."""
        return course.steps if self.name == "step" else course.epochs

    def words(self, x: float) -> str:
        """A place, in words."""
        return f"{x:,.0f}" if self.name == "step" else f"{x:.4g}"


def along(runs: Sequence[Run]) -> Along | None:
    """What runs are compared along; None where no run has a line.

    Steps of batches of several sizes are not alike: such runs are compared by epoch, where
    an epoch is the same for all.
    """
    courses = [c for run in runs for c in run.courses.values() if len(c.steps)]
    if not courses:
        return None
    sources = [run.config.data for run in runs if run.lines]
    sizes = {source.batch_size for source in sources}
    same = len({(source.source, getattr(source, "path", None)) for source in sources}) == 1
    by_epoch = same and len(sizes) > 1 and not any(np.isnan(c.epochs).any() for c in courses)
    whole = Along("epoch" if by_epoch else "step", steps_axis(0, 1))
    xs = [whole.x(course) for course in courses]
    low, high = min(float(x[0]) for x in xs), max(float(x[-1]) for x in xs)
    return whole._replace(axis=steps_axis(0.0 if low < 0.2 * high else low, high))


def points_each(metrics: Sequence[Metric]) -> int:
    """How many points each curve of a page has at most."""
    curves = sum(len(metric.courses) for metric in metrics)
    return min(max(_POINTS_OF_A_PAGE // max(curves, 1), _FEWEST_POINTS), MOST_POINTS)


def draw(metric: Metric, runs: Sequence[Run], where: Along, most: int) -> Html:
    """The chart of a metric, all runs over each other.

    Args:
      metric: of the runs.
      runs: those that it is of.
      where: along what.
      most: points of a curve.
    """
    several = len(runs) > 1
    parts = list(dict.fromkeys(part for _, part in metric.courses))
    # Of the learning rate, or the gradient's norm, nobody asks whether it is training's.
    named = len(parts) > 1 or metric.name in _SCORES
    said = {part: part for part in parts if named}
    lines = []
    for (i, part), course in metric.courses.items():
        x = where.x(course)
        some = thinned(x, course.values, most)
        whole = len(some.x) == len(x)
        lines.append(
            Line(
                item=runs[i].label if several else said.get(part, ""),
                style=f"{style_of(i)} run{i}" if several else style_of(int(part in _PARTS[1:])),
                x=some.x,
                y=some.y,
                where=_where(where, x, some),
                words=_words(metric.kind, some),
                last=metric.kind.words(course.values[-1]),
                low=None if whole else some.low,
                high=None if whole else some.high,
                part=said.get(part, "") if several else "",
                light=len(parts) > 1 and part == parts[0],
                dots=part == "test" and len(some.x) <= 40,
            )
        )
    low = min(float(np.min(line.y if line.low is None else line.low)) for line in lines)
    high = max(float(np.max(line.y if line.high is None else line.high)) for line in lines)
    upward = axis(metric.kind, low, high)
    about = ["log scale"] if upward.logarithmic else []
    if several and len(parts) > 1:
        about.append(" / ".join(said.values()))
    return chart(
        metric.title,
        ", ".join(about),
        lines,
        (where.name, where.axis),
        upward,
        at=_end(where, metric),
        group="steps",
        several=several,
    )


def _end(where: Along, metric: Metric) -> str:
    ends = {float(where.x(course)[-1]) for course in metric.courses.values()}
    return f"{where.name} {where.words(ends.pop())}" if len(ends) == 1 else "each at its end"


def _where(where: Along, x: np.ndarray, some: Thinned) -> list[str]:
    first, last = x[some.first].tolist(), x[some.last].tolist()
    return [
        where.words(a) if a == b else f"{where.words(a)} to {where.words(b)}"
        for a, b in zip(first, last, strict=True)
    ]


def _words(kind: Kind, some: Thinned) -> list[str]:
    def of(y: float, low: float, high: float) -> str:
        band = "" if low == high else f" ({kind.words(low)} to {kind.words(high)})"
        return kind.words(y) + band

    rows = zip(some.y.tolist(), some.low.tolist(), some.high.tolist(), strict=True)
    return [of(*row) for row in rows]


def constant_words(metric: Metric) -> str | None:
    """``"learning rate 0.001"`` where it is the same wherever it was logged, else None."""
    value = metric.constant
    return None if value is None else f"{metric.title} {metric.kind.words(value)}"
