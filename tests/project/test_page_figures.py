"""Figures that pages take from the benchmark log are still those of the log."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
RESULTS = json.loads((FOLDER / "benchmarks.json").read_text())["results"]
RESULTS |= {
    name: json.loads((FOLDER / f"{name}.json").read_text())
    for name in ("gpu_h100", "gpu_h200", "gpu_ahead_of_time")
}

SHOWN = {
    "attention_context.md": {"attention_context": 12},
    "batched.md": {"batched": 4},
    "gpu.md": {"gpu_h100": 24, "gpu_h200": 40, "gpu_ahead_of_time": 36},
    "in_place.md": {
        "abn_stack_on_cpu": 16,
        "abn_stack_ahead_of_time_h100": 9,
        "abn_stack_ahead_of_time_v5e": 7,
        "abn_against_torch": 2,
        "abn_bfloat16": 5,
        "resnet50_step": 6,
    },
    "memory.md": {
        "accumulation": 5,
        "attention": 4,
        "linear_cross_entropy": 3,
        "linear_cross_entropy_h100": 2,
        "budgets": 12,
        "checkpoint_memory": 3,
    },
    "per_example.md": {"clipped_grad": 14, "clipped_grad_peers": 9},
    "reliability.md": {"import_time": 1, "processes": 2},
    "sequence_models.md": {
        "transformer_step": 12,
        "transformer_step_h100": 1,
        "selective_scan": 2,
        "generation": 1,
    },
    "vision.md": {
        "vision_networks": 6,
        "max_pool": 4,
        "max_pool_h100": 2,
        "pixel_cross_entropy": 4,
    },
}


def shown(page, benchmark):
    """Number of a benchmark's claims whose figure is on a page, with one to three decimals."""
    text = (FOLDER / page).read_text()
    ratios = [c["ratio"] for c in RESULTS[benchmark]["claims"] if c["ratio"] is not None]
    forms = [{f"{ratio:.{digits}f}" for digits in (1, 2, 3)} for ratio in ratios]
    pattern = r"(?<![\d.])(?:{})(?!\d)"
    return sum(bool(re.search(pattern.format("|".join(map(re.escape, f))), text)) for f in forms)


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_shows_the_figures_of_the_log(page):
    """If a figure changes on the page or in the log alone, one is missing here.

    Change the other, too. Change the number only if the page shows more or fewer claims.
    """
    assert {benchmark: shown(page, benchmark) for benchmark in SHOWN[page]} == SHOWN[page]
