"""Files of examples."""

import json

import pytest


@pytest.fixture
def write(tmp_path):
    """``write(records)`` returns the path of a file of JSON lines."""

    def write(records, name="data.jsonl"):
        lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write
