"""Random train steps within budgets: exact gradients, and bytes within the budget.

`python -m benchmarks.random_steps` measures many more.
"""

import random
import re

import jax
import pytest

from benchmarks.foreign_steps import ROUTES, is_over, is_unequal, not_monotone
from benchmarks.random_losses import BLOCKS, random_loss
from benchmarks.random_steps import failures, measure_seed
from fnet import memory

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")


WITH_REMAT_TO_FIT = (0, 1, 4, 8, 9, 11, 12, 14, 15, 16, 18, 20, 25, 26, 27)
WITH_COMPILE_STEP = (35, 62, 65, 94, 102)


def check(seed, shares, most_blocks, routes):
    with jax.debug_key_reuse(False):
        rows = measure_seed(seed, shares, most_blocks, routes)
    assert rows
    assert not failures(rows), "\n".join(failures(rows))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", WITH_REMAT_TO_FIT)
def test_a_loss_stays_exact_in_a_budget(seed):
    check(seed, [(0.7, 0.5, 0.35)[seed % 3]], 2, ["remat_to_fit"])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", WITH_COMPILE_STEP)
def test_a_step_stays_exact_in_a_budget(seed):
    check(seed, [(0.7, 0.5, 0.35)[seed % 3]], 2, ["compile_step"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_more_steps_stay_exact_in_more_budgets(seed):
    check(seed, [0.85, 0.6, 0.4, 0.25], 4, list(ROUTES))


@pytest.mark.parametrize(
    "seed", [60, *(pytest.param(n, marks=pytest.mark.slow) for n in range(60))]
)
def test_a_plan_is_a_function_of_program_and_budget(seed):
    """The order of plans does not matter, more bytes fit too, and the remedy of a refusal works."""
    program = random_loss(seed, 1 if seed == 60 else 2)[1]

    def outcome(budget):
        try:
            with jax.debug_key_reuse(False):
                chosen = memory.remat_to_fit(*program[:3], budget=budget)[1].chosen
        except memory.BudgetError as error:
            return re.search(r"Raise the budget to (\S+ \S+),", str(error))[1]
        return chosen.policy.tree, chosen.peak

    shares = random.Random(seed).sample(range(10, 110), 2)
    found = {n: outcome(f"{n}%") for n in shares}
    refused = [isinstance(found[n], str) for n in sorted(shares)]
    assert refused == sorted(refused, reverse=True)
    assert [outcome(f"{n}%") for n in sorted(shares)] == [found[n] for n in sorted(shares)]
    for enough in {r for r in found.values() if isinstance(r, str)}:
        assert not isinstance(outcome(enough), str)


def test_a_failure_names_the_command_that_repeats_it():
    row = {"program": "7: rows", "route": "remat_to_fit", "share": 0.5, "plain": 100}
    good = {"peak": 40, "difference": 1e-7, "tolerance": 1e-5}
    wrong = good | {"difference": 1e-3}
    assert is_unequal(wrong)
    assert not is_unequal(wrong | {"double": 1e-14})
    assert is_unequal(good | {"difference": float("nan")})
    assert is_over(row | good | {"peak": 60})
    refused = row | {"refused": "too large"}
    assert not_monotone([refused, row | good | {"share": 0.4}]) == [refused]
    assert failures([row | good, refused]) == []
    (text,) = failures([row | wrong])
    assert text.startswith("python -m benchmarks.random_steps --seeds 7 ")
    (text,) = failures([row | {"traceback": "KeyError: 1"}])
    assert "KeyError" in text


def test_most_blocks_appear():
    names = [random_loss(seed)[0] for seed in range(12)]
    assert sum(any(block in name for name in names) for block in BLOCKS) > len(BLOCKS) / 2
