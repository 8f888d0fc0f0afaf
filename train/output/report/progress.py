"""How runs went: their curves, over each other, and how fast they were."""

from collections.abc import Sequence

import numpy as np

from train.output.report.curves import Along, Metric, constant_words, draw, points_each
from train.output.report.html import Html, element
from train.output.report.runs import Run
from train.output.report.scales import duration, number, share
from train.output.report.tables import label, notes, section, side_by_side


def curves(runs: Sequence[Run], metrics: dict[str, list[Metric]], where: Along | None) -> Html:
    """The section.

    Args:
      runs: at least one.
      metrics: of them, by section, from `metrics_of`.
      where: along what; None where no line has been written.
    """
    if where is None:
        said = "There are no curves: no line of metrics has been written."
        return section("curves", "Curves", element("p", said, class_="muted"))
    most = points_each([m for some in metrics.values() for m in some])
    shown = metrics["scores"] + metrics["training"]
    constant = {m.name: words for m in shown if (words := constant_words(m))}
    drawn = [draw(m, runs, where, most) for m in shown if m.name not in constant]
    same = f"The same wherever it was logged: {'; '.join(constant.values())}."
    return section(
        "curves",
        "Curves",
        _boxes(runs),
        notes(_about_curves(runs, metrics, where, most)),
        element("div", drawn, class_="charts"),
        element("p", same, class_="muted") if constant else None,
    )


def _about_curves(
    runs: Sequence[Run], metrics: dict[str, list[Metric]], where: Along, most: int
) -> list[str]:
    courses = [c for some in metrics.values() for m in some for c in m.courses.values()]
    found = []
    longest = max((len(c.values) for c in courses), default=0)
    if longest > most:
        found.append(
            f"Curves of more than {most} values are thinned to at most {most} points: each is the "
            f"mean of those beside it (of the longest curve about {longest // most}), the band "
            "goes from the least of them to the most."
        )
    if where.name == "epoch":
        found.append("Along epochs, because the runs' batches are not of the same size.")
    dropped = {
        f"{run.label}: {key}" if len(runs) > 1 else key: course.dropped
        for run in runs
        for key, course in run.courses.items()
        if course.dropped
    }
    if dropped:
        words = ", ".join(f"{n:,} of {key}" for key, n in dropped.items())
        found.append(f"Values that are not finite are left out: {words}.")
    without = [run.label for run in runs if not run.lines]
    if without:
        found.append(f"No line of metrics yet: {', '.join(without)}.")
    return found


def _boxes(runs: Sequence[Run]) -> Html | None:
    """Boxes that show and hide runs in the charts below."""
    if len(runs) == 1:
        return None
    boxes = [
        element(
            "label",
            element("input", type="checkbox", id=f"show{i}", checked=True),
            " ",
            label(run, i),
        )
        for i, run in enumerate(runs)
    ]
    return element("fieldset", element("legend", "runs shown"), boxes, class_="runs")


def throughput(runs: Sequence[Run], metrics: dict[str, list[Metric]], where: Along | None) -> Html:
    """The section; arguments as of `curves`."""
    if where is None or not metrics["throughput"]:
        said = "No rate has been written."
        return section("throughput", "Throughput", element("p", said, class_="muted"))
    most = points_each([m for some in metrics.values() for m in some])
    drawn = [draw(m, runs, where, most) for m in metrics["throughput"]]
    rates = [_rates(run) for run in runs]
    return section(
        "throughput",
        "Throughput",
        element("div", drawn, class_="charts"),
        side_by_side(
            [(name, [of_run.get(name) for of_run in rates]) for name in _RATES],
            runs,
            "Training steps alone, without compiling, testing and saving; input wait is the share "
            "of the time in which the device may have waited for a batch",
        ),
    )


_RATES = (
    "examples a second",
    "median line",
    "slowest line",
    "a step",
    "time in steps",
    "input wait",
)


def _rates(run: Run) -> dict[str, str]:
    rate, wait = run.courses.get("examples_per_second"), run.courses.get("input_wait")
    seconds = run.training_seconds
    if rate is None or not seconds:
        return {}
    slowest = int(np.argmin(rate.values))
    found = {
        "examples a second": number(run.step * run.config.data.batch_size / seconds),
        "median line": number(float(np.median(rate.values))),
        "slowest line": f"{number(rate.values[slowest])} at step {rate.steps[slowest]:,.0f}",
        "a step": f"{number(1000 * seconds / run.step)} ms",
        "time in steps": duration(seconds),
    }
    if wait is not None and np.array_equal(wait.steps, rate.steps):
        time_of = np.diff(rate.steps, prepend=0.0) / rate.values
        found["input wait"] = share(float((wait.values * time_of).sum() / time_of.sum()))
    return found
