"""The sections of a report as data: charts and tables, which the template lays out."""

import dataclasses
import functools
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fnet.memory import format_bytes
from train.config import Config, flatten
from train.output import memory_tables
from train.output.curves import Metric, XAxis
from train.output.formats import duration, number, percent
from train.output.logged import NOT_PRIVATE, input_wait
from train.output.memory_tables import StepMemory
from train.output.plots import COLORS, DASHES, GRID_COLOR, draw, draw_live_bytes
from train.output.tables import MISSING, Cell, Table
from train.report.runs import Run

_MOST_ROWS = 20
_MOST_NAMES = 8
_SVG = "{http://www.w3.org/2000/svg}"
_THEME = {color: f"var(--c{i})" for i, color in enumerate(COLORS)} | {GRID_COLOR: "var(--rule)"}


class Chart(NamedTuple):
    """A chart: title, text behind it, values of lines by label and CSS classes, and the SVG."""

    title: str
    note: str
    values: Mapping[tuple[str, str], Sequence[str]]
    svg: Markup


def line_of(run: int) -> str:
    """Return the CSS classes of a run's line: ``"run3 c3 solid"``."""
    return f"run{run} c{run % len(COLORS)} {DASHES[run // len(COLORS) % len(DASHES)]}"


def shared_axis(runs: Sequence[Run]) -> XAxis:
    """Return the axis of all charts: steps, or epochs if runs differ in their batch size."""
    curves = [c for run in runs for c in run.curves.values() if len(c.steps)]
    sources = [run.config.data for run in runs if run.lines]
    same_data = len({(data.source, data.path) for data in sources}) == 1
    by_epoch = same_data and len({data.batch_size for data in sources}) > 1
    by_epoch = by_epoch and not any(np.isnan(c.epochs).any() for c in curves)
    axis = XAxis("epoch" if by_epoch else "step", 0.0, 1.0)
    xs = np.concatenate([axis.of(c) for c in curves] or [np.zeros(1)])
    low, high = float(xs.min()), float(xs.max())
    return axis._replace(low=0.0 if low < 0.2 * high else low, high=high)


def chart(metric: Metric, runs: Sequence[Run], axis: XAxis, points: int) -> Chart:
    """Draw a metric of all runs with at most so many points per curve."""
    several, text = len(runs) > 1, metric.scale.text
    values, titles, ends = defaultdict[tuple[str, str], list[str]](list), dict[str, str](), set()
    for (run, part), curve in metric.curves.items():
        label = runs[run].label if several else metric.label(part)
        line = line_of(run) if several else f"c{int(part in ('test', 'averaged'))} solid"
        first, last = (text(curve.values[i]) for i in (0, -1))
        begin, end = (axis.text(axis.of(curve)[i]) for i in (0, -1))
        values[label, line].append(last)
        ends.add(end)
        name = " ".join(dict.fromkeys([label, metric.label(part), metric.title])).strip()
        titles[f"run{run}-{part}"] = f"{name}: from {first} at {begin} to {last} at {end}."
    labels = list(filter(None, map(metric.label, metric.parts)))
    named = several and (len(metric.parts) > 1 or NOT_PRIVATE in metric.parts)
    notes = [" / ".join(labels)] if named else []
    notes += [f"at {ends.pop()}" if len(ends) == 1 else "last values"]
    notes += ["log scale"] * metric.log
    draw_metric = functools.partial(draw, metric=metric, x_axis=axis, runs=len(runs), points=points)
    svg = to_svg(draw_metric, axis.name, metric.name, titles)
    return Chart(metric.title, ", ".join(notes), values, svg)


def compare(
    title: str, columns: Sequence[Mapping[str, str]], runs: Sequence[Run], mark: bool = False
) -> Table:
    """Return a table of each run's texts by name, a column each; differences can be marked."""
    mark = mark and len(runs) > 1
    title += ", differences in bold" if mark else ""
    fullest_first = sorted(columns, key=len, reverse=True)
    rows = []
    for name in dict.fromkeys(name for column in fullest_first for name in column):
        texts = [column.get(name) for column in columns]
        rows.append([Cell(name, strong=mark and len({*texts} - {None}) > 1), *texts])
    heads = [Cell(run.label, run=i) for i, run in enumerate(runs)]
    return Table(title, ["", *heads], rows, texts=1 + len(runs))


def throughput(runs: Sequence[Run]) -> Table:
    """Return how fast runs trained."""

    def texts(run: Run) -> dict[str, str]:
        rate, seconds = run.curves.get("examples_per_second"), run.training_seconds
        if rate is None or not seconds:
            return {}
        slowest = int(np.argmin(rate.values))
        texts = {
            "examples per second": number(run.rate or 0.0),
            "median": number(float(np.median(rate.values))),
            "slowest": f"{number(rate.values[slowest])} at step {rate.steps[slowest]:,.0f}",
            "time per step": f"{number(1000 * seconds / run.step)} ms",
            "training time": duration(seconds),
        }
        if "input_wait" in run.curves:
            texts["input wait"] = percent(input_wait(run.lines) or 0.0)
        if run.summary and run.summary.input_wait_reason:
            texts["why it waits"] = run.summary.input_wait_reason
        return texts

    title = "Training steps only, without compilation, evaluation and checkpoints"
    return compare(title, [texts(run) for run in runs], runs)


def memory_sums(runs: Sequence[Run]) -> Table:
    """Return the memory of runs in sums."""

    def texts(run: Run) -> dict[str, str]:
        sums, s = memory_tables.step_sums(run.memory) if run.memory else {}, run.summary
        if not s:
            return sums
        sizes = {"predicted peak": s.peak_bytes_predicted, "measured peak": s.peak_bytes_seen}
        sizes |= {"budget": s.budget_bytes}
        errors = s.quantization_errors
        quantized = {"quantized weights": memory_tables.describe_errors(errors)} if errors else {}
        known = {n: format_bytes(size) for n, size in sizes.items() if size is not None}
        return known | quantized | sums

    return compare("Peak memory and its parts", [texts(run) for run in runs], runs, mark=True)


def versions(runs: Sequence[Run]) -> Table:
    """Return the versions of fnet and its libraries."""
    columns = [run.summary.versions if run.summary else {} for run in runs]
    return compare("Versions", columns, runs, mark=True)


def compiled_steps(runs: Sequence[Run]) -> Iterator[tuple[str, Table, Chart | None, Table]]:
    """Yield runs, residuals, live bytes and largest buffers of each compiled step, to one scale."""
    labels: dict[StepMemory, list[str]] = {}
    for run in runs:
        if run.memory:
            labels.setdefault(run.memory, []).append(run.label)
    longest = max((r.bytes for memory in labels for r in memory.residuals), default=0)
    highest = max((max(memory.live_bytes or [0]) for memory in labels), default=0)
    for i, (memory, names) in enumerate(labels.items()):
        live = _live_bytes(memory, highest, f"live{i}") if memory.live_bytes else None
        residuals = memory_tables.residuals_table(memory, longest)
        yield ", ".join(names), residuals, live, memory_tables.largest_table(memory)


def _live_bytes(memory: StepMemory, highest: int, name: str) -> Chart:
    live = memory.live_bytes or (0,)
    most, at = format_bytes(max(live)), f"at instruction {live.index(max(live)):,}"
    draw_memory = functools.partial(draw_live_bytes, stored=memory, highest=highest)
    svg = to_svg(draw_memory, "", name, {"": f"Live bytes, at most {most} {at}."})
    peak = memory.peak
    assigned = format_bytes(peak.total - peak.workspace - peak.constants)
    values = {("peak", "c0 solid"): [most], ("assigned by XLA", "c1 dashed"): [assigned]}
    return Chart("live bytes", f"over the schedule, peak {at} of {len(live):,}", values, svg)


def class_scores(runs: Sequence[Run]) -> Table:
    """Return the score of each class in `fnet eval`, the lowest first."""
    rows, scores = defaultdict[str, dict[int, Cell]](dict), defaultdict[str, list[float]](list)
    heads, kinds = list[Cell](), set[str]()
    for i, run in enumerate(runs):
        for evaluation, _ in run.evaluations:
            for c in evaluation.classes:
                kind, score, count = "accuracy", c.accuracy, f"{c.examples or 0:,} examples"
                if c.iou is not None:
                    kind, score, count = "IoU", c.iou, f"{c.pixels or 0:,} pixels"
                if score is not None:
                    kinds.add(kind)
                    rows[c.name][len(heads)] = Cell(percent(score), count)
                    scores[c.name].append(score)
            heads.append(Cell(run.label, evaluation.description, run=i))
    names = sorted(rows, key=lambda name: min(scores[name]))[:_MOST_ROWS]
    which = f"The {_MOST_ROWS} lowest classes" if len(rows) > _MOST_ROWS else "Classes"
    return Table(
        f"{which} in fnet eval by {' and '.join(sorted(kinds))}, the lowest first",
        ["class", *heads],
        [[name, *(rows[name].get(i) for i in range(len(heads)))] for name in names],
    )


def skipped_steps(runs: Sequence[Run]) -> Table:
    """Return the steps that were skipped because a loss or a gradient was not finite."""
    rows: list[list[str | Cell]] = []
    for i, run in enumerate(runs):
        for bad in run.bad_steps[:_MOST_ROWS]:
            names, more = ", ".join(bad.examples[:_MOST_NAMES]), len(bad.examples) - _MOST_NAMES
            names += f" and {more:,} more" if more > 0 else ""
            step = Cell(run.label, f"step {bad.step:,}", run=i)
            rows.append([step, bad.loss, bad.grad_norm, bad.origin, names])
    columns = ["run", "loss", "gradient norm", "first non-finite result", "examples"]
    return Table(f"Skipped steps, at most {_MOST_ROWS} of each run", columns, rows, texts=5)


def differences(runs: Sequence[Run]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the fields in which runs differ, of each run, and the fields that are equal.

    One run is compared with the defaults of its fields. A field that a config does not have,
    because its section is of another kind, is `MISSING`.
    """

    def text(value: Any) -> str:  # as on the command line, where values of a tuple are words
        return " ".join(map(str, value)) or "empty" if isinstance(value, tuple) else str(value)

    configs = [run.config for run in runs]
    if len(runs) == 1:
        defaults: Any = {name: type(s)() for name, s in configs[0].sections.items()}
        configs.append(Config(**defaults))
    flat = [{name: text(value) for name, value in flatten(c).items()} for c in configs]
    order = [f.name for f in dataclasses.fields(Config)]
    names = sorted({n: 0 for c in flat for n in c}, key=lambda n: order.index(n.partition(".")[0]))
    columns = [{name: fields.get(name, MISSING) for name in names} for fields in flat]
    equal = {n: columns[0][n] for n in names if len({column[n] for column in columns}) == 1}
    different = [{n: v for n, v in column.items() if n not in equal} for column in columns]
    return different[: len(runs)], equal


def to_svg(
    draw: Callable[[Axes], None], x_name: str, name: str, titles: Mapping[str, str]
) -> Markup:
    """Draw a small chart and return it as an SVG element.

    Styles become attributes, because the page's policy forbids inline styles. Colors become
    variables of the style sheet, which differ between light and dark mode. ``titles`` describe
    lines by gid. A line of gid ``run0-test`` gets the class ``run0``.
    """
    figure = Figure(figsize=(400 / 72, 190 / 72))
    figure.text(0.002, 0.075, x_name)
    draw(figure.add_axes((0.125, 0.14, 0.855, 0.8)))  # all charts have the same margins
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    root = ElementTree.fromstring(file.getvalue())
    for element in list(root.iter()):
        for style in element.findall(f"{_SVG}style"):
            element.remove(style)
        attributes = element.attrib
        for declaration in filter(str.strip, attributes.pop("style", "").split(";")):
            key, _, value = (text.strip() for text in declaration.partition(":"))
            if not key.startswith("font"):
                attributes[key] = _THEME.get(value, value)
        for key in {"d", "x", "y"} & attributes.keys():
            attributes[key] = re.sub(r"(\.\d)\d+", r"\1", attributes[key])
        if element.tag == f"{_SVG}g" and (gid := attributes.pop("id", "")).startswith("run"):
            attributes["class"] = gid.partition("-")[0]
            if gid in titles:
                element.insert(0, ElementTree.Element(f"{_SVG}title"))
                element[0].text = titles[gid]
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": " ".join(titles.values())}
    ElementTree.register_namespace("", _SVG.strip("{}"))
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return Markup(ElementTree.tostring(root, encoding="unicode"))
