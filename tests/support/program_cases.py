"""Helpers to run the program in this process, with a recipe that trains in a second."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from train import cli
from train.run.checkpoints import Checkpoints, without_frozen
from train.run.run_folder import RunFolder
from train.run.setup import setup

TINY = """
from train.config import Checkpoint, Config, Digits, Optim, PreactResNet, Train

def config():
    return Config(
        name="tiny",
        data=Digits(batch_size=16),
        model=PreactResNet(widths=(4,), blocks_per_stage=1),
        optim=Optim(learning_rate=0.05, ema_decay=0.9),
        train=Train(steps=8, log_every=2, eval_every=4),
        checkpoint=Checkpoint(every=3, best=False),
    )
"""

PRIVATE = """
from train.config import Checkpoint, Clipped, Config, Digits, Mlp, Optim, Train

def config():
    return Config(
        name="private",
        data=Digits(batch_size=64),
        model=Mlp(hidden=()),
        optim=Optim(learning_rate=0.5, momentum=0.0, schedule="constant", ema_decay=0.9),
        grad=Clipped(noise_multiplier=1.0, delta=1e-5),
        train=Train(steps=4, log_every=2, eval_every=2),
        checkpoint=Checkpoint(every=3),
    )
"""


def fnet_command(*words):
    cli.main([str(w) for w in words])


def output_of(capsys, *words):
    fnet_command(*words)
    return capsys.readouterr().out


def exit_code(*words):
    with pytest.raises(SystemExit) as exit_:
        fnet_command(*words)
    return exit_.value.code


def assert_one_line_error(capsys, message):
    """Assert that the program printed one line with this message as its error."""
    error = capsys.readouterr().err
    assert error.startswith("fnet: "), error
    assert message in error, error
    assert error.count("\n") == 1, error


def metrics_of(folder):
    """Return the lines of a run's metrics, without times and without the first, of the run."""
    text = RunFolder(folder).metrics.read_text()
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    times = {"seconds", "examples_per_second", "input_wait"}
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


def assert_same_private_metrics(folder, other):
    """Compare metrics, where the epsilon of a line of progress is computed on a coarser grid."""
    for line, expected in zip(metrics_of(folder), metrics_of(other), strict=True):
        epsilon = pytest.approx(expected.pop("privacy/epsilon"), rel=0.01)
        assert line.pop("privacy/epsilon") == epsilon
        assert line == expected


def final_state(folder):
    """Return the content of the newest checkpoint as arrays."""
    config = RunFolder(folder).read_config()
    with Checkpoints(RunFolder(folder).checkpoints, 2) as checkpoints:
        restored = checkpoints.restore(setup(config).state_shapes)
    state = restored.state
    arrays = restored.step, state.params, state.model_state, state.opt_state, state.ema
    key = jax.random.key_data(jax.random.clone(state.key))
    return jax.tree.map(np.asarray, (*arrays, key)), restored.position


def state_of(arrays, size):
    """Return a state with parameters of that many arrays."""
    key, other = jax.random.split(jax.random.key(0))
    params = list(jax.random.normal(key, (arrays, size)))
    return fnet.TrainState(jnp.int32(0), params, {}, (), None, other)


def initial_run(path, config, change=lambda params: params):
    """Write a run with a checkpoint of its initial values, changed or not; return its folder."""
    folder = RunFolder(Path(path))
    folder.create()
    folder.write_config(config)
    run = setup(config)
    state = run.compile_init()(jax.random.key(0))
    state = state.replace(params=change(state.params))
    with Checkpoints(folder.checkpoints, 1) as checkpoints:
        checkpoints.save(0, without_frozen(state), {})
    return folder
