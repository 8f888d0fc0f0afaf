"""Scores of training examples while a network trains, against explicit gradients."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet
from fnet.attribution import InRun

TRAIN, RATE = 12, 0.3


def network(params, x):
    hidden = jnp.tanh(x @ params["first"] + params["bias"][None])
    return hidden @ params["second"]


def loss(params, model_state, batch, key):
    logits = network(params, batch["x"])
    losses = fnet.losses.cross_entropy(logits, batch["label"])
    return losses, fnet.Aux(model_state, {"largest": logits.max(-1)})


def setup(**options):
    rng = np.random.default_rng(0)
    params = {"first": (5, 6), "bias": (6,), "second": (6, 3)}
    params = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in params.items()}

    def examples(n):
        x = jnp.asarray(rng.normal(size=(n, 5)), jnp.float32)
        return {"x": x, "label": jnp.asarray(rng.integers(0, 3, n), jnp.int32)}

    validation = examples(4)
    mode = InRun(validation, train_size=TRAIN, learning_rate=RATE, **options)
    batch = examples(6) | {"row": jnp.array([3, 0, 11, 5, 7, 1])}
    return mode, params, validation, batch


def run(mode, params, batch, optimizer=None, steps=1, function=loss):
    wrapped = optimizer or mode.wrap_optimizer(optax.sgd(RATE))
    step = fnet.make_step(function, wrapped, mode)
    params = jax.tree.map(jnp.copy, params)
    state = fnet.TrainState.create(params=params, optimizer=wrapped, key=jax.random.key(0))
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


@functools.partial(jax.jit, static_argnums=4)
def explicit(params, validation, batch, weights, order):
    """The equations of the docstring, with all gradients and the Hessian as arrays."""
    flat, unflatten = jax.flatten_util.ravel_pytree(params)

    def losses_of(rows):
        return lambda w: loss(unflatten(w), None, rows, None)[0]

    grads = jax.jacobian(losses_of(batch))(flat)

    def of_validation(w):
        return losses_of(validation)(w).mean()

    direction = jax.grad(of_validation)(flat)
    if order == 2:
        direction -= RATE / 2 * jax.hessian(of_validation)(flat) @ (weights @ grads)
    return RATE * weights * (grads @ direction)


def test_scores_of_a_step_match_explicit_gradients():
    mode, params, validation, batch = setup(second_order=True)

    def of_each(params, model_state, batch, key):  # The mean of a batch that it is alone in.
        losses, aux = loss(params, model_state, batch, key)
        return losses / len(losses), aux

    padding = jax.tree.map(lambda a: jnp.concatenate([a, a[:1] * jnp.nan]), validation)
    padded = padding | {"label": jnp.pad(validation["label"], (0, 1)), "weight": jnp.arange(5) < 4}
    mode = dataclasses.replace(mode, validation=padded)
    state, metrics = run(mode, params, batch, function=of_each)
    weights = jnp.full(6, 1 / 6)
    expected = explicit(params, validation, batch, weights, 2)
    chex.assert_trees_all_close(state.opt_state.scores[batch["row"]], expected, rtol=1e-4)
    others = np.setdiff1d(np.arange(TRAIN), batch["row"])
    assert not state.opt_state.scores[others].any()
    assert metrics.keys() == {"loss", "largest", "grad_norm"}
    losses = loss(params, None, batch, None)[0]
    chex.assert_trees_all_close(state.opt_state.mean_losses[batch["row"]], losses, rtol=1e-5)
    assert jnp.isnan(state.opt_state.mean_losses[others]).all()


def test_the_second_order_predicts_the_change_of_the_validation_loss():
    """The sum over the batch is the change of the loss, up to the third order."""
    errors = []
    for order in (1, 2):
        mode, params, validation, batch = setup(second_order=order == 2)
        state, _ = run(mode, params, batch)

        @jax.jit
        def mean_loss(params, validation=validation):
            return loss(params, None, validation, None)[0].mean()

        change = mean_loss(params) - mean_loss(state.params)
        errors.append(abs(float(state.opt_state.scores.sum() - change)))
    assert errors[1] < 0.3 * errors[0]


def test_scores_add_up_over_steps_with_a_schedule():
    mode, params, _, batch = setup()
    halved = InRun(mode.validation, TRAIN, lambda step: RATE * 0.5**step)
    optimizer = mode.wrap_optimizer(optax.sgd(0.0))  # Each step has the same gradients.
    one = run(mode, params, batch, optimizer)[0].opt_state.scores
    outside = jax.tree.map(lambda a: jnp.concatenate([a, a[:2]]), batch)
    outside |= {"row": outside["row"].at[6:].set(jnp.array([-1, TRAIN])), "weight": jnp.ones(8)}
    rows = run(mode, params, outside, optimizer)[0].opt_state
    chex.assert_trees_all_close(rows.scores, one * 6 / 8, rtol=1e-4)
    assert rows.counts.sum() == 6
    three = run(halved, params, batch, optimizer, steps=3)[0].opt_state
    chex.assert_trees_all_close(three.scores, 1.75 * one, rtol=1e-4)
    assert three.step == 3
    assert three.counts.sum() == 18


def test_the_update_is_that_of_the_weighted_mean():
    mode, params, validation, batch = setup()
    weights = jnp.array([1.0, 0.0, 2.0, 1.0, 0.0, 4.0])
    x = batch["x"].at[1].set(jnp.nan)  # Padding has no effect.
    batch |= {"x": x, "weight": weights}
    adam = optax.adam(1e-2)
    state, metrics = run(mode, params, batch, mode.wrap_optimizer(adam))
    plain = fnet.make_step(loss, adam)
    copy = jax.tree.map(jnp.copy, params)
    expected = fnet.TrainState.create(params=copy, optimizer=adam, key=jax.random.key(0))
    expected, expected_metrics = plain(expected, batch)
    chex.assert_trees_all_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(metrics, expected_metrics, rtol=1e-5)
    real = batch | {"x": jnp.nan_to_num(x)}
    scores = explicit(params, validation, real, weights / weights.sum(), 1)
    chex.assert_trees_all_close(state.opt_state.scores[batch["row"]], scores, rtol=1e-4)
    chex.assert_trees_all_equal(state.opt_state.counts[batch["row"]] > 0, weights > 0)


def test_a_part_of_the_validation_examples_is_drawn_for_each_step():
    mode, params, validation, batch = setup(validation_batch=2)
    got = run(mode, params, batch)[0].opt_state.scores[batch["row"]]
    examples = [{n: a[i : i + 1] for n, a in validation.items()} for i in range(4)]
    each = [explicit(params, one, batch, jnp.full(6, 1 / 6), 1) for one in examples]
    pairs = [(a + b) / 2 for a, b in itertools.combinations(each, 2)]
    assert sum(np.allclose(got, pair, rtol=1e-4, atol=1e-6) for pair in pairs) == 1


def test_rejects_wrong_arguments():
    mode, params, _, batch = setup()

    def mixing(params, model_state, batch, key):
        x = batch["x"] - batch["x"].mean(0, keepdims=True)
        return loss(params, model_state, batch | {"x": x}, key)

    sgd = optax.sgd(RATE)
    wrapped, without = mode.wrap_optimizer(sgd), {n: a for n, a in batch.items() if n != "row"}
    for function, optimizer, rows, message in (
        (loss, wrapped, without, r'expected an array "row" .* got \[.label., .x.\]'),
        (loss, sgd, batch, "the optimizer has no scores in its state"),
        (mixing, wrapped, batch, "the loss mixes the examples"),
    ):
        with pytest.raises(ValueError, match=f"InRun: {message}"):
            run(mode, params, rows, optimizer, function=function)
    with pytest.raises(ValueError, match=r"must be between 1 and 4.*got 5"):
        setup(validation_batch=5)
