"""Estimated peaks of traced steps against those of compiled ones."""

import jax
import numpy as np
import optax
import pytest

from benchmarks.random_losses import random_loss
from fnet import memory
from fnet.memory.assemble import Step

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")


def estimate_and_peak(loss, params, batch, optimizer):
    shapes = jax.eval_shape(optimizer.init, params)
    has_aux = isinstance(jax.eval_shape(loss, params, batch), tuple)

    def step(params, moments, batch):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, shapes, batch)
    options = memory.CANDIDATE_OPTIONS["cpu"]
    peak = min(memory.estimate_peak(traced.lower(), o).assigned for o in options)
    donated = [a.donated for a in jax.tree.leaves(traced.args_info)]
    return Step(traced.jaxpr, donated).estimate()[0], peak


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.numpy.tanh, jax.nn.gelu])
def test_layers_are_estimated_to_within_two_arrays(activation, checkpoint):
    layer = jax.checkpoint(activation) if checkpoint else activation

    def loss(params, x):
        for w in params:
            x = x + layer(x @ w)
        return jax.numpy.square(x).mean()

    params, x = [0.1 * np.eye(64, dtype=np.float32)] * 6, np.ones((2048, 64), np.float32)
    estimated, peak = estimate_and_peak(loss, params, x, optax.adam(1e-3))
    assert abs(estimated - peak) < 2.1 * x.nbytes


@pytest.mark.slow
def test_most_random_steps_are_estimated_within_5_percent_or_1_megabyte():
    programs = [random_loss(seed, 3)[1] for seed in range(60)]
    with jax.debug_key_reuse(False):
        pairs = [estimate_and_peak(*p[:3], p.optimizer()) for p in programs]
    assert np.mean([abs(e - p) <= max(0.05 * p, 1e6) for e, p in pairs]) >= 0.9
    assert np.median([abs(e / p - 1) for e, p in pairs]) < 0.05
