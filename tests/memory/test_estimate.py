"""Estimated peaks of traced steps against those of compiled ones."""

import example_losses
import jax
import numpy as np
import optax
import pytest

from benchmarks.random_losses import random_loss
from fnet import memory
from fnet.memory.estimate import estimate_step

allow_rank_promotion = pytest.fixture(autouse=True)(example_losses.allow_rank_promotion)


def estimate_and_peak(loss, params, batch, optimizer):
    shapes = jax.eval_shape(optimizer.init, params)
    has_aux = isinstance(jax.eval_shape(loss, params, batch), tuple)

    def step(params, moments, batch):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, shapes, batch)
    lowered = traced.lower()
    options = memory.CANDIDATE_OPTIONS["cpu"]
    peak = min(memory.estimate_peak(lowered, o).assigned for o in options)
    return estimate_step(traced.jaxpr, len(jax.tree.leaves((params, shapes)))), peak


def of_random_step(seed):
    program = random_loss(seed, 3)[1]
    with jax.debug_key_reuse(False):
        return estimate_and_peak(program.loss, program.params, program.batch, program.optimizer())


def loss_of(layer):
    def loss(params, x):
        for w in params:
            x = x + layer(x @ w)
        return jax.numpy.square(x).mean()

    return loss


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.numpy.tanh, jax.nn.gelu])
def test_layers_are_estimated_to_within_two_arrays(activation, checkpoint):
    layer = jax.checkpoint(activation) if checkpoint else activation
    params, x = [0.1 * np.eye(64, dtype=np.float32)] * 6, np.ones((2048, 64), np.float32)
    estimated, peak = estimate_and_peak(loss_of(layer), params, x, optax.adam(1e-3))
    assert abs(estimated - peak) < 2.1 * x.nbytes


@pytest.mark.parametrize("seed", [0, 3, 4, 7, 22])
def test_random_steps_are_estimated(seed):
    estimated, peak = of_random_step(seed)
    assert estimated == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
def test_most_random_steps_are_estimated_within_5_percent_or_1_megabyte():
    pairs = [of_random_step(seed) for seed in range(60)]
    near = [abs(e - p) <= max(0.05 * p, 1e6) for e, p in pairs]
    assert np.mean(near) >= 0.9
    assert np.median([abs(e / p - 1) for e, p in pairs]) < 0.05
