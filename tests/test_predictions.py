"""The predicted memory of a run is what the process needs."""

import os

import pytest

from benchmarks.peak_memory import RUNS, is_good, measure, write_deeplab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux only"),
]


@pytest.mark.parametrize("run", RUNS)
def test_predicts_the_memory_of_every_recipe(run, tmp_path):
    if run == "deeplab":
        write_deeplab(tmp_path)
    predicted, measured = measure(run, RUNS[run], tmp_path)
    assert is_good(predicted, measured), f"predicted {predicted:,} bytes, measured {measured:,}"


@pytest.mark.parametrize(
    ("predicted", "measured", "good"),
    [
        (100, 15 * 10**6, True),
        (100, 17 * 10**6, False),
        (96, 100, True),
        (10**9, 94 * 10**7, False),
    ],
)
def test_bound_of_a_prediction(predicted, measured, good):
    assert is_good(predicted, measured) is good
