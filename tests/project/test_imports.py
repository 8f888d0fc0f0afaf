"""Imports between the packages of the program go down."""

import ast
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "train"
FLOORS = ("commands", "report", "run", "output", "tasks", "data", "config")
"""Packages of `train` from the top. A package imports only those behind it."""


@pytest.mark.parametrize("package", FLOORS)
def test_a_package_imports_only_packages_below_it(package):
    above = FLOORS[: FLOORS.index(package)]
    wrong = [
        f"{path.relative_to(TRAIN)}: {node.module}"
        for path in (TRAIN / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("train.")
        if node.module.split(".")[1] in above
    ]
    assert not wrong, "\n".join(wrong)
