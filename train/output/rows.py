"""Tables that runs write: one row per image, as CSV."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def as_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    r"""Write rows as CSV in UTF-8, with a line of column names; numbers are rounded to 32 bits.

    Columns are in the order in which rows first have them. File names that are not UTF-8 have
    their bytes as ``\xNN``.
    """
    rows = [*rows]
    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        texts = {k: str(np.float32(v)) for k, v in row.items() if isinstance(v, float)}
        writer.writerow({**row} | {k: text.removesuffix(".0") for k, text in texts.items()})
    plain = text.getvalue().encode("utf-8", "surrogateescape")
    return plain.decode("utf-8", "backslashreplace").encode()
