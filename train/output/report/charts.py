"""Line charts as SVG: readable as they stand, and read out point by point by the page's script."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.output.report.html import Html, data, element
from train.output.report.scales import Axis
from train.output.report.style import COLOURS, DASHES

WIDTH, HEIGHT = 400, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 10, 8, 24


class Line(NamedTuple):
    """A curve, and what is said of each of its points.

    Attributes:
      item: what it is called under the title; lines of one name stand together there.
        Empty where the title says all.
      style: CSS classes, of its colour at least.
      x: [N], rising.
      y: [N].
      where: of each point, in words.
      words: of each point, its value.
      last: what is said while nobody points.
      low: [N], from where, and
      high: [N], to where a band goes that the line stands for; None without.
      part: what of the item it is, where that has several.
      light: whether it is less than the others.
      dots: whether its points are marked.
    """

    item: str
    style: str
    x: np.ndarray
    y: np.ndarray
    where: list[str]
    words: list[str]
    last: str
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    part: str = ""
    light: bool = False
    dots: bool = False


def style_of(i: int) -> str:
    """CSS classes of the line of run i."""
    return f"c{i % COLOURS} dash{i // COLOURS % DASHES}"


def key(style: str) -> Html:
    """A short line of a style, for a legend."""
    path = element("path", class_=f"line {style}", d="M0,5H24", stroke_width=3)
    return element("svg", path, class_="key", viewBox="0 0 24 10", aria_hidden="true")


def chart(
    title: str,
    about: str,
    lines: Sequence[Line],
    along: tuple[str, Axis],
    upward: Axis,
    *,
    at: str,
    group: str,
    several: bool = False,
    area: bool = False,
    marks: Sequence[tuple[str, float]] = (),
) -> Html:
    """A figure: its title, what is read out, and the curves.

    Args:
      title: of it.
      about: behind the title, in grey.
      lines: at least one, the topmost last.
      along: what x is, and its axis.
      upward: the axis of y.
      at: where the lines are read out while nobody points, "step 135".
      group: of charts that are read out together; they have the same axis along.
      several: whether lines are of several runs, of which light ones are drawn lighter.
      area: whether what is below a line is filled.
      marks: broken horizontal lines with their words.
    """
    name, axis = along
    caption = element(
        "figcaption",
        element("span", title, class_="title"),
        f" {about}" if about else None,
        element("div", _readout(lines), element("span", at, class_="at"), class_="readout"),
    )
    drawn = [
        _grid(name, axis, upward),
        [_band(line, axis, upward) for line in lines],
        [_area(line, axis, upward) for line in lines if area],
        [_mark(words, value, upward) for words, value in marks],
        [_curve(line, axis, upward) for line in lines],
    ]
    words = f"{title}. " + " ".join(_in_words(line, name) for line in lines)
    svg = element(
        "svg",
        drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex=0,
        aria_label=words.strip(),
    )
    points = data([[line.where for line in lines], [line.words for line in lines]])
    classes = "chart several" if several else "chart"
    return element(
        "figure", caption, svg, points, class_=classes, data_group=group, data_along=name
    )


def _readout(lines: Sequence[Line]) -> list[Html]:
    items = []
    numbered = enumerate(lines)
    for item, of_item in itertools.groupby(numbered, key=lambda numbered: numbered[1].item):
        found = list(of_item)
        values = [element("b", line.last, data_value=i) for i, line in found]
        between = [x for value in values for x in (" / ", value)][1:]
        style = found[-1][1].style
        label = [key(style), element("span", item, class_="label", title=item), " "]
        run = next((word for word in style.split() if word.startswith("run")), "")
        classes = f"item {run}".strip()
        items.append(element("span", label if item else None, between, class_=classes))
    return items


def _in_words(line: Line, name: str) -> str:
    item = ", ".join(word for word in (line.item, line.part) if word)
    item = f"{item}: " if item else ""
    if len(line.x) == 1:
        return f"{item}{line.last} at {name} {line.where[0]}."
    return (
        f"{item}from {line.words[0]} at {name} {line.where[0]} "
        f"to {line.last} at {name} {line.where[-1]}."
    )


def _across(values: np.ndarray, axis: Axis) -> np.ndarray:
    return _LEFT + axis.place(values) * (WIDTH - _LEFT - _RIGHT)


def _down(values: np.ndarray, axis: Axis) -> np.ndarray:
    return HEIGHT - _BOTTOM - axis.place(values) * (HEIGHT - _TOP - _BOTTOM)


def _grid(name: str, along: Axis, upward: Axis) -> list[Html]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    drawn = []
    for value, words in upward.ticks:
        y = f"{_down(np.array(value), upward):.1f}"
        drawn.append(element("line", class_="grid", x1=_LEFT, x2=right, y1=y, y2=y))
        drawn.append(element("text", words, x=_LEFT - 5, y=y, dy=3.5, text_anchor="end"))
    below = bottom + 15
    if len(name) < 7:  # as many letters as there is room for, left of the first tick
        drawn.append(element("text", name, x=2, y=below))
    for value, words in along.ticks:
        x = float(_across(np.array(value), along))
        drawn.append(
            element("line", class_="grid", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=bottom, y2=bottom + 4)
        )
        anchor = "end" if x > WIDTH - _RIGHT - 3 * len(words) else "middle"
        x = min(x + 4, WIDTH - 1.0) if anchor == "end" else x
        drawn.append(element("text", words, x=f"{x:.1f}", y=below, text_anchor=anchor))
    return drawn


def _points(x: np.ndarray, y: np.ndarray) -> list[str]:
    return [f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def _curve(line: Line, along: Axis, upward: Axis) -> list[Html]:
    points = _points(_across(line.x, along), _down(line.y, upward))
    light = " light" if line.light else ""
    drawn = [
        element(
            "path",
            class_=f"line {line.style}{light}",
            d="M" + "L".join(points),
            data_points=line.style,
        )
    ]
    if line.dots or len(points) == 1:
        dots = "".join(f"M{point}h0" for point in points)
        colour = " ".join(word for word in line.style.split() if not word.startswith("dash"))
        drawn.append(element("path", class_=f"dots {colour}", d=dots))
    return drawn


def _band(line: Line, along: Axis, upward: Axis) -> Html | None:
    if line.low is None or line.high is None:
        return None
    x = _across(line.x, along)
    there = _points(x, _down(line.high, upward))
    back = _points(x[::-1], _down(line.low[::-1], upward))
    return element("path", class_=f"band {line.style}", d=f"M{'L'.join(there + back)}Z")


def _area(line: Line, along: Axis, upward: Axis) -> Html:
    points = _points(_across(line.x, along), _down(line.y, upward))
    first, last = points[0].split(",")[0], points[-1].split(",")[0]
    bottom = HEIGHT - _BOTTOM
    d = f"M{first},{bottom}L{'L'.join(points)}L{last},{bottom}Z"
    return element("path", class_=f"area {line.style}", d=d)


def _mark(words: str, value: float, upward: Axis) -> list[Html]:
    y = float(_down(np.array(value), upward))
    right = WIDTH - _RIGHT
    return [
        element("line", class_="mark", x1=_LEFT, x2=right, y1=f"{y:.1f}", y2=f"{y:.1f}"),
        element("text", words, x=right, y=f"{y - 3:.1f}", text_anchor="end"),
    ]
