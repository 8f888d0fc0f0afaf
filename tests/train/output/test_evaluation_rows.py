"""Tables of a row per image."""

import csv
import io
import os

import pytest

from train.output.rows import as_csv, read_csv
from train.stored import StoredError


def test_values_are_read_back():
    name = os.fsdecode(b'latin\xe9 "a",\n.png')
    rows = [{"file": name, "number": 1234567.5}, {"file": "b", "number": 0.1, "more": 5.0}]
    content = as_csv(rows).decode()
    assert [*csv.DictReader(io.StringIO(content, newline=""))] == [
        {"file": 'latin\\xe9 "a",\n.png', "number": "1.2345675e+06", "more": ""},
        {"file": "b", "number": "0.1", "more": "5"},
    ]


def test_cells_that_a_spreadsheet_would_run_get_a_quote(tmp_path):
    texts = ["=1+1", "+cmd|' /C calc'!A0", "@x", "\t=1", "'=1", "-a", "-1.5", "'tis", "a=b"]
    quoted = [(t[0] in "=+@\t'" and t != "'tis") or t == "-a" for t in texts]
    content = as_csv([{"label": text, "loss": -0.5} for text in texts])
    assert [row.startswith(("'", "\"'")) for row in content.decode().splitlines()[1:]] == [
        is_quoted or text.startswith("'") for is_quoted, text in zip(quoted, texts, strict=True)
    ]
    path = tmp_path / "r.csv"
    path.write_bytes(content)
    assert [row["label"] for row in read_csv(path)] == texts
    assert {row["loss"] for row in read_csv(path)} == {"-0.5"}
    path.write_bytes(content[:-6])
    with pytest.raises(StoredError, match=r"r.csv: row 9 has 1 of 2 cells"):
        read_csv(path)


def test_numbers_keep_their_digits():
    rows = as_csv([{"label": value} for value in (20260101.0, 1e9 + 1, float("nan"), 1e300)])
    assert rows.decode().split() == ["label", "20260101", "1000000001", "nan", "1e+300"]
