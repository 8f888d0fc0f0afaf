"""Faults during a run: a full disk, a signal during a save, nonfinite gradients."""

import json
import shutil
import signal
import subprocess

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from program_cases import assert_one_line_error, exit_code, final_state, fnet_command

import fnet
from train.config import Config, Digits, Mlp
from train.run import planning
from train.run.checkpoints import Checkpoints
from train.run.setup import setup
from train.run.skipped_steps import SkippedSteps


@pytest.fixture
def small_disk(workplace):
    """A file system of 2 MiB."""
    place = workplace / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs leave to mount a file system: {error}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_keeps_saved_checkpoints(small_disk, capsys):
    run = small_disk / "run"
    often = "--checkpoint.every", 1, "--checkpoint.keep", 1000, "--train.steps", 1000
    assert exit_code("train", "tiny.py", "--out", run, *often) == 1
    assert_one_line_error(capsys, "No space left on device")
    with Checkpoints(run / "checkpoints") as checkpoints:
        saved = checkpoints.latest_step
    assert saved > 0
    for step in range(1, 5):  # frees space
        shutil.rmtree(run / "checkpoints" / str(step))
    fnet_command("train", "tiny.py", "--out", run, "--resume", "--train.steps", saved)
    assert f"resumed after step {saved} of {saved}" in capsys.readouterr().out


def test_a_signal_during_a_save_loses_nothing(workplace, finished_run, monkeypatch):
    write = ocp.PyTreeCheckpointHandler.async_save
    steps = iter((3, 4, 6, 8))

    async def interrupted(*args, **named):
        writing = await write(*args, **named)
        if next(steps) == 3:
            assert not (workplace / "parts" / "checkpoints" / "3").exists()  # still being written
            signal.raise_signal(signal.SIGTERM)
        return writing

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "async_save", interrupted)
    fnet_command("train", "tiny.py", "--out", "parts")
    there = {p.name for p in (workplace / "parts" / "checkpoints").iterdir()}
    assert there == {"3", "4"}
    fnet_command("train", "tiny.py", "--out", "parts", "--resume")
    chex.assert_trees_all_equal(final_state(finished_run), final_state(workplace / "parts"))


def test_reports_the_layer_of_a_nonfinite_gradient(tmp_path):
    """The forward pass is finite; the gradient of one example is not."""
    network = Mlp(hidden=()).build((8, 8, 1), 10)

    def apply(params, state, x, *, key=None, train):
        y, state = network.apply(params, state, x, key=key, train=train)
        with jax.named_scope("bad_layer"):
            bad = (x > 1.5).any((1, 2, 3))[:, None]
            zero = y - jax.lax.stop_gradient(y)  # at which the square root has no derivative
            return y * jnp.sqrt(jnp.where(bad, zero, 1.0)), state

    def loss(params, state, batch, key):
        y, state = apply(params, state, batch["image"], train=True)
        return fnet.losses.cross_entropy(y, batch["label"]), fnet.Aux(state, {})

    run = setup(Config(data=Digits(batch_size=4), model=Mlp(hidden=())))
    run = run._replace(step=run.step.replace(loss=loss), task=run.task._replace(loss=loss))
    state, batch = run.init(jax.random.key(0)), dict(next(run.training_batches(0)))
    batch["image"] = batch["image"].copy()
    batch["image"][2] = 2.0  # the others are in [0, 1]
    state, metrics = run.step(state, batch)
    skipped = SkippedSteps(run, tmp_path / "bad.jsonl", print)
    skipped.add(1, batch, metrics)
    skipped.check(state, wait=True)
    bad = json.loads((tmp_path / "bad.jsonl").read_text())
    assert "bad_layer" in bad["origin"]
    assert bad["rows"] == batch["row"].tolist()
    assert np.isfinite(float(bad["loss"]))
    assert not np.isfinite(float(bad["grad_norm"]))
    chex.assert_tree_all_finite(state.params)


@pytest.mark.slow
def test_reports_a_nonfinite_parameter_and_does_not_save_it(
    workplace, finished_run, monkeypatch, capsys
):
    class Spoiling(planning.StepCache):
        """Set one parameter to infinity after the third step."""

        def __call__(self, state, batch):
            state, metrics = super().__call__(state, batch)
            if state.step == 3:
                state.params["head"]["bias"] = state.params["head"]["bias"].at[2].set(jnp.inf)
            return state, metrics

    with monkeypatch.context() as patch:
        patch.setattr(planning, "StepCache", Spoiling)
        few = "--nonfinite.max-skipped", 2, "--checkpoint.every", 2
        assert exit_code("train", "tiny.py", *few, "--out", "r") == 1
    assert "params['head']['bias'] has inf" in capsys.readouterr().err
    assert {p.name for p in (workplace / "r" / "checkpoints").iterdir()} == {"2"}
    bad = map(json.loads, (workplace / "r" / "bad_steps.jsonl").read_text().splitlines())
    assert [line["step"] for line in bad] == [4, 5, 6]
    fnet_command("train", "tiny.py", "--out", "r", "--resume")
    chex.assert_trees_all_equal(final_state(finished_run), final_state(workplace / "r"))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (0, "8 of 8 steps were skipped, so that nothing was trained"),
        (3, "test loss is nan after the last step"),
    ],
)
def test_a_run_that_ends_with_nan_fails(first, message, workplace, monkeypatch, capsys):
    class Spoiling(planning.StepCache):
        """Set one parameter and its average to NaN before a step."""

        def __call__(self, state, batch):
            if state.step == first:
                for tree in (state.params, state.ema):
                    tree["head"]["bias"] = tree["head"]["bias"].at[2].set(jnp.nan)
            return super().__call__(state, batch)

    monkeypatch.setattr(planning, "StepCache", Spoiling)
    many = "--nonfinite.max-skipped", 20, "--train.steps", 8
    assert exit_code("train", "tiny.py", *many, "--out", "r") == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert (workplace / "r" / "checkpoints" / "8").is_dir()
    if first:
        assert "5 of 8 steps were skipped; their examples are in r/bad_steps" in captured.out
