"""The denoising loss, its weights and its timesteps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusion_cases import images

from fnet.diffusion import (
    add_noise,
    denoised,
    denoising_losses,
    min_snr_weight,
    sample_timesteps,
    schedules,
    target,
)
from fnet.diffusion.targets import TARGETS


def test_min_snr_weights_match_the_paper():
    """Hang et al. 2023, section 3.4 and its appendix: gamma 5, at snr 100, 5, 1/4."""
    snr = np.asarray([100.0, 5.0, 0.25])
    alpha, sigma = np.sqrt(snr / (1 + snr)), np.sqrt(1 / (1 + snr))
    expected = {"x0": [5.0, 5.0, 0.25], "eps": [0.05, 1.0, 1.0], "v": [5 / 101, 5 / 6, 0.2]}
    for name, weights in expected.items():
        chex.assert_trees_all_close(
            min_snr_weight(name, alpha, sigma), jnp.asarray(weights, jnp.float32), rtol=1e-5
        )


@pytest.mark.parametrize(("name", "ends"), [("x0", (0, 3)), ("eps", (1, 0)), ("v", (0, 0))])
def test_min_snr_weights_without_signal_or_noise_are_their_limits(name, ends):
    got = min_snr_weight(name, jnp.asarray([0.0, 1.0]), jnp.asarray([1.0, 0.0]), gamma=3.0)
    chex.assert_trees_all_equal(got, jnp.asarray(ends, jnp.float32))
    close_to_limit = min_snr_weight(
        name, jnp.asarray([1e-4, 1.0]), jnp.asarray([1.0, 1e-4]), gamma=3.0
    )
    chex.assert_trees_all_close(close_to_limit, got, atol=1e-6)


def test_weighted_error_does_not_depend_on_the_target():
    """The three weights are the same weight of an error of x0."""
    x0, noise, wrong = images(3, 1), images(3, 2), images(3, 3)
    angle = jnp.asarray([0.1, 0.6, 1.4])
    alpha, sigma = jnp.cos(angle), jnp.sin(angle)
    x = add_noise(x0, noise, alpha, sigma)
    _, wrong_noise = denoised("x0", wrong, x, alpha, sigma)
    errors = []
    for name in TARGETS:
        error = target(name, wrong, wrong_noise, alpha, sigma) - target(
            name, x0, noise, alpha, sigma
        )
        weight = min_snr_weight(name, alpha, sigma)
        errors.append(weight * jnp.square(error).mean((1, 2, 3)))
    chex.assert_trees_all_close(errors[1], errors[0], rtol=1e-4)
    chex.assert_trees_all_close(errors[2], errors[0], rtol=1e-4)


@pytest.mark.parametrize("predicts", TARGETS)
@pytest.mark.parametrize("weighting", ["uniform", "min_snr"])
def test_loss_is_0_for_an_oracle_only(predicts, weighting):
    x0, schedule = images(8), schedules.cosine(100)
    alpha, sigma = (jnp.asarray(a, jnp.float32) for a in schedule)

    def oracle(x, t):
        _, noise = denoised("x0", x0, x, alpha[t], sigma[t])
        return target(predicts, x0, noise, alpha[t], sigma[t])

    def losses(denoise):
        return denoising_losses(
            denoise, x0, jax.random.key(3), schedule, predicts=predicts, weighting=weighting
        )

    chex.assert_trees_all_close(losses(oracle), jnp.zeros(8), atol=1e-7)
    chex.assert_shape(losses(lambda x, t: oracle(x, t) + 0.1), (8,))
    assert float(losses(lambda x, t: oracle(x, t) + 0.1).min()) > 0


def test_loss_is_the_weighted_mean_squared_error_at_the_sampled_timestep():
    x0, schedule, seen = images(64, size=2), schedules.linear(100), {}

    def zero(x, t):
        seen.update(x=x, t=t)
        return jnp.zeros_like(x)

    got = denoising_losses(
        zero, x0, jax.random.key(3), schedule, predicts="v", weighting="min_snr", gamma=2.0
    )
    alpha, sigma = (np.asarray(a)[seen["t"], None, None, None] for a in schedule)
    noise = (np.asarray(seen["x"]) - alpha * np.asarray(x0)) / sigma
    snr = (alpha / sigma)[:, 0, 0, 0] ** 2
    error = ((alpha * noise - sigma * np.asarray(x0)) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(got, error * np.minimum(snr, 2.0) / (snr + 1), rtol=1e-3)
    assert seen["t"].dtype == jnp.int32
    assert len(set(seen["t"].tolist())) > 30
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size)
    assert abs(noise.var() - 1) < 5 * np.sqrt(2 / noise.size)


def test_bfloat16_examples_have_float32_losses_and_a_bfloat16_model_input():
    x0, seen = images(4).astype(jnp.bfloat16), []

    def identity(x, t):
        seen.append(x.dtype)
        return x

    got, full = (
        denoising_losses(identity, a, jax.random.key(3), schedules.cosine(10))
        for a in (x0, x0.astype(jnp.float32))
    )
    assert seen == [jnp.bfloat16, jnp.float32]
    assert got.dtype == jnp.float32
    chex.assert_trees_all_close(got, full, rtol=0.02, atol=0.02)


def test_returns_aux_and_differentiates():
    x0, schedule = images(4), schedules.cosine(10)

    def mean_loss(w):
        losses, seen = denoising_losses(
            lambda x, t: (w * x, (x, t)), x0, jax.random.key(3), schedule, has_aux=True
        )
        return losses.mean(), seen

    gradient, (x, t) = jax.jit(jax.grad(mean_loss, has_aux=True))(0.0)
    alpha, sigma = (np.asarray(a)[np.asarray(t), None, None, None] for a in schedule)
    noise = (np.asarray(x) - alpha * np.asarray(x0)) / sigma
    np.testing.assert_allclose(gradient, -2 * (np.asarray(x) * noise).mean(), rtol=1e-4)


def test_timesteps_are_uniform():
    n, steps = 20_000, 10
    counts = np.bincount(sample_timesteps(jax.random.key(1), n, steps), minlength=steps)
    assert counts.shape == (steps,)
    assert np.abs(counts - n / steps).max() < 5 * np.sqrt(n / steps)


def test_stratified_timesteps_cover_every_step_and_are_uniform():
    draw = jax.jit(jax.vmap(lambda key: sample_timesteps(key, 10, 10, stratified=True)))
    times = np.asarray(draw(jax.random.split(jax.random.key(1), 2000)))
    # One timestep each, except for rounding of u + i / 10.
    assert (np.sort(times, -1) == np.arange(10)).all(-1).mean() > 0.99
    for example in (0, 7):
        counts = np.bincount(times[:, example], minlength=10)
        assert np.abs(counts - 200).max() < 5 * np.sqrt(200)
    counts = np.bincount(
        sample_timesteps(jax.random.key(2), 1000, 10, stratified=True), minlength=10
    )
    assert np.abs(counts - 100).max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predicts": "u"}, r"one of \('eps', 'x0', 'v'\), got 'u'"),
        ({"weighting": "snr"}, r"one of \('uniform', 'min_snr'\), got 'snr'"),
        ({"weighting": "min_snr", "gamma": 0.0}, "gamma must be > 0, got 0.0"),
    ],
)
def test_rejects_unknown_target_and_weighting(options, message):
    with pytest.raises(ValueError, match=message):
        denoising_losses(
            lambda x, t: x, images(2), jax.random.key(1), schedules.cosine(10), **options
        )


def test_rejects_prediction_of_another_shape_and_uint8_examples():
    schedule = schedules.cosine(10)
    with pytest.raises(
        ValueError, match=r"prediction must have shape \(2, 3, 3, 1\) .* got \(1, 3, 3, 1\)"
    ):
        denoising_losses(lambda x, t: x[:1], images(2), jax.random.key(1), schedule)
    with pytest.raises(TypeError, match="x0 must be floating, got uint8"):
        denoising_losses(lambda x, t: x, jnp.zeros((2, 3), jnp.uint8), jax.random.key(1), schedule)
