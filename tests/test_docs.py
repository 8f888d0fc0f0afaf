import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    (path.name, i, code)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize(("name", "number", "code"), BLOCKS)
def test_every_python_block_of_the_documents_runs(name, number, code):
    exec(compile(code, f"{name}, block {number}", "exec"), {"__name__": name})


def test_the_map_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for package in ("fnet", "train"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.name if path.stem != "__init__" else path.parent.name
            assert name in text or path.stem in text, f"{path.relative_to(ROOT)} is not on the map"
