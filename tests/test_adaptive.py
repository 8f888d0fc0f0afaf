"""Clipping to a bound that follows a quantile of the norms."""

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
    """Its gradients are the rows of the batch, whatever the parameters."""
    return batch["x"] @ params["w"], fnet.Aux(state, {})


def steps(mode, batch, n, *, learning_rate=0.0):
    """States and metrics of n steps."""
    optimizer = mode.wrap_optimizer(optax.sgd(learning_rate))
    state = fnet.TrainState.create(MODEL, optimizer, jax.random.key(0))
    step = fnet.compile_step(fnet.make_step(loss, optimizer, mode), state, batch)
    seen = []
    for _ in range(n):
        state, metrics = step(state, batch)
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen, step.report


def rows(norms):
    """Gradients of these norms."""
    directions = np.random.default_rng(0).standard_normal((len(norms), 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return {"x": jnp.asarray(directions * np.asarray(norms)[:, None], jnp.float32)}


def test_the_bound_moves_by_the_geometric_rule():
    chex.assert_trees_all_close(
        adapt_clip(2.0, 1.0, quantile=0.5), jnp.float32(2 * math.exp(-0.1)), rtol=1e-6
    )
    _, seen, _ = steps(AdaptiveClipping(1.0, quantile=0.75), rows([0.5, 2.0, 3.0, 4.0]), 2)
    assert seen[1]["clip"] == pytest.approx(math.exp(-0.2 * (0.25 - 0.75)))
    assert seen[0]["clipped"] == 0.75


@pytest.mark.parametrize(("quantile", "first"), [(0.1, 1e3), (0.5, 1e-3), (0.9, 1e-3)])
def test_from_anywhere_it_comes_to_the_quantile(quantile, first):
    norms = np.random.default_rng(1).lognormal(size=101)
    _, seen, _ = steps(AdaptiveClipping(first, quantile=quantile), rows(norms), 600)
    near = np.quantile(norms, [quantile - 0.05, quantile + 0.05])
    assert near[0] < seen[-1]["clip"] < near[1]


def test_the_bound_is_what_gradients_are_clipped_to():
    batch = rows([0.5, 2.0, 3.0, 4.0])
    state, _, report = steps(AdaptiveClipping(1.0), batch, 1, learning_rate=1.0)
    x = np.asarray(batch["x"])
    expected = -(x * np.minimum(1, 1 / np.linalg.norm(x, axis=1, keepdims=True))).mean(0)
    chex.assert_trees_all_close(state.params["w"], expected, rtol=1e-5)
    assert report.donation.aliased_bytes == report.state_bytes


def test_the_second_step_clips_to_the_bound_that_the_first_has_left():
    batch = rows([2.0, 3.0, 4.0, 5.0])
    first, _, _ = steps(AdaptiveClipping(1.0, learning_rate=2.0), batch, 1, learning_rate=1.0)
    second, seen, _ = steps(AdaptiveClipping(1.0, learning_rate=2.0), batch, 2, learning_rate=1.0)
    change = second.params["w"] - first.params["w"]
    assert seen[1]["clip"] == pytest.approx(math.e)
    directions = batch["x"] / jnp.linalg.norm(batch["x"], axis=1, keepdims=True)
    bound = jnp.minimum(jnp.linalg.norm(batch["x"], axis=1, keepdims=True), math.e)
    chex.assert_trees_all_close(change, -(directions * bound).mean(0), rtol=1e-5)


def test_padding_has_no_vote_and_a_gradient_that_is_not_finite_is_above_any_bound():
    batch = rows([0.5, 2.0, np.nan, 0.1]) | {"weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
    _, seen, _ = steps(AdaptiveClipping(1.0), batch, 2)
    assert seen[1]["clip"] == pytest.approx(math.exp(-0.2 * (1 / 3 - 0.5)))
    assert seen[0]["nonfinite"] == 1


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_in_float64_the_bound_stays_where_it_was(noise):
    mode = AdaptiveClipping(1.0, noise_multiplier=noise, count_noise=5.0, expected_batch_size=4)
    state, _, report = steps(mode, rows([0.5, 2.0, 3.0, 4.0]), 2)
    assert state.opt_state.clip.dtype == jnp.float32
    assert report.donation.aliased_bytes == report.state_bytes


def test_gradients_and_count_together_spend_what_the_noise_multiplier_says():
    mode = AdaptiveClipping(0.1, noise_multiplier=1.0, count_noise=10.0, expected_batch_size=4)
    assert mode.gradient_noise == pytest.approx(1.0012523486)
    assert mode.gradient_noise**-2 + (2 * 10.0) ** -2 == pytest.approx(1.0)
    default = AdaptiveClipping(0.1, noise_multiplier=1.0, expected_batch_size=400)
    assert default.gradient_noise == pytest.approx((1 - 40.0**-2) ** -0.5)


def test_noise_has_the_deviations_asked_for():
    mode = AdaptiveClipping(
        2.0, noise_multiplier=3.0, count_noise=5.0, expected_batch_size=8, learning_rate=0.01
    )
    update = jax.jit(mode.update(loss, mode.wrap_optimizer(optax.sgd(1.0))))
    params = {"w": jnp.zeros(3)}
    opt_state = mode.wrap_optimizer(optax.sgd(1.0)).init(params)
    batch = rows([1.0] * 8)
    draws = [update(params, opt_state, {}, batch, jax.random.key(i)) for i in range(600)]
    gradients = np.stack([p["w"] for p, *_ in draws])
    assert gradients.std(0).mean() == pytest.approx(mode.gradient_noise * 2 / 8, rel=0.06)
    bounds = np.array([float(o.clip) for _, o, *_ in draws])
    votes = 0.5 - np.log(bounds / 2) / 0.01
    assert votes.mean() == pytest.approx(1.0, abs=0.1)
    assert votes.std() == pytest.approx(5 / 8, rel=0.1)
    assert abs(np.corrcoef(gradients[:, 0], votes)[0, 1]) < 0.15


REFUSED = {
    "clip": ({"clip": 0.0}, "clip must be > 0 and finite, got 0.0"),
    "quantile": ({"quantile": 1.0}, "quantile must be between 0 and 1, got 1.0"),
    "rate": ({"learning_rate": -1.0}, "learning_rate must be >= 0 and finite, got -1.0"),
    "any rate": ({"learning_rate": float("inf")}, "must be >= 0 and finite, got inf"),
    "count below 0": ({"count_noise": -1.0}, "count_noise must be >= 0 and finite, got -1"),
    "parts": ({"microbatches": 0}, "microbatches must be >= 1, got 0"),
    "size": ({"noise_multiplier": 1.0}, "give expected_batch_size"),
    "count": (
        {"noise_multiplier": 1.0, "expected_batch_size": 8.0},
        "count_noise must be more than half of noise_multiplier, 1.0, got 0.4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name):
    wrong, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        AdaptiveClipping(**({"clip": 1.0} | wrong))


@pytest.mark.parametrize("keeping", ["neither", "state", "step"])
def test_an_optimizer_that_keeps_no_bound_is_refused(keeping):
    mode, plain = AdaptiveClipping(1.0), optax.sgd(1.0)
    of_state, of_step = (
        mode.wrap_optimizer(plain) if keeping == part else plain for part in ("state", "step")
    )
    state = fnet.TrainState.create(MODEL, of_state, jax.random.key(0))
    step = fnet.make_step(loss, of_step, mode)
    with pytest.raises(ValueError, match=r"use mode.wrap_optimizer\(optimizer\)"):
        step(state, rows([1.0]))


def test_the_optimizers_own_state_is_renewed_beside_the_bound():
    batch = rows([0.5, 2.0, 3.0, 4.0])
    mode = AdaptiveClipping(1e3, learning_rate=0.0)
    optimizer = mode.wrap_optimizer(optax.sgd(1.0, momentum=0.5))
    state = fnet.TrainState.create(MODEL, optimizer, jax.random.key(0))
    step = fnet.make_step(loss, optimizer, mode)
    for _ in range(2):
        state, _ = step(state, batch)
    # g, then g and half of the first.
    chex.assert_trees_all_close(state.params["w"], -2.5 * batch["x"].mean(0), rtol=1e-5)
