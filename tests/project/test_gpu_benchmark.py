"""The benchmark for GPUs, at sizes for a CPU."""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks import gpu

PROGRAMS = [(case, name) for case, (programs, *_) in gpu.CASES.items() for name in programs]
QUICK = [(case, name) for case, name in PROGRAMS if name != gpu.HALF]


@pytest.mark.sweep(21)
@pytest.mark.parametrize(("case", "name"), QUICK)
def test_programs_run_and_report_bytes_and_seconds(case, name):
    with jax.numpy_rank_promotion("allow"):  # the baselines promote ranks
        result = gpu.measure(case, name, tiny=True)
    assert result["predicted"] > 0
    assert result["seconds"] > 0
    assert result.get("in_place", 1) == 1
    assert ("in_place" in result) == (case in ("train step", "Adam"))


@pytest.mark.slow
def test_budget_halves_the_predicted_bytes():
    plain, half = (gpu.measure("train step", name, tiny=True) for name in (gpu.PLAIN, gpu.HALF))
    assert half["predicted"] <= plain["predicted"] / 2


def test_programs_are_skipped_when_the_time_is_over(monkeypatch):
    def run(command, seconds):
        if "--worker" not in command:
            raise RuntimeError("no such recipe")
        if "fused loss" in command:
            raise subprocess.TimeoutExpired(command, seconds)
        return json.dumps({"predicted": 100, "measured": None, "seconds": 1.0})

    monkeypatch.setattr(gpu, "_run", run)
    results, failed = gpu.run_all(minutes=1.0, tiny=True, parallel=1)
    assert list(results) == [f"{c}, {n}" for c, n in PROGRAMS if c != "fused loss"]
    assert failed == [
        "fused loss, optax: more than 60 s",
        "fused loss, fnet: more than 60 s",
        "recipe text_transformer: no such recipe",
    ]
    assert gpu.run_all(minutes=-1.0, tiny=True, parallel=1)[0] == {}


def test_claims_compare_with_the_baseline_and_with_the_prediction():
    results = {
        "fused loss, optax": {"predicted": 990e6, "measured": 1000e6, "seconds": 1.0},
        "fused loss, fnet": {
            "predicted": 300e6,
            "measured": 332e6,
            "seconds": 1.2,
            "estimated": 0.9,
        },
        "train step, plain": {"predicted": 1e6, "measured": None, "seconds": 1.0, "in_place": 0.5},
    }
    figures = {c.claim: (c.ratio, c.met) for c in gpu.claims(results)}
    assert figures == {
        "fused loss, fnet: peak": (0.332, True),
        "fused loss, fnet: time": (1.2, False),
        "fused loss, optax: difference of predicted and measured peak": (10 / 49.5, True),
        "fused loss, fnet: difference of predicted and measured peak": (2.0, False),
        "fused loss, fnet: estimated seconds": (0.75, True),
        "train step, plain: share of the state's buffers that are updated in place": (0.5, False),
    }


@pytest.mark.slow
def test_whole_benchmark_in_processes_of_its_own(tmp_path):
    written = tmp_path / "claims.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--json", str(written)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "skipped" not in done.stdout
    names = list(json.loads(written.read_text())["data"])
    assert names == [*(f"{c}, {n}" for c, n in PROGRAMS), "recipe text_transformer"]
