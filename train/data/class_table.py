"""Class tables: names of classes, their values in masks, and their colors."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from train.data.columns import TITLES, parse_integer, read_rows
from train.errors import UserError, shorten

Color = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""

VOID: Color = (224, 224, 192)
"""Color of ignored pixels in pictures, as in PASCAL VOC, if no table has another."""

FILES = (
    *("classes.csv", "classes.txt", "class_dict.csv", "label_colors.txt"),
    *("objectInfo150.txt", "class_names.txt", "labelmap.txt"),
)
"""Names of class tables that are looked for in the folder of the data."""

MASK_VALUES = range(-(2**15), 2**16)
"""Values that masks can have."""

VOID_NAMES = frozenset({"void", "ignore", "ignored", "unlabeled", "unlabelled"})
"""Names of rows that are no class; their pixels are ignored."""


class Row(NamedTuple):
    """A row of a class table.

    Attributes:
      name: Name of the class.
      value: Its value in masks; None counts rows from 0.
      color: Its color in masks and pictures; None without one.
    """

    name: str
    value: int | None = None
    color: Color | None = None

    @property
    def is_void(self) -> bool:
        """Whether the row stands for pixels that are ignored."""
        return self.name.lower() in VOID_NAMES


def find_table(
    given: str | None, root: Path, default: str | None, *, is_needed: bool = True
) -> tuple[tuple[Row, ...], str]:
    """Return the rows of a class table, and where they come from; no rows and "" without one.

    The table is a file, perhaps below the folder ``root`` of the data, or the name of a published
    data set. None looks for one of `FILES`, else takes the ``default`` data set's.
    """
    if given in PUBLISHED:
        return PUBLISHED[given], given
    paths = [root / given, Path(given)] if given is not None else [root / name for name in FILES]
    tables = [(path, read_table(path)) for path in paths if path.is_file()]
    for path, rows in tables:
        if given is None and [row[:2] for row in rows] != [row[:2] for row in tables[0][1]]:
            raise UserError(
                f"data.class_table: {tables[0][0]} and {path} differ; move one elsewhere"
            )
    if tables:
        return tables[0][1], str(tables[0][0])
    if given is not None and is_needed:
        raise UserError(
            f"data.class_table: no file {given}, here or in {root}; give a file, or one of "
            f"{', '.join(PUBLISHED)}"
        )
    return (PUBLISHED[default], default) if default else ((), "")


def read_table(path: Path) -> tuple[Row, ...]:
    """Read a class table, whose quotes and line breaks are as in CSV.

    Lines are names; or a name with a value, or with a color r, g, b or #rrggbb, in either order.
    With a header, columns are ``name``, and optionally ``value`` (or ``id``, ``class_id``, ...),
    ``r``, ``g`` and ``b``, or ``color``. A header of names alone is ``name``, ``class``, ``class
    name`` or ``label``. Lines that begin with # and no color are comments.

    Raises:
      UserError: for a damaged file or an empty line; if a column of another title holds integers or
        colors, but none has the values or colors; or if numbers may be part of the names.
    """
    lines = read_rows(str(path), "data.class_table")
    try:
        rows = tuple(_rows(lines))
        names = [row.name for row in rows]
        are_numbers = bool(rows) and all(map(_INTEGER.fullmatch, names))
        if are_numbers and rows[0].value is None and names != [str(i) for i in range(len(rows))]:
            raise ValueError(
                f"its names are numbers, {shorten(names)}, but not 0, 1, ...; name each value in "
                "lines value,name"
            )
        for what in ("name", "value", "color"):
            found = [getattr(row, what) for row in rows if getattr(row, what) is not None]
            twice = [value for i, value in enumerate(found) if value in found[:i]]
            # Several kinds of ignored pixels may share a value, such as -1 in Cityscapes.
            if twice and not all(r.is_void for r in rows if getattr(r, what) == twice[0]):
                raise ValueError(f"the {what} {twice[0]} is there twice")
    except ValueError as error:
        raise UserError(f"data.class_table: cannot read {path}: {error}") from error
    return rows


_RGB = r"\d{1,3}(?:\s*[,;\s]\s*\d{1,3}){2}"
_NUMBER = r"(?:-?\d+|#[0-9a-fA-F]{6})"
_SPACED = re.compile(rf"((?:{_NUMBER}[:=\s,]+)*)(.*?)((?:[:=\s,]+{_NUMBER})*)")
"""A line without a header: numbers, a name, and numbers."""
_RED_GREEN_BLUE = ("color",) * 3
# Data sets agree on no order of the fields, and on no separator: the kinds of the fields decide.
_SHAPES: dict[str, tuple[str, ...]] = {
    "n": (),
    **dict.fromkeys(("1n", "n1"), ("value",)),
    **dict.fromkeys(("#n", "n#"), ("color",)),
    **dict.fromkeys(("111n", "n111"), _RED_GREEN_BLUE),
    **dict.fromkeys(("1#n", "1n#", "n1#"), ("value", "color")),
    **dict.fromkeys(("#1n", "#n1", "n#1"), ("color", "value")),
    "1n111": ("value", *_RED_GREEN_BLUE),
    "111n1": (*_RED_GREEN_BLUE, "value"),
}
"""Meaning of the numbers (1) and colors (#) before and after the name (n) of a line."""
_NAMES = ("name", "class", "classname")
_COLUMNS: dict[str, str] = {
    **dict.fromkeys(_NAMES, "name"),
    **dict.fromkeys(("value", "id", "idx", "index", "label", "number", "gray", "grey"), "value"),
    **dict.fromkeys(("classid", "labelid", "pixel", "pixelvalue", "maskvalue"), "value"),
    **dict.fromkeys(("color", "colour", "rgb", "hex"), "color"),
    **{name: name[0] for name in ("r", "g", "b", "red", "green", "blue")},
}
"""Meanings of titles, which are compared without case, spaces and remarks in brackets."""


def _rows(lines: Sequence[list[str]]) -> Iterator[Row]:
    if not lines:
        return
    words = [_COLUMNS.get(_plain(word)) for word in " ".join(lines[0]).split()]
    if len(lines[0]) == 1 and None not in words and len({*words}) == len(words) > 1:
        lines = [line[0].split() for line in lines]  # separated by spaces
    titles = [*map(_plain, lines[0])]
    if len(titles) == 1 or not any(title == "label" or title in _NAMES for title in titles):
        has_head = len(titles) == 1 and titles[0] in TITLES
        yield from map(_row, _without_head(lines[has_head:], has_head=has_head))
        return
    head, *body = lines
    columns = [_COLUMNS.get(title, "") for title in titles]
    if "name" not in columns:
        columns[titles.index("label")] = "name"
    for texts in body:
        if len(texts) != len(columns):
            raise ValueError(f"{len(texts)} columns instead of {len(columns)} in {','.join(texts)}")
    _check_columns(head, columns, [*zip(*body, strict=True)])
    for texts in body:
        fields = {c: text for c, text in zip(columns, texts, strict=True) if c}
        if "r" in fields:
            fields["color"] = " ".join(fields[channel] for channel in "rgb")
        yield _row(fields)


def _plain(title: str) -> str:
    return re.sub(r"[(\[].*|[\s_:]", "", title.lower())


def _without_head(lines: Sequence[list[str]], *, has_head: bool) -> list[dict[str, str]]:
    rows, shapes = [], set()
    for line in lines:
        parts = [field for field in line if field]  # some separators stand twice
        if len(parts) == 1 and not has_head:
            match = _SPACED.fullmatch(parts[0].rstrip(":"))  # labelmap.txt of CVAT ends in ::
            assert match is not None  # because a name can be anything
            before, last = (re.findall(_NUMBER, match[i]) for i in (1, 3))
            parts = [*before, match[2], *last]
        else:
            spaced = (re.split(r"[,;\s]+", p) if re.fullmatch(_RGB, p) else [p] for p in parts)
            parts = [number for numbers in spaced for number in numbers]
        kinds = ["n1#"[bool(re.fullmatch(_NUMBER, p)) + (p[:1] == "#")] for p in parts]
        if "n" not in kinds and len({*kinds}) == 1 == len(kinds):
            kinds = ["n"]  # such as 0, 1, ...
        shape = "".join(kinds)
        shapes.add(shape)
        row = {"name": parts[kinds.index("n")] if "n" in kinds else ""}
        numbers = [p for p, kind in zip(parts, kinds, strict=True) if kind != "n"]
        for meaning, number in zip(_SHAPES.get(shape, ""), numbers, strict=False):
            row[meaning] = f"{row[meaning]} {number}" if meaning in row else number
        rows.append(row)
    is_plain = all(len(line) == 1 and not re.search("[:=#,]", line[0]) for line in lines)
    if is_plain and not has_head and shapes & {"1n", "n1"} and "n" not in shapes:
        raise ValueError(
            f"each line has a number, as {lines[0][0]}, which may be a value or part of the name; "
            "give a first line name,value and lines such as cat,1, or a first line name"
        )
    if is_plain and (has_head or len(shapes) > 1):
        return [{"name": line[0]} for line in lines]  # such as "car" and "2 wheeler"
    if len(shapes) > 1 or not shapes <= _SHAPES.keys():
        raise ValueError(
            f"no column name in its first line, {','.join(lines[0])}, and the lines are not all a "
            "name, with a value or a color"
        )
    return rows


def _check_columns(
    titles: Sequence[str], columns: list[str], texts: Sequence[Sequence[str]]
) -> None:
    """Name a column ``class`` of numbers ``value``, and refuse columns of an unclear meaning."""
    for i, (title, cells) in enumerate(zip(titles, texts, strict=False)):
        is_number, is_color = (
            all(pattern.fullmatch(cell) for cell in cells) for pattern in (_INTEGER, _ANY_COLOR)
        )
        if is_number and columns[i] == "name" and columns.count("name") == 2:
            columns[i] = "value"
        what = "color" if is_color and not is_number else "value"
        has_one = what in columns or (what == "color" and "r" in columns)
        is_index = _plain(title) in ("", "unnamed0")  # of pandas
        if not (columns[i] or is_index or has_one) and (is_number or is_color):
            raise ValueError(
                f"its column {title} may hold the {what} of each class; call it {what}, or "
                "leave it out"
            )
    for column in {*columns} - {""}:
        same = [title for title, c in zip(titles, columns, strict=True) if c == column]
        if len(same) > 1:
            raise ValueError(f"its columns {same[0]} and {same[1]} mean the same; leave one out")
    if 0 < len({*"rgb"} & {*columns}) < 3:
        raise ValueError(f"it has some of r, g and b, but not all: {', '.join(titles)}")


_INTEGER = re.compile(r"-?\d+")
_ANY_COLOR = re.compile(rf"#?[0-9a-fA-F]{{6}}|[(\[]?{_RGB}[)\]]?")


def _row(fields: dict[str, str]) -> Row:
    value = parse_integer(fields["value"]) if "value" in fields else None
    if value is not None and value not in MASK_VALUES:
        raise ValueError(f"the value {value} is not from {MASK_VALUES[0]:,} to {MASK_VALUES[-1]:,}")
    row = Row(fields["name"], value)
    if fields.get("color") or ("color" in fields and not row.is_void):
        row = row._replace(color=_color(fields["color"]))
    if value is not None and value < 0 and not row.is_void:
        raise ValueError(f"the class {row.name} has the value {value}; call it void, or change it")
    return row


def _color(text: str) -> Color:
    if hexadecimal := re.fullmatch("#?([0-9a-fA-F]{6})", text.strip()):
        r, g, b = bytes.fromhex(hexadecimal[1])
        return r, g, b
    parts = re.split(r"\s*[,;\s]\s*", text.strip("()[] "))
    r, g, b = map(parse_integer, parts) if len(parts) == 3 else (-1, -1, -1)
    if max(r, g, b) > 255 or min(r, g, b) < 0:
        raise ValueError(f"the color {text} is not of three integers from 0 to 255, or #rrggbb")
    return r, g, b


PUBLISHED = {
    path.stem: read_table(path) for path in sorted(Path(__file__).parent.glob("tables/*.csv"))
}
"""Class tables of published data sets: of SegNet's CamVid (Badrinarayanan et al. 2015), Cityscapes
with the values of labelIds (Cordts et al. 2016) and PASCAL VOC (Everingham et al. 2015)."""
