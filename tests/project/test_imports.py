"""Imports between the packages of the program go down."""

import ast
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "train"
FNET = TRAIN.parent / "fnet"
FLOORS = (
    *("commands", "report", "run", "output", "tasks"),
    *("gradients", "networks", "data", "config"),
)
"""Packages of `train` from the top. A package imports only those behind it."""


def imports(node):
    """Yield the nodes of a module, without imports for annotations alone."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


@pytest.mark.parametrize("package", FLOORS)
def test_a_package_imports_only_packages_below_it(package):
    above = FLOORS[: FLOORS.index(package)]
    wrong = [
        f"{path.relative_to(TRAIN)}: {node.module}"
        for path in (TRAIN / package).rglob("*.py")
        for node in imports(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("train.")
        if node.module.split(".")[1] in above
    ]
    assert not wrong, "\n".join(wrong)


OUTSIDE = {"ctypes", "io", "logging", "os", "pathlib", "shutil", "subprocess", "tempfile", "time"}
"""Modules that reach out of a function: to files, output, the clock or the process."""
REACHES_OUT = {
    "__main__.py": {"pathlib"},  # the launcher of the program
    "cpu/heap.py": {"ctypes"},
    "memory/plan.py": {"os"},  # the number of CPUs
    "memory/target.py": {"os"},  # the environment, while a compiler is loaded
    "testing.py": {"pathlib"},  # baselines beside a test
}
"""The exceptions that docs/architecture.md names."""


def test_the_library_is_pure_but_for_the_exceptions_on_the_map():
    found = {}
    for path in sorted(FNET.rglob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names} & OUTSIDE
            elif isinstance(node, ast.ImportFrom):
                names |= {(node.module or "").split(".")[0]} & OUTSIDE
            elif isinstance(node, ast.Global):
                names.add("global")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names |= {node.func.id} & {"open", "print"}
        if names:
            found[str(path.relative_to(FNET))] = names
    assert found == REACHES_OUT


def test_only_the_program_changes_the_heap():
    for path in FNET.rglob("*.py"):
        assert "cpu.heap" not in path.read_text(), path
