"""Samplers: identities, coefficients against the papers, and a Gaussian with a known denoiser."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet.diffusion import (
    Schedule,
    add_noise,
    ddim,
    denoised,
    dpm_solver,
    samplers,
    sampling_timesteps,
    schedules,
    target,
)
from fnet.diffusion.samplers import SAMPLERS
from fnet.diffusion.schedules import SCHEDULES
from fnet.diffusion.targets import TARGETS

ddpm = SAMPLERS["ddpm"]
MEAN, STD = 0.4, 0.5


def noise(n, seed=1, size=3, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (n, size), dtype)


def gaussian_denoiser(schedule, predicts, dtype=jnp.float32):
    """The optimal denoiser for data from N(MEAN, STD^2)."""
    alphas, sigmas = (jnp.asarray(a, dtype) for a in schedule)

    def denoise(x, t):
        alpha, sigma = alphas[t][:, None], sigmas[t][:, None]
        gain = alpha * STD**2 / ((alpha * STD) ** 2 + sigma**2)
        x0 = MEAN + gain * (x - alpha * MEAN)
        return target(predicts, x0, (x - alpha * x0) / sigma, alphas[t], sigmas[t])

    return denoise


def flow(schedule, x):
    """The exact solution of the probability flow for that data, from x at the last timestep."""
    alpha, sigma = schedule.alpha[-1], schedule.sigma[-1]
    return MEAN + STD * (x - alpha * MEAN) / np.hypot(alpha * STD, sigma)


def moments(schedule):
    """Exact mean and standard deviation of the samples: every step is linear in x."""
    levels = Schedule(np.append(schedule.alpha[::-1], 1.0), np.append(schedule.sigma[::-1], 0.0))
    coefficients = samplers._ddim_coefficients(levels, 1.0)
    # x as (constant, coefficient of the initial x), and the variance of the added noise.
    x, noise_variance = np.asarray([0.0, 1.0]), 0.0
    for alpha, sigma, a, b, _, d in zip(
        levels.alpha[:-1], levels.sigma[:-1], *coefficients, strict=True
    ):
        gain = alpha * STD**2 / ((alpha * STD) ** 2 + sigma**2)
        x0 = gain * x + [MEAN - gain * alpha * MEAN, 0.0]
        x = a * x + b * x0
        noise_variance = (a + b * gain) ** 2 * noise_variance + d**2
    return x[0], np.hypot(x[1], np.sqrt(noise_variance))


def oracle(schedule, x0, predicts):
    """A denoiser that knows the clean example."""
    alphas, sigmas = (jnp.asarray(a, x0.dtype) for a in schedule)

    def denoise(x, t):
        _, eps = denoised("x0", x0, x, alphas[t], sigmas[t])
        return target(predicts, x0, eps, alphas[t], sigmas[t])

    return denoise


def levels_at(*angles):
    """Signal and noise levels at angles from 0 (clean) to pi / 2 (noise)."""
    return Schedule(np.cos(angles), np.sin(angles))


def uniform_log_snr(steps, least=-3.0, most=10.0):
    log_snr = np.linspace(most, least, steps)
    return Schedule(1 / np.sqrt(1 + np.exp(-2 * log_snr)), 1 / np.sqrt(1 + np.exp(2 * log_snr)))


# Identities.


def error_of_one_step(schedule, predicts, dtype=jnp.float32):
    """Largest error of an example that DDIM recovers from the true noise in one step."""
    x0, eps = noise(4, 1, dtype=dtype), noise(4, 2, dtype=dtype)
    alpha, sigma = schedule.alpha[-1], schedule.sigma[-1]
    truth = target(predicts, x0, eps, alpha, sigma)
    got = ddim(lambda x, t: truth, schedule, add_noise(x0, eps, alpha, sigma), 1, predicts=predicts)
    return jnp.abs(got - x0).max()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("predicts", TARGETS)
def test_ddim_recovers_the_example_from_the_last_timestep_in_float64(float64, name, predicts):
    assert error_of_one_step(schedules.get(name), predicts, jnp.float64) < 1e-11


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("predicts", TARGETS)
def test_samplers_with_an_oracle_end_at_the_example(sampler, predicts):
    schedule, x0 = schedules.cosine(50), noise(2, 1)
    got = samplers.get(sampler)(
        oracle(schedule, x0, predicts), schedule, noise(2, 2), 7,
        predicts=predicts, key=jax.random.key(3),
    )  # fmt: skip
    chex.assert_trees_all_close(got, x0, atol=1e-5)


def test_ddim_step_matches_the_paper():
    """Song et al. 2021, equations 12 and 16, in its x0 and eps."""
    levels, eta = levels_at(1.3, 0.9), 0.6
    (alpha, alpha_next), (sigma, sigma_next) = levels
    x, x0, noise_sample = 0.3, -0.7, 1.9
    eps = (x - alpha * x0) / sigma
    std = eta * sigma_next / sigma * np.sqrt(1 - (alpha / alpha_next) ** 2)
    expected = alpha_next * x0 + np.sqrt(sigma_next**2 - std**2) * eps + std * noise_sample
    a, b, _, d = samplers._ddim_coefficients(levels, eta)
    np.testing.assert_allclose(a * x + b * x0 + d * noise_sample, expected, rtol=1e-14)


def test_dpm_solver_step_matches_the_paper():
    """Lu et al. 2022, "DPM-Solver++", algorithm 2: D and x of its third step."""
    levels = levels_at(1.5, 1.3, 0.9, 0.4)
    log_snr = np.log(levels.alpha / levels.sigma)
    h = np.diff(log_snr)
    r = h[0] / h[1]
    x, x0, previous = 0.3, -0.7, -0.5
    d = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * previous
    expected = levels.sigma[2] / levels.sigma[1] * x - levels.alpha[2] * np.expm1(-h[1]) * d
    a, b, c, _ = (n[1] for n in samplers._dpm_solver_coefficients(levels))
    np.testing.assert_allclose(a * x + b * x0 + c * previous, expected, rtol=1e-13)


@pytest.mark.parametrize("ends", ["clean", "without signal", "both"])
def test_dpm_solver_takes_first_order_steps_at_the_ends(ends):
    levels = levels_at(
        np.pi / 2 if ends != "clean" else 1.5, 1.2, 0.8, 0.4 if ends == "without signal" else 0.0
    )
    if ends != "clean":
        levels.alpha[0] = 0.0
    ours, first_order = (
        samplers._dpm_solver_coefficients(levels),
        samplers._ddim_coefficients(levels),
    )
    chex.assert_tree_all_finite(ours)
    same = {"clean": [0, 2], "without signal": [0, 1], "both": [0, 1, 2]}[ends]
    for actual, expected in zip(ours, first_order, strict=True):
        np.testing.assert_array_equal(actual[same], expected[same])
    others = [i for i in range(3) if i not in same]
    assert (ours.c[others] != 0).all()


# Gaussian data with a known denoiser.


def error_of(sampler, steps):
    schedule = uniform_log_snr(steps)
    x = jnp.linspace(-2, 2, 9, dtype=jnp.float64)[:, None]
    got = sampler(gaussian_denoiser(schedule, "x0", jnp.float64), schedule, x, steps, predicts="x0")
    return np.abs(got - flow(schedule, x)).max()


@pytest.mark.parametrize(("sampler", "order"), [(ddim, 1), (dpm_solver, 2)])
def test_deterministic_samplers_converge_to_the_probability_flow_at_their_order(
    float64, sampler, order
):
    coarse, fine, finer = (error_of(sampler, n) for n in (100, 200, 400))
    assert finer < fine < coarse < 0.05
    assert abs(np.log2(coarse / fine) - order) < 0.15
    assert abs(np.log2(fine / finer) - order) < 0.1


def test_samples_of_ddpm_have_the_mean_and_variance_of_the_data():
    schedule, n = schedules.cosine(500), 20_000
    denoise, start = gaussian_denoiser(schedule, "v"), noise(n, 5, size=1)
    got = ddpm(denoise, schedule, start, 500, predicts="v", key=jax.random.key(6))
    mean, std = moments(schedule)
    assert abs(float(got.mean()) - mean) < 5 * std / np.sqrt(n)
    assert abs(float(got.std()) / std - 1) < 5 / np.sqrt(2 * n)
    assert abs(mean - MEAN) < 0.01
    assert abs(std / STD - 1) < 0.02


def test_noise_of_a_timestep_uses_the_key_folded_with_it():
    schedule, x = schedules.cosine(20), noise(3)
    got = ddpm(lambda x, t: 0 * x, schedule, x, 4, predicts="v", key=jax.random.key(5))
    timesteps = sampling_timesteps(schedule, 4)
    levels = Schedule(
        np.append(schedule.alpha[timesteps], 1.0), np.append(schedule.sigma[timesteps], 0.0)
    )
    coefficients = samplers._ddim_coefficients(levels, 1.0)
    for t, alpha, a, b, _, d in zip(timesteps, levels.alpha[:-1], *coefficients, strict=True):
        step_noise = jax.random.normal(jax.random.fold_in(jax.random.key(5), t), x.shape)
        x = float(a + b * alpha) * x + float(d) * step_noise  # v = 0 means x0 = alpha x
    chex.assert_trees_all_close(got, x, atol=1e-5)


# Calling conventions.


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_denoiser_sees_timesteps_of_the_schedule(sampler):
    schedule, seen = schedules.cosine(100), []

    def denoise(x, t):
        assert t.shape == x.shape[:1]
        assert t.dtype == jnp.int32
        jax.debug.callback(lambda t: seen.append(np.asarray(t)), t, ordered=True)
        return x

    jax.block_until_ready(
        samplers.get(sampler)(denoise, schedule, noise(2), 7, key=jax.random.key(3))
    )
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, np.stack([sampling_timesteps(schedule, 7)] * 2, -1))


def test_samplers_support_jit_and_vmap_and_trace_the_model_once():
    schedule, traces = schedules.linear(100), []
    exact = gaussian_denoiser(schedule, "v")

    def denoise(x, t):
        traces.append(x)
        return exact(x, t)

    def sample(x, key):
        return ddpm(denoise, schedule, x, 9, predicts="v", key=key)

    expected = sample(noise(4), jax.random.key(3))
    traces.clear()
    got = jax.jit(sample)(noise(4), jax.random.key(3))
    assert len(traces) == 1
    chex.assert_trees_all_close(got, expected, atol=1e-5)
    batched = jax.vmap(sample)(
        jnp.stack([noise(4), noise(4, 2)]), jax.random.split(jax.random.key(4), 2)
    )
    single = sample(noise(4, 2), jax.random.split(jax.random.key(4), 2)[1])
    chex.assert_trees_all_close(batched[1], single, atol=1e-5)


def test_clip_applies_to_every_x0():
    schedule = schedules.cosine(50)
    x0 = jnp.asarray([[3.0, -0.25, -3.0]])
    for sampler in SAMPLERS.values():
        got = sampler(
            lambda x, t: x0, schedule, noise(1), 9,
            predicts="x0", clip=1.0, key=jax.random.key(3),
        )  # fmt: skip
        chex.assert_trees_all_close(got, jnp.asarray([[1.0, -0.25, -1.0]]), atol=1e-6)


def test_schedule_ending_without_signal_supports_x0_and_v_only():
    schedule = levels_at(0.3, 0.8, 1.2, np.pi / 2)
    schedule.alpha[-1] = 0.0
    for sampler in SAMPLERS.values():
        for predicts in ("x0", "v"):
            sample = functools.partial(sampler, predicts=predicts, key=jax.random.key(3))
            x0 = noise(2, 1)
            got = sample(oracle(schedule, x0, predicts), schedule, noise(2, 2), 4)
            chex.assert_trees_all_close(got, x0, atol=1e-5)
        with pytest.raises(ValueError, match=r'no signal at its last timestep.*"x0" or "v"'):
            sampler(lambda x, t: x, schedule, noise(2, 2), 4, key=jax.random.key(3))


def test_rejects_steps_out_of_range():
    for sampler in SAMPLERS:
        for steps in (0, 11):
            with pytest.raises(ValueError, match=rf"steps must be in \[1, 10\].*got {steps}"):
                samplers.get(sampler)(
                    lambda x, t: x, schedules.cosine(10), noise(2), steps, key=jax.random.key(3)
                )


def test_rejects_invalid_arguments():
    for call, message in (
        (lambda f, s, x: samplers.get("euler"), r"one of \('ddpm', 'ddim', 'dpm_solver'\), got"),
        (lambda f, s, x: ddim(f, s, x, 5, predicts="u"), r"one of \('eps', 'x0', 'v'\), got 'u'"),
        (lambda f, s, x: ddim(f, s, x, 5, eta=1.5), r"eta must be in \[0, 1\], got 1.5"),
        (lambda f, s, x: ddpm(f, s, x, 5), "pass a key"),
        (lambda f, s, x: ddim(f, s, x, 5, clip=-1.0), "clip must be > 0"),
        (lambda f, s, x: dpm_solver(lambda x, t: x[:1], s, x, 5), "prediction must have shape"),
        (lambda f, s, x: ddim(f, Schedule(s.alpha, s.alpha), x, 5), "must be 1"),
        (lambda f, s, x: ddim(f, s, x[0, 0], 5), "a batch of examples"),
    ):
        with pytest.raises(ValueError, match=message):
            call(lambda x, t: x, schedules.cosine(10), noise(2))


def test_rejects_samples_narrower_than_float32():
    with pytest.raises(TypeError, match="x must be float32 or wider, got bfloat16"):
        ddim(lambda x, t: x, schedules.cosine(10), noise(2).astype(jnp.bfloat16), 5)


def test_bfloat16_model_is_sampled_in_float32():
    schedule = schedules.cosine(50)
    exact = gaussian_denoiser(schedule, "v")
    got = ddim(lambda x, t: exact(x, t).astype(jnp.bfloat16), schedule, noise(4), 20, predicts="v")
    assert got.dtype == jnp.float32
    chex.assert_trees_all_close(got, ddim(exact, schedule, noise(4), 20, predicts="v"), atol=0.02)
