"""The ledger: how many lines each package has. A number may fall, never rise."""

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEDGER = {
    "fnet/jaxpr": 3_680,
    "fnet/autodiff": 9_580,
    "fnet/memory": 8_369,
    "fnet/layers": 5_794,
    "fnet/models + fnet/interop": 9_310,
    "fnet, the rest": 10_937,
    "train/data": 11_311,
    "train/run + train/commands": 8_582,
    "train, the rest": 8_225,
    "tests": 56_803,
    "benchmarks": 16_510,
}
"""Lines of ``*.py``. A row of its own takes a package out of the rest."""
SLACK = 30
"""Lines that a row may be below its number, so that not every commit has to edit the ledger."""


def lines_of_rows():
    row_of = {folder: row for row in LEDGER for folder in row.split(" + ")}
    lines = Counter()
    for top in ("fnet", "train", "tests", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            package = "/".join(path.relative_to(ROOT).parts[:2])
            row = row_of.get(package) or row_of.get(top) or f"{top}, the rest"
            lines[row] += len(path.read_text().splitlines())
    return lines


@pytest.mark.parametrize("row", LEDGER)
def test_lines_of_a_package_only_fall(row):
    lines = lines_of_rows()[row]
    more = lines - LEDGER[row]
    assert more <= 0, (
        f"{row} has {more} lines more than the ledger allows. Delete as many there, or delete them "
        "in another row in this commit, and move them from its number to this one."
    )
    assert more >= -SLACK, f"{row} became smaller. Lower its number: {row!r}: {lines:_},"
