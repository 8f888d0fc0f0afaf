"""Predicted steps: what a table of devices says, and the largest batch that fits."""

from types import SimpleNamespace

import numpy as np
import pytest

from fnet import memory
from fnet.memory.roofline import Estimate
from train.commands.memory import _largest_batch
from train.output.memory_tables import plan_table
from train.run import planning
from train.run.planning import Planned, devices_table, largest_batch

IMAGES = {"image": np.zeros((8, 4, 4, 3), np.uint8), "label": np.zeros(8)}
ESTIMATE = Estimate(0.5, {"float32": 4.0}, 8.0, 3 * 2.0**20, {"memory": 0.75, "compute": 0.25})


def planned(total, *, shapes=IMAGES, devices=1, size=8, **fields):
    data = SimpleNamespace(batch_size=size)
    run = SimpleNamespace(
        config=SimpleNamespace(data=data), batch_shapes=shapes, devices=devices, size=size
    )
    executable = SimpleNamespace(report=SimpleNamespace(peak=SimpleNamespace(total=total)))
    return Planned(run, executable, **{"policy": "none", "microbatches": 1} | fields)


def test_a_table_of_devices_has_what_a_step_takes_on_each():
    known = {"estimate": ESTIMATE, "utilization": 0.375, "target": SimpleNamespace(name="h100")}
    fits = planned(3 * 2**20, limit=3 * 2**20, **known)
    large = planned(3 * 2**20, limit=3 * 2**20 - 1, microbatches=2, policy="segments")
    table = devices_table([fits, large])
    assert table.columns[5] == "images / s"
    assert [*table.rows] == [
        ("h100", "none", "8", "3.00 MiB", "0.5", "16", "38%", "memory"),
        ("this machine", "segments / 2", "8", "3.00 MiB too large", *"???", "rates unknown"),
    ]
    assert [*table.styles] == ["", "dim"]
    tokens = {"tokens": np.zeros((8, 33), np.int32)}  # of a row, the last is only a target
    table = devices_table([planned(2**20, shapes=tokens, devices=2, **known), large])
    assert (table.columns[5], table.columns[-1]) == ("tokens / s", "sent")
    assert [row[-1] for row in table.rows] == ["3.00 MiB", "?"]
    assert table.rows[0][5] == f"{8 * 32 / 0.5:,.0f}"


@pytest.mark.parametrize("limit", [3000, 3600, 7000, 20_000, 20_001])
@pytest.mark.parametrize(("policy", "chosen"), [("auto", "segments"), ("none", "none")])
def test_the_largest_batch_is_that_of_the_policy_that_takes_less(
    policy, chosen, limit, monkeypatch
):
    bytes_of = {"none": lambda n: 1000 + 70 * n, "segments": lambda n: 1400 + 20 * n}

    def run(size):
        fields = {"config": SimpleNamespace(memory=SimpleNamespace(policy=policy))}
        fields["config"].data = SimpleNamespace(batch_size=size)
        fields |= {"step": SimpleNamespace(microbatches=2), "devices": 3, "size": size}
        return SimpleNamespace(with_batch_size=lambda size, microbatches: run(size), **fields)

    def analyze(run, policy, target):
        return planned(bytes_of[policy](run.size), size=run.size, policy=policy)

    monkeypatch.setattr(planning, "analyze", analyze)
    monkeypatch.setattr(planning, "reserve", lambda run, target: 5 * run.size)
    lines = []
    found = largest_batch(run(24), limit, progress=lines.append)
    fit = [n for n in range(6, 2000, 6) if bytes_of[chosen](n) + 5 * (n - 24) <= limit]
    assert (found.run.size, found.policy) == (fit[-1], chosen)
    needs = memory.format_bytes(bytes_of[chosen](fit[-1]))
    assert f"searching the largest batch size: {fit[-1]} needs {needs}" in lines
    assert largest_batch(run(24), 1000) is None
    found.run.devices, found.run.config.memory = 3, SimpleNamespace(budget=None)
    assert f"{fit[-1]}, {fit[-1] // 3} for each of 3 devices; train with" in _largest_batch(found)


def test_a_table_of_a_plan_says_what_is_chosen_and_what_is_too_large():
    def candidate(total, time, flops=2e9):
        cost = SimpleNamespace(time=time, flops=flops, bytes=3e9)
        policy = SimpleNamespace(chunks=4)
        peak = SimpleNamespace(total=total)
        fields = {"cost": cost, "policy": policy, "peak": peak, "microbatches": 2}
        return SimpleNamespace(compiler_options={}, **fields)

    candidates = [candidate(900, 2.0), candidate(901, 1.0), candidate(800, 3.0)]
    plan = SimpleNamespace(candidates=candidates, chosen=candidates[0], budget=1000)
    table = plan_table(plan, reserve=100)
    assert [row[1:] for row in table.rows] == [
        ("default", "2", "4", "900 bytes", "2.0", "3.0", "2.00", "chosen"),
        ("default", "2", "4", "901 bytes", "2.0", "3.0", "1.00", "too large"),
        ("default", "2", "4", "800 bytes", "2.0", "3.0", "3.00", ""),
    ]
    plan.chosen, plan.budget = candidates[2], None
    assert [row[-1] for row in plan_table(plan, 100).rows] == ["", "", "chosen"]
