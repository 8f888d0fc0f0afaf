"""The list of mutations fits the code; `python -m tests.mutations` runs them."""

import ast
import re
from pathlib import Path

import pytest

from tests.mutations import ROOMS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).parents[1]
MUTATIONS = [m for mutations in ROOMS.values() for m in mutations]


@pytest.mark.parametrize("room", ROOMS)
def test_each_change_has_exactly_one_place_and_leaves_a_program(room):
    for mutation in ROOMS[room]:
        ast.parse(mutation.apply(ROOT))


def test_the_tests_that_are_to_notice_it_are_there():
    for file, part in {(m.tests, part) for m in MUTATIONS for part in m.alternatives}:
        text = (ROOT / file).read_text()
        names = re.findall(r"^def (test_\w+)", text, re.MULTILINE)
        words = [node.id for node in ast.walk(ast.parse(part)) if isinstance(node, ast.Name)]
        assert any(word in name for word in words for name in names), (file, part)
        # Other words are those of parameters, which are here or in cases that are imported.
        for module in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE):
            cases = ROOT / f"tests/{module}.py"
            text += cases.read_text() if cases.is_file() else ""
        assert all(word in text for word in words), (file, part)


def test_a_place_that_is_not_found_is_told():
    lost = Mutation("nothing is added", "fnet/__init__.py", "no such line", "", "tests", "")
    with pytest.raises(ValueError, match=r"expected 'no such line' exactly once, found it 0 times"):
        lost.apply(ROOT)
