"""The training loss of a denoiser, its weights, and the steps that are drawn for it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusion_cases import images

from fnet.diffusion import (
    TARGETS,
    add_noise,
    denoised,
    denoising_losses,
    draw_times,
    min_snr_weight,
    schedules,
    target,
)


def test_min_snr_weights_are_the_papers():
    """Hang et al. 2023, section 3.4 and its appendix: gamma 5, at snr 100, 5, 1/4."""
    snr = np.asarray([100.0, 5.0, 0.25])
    alpha, sigma = np.sqrt(snr / (1 + snr)), np.sqrt(1 / (1 + snr))
    expected = {
        "x0": [5.0, 5.0, 0.25],
        "eps": [0.05, 1.0, 1.0],
        "v": [5 / 101, 5 / 6, 0.2],
    }
    for name, weights in expected.items():
        chex.assert_trees_all_close(
            min_snr_weight(name, alpha, sigma), jnp.asarray(weights, jnp.float32), rtol=1e-5
        )


@pytest.mark.parametrize(("name", "ends"), [("x0", (0, 3)), ("eps", (1, 0)), ("v", (0, 0))])
def test_weights_without_signal_or_noise_are_their_limits(name, ends):
    got = min_snr_weight(name, jnp.asarray([0.0, 1.0]), jnp.asarray([1.0, 0.0]), gamma=3.0)
    chex.assert_trees_all_equal(got, jnp.asarray(ends, jnp.float32))
    near = min_snr_weight(name, jnp.asarray([1e-4, 1.0]), jnp.asarray([1.0, 1e-4]), gamma=3.0)
    chex.assert_trees_all_close(near, got, atol=1e-6)


def test_an_error_of_any_target_weighs_the_same():
    """The three weights are one weight of x0's error, in three coordinates."""
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
def test_the_loss_is_0_for_who_knows_the_example_and_not_otherwise(predicts, weighting):
    x0, schedule = images(8), schedules.cosine(100)
    alpha, sigma = (jnp.asarray(a, jnp.float32) for a in schedule)

    def knows(x, t):
        _, noise = denoised("x0", x0, x, alpha[t], sigma[t])
        return target(predicts, x0, noise, alpha[t], sigma[t])

    def losses(denoise):
        return denoising_losses(
            denoise, x0, jax.random.key(3), schedule, predicts=predicts, weighting=weighting
        )

    chex.assert_trees_all_close(losses(knows), jnp.zeros(8), atol=1e-7)
    chex.assert_shape(losses(lambda x, t: knows(x, t) + 0.1), (8,))
    assert float(losses(lambda x, t: knows(x, t) + 0.1).min()) > 0


def test_the_loss_is_the_mean_square_error_times_the_weight_at_the_step_drawn():
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


def test_losses_of_bfloat16_examples_are_float32_and_the_model_sees_bfloat16():
    x0, seen = images(4).astype(jnp.bfloat16), []

    def same(x, t):
        seen.append(x.dtype)
        return x

    got, wide = (
        denoising_losses(same, a, jax.random.key(3), schedules.cosine(10))
        for a in (x0, x0.astype(jnp.float32))
    )
    assert seen == [jnp.bfloat16, jnp.float32]
    assert got.dtype == jnp.float32
    chex.assert_trees_all_close(got, wide, rtol=0.02, atol=0.02)


def test_what_the_model_returns_beside_is_handed_on_and_the_losses_differentiate():
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


def test_times_are_uniform_and_each_step_is_drawn():
    n, steps = 20_000, 10
    counts = np.bincount(draw_times(jax.random.key(1), n, steps), minlength=steps)
    assert counts.shape == (steps,)
    assert np.abs(counts - n / steps).max() < 5 * np.sqrt(n / steps)


def test_stratified_times_hit_every_step_and_each_is_uniform():
    draw = jax.jit(jax.vmap(lambda key: draw_times(key, 10, 10, stratified=True)))
    times = np.asarray(draw(jax.random.split(jax.random.key(1), 2000)))
    # Ten equal parts of a circle: one each, but for the rounding of u + i / 10.
    assert (np.sort(times, -1) == np.arange(10)).all(-1).mean() > 0.99
    for example in (0, 7):
        counts = np.bincount(times[:, example], minlength=10)
        assert np.abs(counts - 200).max() < 5 * np.sqrt(200)
    more = np.bincount(draw_times(jax.random.key(2), 1000, 10, stratified=True), minlength=10)
    assert np.abs(more - 100).max() <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predicts": "u"}, r"one of \('eps', 'x0', 'v'\), got 'u'"),
        ({"weighting": "snr"}, r"one of \('uniform', 'min_snr'\), got 'snr'"),
        ({"weighting": "min_snr", "gamma": 0.0}, "gamma must be > 0, got 0.0"),
    ],
)
def test_unknown_targets_and_weightings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        denoising_losses(
            lambda x, t: x, images(2), jax.random.key(1), schedules.cosine(10), **options
        )


def test_predictions_of_another_shape_and_examples_in_bytes_are_refused():
    schedule = schedules.cosine(10)
    with pytest.raises(ValueError, match=r"the shape of x0, \(2, 3, 3, 1\), got \(1, 3, 3, 1\)"):
        denoising_losses(lambda x, t: x[:1], images(2), jax.random.key(1), schedule)
    with pytest.raises(TypeError, match="x0 must be floating, got uint8"):
        denoising_losses(lambda x, t: x, jnp.zeros((2, 3), jnp.uint8), jax.random.key(1), schedule)
