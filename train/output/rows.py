"""Tables that runs write: one row per image, as CSV."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from train import limits
from train.stored import StoredError, read_bytes

_FORMULA = re.compile("('*)([=+\\-@\t\r\uff1d\uff0b\uff0d\uff20])")
"""Begins a cell that a spreadsheet would run."""


def as_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    r"""Write rows as CSV in UTF-8, with a line of column names.

    Columns are in the order in which rows first have them. File names that are not UTF-8 have
    their bytes as ``\xNN``. A text that a spreadsheet would run, such as ``=1+1``, gets a leading
    quote.
    """
    rows = [*rows]
    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    plain = text.getvalue().encode("utf-8", "surrogateescape")
    return plain.decode("utf-8", "backslashreplace").encode()


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows that `as_csv` wrote."""
    try:
        text = read_bytes(path, limits.ANNOTATIONS).decode()
        columns, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    except (ValueError, csv.Error) as error:
        raise StoredError(path, error) from error
    for i, row in enumerate(rows, 1):
        if len(row) != len(columns):
            raise StoredError(path, f"row {i:,} has {len(row)} of {len(columns)} cells")
    return [dict(zip(columns, map(_text, row), strict=True)) for row in rows]


def _text(cell: str) -> str:
    quoted = _FORMULA.match(cell)
    return cell[1:] if quoted and quoted[1] else cell


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 2**53:
            return int(value)  # 20260101 keeps its digits
        with np.errstate(over="ignore"):
            single = np.float32(value)  # its shortest text, if it is one
        return str(single if float(single) == value else value)
    return f"'{value}" if isinstance(value, str) and _runs(value) else value


def _runs(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return _FORMULA.match(text) is not None
    return False
