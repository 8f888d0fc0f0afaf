"""Samplers: the reverse diffusion process, from noise to examples, in one scan.

All samplers take steps of the same form. With the denoiser's x0 of this step and of the previous
step::

    x' = a x + b x0 + c x0_previous + d noise

They differ in the four coefficients, which depend only on the schedule. The coefficients are
computed in float64 when the sampler is traced. The last step goes to the clean example.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from fnet import checks
from fnet.diffusion import schedules
from fnet.diffusion.schedules import Schedule
from fnet.diffusion.targets import check_target, denoised

Denoise = Callable[[Array, Array], Array]
"""``denoise(x [B, ...], t [B] int32) -> prediction [B, ...]``, with a timestep t per example."""


def ddim(
    denoise: Denoise,
    schedule: Schedule,
    x: Float[Array, "b ..."],
    steps: int,
    *,
    predicts: str = "eps",
    eta: float = 0.0,
    clip: float | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "b ..."]:
    """Denoising diffusion implicit models (Song, Meng & Ermon, ICLR 2021, equations 12 and 16).

    With ``eps = (x - alpha x0) / sigma``, and alpha', sigma' of the next timestep visited::

        d  = eta sigma'/sigma sqrt(1 - (alpha / alpha')^2)
        x' = alpha' x0 + sqrt(sigma'^2 - d^2) eps + d noise

    With ``eta=0`` sampling is deterministic: a first-order solver of the probability flow ODE. With
    ``eta=1`` it is ancestral sampling (DDPM: Ho, Jain & Abbeel, NeurIPS 2020, equations 6 and 7,
    with the smaller of the paper's two variances), whose samples vary too little after few steps.

    Args:
      denoise: ``denoise(x [B, ...], t [B] int32) -> prediction [B, ...]``.
      schedule: noise schedule of the training.
      x: standard normal noise [B, ...], float32 or float64.
      steps: number of timesteps to visit (`sampling_timesteps`); static.
      predicts: target that ``denoise`` predicts: ``eps``, ``x0`` or ``v``.
      eta: amount of noise, in [0, 1]; 1: DDPM.
      clip: clip every x0 to [-clip, clip]. None: no clipping.
      key: random key, required for ``eta > 0``. The noise of timestep t is drawn with
        ``fold_in(key, t)``.

    Returns:
      Examples, of the shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is narrower than float32, or the schedule is traced.
      ValueError: if ``steps`` or ``eta`` is out of range, ``eta > 0`` without a key, for an unknown
        target, ``clip <= 0``, an invalid schedule, or a prediction whose shape differs from
        ``x``. Also if the schedule has no signal at its last timestep and ``predicts`` is
        ``eps``, because x0 cannot be computed from eps then.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> schedule = fnet.diffusion.schedules.cosine(100)
      >>> denoise = lambda x, t: jnp.full_like(x, 0.5)
      >>> x = jax.random.normal(jax.random.key(0), (2, 8))
      >>> samples = fnet.diffusion.ddim(denoise, schedule, x, 10, predicts="x0")
      >>> bool(jnp.allclose(samples, 0.5))
      True
    """
    checks.numbers("ddim", "in [0, 1]", eta=eta)
    if eta and key is None:
        raise ValueError(f"ddim: eta={eta} adds noise at every step; pass a key (ddpm is eta=1)")
    timesteps, levels = _visited(schedule, steps)
    coefficients = _ddim_coefficients(levels, eta)
    return _sample(denoise, timesteps, levels, coefficients, x, predicts, clip, key)


def dpm_solver(
    denoise: Denoise,
    schedule: Schedule,
    x: Float[Array, "b ..."],
    steps: int,
    *,
    predicts: str = "eps",
    clip: float | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "b ..."]:
    """DPM-Solver++(2M), second order (Lu et al. 2022, "DPM-Solver++", algorithm 2).

    With ``lambda = log(alpha / sigma)``, ``h = lambda' - lambda`` and r the previous h divided by
    this one::

        D  = x0 + (x0 - x0_previous) / (2 r)
        x' = sigma'/sigma x + alpha' (1 - exp(-h)) D

    The first step, and the last one to the clean example, where h is infinite, use ``D = x0``,
    as `ddim` does. Sampling is deterministic.

    Args:
      denoise, schedule, x, steps, predicts, clip: as for `ddim`.
      key: ignored; accepted so that all samplers have the same signature.

    Returns:
      Examples [B, ...], of the shape and dtype of ``x``.

    Raises:
      TypeError, ValueError: as `ddim`.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> schedule = fnet.diffusion.schedules.cosine(100)
      >>> denoise = lambda x, t: jnp.full_like(x, 0.5)
      >>> x = jax.random.normal(jax.random.key(0), (2, 8))
      >>> samples = fnet.diffusion.dpm_solver(denoise, schedule, x, 10, predicts="x0")
      >>> bool(jnp.allclose(samples, 0.5))
      True
    """
    del key
    timesteps, levels = _visited(schedule, steps)
    coefficients = _dpm_solver_coefficients(levels)
    return _sample(denoise, timesteps, levels, coefficients, x, predicts, clip, None)


SAMPLERS: dict[str, Callable[..., Array]] = {
    "ddpm": functools.partial(ddim, eta=1.0),
    "ddim": ddim,
    "dpm_solver": dpm_solver,
}
"""Samplers by name."""


def get(name: str) -> Callable[..., Array]:
    """Look up a sampler by name.

    Args:
      name: ``ddpm``, ``ddim`` or ``dpm_solver``.

    Returns:
      ``sampler(denoise, schedule, x, steps, *, predicts, clip, key) -> samples``.

    Raises:
      ValueError: for an unknown name.

    Example:
      >>> import fnet
      >>> fnet.diffusion.samplers.get("ddim") is fnet.diffusion.ddim
      True
    """
    checks.choice("samplers", tuple(SAMPLERS), sampler=name)
    return SAMPLERS[name]


class _Coefficients(NamedTuple):
    """Coefficients of n steps, ``x' = a x + b x0 + c x0_previous + d noise``; all [n]."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray


def _ddim_coefficients(levels: Schedule, eta: float = 0.0) -> _Coefficients:
    """Compute the coefficients of `ddim` from the levels before and after each step [n + 1].

    The noisiest level is the first. Only the last may be without noise.
    """
    (alpha, alpha_next), (sigma, sigma_next) = ((level[:-1], level[1:]) for level in levels)
    variance = eta**2 * (1 - (alpha / alpha_next) ** 2) / sigma**2  # (d / sigma')^2
    variance = np.clip(variance, 0, 1)  # Rounding may exceed 1, and 1 - variance has a root below.
    a = sigma_next / sigma * np.sqrt(1 - variance)
    b, c, d = alpha_next - alpha * a, np.zeros_like(a), sigma_next * np.sqrt(variance)
    return _Coefficients(a, b, c, d)


def _dpm_solver_coefficients(levels: Schedule) -> _Coefficients:
    """Compute the coefficients of `dpm_solver`, as `_ddim_coefficients` does."""
    a, b, _, d = _ddim_coefficients(levels)  # alpha' (1 - exp(-h)) = alpha' - alpha sigma'/sigma
    # Infinite without noise or without signal.
    with np.errstate(divide="ignore"):
        log_snr = np.log(levels.alpha) - np.log(levels.sigma)
    h, extrapolation = np.diff(log_snr), np.zeros_like(a)
    finite = np.isfinite(h[1:])
    extrapolation[1:][finite] = h[1:][finite] / (2 * h[:-1][finite])
    return _Coefficients(a, b * (1 + extrapolation), -b * extrapolation, d)


def _visited(schedule: Schedule, steps: int) -> tuple[np.ndarray, Schedule]:
    """Timesteps visited [n], and the levels at them and at the clean end [n + 1]."""
    schedule.check()
    timesteps = schedules.sampling_timesteps(schedule, steps)
    alpha, sigma = (np.asarray(a, np.float64)[timesteps] for a in schedule)
    return timesteps, Schedule(np.append(alpha, 1.0), np.append(sigma, 0.0))


def _sample(
    denoise: Denoise,
    timesteps: np.ndarray,
    levels: Schedule,
    coefficients: _Coefficients,
    x: Array,
    predicts: str,
    clip: float | None,
    key: Array | None,
) -> Array:
    _check(x, levels, predicts, clip)
    # Skip the previous x0 and the noise if no step uses them.
    uses_previous, uses_noise = bool(coefficients.c.any()), bool(coefficients.d.any())
    visited = Schedule(levels.alpha[:-1], levels.sigma[:-1])
    rows = jax.tree.map(lambda a: jnp.asarray(a, x.dtype), (visited, coefficients))

    def step(carry: tuple[Array, Array | None], row: tuple[Any, ...]) -> tuple[Any, None]:
        x, previous = carry
        t, ((alpha, sigma), (a, b, c, d)) = row
        prediction = denoise(x, jnp.full(x.shape[:1], t))
        x0, _ = denoised(predicts, prediction, x, alpha, sigma, clip=clip)
        x_next = a * x + b * x0
        if previous is not None:
            x_next = x_next + c * previous
        if uses_noise and key is not None:
            x_next = x_next + d * jax.random.normal(jax.random.fold_in(key, t), x.shape, x.dtype)
        return (x_next, x0 if uses_previous else None), None

    # The first step has no previous x0. Its coefficient is 0, so any array of the shape will do.
    first = (x, x if uses_previous else None)
    return jax.lax.scan(step, first, (jnp.asarray(timesteps), rows))[0][0]


def _check(x: Array, levels: Schedule, predicts: str, clip: float | None) -> None:
    check_target(predicts)
    checks.numbers("sampling", "> 0", clip=clip)
    checks.wide("sampling", x=x)
    if not x.ndim:
        raise ValueError("sampling: x must be a batch of examples [B, ...], got a scalar")
    if predicts == "eps" and levels.alpha[0] == 0:
        raise ValueError(
            "sampling: the schedule has no signal at its last timestep, so x0 cannot be computed "
            'from eps; train a model that predicts "x0" or "v" on this schedule'
        )
