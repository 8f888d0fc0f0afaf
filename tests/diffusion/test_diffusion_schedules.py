"""Noise schedules against their papers, and the timesteps that samplers visit."""

import chex
import jax
import numpy as np
import pytest

from fnet.diffusion import Schedule, sampling_timesteps, schedules
from fnet.diffusion.schedules import SCHEDULES


def test_cosine_matches_the_paper():
    """Nichol & Dhariwal 2021, equation 17: before the clipped last step, alpha_bar itself."""
    steps, s = 1000, 0.008
    t = np.arange(1, steps + 1)
    f = np.cos((t / steps + s) / (1 + s) * np.pi / 2) ** 2
    alpha_bar = f / np.cos(s / (1 + s) * np.pi / 2) ** 2
    got = schedules.cosine(steps)
    np.testing.assert_allclose(got.alpha[:-1] ** 2, alpha_bar[:-1], rtol=1e-9)
    np.testing.assert_allclose(got.alpha[-1] ** 2, alpha_bar[-2] * (1 - 0.999), rtol=1e-9)


def test_cosine_starts_with_noise_below_one_gray_level():
    """The paper: s is such that sqrt(beta) at t = 0 is slightly below 1/127.5."""
    assert 0.006 < schedules.cosine(1000).sigma[0] < 1 / 127.5


def test_linear_matches_the_paper():
    """Ho et al. 2020, section 4: betas from 1e-4 to 0.02 in 1,000 steps."""
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    got = schedules.linear()
    np.testing.assert_allclose(got.alpha**2, alpha_bar, rtol=1e-10)
    np.testing.assert_allclose(got.sigma**2, 1 - alpha_bar, rtol=1e-8)
    np.testing.assert_allclose(got.sigma[0], 1e-2, rtol=1e-9)


def test_linear_ends_as_close_to_noise_as_in_the_paper():
    """Ho et al. 2020, section 4: KL(q(x_T | x_0) || N(0, I)) is about 1e-5 bits a dimension."""
    alpha, sigma = (a[-1] for a in schedules.linear())
    mean_square = 0.25  # of pixels in [-1, 1]
    nats = (alpha**2 * mean_square + sigma**2 - 1 - 2 * np.log(sigma)) / 2
    assert 0.5e-5 < nats / np.log(2) < 1.5e-5


@pytest.mark.parametrize("steps", [50, 200, 4000])
def test_linear_ends_with_the_same_noise_for_any_number_of_steps(steps):
    (log_snr, expected) = (
        2 * np.log(s.alpha[-1] / s.sigma[-1]) for s in map(schedules.linear, (steps, 1000))
    )
    # They differ by the second-order term of log(1 - beta), sum(beta^2) / 2.
    second_order = 1000**2 * np.mean(np.linspace(1e-4, 0.02, 1000) ** 2) / 2
    assert abs(log_snr - expected) < 1.3 * second_order * abs(1 / steps - 1 / 1000)


def test_karras_matches_the_paper():
    """Karras et al. 2022, table 1: sigma from 0.002 to 80, rho 7; the paper starts with the noise."""
    n = 18
    i = np.arange(n)
    for rho in (7.0, 1.0):
        ramp = (80 ** (1 / rho) + i / (n - 1) * (0.002 ** (1 / rho) - 80 ** (1 / rho))) ** rho
        got = schedules.karras(n, **{} if rho == 7 else {"rho": rho})
        np.testing.assert_allclose((got.sigma / got.alpha)[::-1], ramp, rtol=1e-10)
        np.testing.assert_allclose((got.sigma / got.alpha)[[0, -1]], [0.002, 80], rtol=1e-10)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("steps", [30, 1000])
def test_schedules_preserve_variance_and_decrease_the_signal(name, steps):
    got = schedules.get(name, steps)
    got.check()
    assert got.steps == steps
    assert got.alpha.shape == got.sigma.shape == (steps,)
    assert got.alpha.dtype == got.sigma.dtype == np.float64
    np.testing.assert_allclose(got.alpha**2 + got.sigma**2, 1, rtol=1e-14)
    assert (np.diff(got.alpha) < 0).all()
    assert (np.diff(got.sigma) >= 0).all()  # the last ones may round to 1


def test_get_passes_options_to_the_schedule():
    by_name = schedules.get("karras", 10, sigma_max=10.0)
    chex.assert_trees_all_equal(by_name, schedules.karras(10, sigma_max=10.0))
    np.testing.assert_allclose(by_name.sigma[-1] / by_name.alpha[-1], 10.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_sampling_timesteps_start_at_the_noisiest_and_are_evenly_spaced(name):
    schedule = schedules.get(name, 1000)
    assert sampling_timesteps(schedule, 1).tolist() == [999]
    assert sampling_timesteps(schedule, 4).tolist() == [999, 749, 499, 249]
    assert sampling_timesteps(schedule, 1000).tolist() == list(range(999, -1, -1))
    for n in (3, 7, 333, 999):
        times = sampling_timesteps(schedule, n)
        widths = -np.diff(np.append(times, -1))
        assert times[0] == 999
        assert times.dtype == np.int32
        assert set(widths) <= {1000 // n, 1000 // n + 1}


@pytest.mark.parametrize("n", [0, -1, 11])
def test_sampling_timesteps_rejects_steps_out_of_range(n):
    with pytest.raises(ValueError, match=rf"steps must be in \[1, 10\].*got {n}"):
        sampling_timesteps(schedules.cosine(10), n)


def test_schedules_reject_invalid_numbers():
    for make, message in (
        (lambda: schedules.get("sine"), r"one of \('cosine', 'linear', 'karras'\), got 'sine'"),
        (lambda: schedules.cosine(0), "steps must be at least 1, got 0"),
        (lambda: schedules.cosine(10, s=-1.0), "s must be >= 0"),
        (lambda: schedules.cosine(10, max_beta=1.0), r"max_beta must be in \(0, 1\)"),
        (lambda: schedules.linear(20), "use more than 20 steps"),
        (lambda: schedules.linear(first=0.0), "first must be > 0, got 0.0$"),
        (lambda: schedules.linear(last=-0.1), "last must be > 0, got -0.1$"),
        (lambda: schedules.karras(1), "needs steps >= 2.* got steps=1"),
        (lambda: schedules.karras(10, sigma_min=2.0, sigma_max=1.0), "sigma_min < sigma_max"),
        (lambda: schedules.karras(10, rho=0.0), "rho > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_check_rejects_invalid_arrays():
    for alpha, sigma, message in (
        ([0.8, 0.6], [0.6], r"shapes \(2,\) and \(1,\)"),
        ([], [], "same length"),
        ([0.8, 0.6], [0.8, 0.8], r"must be 1, got alpha=0.8 and sigma=0.8 at timestep 0"),
        ([0.6, 0.8], [0.8, 0.6], "must decrease, got 0.75 at timestep 0"),
        ([1.0, 0.6], [0.0, 0.8], "sigma > 0"),
        ([0.6, -0.8], [0.8, 0.6], "alpha >= 0"),
        ([0.6, np.nan], [0.8, 0.6], "alpha >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Schedule(np.asarray(alpha), np.asarray(sigma)).check()


def test_check_rejects_traced_schedule():
    with pytest.raises(TypeError, match="close over the schedule"):
        jax.jit(lambda s: s.check())(schedules.cosine(10))
