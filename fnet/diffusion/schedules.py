"""Noise schedules: how much signal and how much noise there is at each step, from papers by name.

Step 0 is the cleanest, the last one the noisiest; at step t an example is
``alpha[t] x0 + sigma[t] eps`` with ``alpha^2 + sigma^2 = 1`` (variance preserving). A model is
trained on all steps, and sampled from on some of them: both read the same arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class Schedule(NamedTuple):
    """Signal and noise at each step, as constants of the program.

    They are numpy's, in float64, so that what samplers make of them is rounded once, to the
    dtype of the sample. Close over a schedule; do not pass it through `jax.jit`.

    Attributes:
      alpha: standard deviation of the signal [steps], in [0, 1], falling with the step.
      sigma: standard deviation of the noise [steps], ``sqrt(1 - alpha^2)``, > 0.
    """

    alpha: np.ndarray
    sigma: np.ndarray

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.alpha)


def cosine(steps: int = 1000, *, s: float = 0.008, max_beta: float = 0.999) -> Schedule:
    """The cosine schedule of Nichol & Dhariwal, "Improved DDPM", ICML 2021, equation 17.

    Ours counts from 0, the paper from 1::

        f(u) = cos^2((u + s) / (1 + s) * pi / 2)
        beta[t] = min(1 - f((t + 1) / steps) / f(t / steps), max_beta)
        alpha[t]^2 = prod_(i <= t) (1 - beta[i])

    Args:
      steps: how many, >= 1.
      s: keeps the first betas from being tiny, >= 0.
      max_beta: in (0, 1); it limits the last beta, which would leave no signal.

    Returns:
      The schedule, its arrays [steps], float64.

    Raises:
      ValueError: for a number outside of these.
    """
    _check_steps("cosine", steps)
    if s < 0 or not 0 < max_beta < 1:
        raise ValueError(
            f"cosine: s must be >= 0 and max_beta in (0, 1), got s={s}, max_beta={max_beta}"
        )
    u = np.arange(steps + 1) / steps
    f = np.cos((u + s) / (1 + s) * np.pi / 2) ** 2
    return _of_betas(np.minimum(1 - f[1:] / f[:-1], max_beta))


def linear(steps: int = 1000, *, first: float = 1e-4, last: float = 0.02) -> Schedule:
    """The linear schedule of Ho, Jain & Abbeel, "Denoising Diffusion", NeurIPS 2020, section 4.

    The betas are those for 1,000 steps. With another number of steps they are scaled, as in
    Dhariwal & Nichol 2021's code, so that the last step is as noisy::

        beta[t] = (first + (last - first) * t / (steps - 1)) * 1000 / steps
        alpha[t]^2 = prod_(i <= t) (1 - beta[i])

    Args:
      steps: how many, enough for every beta to be below 1: more than ``1000 * last``.
      first: the first of 1,000 betas, > 0.
      last: the last of them.

    Returns:
      The schedule, its arrays [steps], float64.

    Raises:
      ValueError: for a number outside of these.
    """
    _check_steps("linear", steps)
    if not (first > 0 and last > 0):
        raise ValueError(f"linear: first and last must be > 0, got {first} and {last}")
    betas = np.linspace(first, last, steps) * (1000 / steps)
    if not betas.max() < 1:
        raise ValueError(
            f"linear: betas must be in (0, 1), got {betas.min():.4g} to {betas.max():.4g} for "
            f"first={first}, last={last} of 1000, scaled to steps={steps}; "
            f"use more than {1000 * max(first, last):g} steps"
        )
    return _of_betas(betas)


def karras(
    steps: int = 1000, *, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0
) -> Schedule:
    """The ramp of Karras et al., "Elucidating the Design Space", NeurIPS 2022, equation 5.

    Its ``x0 + s eps`` is scaled to variance 1, for data of variance 1::

        s[t] = (sigma_min^(1/rho) + t / (steps - 1) (sigma_max^(1/rho) - sigma_min^(1/rho)))^rho
        alpha[t] = 1 / sqrt(1 + s[t]^2),  sigma[t] = s[t] / sqrt(1 + s[t]^2)

    The paper takes this ramp for sampling and draws training noise from a log-normal; here,
    as with the other schedules, training draws steps of the ramp evenly.

    Args:
      steps: how many, >= 2.
      sigma_min: noise over signal at the first step, > 0.
      sigma_max: noise over signal at the last step, > ``sigma_min``.
      rho: > 0; the larger, the more steps with little noise.

    Returns:
      The schedule, its arrays [steps], float64.

    Raises:
      ValueError: for a number outside of these.
    """
    _check_steps("karras", steps, least=2)
    if not 0 < sigma_min < sigma_max or rho <= 0:
        raise ValueError(
            "karras: expected 0 < sigma_min < sigma_max and rho > 0, "
            f"got sigma_min={sigma_min}, sigma_max={sigma_max}, rho={rho}"
        )
    s = np.linspace(sigma_min ** (1 / rho), sigma_max ** (1 / rho), steps) ** rho
    return Schedule(alpha=1 / np.hypot(1, s), sigma=s / np.hypot(1, s))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "cosine": cosine,
    "linear": linear,
    "karras": karras,
}
"""By name."""


def get(name: str, steps: int = 1000, **options: float) -> Schedule:
    """The schedule of that name: one of `SCHEDULES`.

    Args:
      name: ``cosine``, ``linear`` or ``karras``.
      steps: how many.
      **options: of the function of that name.

    Raises:
      ValueError: for an unknown name; otherwise as the schedule itself.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {tuple(SCHEDULES)}, got {name!r}")
    return SCHEDULES[name](steps, **options)


def sampling_times(schedule: Schedule, steps: int) -> np.ndarray:
    """Which of the schedule's steps a sampler visits: ``steps`` of them, the noisiest first.

    The way from the noisiest step, T - 1, to the clean example, as it were step -1, is cut into
    equal parts, ``t[i] = T - 1 - floor(i T / steps)`` ("trailing" in Lin et al. 2024, "Common
    Diffusion Noise Schedules and Sample Steps Are Flawed"). Its end is not visited.

    Args:
      schedule: T steps.
      steps: how many to visit, in [1, T].

    Returns:
      int32 [steps], falling.

    Raises:
      ValueError: if ``steps < 1``, or if the schedule has fewer.
    """
    if not 1 <= steps <= schedule.steps:
        raise ValueError(
            f"sampling: steps must be in [1, {schedule.steps}], those of the schedule, got {steps}"
        )
    return (schedule.steps - 1 - np.arange(steps) * schedule.steps // steps).astype(np.int32)


def check(schedule: Schedule) -> None:
    """Refuses a schedule that is not one.

    Args:
      schedule: what is looked at.

    Raises:
      TypeError: for arrays that are traced.
      ValueError: for arrays that are not vectors of one length >= 1, for signal that does not
        fall or is outside [0, 1], no noise, or ``alpha^2 + sigma^2`` other than 1.
    """
    arrays: tuple[Any, ...] = tuple(schedule)
    if any(isinstance(a, jax.core.Tracer) for a in arrays):
        raise TypeError(
            "schedule: its arrays are constants of the program, got traced ones; "
            "close over the schedule rather than passing it through jax.jit"
        )
    alpha, sigma = (np.asarray(a, np.float64) for a in arrays)
    if alpha.ndim != 1 or alpha.shape != sigma.shape or not alpha.size:
        raise ValueError(
            "schedule: alpha and sigma must be vectors of one length, "
            f"got shapes {alpha.shape} and {sigma.shape}"
        )
    if not (alpha.min() >= 0 and sigma.min() > 0):
        raise ValueError(
            "schedule: expected alpha >= 0 and sigma > 0 at every step, "
            f"got at least {alpha.min():.4g} and {sigma.min():.4g}"
        )
    if not np.allclose(alpha**2 + sigma**2, 1, rtol=0, atol=1e-5):
        worst = np.abs(alpha**2 + sigma**2 - 1).argmax()
        raise ValueError(
            f"schedule: alpha^2 + sigma^2 must be 1, got alpha={alpha[worst]:.6g} and "
            f"sigma={sigma[worst]:.6g} at step {worst}; divide both by sqrt(alpha^2 + sigma^2)"
        )
    if (np.diff(alpha / sigma) >= 0).any():
        t = int((np.diff(alpha / sigma) >= 0).argmax())
        raise ValueError(
            "schedule: signal over noise must fall with the step, "
            f"got {alpha[t] / sigma[t]:.6g} at step {t} and "
            f"{alpha[t + 1] / sigma[t + 1]:.6g} at step {t + 1}"
        )


def _of_betas(betas: np.ndarray) -> Schedule:
    """The schedule with the variances ``betas`` [steps], each of what a step adds."""
    # log1p and expm1 keep the digits of the first sigmas, which are small.
    log_alpha_bar = np.cumsum(np.log1p(-betas))
    return Schedule(alpha=np.exp(log_alpha_bar / 2), sigma=np.sqrt(-np.expm1(log_alpha_bar)))


def _check_steps(name: str, steps: int, *, least: int = 1) -> None:
    if steps < least:
        raise ValueError(f"{name}: steps must be at least {least}, got {steps}")
