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
from train.config import Digits, PreactResNet
from train.run import planning
from train.run.checkpoints import Checkpoints


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_reports_the_layer_of_a_nonfinite_gradient(workplace, monkeypatch):
    """The forward pass is finite; the gradient of one example is not."""

    read = Digits.load

    def load(config, **options):
        dataset = read(config, **options)
        image = np.array(dataset.train["image"], np.float32)
        image[5] = 2.0  # the others are in [0, 1]
        return dataset._replace(train=dataset.train | {"image": image})

    monkeypatch.setattr(Digits, "load", load)

    build = PreactResNet.build

    def with_bad_layer(self, *shape):
        inner = build(self, *shape)

        def apply(params, state, x, *, key=None, train):
            y, state = inner.apply(params, state, x, key=key, train=train)
            with jax.named_scope("bad_layer"):
                bad = (x > 1.5).any((1, 2, 3))[:, None]
                zero = y - jax.lax.stop_gradient(y)  # at which the square root has no derivative
                return y * jnp.sqrt(jnp.where(bad, zero, 1.0)), state

        return fnet.Layer(inner.init, apply)

    monkeypatch.setattr(PreactResNet, "build", with_bad_layer)
    few = "--data.test-fraction", 0.9, "--train.steps", 12, "--train.eval-every", 12
    fnet_command("train", "tiny.py", *few, "--out", "r")
    (bad,) = map(json.loads, (workplace / "r" / "bad_steps.jsonl").read_text().splitlines())
    assert "bad_layer" in bad["origin"]
    assert 5 in bad["rows"]
    assert np.isfinite(float(bad["loss"]))
    assert not np.isfinite(float(bad["grad_norm"]))
    chex.assert_tree_all_finite(final_state(workplace / "r"))


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


@pytest.mark.sweep(6)
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
