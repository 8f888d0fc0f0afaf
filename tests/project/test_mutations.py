"""`python -m tests.mutations` runs the tests on each mutant."""

import shutil

import pytest

from tests import line_map
from tests.line_map import LineMap
from tests.mutations import EQUIVALENT, ROOT, Runner, mutants

SOURCE = '''
def scaled(x, n=2):
    """Doc: 1 + 1."""
    if n < 0:
        raise ValueError(f"{n + 1}")
    return -x * n + 1


class Point:
    def norm(self):
        return self.x and self.y
'''


def test_each_operator_gives_a_mutant_with_an_address():
    changes = {m.address.split("::")[1]: (m.before, m.after) for m in mutants("a.py", SOURCE)}
    assert changes == {
        "scaled: swap Lt 1": ("n < 0", "n <= 0"),
        "scaled: change number 1": ("0", "1"),
        "scaled: swap Add 1": ("-x * n + 1", "-x * n - 1"),
        "scaled: drop term 1": ("-x * n + 1", "-x * n"),
        "scaled: drop first term 1": ("-x * n + 1", "1"),
        "scaled: swap Mult 1": ("-x * n", "-x / n"),
        "scaled: drop factor 1": ("-x * n", "-x"),
        "scaled: drop first factor 1": ("-x * n", "n"),
        "scaled: drop USub 1": ("-x", "x"),
        "scaled: change number 2": ("1", "2"),
        "Point.norm: swap And 1": ("self.x and self.y", "self.x or self.y"),
    }


def test_a_mutant_differs_in_one_place_and_knows_its_lines():
    found = {m.address.split("::")[1]: m for m in mutants("a.py", SOURCE)}
    assert found["scaled: drop factor 1"].text == SOURCE.replace("-x * n", "(-x)")
    places = {name: (m.statement, m.function) for name, m in found.items()}
    assert places["scaled: swap Lt 1"] == (range(4, 5), range(2, 7))
    assert places["scaled: swap Add 1"] == (range(6, 7), range(2, 7))
    assert places["Point.norm: swap And 1"] == (range(11, 12), range(10, 12))


def test_equivalent_mutants_exist():
    files = {address.split("::")[0] for address in EQUIVALENT}
    addresses = {m.address for file in files for m in mutants(file, (ROOT / file).read_text())}
    assert set(EQUIVALENT) <= addresses


CORE = """
def half(x):
    if x < 0:
        return x * 2
    return x / 2

def third(x):
    return x / 3

SIZES = [half(n) for n in (8,)]

def unused(x):
    return x + 1

def own_result(x):
    return x + 2
"""

TESTS = """
import pathlib, subprocess, sys
from fnet import core

def test_half():
    assert core.half(4) == 2

def test_third():
    command = "from fnet import core; assert core.third(3) == 1"
    subprocess.run([sys.executable, "-c", command], check=True)

def test_negative():
    core.half(-1)

def test_passes_once():
    assert core.own_result(1) and not pathlib.Path("dist/ran").exists()
    pathlib.Path("dist/ran").touch()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A small project with a map, and its runner."""
    root = tmp_path_factory.mktemp("small")
    for name, text in {
        "fnet/__init__.py": "",
        "fnet/core.py": CORE,
        "train/__init__.py": "",
        "tests/test_small.py": TESTS,
        "pyproject.toml": (ROOT / "pyproject.toml").read_text(),
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    line_map.make(root, 0)
    shutil.copytree(root / line_map.MADE / "fnet", root / "fnet")
    (root / "fnet/core.py").write_text("# A line more.\n" + CORE)
    return root


def mutants_of(project):
    """The small project's mutants and a map for its tests."""
    found = mutants("fnet/core.py", (project / "fnet/core.py").read_text())
    lines = LineMap(project / line_map.MADE, project, share=1)
    return {m.address.split("::")[1]: m for m in found}, lines


def test_a_line_belongs_to_the_tests_that_run_it(project):
    found, lines = mutants_of(project)

    def tests(address):
        m = found[address]
        names = lines.tests(m.file, m.statement, m.function, ["tests/test_small.py"])
        return [name.split("::")[1] for name in names]

    assert tests("half: swap Mult 1")[0] == "test_negative"
    assert {"test_half", "test_third", "test_passes_once"} < {*tests("half: swap Mult 1")}
    assert tests("half: swap Div 1")[0] == "test_half"
    assert tests("third: swap Div 1")[0] == "test_third"
    assert not tests("unused: swap Add 1")


def test_a_line_that_changed_belongs_to_the_tests_of_its_function(project):
    text = (project / "fnet/core.py").read_text()
    (project / "fnet/core.py").write_text(text.replace("x * 2", "2 * x"))
    found, lines = mutants_of(project)
    m = found["half: swap Mult 1"]
    names = lines.tests(m.file, m.statement, m.function, [])
    assert "tests/test_small.py::test_negative" in names
    (project / "fnet/core.py").write_text(text)


@pytest.mark.slow
def test_a_mutant_is_caught_by_a_test_that_passes_without_it(project):
    found, lines = mutants_of(project)
    runner = Runner(project, lines, "not slow")

    def outcome(address):
        return runner.outcome(found[address])

    assert outcome("half: swap Div 1") == ("caught", "tests/test_small.py::test_half")
    assert outcome("third: swap Div 1") == ("caught", "tests/test_small.py::test_third")
    assert outcome("unused: swap Add 1") == ("survived", "not run")
    assert outcome("own_result: swap Add 1") == ("survived", "")  # its test always fails
    assert outcome("half: swap Mult 1") == ("survived", "")
    new = "def test_sign(): assert core.half(-1) == -2"
    (project / "tests/test_small.py").write_text(TESTS + new)
    assert outcome("half: swap Mult 1") == ("caught", "tests/test_small.py::test_sign")
