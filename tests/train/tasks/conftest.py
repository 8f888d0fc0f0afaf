"""Files of examples for tests of tasks."""

import json

import pytest


@pytest.fixture
def write(workplace):
    """``write(records)`` returns the path of a file of JSON lines."""

    def write(records, name="data.jsonl"):
        (workplace / name).write_text("\n".join(map(json.dumps, records)))
        return str(workplace / name)

    return write
