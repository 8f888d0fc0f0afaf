"""The benchmark of the attention context: its data, its rule, and a short run."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from benchmarks import attention_context as benchmark


def test_recall_asks_for_each_key_once_and_scores_its_value():
    batch = benchmark.recall_rows(np.random.default_rng(0), 5, pairs=4, keys=8)
    for tokens, scored in zip(batch["tokens"], batch["scored"], strict=True):
        value_of = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
        assert len(value_of) == 4
        assert sorted(tokens[8::2]) == sorted(value_of)
        labels = tokens[1:][scored == 1]
        assert labels.tolist() == [value_of[key] for key in tokens[8::2]]
        assert labels.min() >= 8 > tokens[::2].max()


def test_copies_the_symbols_in_their_order():
    batch = benchmark.copy_rows(np.random.default_rng(0), 5, items=3, length=10, symbols=4)
    for tokens, scored in zip(batch["tokens"], batch["scored"], strict=True):
        noisy = tokens[:10]
        labels = tokens[1:][scored == 1]
        assert labels.tolist() == noisy[noisy > 0].tolist()
        assert len(labels) == 3
        assert tokens[10] == 1


def test_chains_change_every_period():
    batches = benchmark.chain_batches(16, 64, 1, 2 * benchmark.PERIOD, chains=2, symbols=4, alpha=1)
    counts = np.zeros((2, 4, 4))
    for step, batch in enumerate(batches):
        tokens = batch["tokens"]
        np.add.at(counts[step // benchmark.PERIOD], (tokens[:, :-1], tokens[:, 1:]), 1)
    first, second = counts / counts.sum(-1, keepdims=True)
    assert np.abs(first - second).max() > 0.3


def test_seeds_of_the_comparison_have_other_examples_than_the_selection(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(np.random.default_rng(0).integers(32, 127, 130_000, np.uint8)))
    for task in benchmark.tasks(text):
        if task.held_out is None:
            continue
        rows = [
            {row.tobytes() for row in next(iter(task.held_out(seed).values()))}
            for seed in (benchmark.SELECTION, 1)
        ]
        assert not rows[0] & rows[1], task.name


@pytest.mark.parametrize("shift", [-0.02, 0.0, 0.005, 0.02])
def test_sign_agrees_with_the_t_test_of_scipy(shift):
    differences = (np.array([-0.01, 0.0, 0.02, -0.015, 0.005]) / 2 + shift).tolist()
    test = scipy.stats.ttest_1samp(differences, 0)
    expected = 0 if test.pvalue >= 0.05 else int(np.sign(shift))
    assert benchmark.sign(differences) == expected


@pytest.mark.parametrize(
    ("groups", "verdict"),
    [
        ([[1, 1.1, 0.9]], "no difference"),  # not confirmed
        ([[1, 1.1, 0.9], [1, 1.2, 0.9]], "hurts"),
        ([[-1, -1.1, -0.9], [-1, -1.2, -0.9]], "helps"),
        ([[-1, -1.1, -0.9], [1, 1.2, 0.9]], "no difference"),
        ([[-1, -1.1, -0.9], [-1, 1.2, -0.9]], "no difference"),
    ],
)
def test_verdict_needs_two_groups_of_seeds(groups, verdict):
    results = [
        {"none": [{"loss": 2.0}] * 3, "lagged": [{"loss": 2 + d} for d in differences]}
        for differences in groups
    ]
    assert benchmark.Comparison(None, {}, results).verdict("lagged") == verdict


def test_page_has_the_losses_of_the_last_run():
    folder = Path(__file__).parents[2] / "docs/benchmarks"
    page = (folder / "attention_context.md").read_text()
    results = json.loads((folder / "benchmarks.json").read_text())["results"]
    for task in results["attention_context"]["data"].values():
        for losses in task["losses"]:
            cells = [benchmark.spread(losses["none"])]
            for form in ("lagged", "current"):
                cells.append(benchmark.spread(np.subtract(losses[form], losses["none"]).tolist()))
            assert " | ".join(cells) in page


@pytest.fixture
def tiny(monkeypatch):
    """A task of 20 steps whose network has width 8."""
    monkeypatch.setattr(benchmark, "WIDTH", 8)
    monkeypatch.setattr(benchmark, "ROWS", 2)
    make_rows = functools.partial(benchmark.recall_rows, pairs=2, keys=4)
    return benchmark.synthetic("tiny", "recall", make_rows, 8, benchmark.attention, 20)


@pytest.mark.slow
def test_one_program_trains_with_any_boost_of_the_strengths(tiny):
    trainer = benchmark.Trainer(tiny, "lagged", 0.3)
    still, slow, fast = (trainer.run(3e-3, boost, 1) for boost in (0.0, 1.0, 30.0))
    assert still["term"] == [0.0] < slow["term"] < fast["term"]
    assert still["loss"] != fast["loss"]
    assert (still["parameters"] - fast["parameters"], still["state"]) == (0, 8 * 8)
    assert trainer.run(3e-3, 1.0, 1)["loss"] == slow["loss"]


@pytest.mark.slow
def test_short_run_trains_every_form_and_resumes(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be " * 8_000)
    monkeypatch.setattr(benchmark, "WIDTH", 8)
    monkeypatch.setattr(benchmark, "ROWS", 2)
    words = f"--path {text} --quick --tasks copy --out {tmp_path}/runs --json {tmp_path}/x.json"
    benchmark.main(words.split())
    printed = capsys.readouterr().out
    assert "| selective copying, 2 RG-LRU blocks | lagged | 0.003 | 0.01 | 1 |" in printed
    claims = json.loads((tmp_path / "x.json").read_text())["claims"]
    assert [c["kind"] for c in claims] == ["count", "count"]
    assert all(1 < c["ratio"] < 1.5 for c in claims)
    losses = json.loads((tmp_path / "x.json").read_text())["data"]["copy"]["losses"]
    assert [list(map(len, group.values())) for group in losses] == [[2, 2, 2]]

    monkeypatch.setattr(benchmark.Trainer, "__init__", None)
    benchmark.main(words.split())  # all runs are saved
