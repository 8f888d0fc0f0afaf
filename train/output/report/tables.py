"""Sections of a report, and tables in which runs stand side by side."""

import re
from collections.abc import Sequence

from train.output.report.charts import key, style_of
from train.output.report.html import Html, element, joined
from train.output.report.runs import Run

_NOT_THERE = "-"


def section(name: str, title: str, *children: object) -> Html:
    """A part of the page, with a heading that the page's contents point to."""
    return element("section", element("h2", title), children, id=name)


def notes(words: Sequence[str]) -> Html | None:
    """Remarks, where there are any."""
    return element("ul", [element("li", w) for w in words], class_="notes") if words else None


def side_by_side(
    rows: Sequence[tuple[str, Sequence[str | None]]],
    runs: Sequence[Run],
    caption: str,
    *,
    mark: bool = False,
) -> Html:
    """What is said of each run, a column each.

    Args:
      rows: a name, and what is said of each run, None where it is not known. A row that
        says nothing of any run is left out.
      runs: of the columns.
      caption: above.
      mark: whether rows in which runs differ are set off.
    """
    rows = [(name, values) for name, values in rows if any(v is not None for v in values)]
    if len(runs) == 1:
        return pairs([(name, str(values[0]), False) for name, values in rows], caption)
    body = [
        element(
            "tr",
            element("th", breakable(name), scope="row", class_="name"),
            [element("td", _NOT_THERE if v is None else breakable(v)) for v in values],
            class_="changed" if mark and len({*values} - {None}) > 1 else None,
        )
        for name, values in rows
    ]
    heads = [element("th", label(run, i), scope="col") for i, run in enumerate(runs)]
    head = element("thead", element("tr", element("td"), heads))
    return _scrolled(caption, head, element("tbody", body), kind="beside")


def pairs(rows: Sequence[tuple[str, str, bool]], caption: str | None = None) -> Html:
    """Names and what is said of them, in as many columns as there is room for.

    Args:
      rows: name, words, and whether they are set off.
      caption: above.
    """
    found = [
        element(
            "div",
            element("dt", breakable(name)),
            element("dd", breakable(words), class_="changed" if bold else None),
        )
        for name, words, bold in rows
    ]
    head = element("p", caption, class_="caption") if caption else None
    return joined([head, element("dl", found, class_="pairs")])


def below_each_other(
    heads: Sequence[str],
    rows: Sequence[tuple[object, Sequence[object]]],
    caption: str,
    first: str = "",
) -> Html:
    """A table with a row each, of numbers.

    Args:
      heads: of the columns of numbers.
      rows: the row's head, and its cells; None is not known.
      caption: above.
      first: head of the rows' heads.
    """
    head = element(
        "tr",
        element("th", first, scope="col") if first else element("td"),
        [element("th", h, scope="col", class_="number") for h in heads],
    )
    body = [
        element(
            "tr",
            element("th", name, scope="row", class_="name"),
            [element("td", _NOT_THERE if c is None else c, class_="number") for c in cells],
        )
        for name, cells in rows
    ]
    return _scrolled(caption, element("thead", head), element("tbody", body))


def texts(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Html:
    """A table of words.

    Args:
      heads: of the columns.
      rows: as many words each; the first is the row's head.
      caption: above.
    """
    head = element("tr", [element("th", h, scope="col") for h in heads])
    body = [
        element(
            "tr",
            element("th", breakable(row[0]), scope="row"),
            [element("td", breakable(words)) for words in row[1:]],
        )
        for row in rows
    ]
    return _scrolled(caption, element("thead", head), element("tbody", body))


def bars(
    heads: Sequence[str],
    rows: Sequence[tuple[Sequence[str], int, str]],
    longest: int,
    caption: str,
    style: str = "c0",
) -> Html:
    """A table in which every row ends in a bar.

    Args:
      heads: of the columns before the bar; the last is of the number.
      rows: cells before the number, the number, and the number in words.
      longest: number of a bar over the whole width.
      caption: above.
      style: CSS class of the bars' colour.
    """
    last = len(heads) - 1
    head = [
        element("th", h, scope="col", class_="number" if i == last else None)
        for i, h in enumerate(heads)
    ]
    body = []
    for cells, value, words in rows:
        rect = element(
            "rect", class_="fill", width=f"{100 * value / max(longest, 1):.2f}%", height="100%"
        )
        bar = element("svg", rect, aria_hidden="true", class_=style)
        body.append(
            element(
                "tr",
                element("th", breakable(cells[0]), scope="row", class_="name"),
                [element("td", c) for c in cells[1:]],
                element("td", words, class_="number"),
                element("td", bar, class_="bar"),
            )
        )
    head_row = element("tr", head, element("td"))
    return _scrolled(caption, element("thead", head_row), element("tbody", body), kind="wide")


def label(run: Run, i: int) -> Html:
    """A run's name with its line."""
    name = element("span", run.label, class_="label", title=run.label)
    return joined([key(style_of(i)), name])


def breakable(name: str) -> Html:
    """A name that may be broken into lines where its parts meet."""
    parts = re.split(r"(?<=[/_])|(?<=[a-z]\.)(?=[a-z])", name)
    return joined(x for part in parts for x in (part, Html("<wbr>")) if part)


def _scrolled(caption: str, *children: object, kind: str | None = None) -> Html:
    """What may be wider than a phone, and is moved by the keyboard too."""
    inside = element("table", children, class_=kind, aria_label=caption)
    moved = element("div", inside, class_="scroll", role="region", tabindex=0, aria_label=caption)
    return element("figure", element("figcaption", caption), moved, class_="table")
