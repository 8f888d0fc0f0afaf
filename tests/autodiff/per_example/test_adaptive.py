"""Adaptive clipping: the bound, its noise and the state of the wrapped optimizer."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet
from fnet.autodiff import AdaptiveClipping, adapt_clip
from fnet.layer import Layer

MODEL = Layer(lambda key: ({"w": jnp.zeros(3)}, {}), None)


def loss(params, state, batch, key):
    """The per-example gradients are the rows of the batch."""
    return batch["x"] @ params["w"], fnet.Aux(state, {})


def steps(mode, batch, n, *, learning_rate=0.0):
    """The last state, the metrics of n steps, and the memory report."""
    optimizer = mode.wrap_optimizer(optax.sgd(learning_rate))
    state = fnet.TrainState.create(MODEL, optimizer, jax.random.key(0))
    step = fnet.make_step(loss, optimizer, mode)
    step = fnet.compile_step(step, state, batch, compiler_options={})
    history = []
    for _ in range(n):
        state, metrics = step(state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history, step.report


def batch_with_norms(norms):
    """A batch whose gradients have these norms."""
    directions = np.random.default_rng(0).standard_normal((len(norms), 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return {"x": jnp.asarray(directions * np.asarray(norms)[:, None], jnp.float32)}


def test_clip_follows_the_geometric_update():
    chex.assert_trees_all_close(
        adapt_clip(2.0, 1.0, quantile=0.5), jnp.float32(2 * math.exp(-0.1)), rtol=1e-6
    )
    _, metrics, _ = steps(
        AdaptiveClipping(1.0, quantile=0.75), batch_with_norms([0.5, 2.0, 3.0, 4.0]), 2
    )
    assert metrics[1]["clip"] == pytest.approx(math.exp(-0.2 * (0.25 - 0.75)))
    assert metrics[0]["clipped"] == 0.75


def test_gradients_are_clipped_to_the_bound_which_each_step_updates():
    batch, mode = batch_with_norms([2.0, 3.0, 4.0, 5.0]), AdaptiveClipping(1.0, learning_rate=2.0)
    expected = 0
    norms = jnp.linalg.norm(batch["x"], axis=1, keepdims=True)
    for n, clip in ((1, 1.0), (2, math.e)):
        state, metrics, report = steps(mode, batch, n, learning_rate=1.0)
        assert metrics[-1]["clip"] == pytest.approx(clip)
        expected -= (batch["x"] / norms * jnp.minimum(norms, clip)).mean(0)
        chex.assert_trees_all_close(state.params["w"], expected, rtol=1e-5)
        assert report.donation.aliased_bytes == report.state_bytes


def test_padding_is_not_counted_and_nonfinite_gradients_are_above_the_bound():
    batch = batch_with_norms([0.5, 2.0, np.nan, 0.1]) | {"weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
    _, metrics, _ = steps(AdaptiveClipping(1.0), batch, 2)
    assert metrics[1]["clip"] == pytest.approx(math.exp(-0.2 * (1 / 3 - 0.5)))
    assert metrics[0]["nonfinite"] == 1


@pytest.mark.usefixtures("float64")
def test_clip_stays_float32_with_float64_norms():
    mode = AdaptiveClipping(1.0, noise_multiplier=1.0, count_noise=5.0, expected_batch_size=4)
    state, _, report = steps(mode, batch_with_norms([0.5, 2.0, 3.0, 4.0]), 2)
    assert state.opt_state.value.dtype == jnp.float32
    assert report.donation.aliased_bytes == report.state_bytes


def test_gradient_and_count_noise_match_the_noise_multiplier():
    mode = AdaptiveClipping(0.1, noise_multiplier=1.0, count_noise=10.0, expected_batch_size=4)
    assert mode.gradient_noise == pytest.approx(1.0012523486)
    assert mode.gradient_noise**-2 + (2 * 10.0) ** -2 == pytest.approx(1.0)
    default = AdaptiveClipping(0.1, noise_multiplier=1.0, expected_batch_size=400)
    assert default.gradient_noise == pytest.approx((1 - 40.0**-2) ** -0.5)


def test_noise_has_the_given_deviations():
    mode = AdaptiveClipping(
        2.0, noise_multiplier=3.0, count_noise=5.0, expected_batch_size=8, learning_rate=0.01
    )
    update = jax.jit(mode.update(loss, mode.wrap_optimizer(optax.sgd(1.0))))
    params = {"w": jnp.zeros(3)}
    opt_state = mode.wrap_optimizer(optax.sgd(1.0)).init(params)
    batch = batch_with_norms([1.0] * 8)
    draws = [update(params, opt_state, {}, batch, jax.random.key(i)) for i in range(600)]
    gradients = np.stack([p["w"] for p, *_ in draws])
    assert gradients.std(0).mean() == pytest.approx(mode.gradient_noise * 2 / 8, rel=0.06)
    bounds = np.array([float(o.value) for _, o, *_ in draws])
    votes = 0.5 - np.log(bounds / 2) / 0.01
    assert votes.mean() == pytest.approx(1.0, abs=0.1)
    assert votes.std() == pytest.approx(5 / 8, rel=0.1)
    assert abs(np.corrcoef(gradients[:, 0], votes)[0, 1]) < 0.15


INVALID = [
    ({"clip": 0.0}, "clip must be > 0 and finite, got 0.0"),
    ({"quantile": 1.0}, "quantile must be between 0 and 1, got 1.0"),
    ({"learning_rate": -1.0}, "learning_rate must be >= 0 and finite, got -1.0"),
    ({"learning_rate": float("inf")}, "must be >= 0 and finite, got inf"),
    ({"count_noise": -1.0}, "count_noise must be >= 0 and finite, got -1"),
    ({"microbatches": 0}, "microbatches must be >= 1, got 0"),
    ({"noise_multiplier": 1.0}, "give expected_batch_size"),
    (
        {"noise_multiplier": 1.0, "expected_batch_size": 8.0},
        "count_noise must be more than half of noise_multiplier, 1.0, got 0.4",
    ),
]


def test_rejects_invalid_arguments():
    for arguments, message in INVALID:
        with pytest.raises(ValueError, match=message):
            AdaptiveClipping(**({"clip": 1.0} | arguments))


def test_rejects_an_optimizer_that_is_not_wrapped():
    mode, plain = AdaptiveClipping(1.0), optax.sgd(1.0)
    wrapped = mode.wrap_optimizer(plain)
    for for_state, for_step in ((plain, plain), (wrapped, plain), (plain, wrapped)):
        state = fnet.TrainState.create(MODEL, for_state, jax.random.key(0))
        step = fnet.make_step(loss, for_step, mode)
        with pytest.raises(ValueError, match=r"use mode.wrap_optimizer\(optimizer\)"):
            step(state, batch_with_norms([1.0]))


def test_inner_optimizer_state_is_updated():
    batch = batch_with_norms([0.5, 2.0, 3.0, 4.0])
    mode = AdaptiveClipping(1e3, learning_rate=0.0)
    optimizer = mode.wrap_optimizer(optax.sgd(1.0, momentum=0.5))
    state = fnet.TrainState.create(MODEL, optimizer, jax.random.key(0))
    step = fnet.make_step(loss, optimizer, mode)
    for _ in range(2):
        state, _ = step(state, batch)
    # The second step adds g and half of the first update.
    chex.assert_trees_all_close(state.params["w"], -2.5 * batch["x"].mean(0), rtol=1e-5)
