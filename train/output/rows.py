"""Tables that runs write: one row per image, as CSV."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any


def as_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    r"""Write rows as CSV in UTF-8, with a line of column names; numbers have six digits.

    Columns are in the order in which rows first have them. File names that are not UTF-8 have
    their bytes as ``\xNN``.
    """
    rows = [*rows]
    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue().encode("utf-8", "backslashreplace")
