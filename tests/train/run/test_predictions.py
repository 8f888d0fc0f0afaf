"""The predicted memory of a run is what the process needs."""

import os

import pytest

from benchmarks.peak_memory import REASONS, RUNS, is_good, measure
from train.config import recipes


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux only")
@pytest.mark.parametrize("recipe", RUNS)
def test_predicts_the_memory_of_every_recipe(recipe, tmp_path):
    predicted, measured = measure(recipe, tmp_path)
    figures = f"predicted {predicted:,} bytes, measured {measured:,}"
    if recipe in REASONS and not is_good(predicted, measured):
        pytest.xfail(f"{figures}: {REASONS[recipe]}")
    assert is_good(predicted, measured), figures


def test_ledger_has_every_recipe():
    assert set(RUNS) == set(recipes.recipes())
    assert set(REASONS) <= set(RUNS)


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [(100, 1.5e7, True), (100, 17 * 10**6, False), (96, 100, True), (10**9, 94 * 10**7, False)],
)
def test_bound_of_a_prediction(predicted, measured, good):
    assert is_good(predicted, measured) is good
