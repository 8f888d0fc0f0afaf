import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_document_runs_from_top_to_bottom(page):
    names = {"__name__": page.name}
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
        exec(compile(code, f"{page.name}, block {i}", "exec"), names)


def test_the_map_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for package in ("fnet", "train"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.name if path.stem != "__init__" else path.parent.name
            assert name in text or path.stem in text, f"{path.relative_to(ROOT)} is not on the map"
