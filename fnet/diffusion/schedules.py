"""Noise schedules: signal and noise levels at each timestep.

Timestep 0 is the cleanest, the last one the noisiest. At timestep t an example is
``alpha[t] x0 + sigma[t] eps`` with ``alpha^2 + sigma^2 = 1`` (variance preserving). Training uses
all timesteps, samplers a subset of them (`sampling_timesteps`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fnet import checks


class Schedule(NamedTuple):
    """Signal and noise level at each timestep, as numpy constants in float64.

    Samplers compute their coefficients from it in float64 and round once, to the dtype of the
    sample. Close over a schedule; do not pass it through `jax.jit`.

    Attributes:
      alpha: standard deviation of the signal [steps], in [0, 1], decreasing.
      sigma: standard deviation of the noise [steps], ``sqrt(1 - alpha^2)``, > 0.

    Example:
      >>> import fnet
      >>> schedule = fnet.diffusion.schedules.cosine(1000)
      >>> schedule.steps, bool(schedule.alpha[-1] < 0.01 < 0.99 < schedule.alpha[0])
      (1000, True)
    """

    alpha: np.ndarray
    sigma: np.ndarray

    @property
    def steps(self) -> int:
        """Number of timesteps."""
        return len(self.alpha)

    def check(self) -> None:
        """Raise ValueError unless the levels are valid, or TypeError if they are traced."""
        arrays: tuple[Any, ...] = tuple(self)
        if any(isinstance(a, jax.core.Tracer) for a in arrays):
            raise TypeError(
                "schedule: alpha and sigma must be constants, got traced arrays; "
                "close over the schedule instead of passing it through jax.jit"
            )
        alpha, sigma = (np.asarray(a, np.float64) for a in arrays)
        if alpha.ndim != 1 or alpha.shape != sigma.shape or not alpha.size:
            raise ValueError(
                "schedule: alpha and sigma must be vectors of the same length >= 1, "
                f"got shapes {alpha.shape} and {sigma.shape}"
            )
        if not (alpha.min() >= 0 and sigma.min() > 0):
            raise ValueError(
                "schedule: needs alpha >= 0 and sigma > 0 at every timestep, "
                f"got minima of {alpha.min():.4g} and {sigma.min():.4g}"
            )
        if not np.allclose(alpha**2 + sigma**2, 1, rtol=0, atol=1e-5):
            worst = np.abs(alpha**2 + sigma**2 - 1).argmax()
            raise ValueError(
                f"schedule: alpha^2 + sigma^2 must be 1, got alpha={alpha[worst]:.6g} and "
                f"sigma={sigma[worst]:.6g} at timestep {worst}; divide both by the root of the sum"
            )
        if (np.diff(alpha / sigma) >= 0).any():
            t = int((np.diff(alpha / sigma) >= 0).argmax())
            raise ValueError(
                "schedule: alpha / sigma must decrease, "
                f"got {alpha[t] / sigma[t]:.6g} at timestep {t} and "
                f"{alpha[t + 1] / sigma[t + 1]:.6g} at {t + 1}"
            )


def cosine(steps: int = 1000, *, s: float = 0.008, max_beta: float = 0.999) -> Schedule:
    """Cosine schedule of Nichol & Dhariwal, "Improved DDPM", ICML 2021, equation 17.

    Timesteps count from 0, where the paper counts from 1::

        f(u) = cos^2((u + s) / (1 + s) * pi / 2)
        beta[t] = min(1 - f((t + 1) / steps) / f(t / steps), max_beta)
        alpha[t]^2 = prod_(i <= t) (1 - beta[i])

    Args:
      steps: number of timesteps, >= 1.
      s: offset that keeps the first betas from being tiny, >= 0.
      max_beta: upper bound of beta, in (0, 1). Without it the last timestep would have no signal.

    Returns:
      A schedule with arrays [steps], float64.

    Raises:
      ValueError: for a number out of range.

    Example:
      >>> import fnet
      >>> print(fnet.diffusion.schedules.cosine(4).sigma.round(2))
      [0.39 0.71 0.93 1.  ]
    """
    checks.sizes("cosine", steps=steps)
    checks.numbers("cosine", ">= 0", s=s)
    checks.numbers("cosine", "in (0, 1)", max_beta=max_beta)
    u = np.arange(steps + 1) / steps
    f = np.cos((u + s) / (1 + s) * np.pi / 2) ** 2
    return _from_betas(np.minimum(1 - f[1:] / f[:-1], max_beta))


def linear(steps: int = 1000, *, first: float = 1e-4, last: float = 0.02) -> Schedule:
    """Linear schedule of Ho, Jain & Abbeel, "Denoising Diffusion", NeurIPS 2020, section 4.

    The betas are given for 1,000 timesteps. For another number they are scaled, as in the
    code of Dhariwal & Nichol 2021, so that the last timestep is equally noisy::

        beta[t] = (first + (last - first) * t / (steps - 1)) * 1000 / steps
        alpha[t]^2 = prod_(i <= t) (1 - beta[i])

    Args:
      steps: number of timesteps, more than ``1000 * last``, so that every beta is below 1.
      first: first of 1,000 betas, > 0.
      last: last of 1,000 betas, > 0.

    Returns:
      A schedule with arrays [steps], float64.

    Raises:
      ValueError: for a number out of range.

    Example:
      >>> import fnet
      >>> print(fnet.diffusion.schedules.linear(1000).sigma[[0, 499, 999]].round(2))
      [0.01 0.96 1.  ]
    """
    checks.sizes("linear", steps=steps)
    checks.numbers("linear", "> 0", first=first, last=last)
    betas = np.linspace(first, last, steps) * (1000 / steps)
    if not betas.max() < 1:
        raise ValueError(
            f"linear: betas must be in (0, 1), got {betas.min():.4g} to {betas.max():.4g} for "
            f"first={first}, last={last} of 1000, scaled to steps={steps}; "
            f"use more than {1000 * max(first, last):g} steps"
        )
    return _from_betas(betas)


def karras(
    steps: int = 1000, *, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0
) -> Schedule:
    """Sigma schedule of Karras et al., "Elucidating the Design Space", NeurIPS 2022, equation 5.

    The paper's ``x0 + s eps`` is scaled to variance 1, for data of variance 1::

        s[t] = (sigma_min^(1/rho) + t / (steps - 1) (sigma_max^(1/rho) - sigma_min^(1/rho)))^rho
        alpha[t] = 1 / sqrt(1 + s[t]^2),  sigma[t] = s[t] / sqrt(1 + s[t]^2)

    The paper uses this schedule for sampling and draws training noise from a log-normal
    distribution. Here training samples timesteps uniformly, as with the other schedules.

    Args:
      steps: number of timesteps, >= 2.
      sigma_min: ratio of noise to signal at the first timestep, > 0.
      sigma_max: ratio of noise to signal at the last timestep, > ``sigma_min``.
      rho: exponent > 0. Larger values give more timesteps with little noise.

    Returns:
      A schedule with arrays [steps], float64.

    Raises:
      ValueError: for a number out of range.

    Example:
      >>> import fnet
      >>> schedule = fnet.diffusion.schedules.karras(3)
      >>> print((schedule.sigma / schedule.alpha).round(3))
      [2.000e-03 2.515e+00 8.000e+01]
    """
    if steps < 2 or not 0 < sigma_min < sigma_max or rho <= 0:
        raise ValueError(
            "karras: needs steps >= 2, 0 < sigma_min < sigma_max and rho > 0, "
            f"got steps={steps}, sigma_min={sigma_min}, sigma_max={sigma_max}, rho={rho}"
        )
    s = np.linspace(sigma_min ** (1 / rho), sigma_max ** (1 / rho), steps) ** rho
    return Schedule(alpha=1 / np.hypot(1, s), sigma=s / np.hypot(1, s))


SCHEDULES: dict[str, Callable[..., Schedule]]
SCHEDULES = {"cosine": cosine, "linear": linear, "karras": karras}
"""Noise schedules by name."""


def get(name: str, steps: int = 1000, **options: float) -> Schedule:
    """Build a schedule by name.

    Args:
      name: ``cosine``, ``linear`` or ``karras``.
      steps: number of timesteps.
      **options: further arguments of the schedule.

    Returns:
      A schedule with arrays [steps], float64.

    Raises:
      ValueError: for an unknown name, and as the schedule itself.

    Example:
      >>> import fnet
      >>> fnet.diffusion.schedules.get("linear", 50).steps
      50
    """
    checks.choice("schedules", tuple(SCHEDULES), schedule=name)
    return SCHEDULES[name](steps, **options)


def sampling_timesteps(schedule: Schedule, steps: int) -> np.ndarray:
    """Timesteps that a sampler visits, the noisiest first.

    They are evenly spaced from T - 1 down, ``t[i] = T - 1 - floor(i T / steps)`` ("trailing" in
    Lin et al. 2024, "Common Diffusion Noise Schedules and Sample Steps Are Flawed").

    Args:
      schedule: schedule with T timesteps.
      steps: number of timesteps to visit, in [1, T].

    Returns:
      int32 [steps], decreasing.

    Raises:
      ValueError: if ``steps`` is not in [1, T].

    Example:
      >>> import fnet
      >>> schedule = fnet.diffusion.schedules.cosine(1000)
      >>> fnet.diffusion.sampling_timesteps(schedule, 4).tolist()
      [999, 749, 499, 249]
    """
    if not 1 <= steps <= schedule.steps:
        raise ValueError(
            f"sampling: steps must be in [1, {schedule.steps}] for this schedule, got {steps}"
        )
    return (schedule.steps - 1 - np.arange(steps) * schedule.steps // steps).astype(np.int32)


def _from_betas(betas: np.ndarray) -> Schedule:
    # log1p and expm1 are precise for the first sigmas, which are small.
    log_alpha_bar = np.cumsum(np.log1p(-betas))
    return Schedule(alpha=np.exp(log_alpha_bar / 2), sigma=np.sqrt(-np.expm1(log_alpha_bar)))
