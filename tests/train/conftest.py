"""Files of examples, and runs that measure their memory without collecting garbage."""

import json
from types import SimpleNamespace

import pytest

from train.run import process_memory


@pytest.fixture(autouse=True, scope="package")
def leave_garbage():
    """Each run collects garbage several times, which takes a quarter of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_memory, "gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture
def write(tmp_path):
    """``write(records)`` returns the path of a file of JSON lines."""

    def write(records, name="data.jsonl"):
        lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write
