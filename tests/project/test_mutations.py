"""Mutants are programs; `python -m tests.mutations` runs the tests on each of them."""

import ast

import pytest

from tests.mutations import EQUIVALENT, FILES, NAMED, ROOT, mirrored, mutants, suite_of

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


def test_a_mutant_differs_in_one_place():
    (mutant,) = (m for m in mutants("a.py", SOURCE) if "drop factor" in m.address)
    assert mutant.text == SOURCE.replace("-x * n", "(-x)")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("file", FILES)
def test_each_target_has_tests_and_its_mutants_are_programs(file):
    assert all((ROOT / tests).is_file() for tests in suite_of(file).split())
    for mutant in mutants(file, (ROOT / file).read_text())[::10]:
        ast.parse(mutant.text)


def test_equivalent_mutants_exist():
    addresses = {m.address for file in FILES for m in mutants(file, (ROOT / file).read_text())}
    assert set(EQUIVALENT) <= addresses


def test_named_files_exist_and_need_more_than_their_mirror():
    assert set(NAMED) <= set(FILES)
    assert not [file for file, tests in NAMED.items() if tests == mirrored(file)]
