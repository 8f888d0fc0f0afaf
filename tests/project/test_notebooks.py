"""The notebooks run from top to bottom, on small settings, and are kept as they were last run."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
SMALL = {  # in place of the cell with the tag "parameters"
    "in_place_nnx": "DEPTHS = [8]\nDEPTH, WIDTH = 1, 16\nEPOCHS, BATCH = 1, 64",
    "clipped_equinox": "WIDTH, DEPTH = 64, 2\nEPOCHS, BATCH = 2, 64\nCLIP = 1.0",
    "planning_a_budget": "SIZE, BATCH = 8, 8\nWIDTHS, BLOCKS = (8,), 1\nSTEPS = 2\nSHARES = [0.8]\nPOLICIES = ['none', 'segments']",
}


def cells(name):
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [c | {"source": "".join(c["source"])} for c in found if c["cell_type"] == "code"]


def assigned(code):
    return set(re.findall(r"\b([A-Z]+)\b", re.sub(r"#.*", "", code)))


def test_there_is_a_small_setting_for_every_notebook():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_from_top_to_bottom(name, monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    names = {"__name__": name}
    for i, cell in enumerate(cells(name)):
        code = cell["source"]
        if "parameters" in cell["metadata"].get("tags", ()):
            assert assigned(code) == assigned(SMALL[name])
            code = SMALL[name]
        exec(compile(code, f"{name}, code cell {i}", "exec"), names)


@pytest.mark.parametrize("name", list(SMALL))
def test_a_notebook_shows_what_its_last_run_gave(name):
    code = cells(name)
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o.get("name") == "stderr" or o["output_type"] == "error"]
    drawn = [c for c in code if "plt.show()" in c["source"]]
    assert drawn
    assert all("image/png" in c["outputs"][-1]["data"] for c in drawn)
