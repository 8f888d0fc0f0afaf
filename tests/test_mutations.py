"""The list of mutations fits the code; `python -m tests.mutations` runs them."""

import ast
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
    names = {file: (ROOT / file).read_text() for file in {m.tests for m in MUTATIONS}}
    for mutation in MUTATIONS:
        words = set(mutation.select.replace("(", " ").replace(")", " ").split()) - {
            "and",
            "or",
            "not",
        }
        assert any(word in names[mutation.tests] for word in words), mutation.select


def test_a_place_that_is_not_found_is_told():
    lost = Mutation("nothing is added", "fnet/__init__.py", "no such line", "", "tests", "")
    with pytest.raises(ValueError, match=r"expected 'no such line' exactly once, found it 0 times"):
        lost.apply(ROOT)
