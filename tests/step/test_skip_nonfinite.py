"""Nonfinite steps: skipped, reported with layer and examples, and limited in number."""

import json
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from program_cases import exit_code, fnet_command

import fnet
from fnet import layers
from train import data
from train.config import Digits
from train.errors import TrainingError
from train.run.skipped_steps import SkippedSteps

NET = fnet.serial(
    conv=layers.conv(1, 2),
    abn=layers.abn(2),
    pool=layers.global_avg_pool(),
    head=layers.dense(2, 3),
)
OPTIMIZER = optax.adam(0.1)


def loss(params, state, batch, key):
    logits, state = NET.apply(params, state, batch["image"], key=key, train=True)
    return fnet.losses.cross_entropy(logits, batch["label"]), fnet.Aux(state, {})


def batch_of(value):
    image = jax.random.normal(jax.random.key(1), (4, 5, 5, 1))
    return {"image": image.at[1, 2, 3].multiply(value), "label": jnp.arange(4) % 3}


def created():
    return fnet.TrainState.create(NET, OPTIMIZER, jax.random.key(0), ema=True)


def arrays(state):
    return jax.tree.map(np.asarray, (state.params, state.model_state, state.opt_state, state.ema))


@pytest.fixture(scope="module")
def step():
    return fnet.make_step(loss, OPTIMIZER, ema_decay=0.9, skip_nonfinite=True)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_nonfinite_step_changes_only_the_step_count(value, step):
    before = arrays(created())
    state, metrics = step(created(), batch_of(value))
    assert (metrics["skipped"], state.step) == (1, 1)
    chex.assert_trees_all_equal(arrays(state), before)


def test_finite_steps_do_not_depend_on_skip_nonfinite(step):
    plain = fnet.make_step(loss, OPTIMIZER, ema_decay=0.9)
    expected, _ = plain(created(), batch_of(1))
    state, metrics = step(created(), batch_of(1))
    assert metrics["skipped"] == 0
    chex.assert_trees_all_close(arrays(state), arrays(expected), rtol=1e-6)


def test_skip_nonfinite_updates_the_state_in_place(step):
    shapes = jax.eval_shape(created)
    compiled = fnet.compile_step(step, shapes, batch_of(1), compiler_options={})
    assert compiled.report.donation.leaves == len(jax.tree.leaves(shapes))


def test_fused_optimizer_rejects_skip_nonfinite():
    mode = fnet.autodiff.optimizer_in_backward("blocks")
    with pytest.raises(
        ValueError, match="skip_nonfinite needs the whole gradient before the update"
    ):
        fnet.make_step(loss, OPTIMIZER, mode, skip_nonfinite=True)


@pytest.mark.parametrize("mode", [fnet.autodiff.clipped, fnet.autodiff.AdaptiveClipping])
def test_private_modes_reject_skip_nonfinite(mode):
    # If all examples were skipped, the parameters would not change.
    fnet.make_step(loss, OPTIMIZER, mode(1.0), skip_nonfinite=True)
    noised = mode(1.0, noise_multiplier=1.0, expected_batch_size=32)
    with pytest.raises(ValueError, match="a skipped step reveals its examples"):
        fnet.make_step(loss, OPTIMIZER, noised, skip_nonfinite=True)


def test_adaptive_clipping_keeps_its_clip_in_a_skipped_step():
    """The mode itself drops single examples with a nonfinite gradient; here all have one."""
    mode = fnet.autodiff.AdaptiveClipping(0.1)
    optimizer = mode.wrap_optimizer(OPTIMIZER)
    net = fnet.serial(pool=layers.global_avg_pool(), head=layers.dense(1, 3))

    def loss(params, state, batch, key):
        logits, state = net.apply(params, state, batch["image"], key=key, train=True)
        return fnet.losses.cross_entropy(logits, batch["label"]), fnet.Aux(state, {})

    def created():
        return fnet.TrainState.create(net, optimizer, jax.random.key(0))

    step, before = fnet.make_step(loss, optimizer, mode, skip_nonfinite=True), arrays(created())
    nothing = jnp.nan * batch_of(1)["image"]
    state, metrics = step(created(), batch_of(1) | {"image": nothing})
    assert metrics["skipped"] == 1
    chex.assert_trees_all_equal(arrays(state), before)
    state, metrics = step(state, batch_of(1))
    assert metrics["skipped"] == 0
    assert state.opt_state.value != before[2].value


@pytest.fixture
def with_nan_images(monkeypatch):
    """``with_nan_images(rows)``: let these training images of the digits be NaN."""

    def set_rows(rows):
        read = Digits.load

        def load(config, **options):
            dataset = read(config, **options)
            image = np.array(dataset.train["image"], np.float32)
            image[list(rows)] = np.nan
            return dataset._replace(train=dataset.train | {"image": image})

        monkeypatch.setattr(Digits, "load", load)

    return set_rows


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_skips_steps_with_bad_examples_and_reports_them(workplace, with_nan_images, capsys):
    with_nan_images([5])
    few = "--data.test-fraction", 0.9, "--train.steps", 24, "--train.eval-every", 24
    fnet_command("train", "tiny.py", *few, "--train.log-every", 8, "--out", "r")
    printed = capsys.readouterr().out
    bad = lines(workplace / "r" / "bad_steps.jsonl")
    # An epoch has 179 / 16 steps, and each example occurs once in it.
    assert len(bad) == 2
    assert all(5 in line["rows"] and "5" in line["examples"] for line in bad)
    assert all(line["origin"] == "batch['image'] has nan" for line in bad)
    assert f"skipped step {bad[0]['step']}: loss nan" in printed
    recorded = [
        line for line in lines(workplace / "r" / "metrics.jsonl") if "train/skipped" in line
    ]
    assert sum(line["train/skipped"] for line in recorded) == 2
    assert all(np.isfinite(line["train/loss"]) for line in recorded)


@pytest.mark.slow
def test_saves_nothing_after_a_nonfinite_loss(workplace, with_nan_images, capsys):
    fnet_command("train", "tiny.py", "--nonfinite.no-skip", "--train.steps", 4, "--out", "r")
    with_nan_images(range(1437))
    words = "train", "tiny.py", "--out", "r", "--resume", "--nonfinite.no-skip"
    assert exit_code(*words, "--train.steps", 20, "--train.log-every", 20) == 1
    error = capsys.readouterr().err
    assert "the loss is nan at step 5; the last checkpoint is from before" in error
    assert {p.name for p in (workplace / "r" / "checkpoints").iterdir()} == {"3", "4"}


def test_a_nonfinite_loss_ends_the_run_without_skipping(workplace, with_nan_images, capsys):
    with_nan_images(range(1437))
    assert exit_code("train", "tiny.py", "--nonfinite.no-skip", "--out", "r") == 1
    assert "the loss is nan at step 1" in capsys.readouterr().err


def test_batches_contain_the_rows_of_their_examples():
    dataset = data.Dataset(
        train={"x": np.arange(10) * 10},
        test={"x": np.arange(2)},
        classes=(),
        augment=lambda rows, generator: {"y": rows["x"] + 1},
    )
    batches = data.training_batches(dataset, 4, seed=0)
    for _ in range(3):
        batch = next(batches)
        np.testing.assert_array_equal(batch["y"], batch["row"] * 10 + 1)
    assert data.sample_batch(dataset, 4)["row"].shape == (4,)


def test_skipped_steps_are_recorded_and_too_many_consecutive_ones_end_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(SkippedSteps, "_find_source", lambda self, taken, state: "somewhere")
    section, dataset = types.SimpleNamespace(max_skipped=2), types.SimpleNamespace(name=str)
    run = types.SimpleNamespace(
        config=types.SimpleNamespace(nonfinite=section), task=types.SimpleNamespace(dataset=dataset)
    )
    output = []
    guard = SkippedSteps(run, tmp_path / "bad_steps.jsonl", output.append)

    def take(step, skipped):
        nan = {"skipped": np.float32(skipped), "loss": np.nan, "grad_norm": np.nan}
        guard.add(step, {"row": np.array([7, 3, 7]), "weight": np.array([1, 1, 0])}, nan)
        guard.check(None, wait=True)

    for step, skipped in enumerate([1, 1, 0, 1, 1], 1):
        take(step, skipped)
    message = "skipped 3 consecutive steps, up to step 6: their loss .* was not finite .*somewhere"
    with pytest.raises(TrainingError, match=message):
        take(6, 1)
    # The first of each.
    assert [words.split(":")[0] for words in output] == ["skipped step 1", "skipped step 4"]
    bad = lines(tmp_path / "bad_steps.jsonl")
    assert [line["step"] for line in bad] == [1, 2, 4, 5, 6]
    assert all(line["origin"] == "somewhere" and line["rows"] == [7, 3] for line in bad)
    assert all(line["examples"] == ["3", "7"] for line in bad)
