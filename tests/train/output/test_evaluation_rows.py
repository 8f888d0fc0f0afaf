"""Tables of a row per image."""

import csv
import io
import os

from train.output.rows import as_csv


def test_values_are_read_back():
    name = os.fsdecode(b'latin\xe9 "a",\n.png')
    rows = [{"file": name, "number": 1234567.5}, {"file": "b", "number": 0.1, "more": 5.0}]
    content = as_csv(rows).decode()
    assert [*csv.DictReader(io.StringIO(content, newline=""))] == [
        {"file": 'latin\\xe9 "a",\n.png', "number": "1.2345675e+06", "more": ""},
        {"file": "b", "number": "0.1", "more": "5"},
    ]
