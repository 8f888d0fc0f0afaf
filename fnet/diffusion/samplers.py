"""Samplers: from noise to examples, one step of a schedule after the other, in one scan.

Every sampler here takes the same kind of step. With the denoiser's example x0 at this step, and
the one that it gave at the step before::

    x' = a x + b x0 + c x0_before + d noise

They differ in the four numbers, which follow from the schedule alone and are computed with it,
in float64, when the sampler is traced. The last step goes to the clean example.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, PRNGKeyArray

from fnet.diffusion import schedules
from fnet.diffusion.schedules import Schedule
from fnet.diffusion.targets import check_clip, check_target, denoised

Denoise = Callable[[Array, Array], Array]
"""``denoise(x [B, ...], t [B] int32) -> prediction [B, ...]``; t: a step of the schedule."""


def ddpm(
    denoise: Denoise,
    schedule: Schedule,
    x: Float[Array, "b ..."],
    steps: int,
    *,
    predicts: str = "eps",
    clip: float | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "b ..."]:
    """Ancestral sampling (Ho, Jain & Abbeel, NeurIPS 2020, equations 6 and 7).

    Draws from ``q(x' | x, x0)``, with the smaller of the paper's two variances. With alpha',
    sigma' of the next step visited, and ``beta = 1 - (alpha / alpha')^2``::

        mean = alpha/alpha' (sigma'/sigma)^2 x + alpha' beta/sigma^2 x0
        x'   = mean + sigma'/sigma sqrt(beta) noise

    This is `ddim` with ``eta`` 1. Few steps give too little variance: use another sampler.

    Args:
      denoise, schedule, x, steps, predicts, clip: as for `ddim`.
      key: for the noise; needed.

    Returns:
      Examples [B, ...], of the shape and dtype of ``x``.

    Raises:
      TypeError, ValueError: as `ddim`.
    """
    return ddim(denoise, schedule, x, steps, predicts=predicts, eta=1.0, clip=clip, key=key)


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

    With eps the noise that is left in x beside x0::

        d  = eta sigma'/sigma sqrt(1 - (alpha / alpha')^2)
        x' = alpha' x0 + sqrt(sigma'^2 - d^2) eps + d noise

    With ``eta`` 0 nothing is drawn: it is a first-order solver of the probability flow.

    Args:
      denoise: ``denoise(x [B, ...], t [B] int32) -> prediction [B, ...]``, as trained.
      schedule: the one trained on.
      x: standard normal noise [B, ...], float32 or float64.
      steps: how many of the schedule's steps to visit (`sampling_times`); static.
      predicts: what ``denoise`` gives: ``eps``, ``x0`` or ``v``.
      eta: in [0, 1]; 1: `ddpm`.
      clip: bounds every x0 to [-clip, clip]; None: no bounds.
      key: for the noise of ``eta > 0``; at step t it is that of ``fold_in(key, t)``.

    Returns:
      Examples, of the shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is narrower than float32, or the schedule is traced.
      ValueError: if ``steps`` is not in [1, those of the schedule]; for an unknown target, an
        ``eta`` outside [0, 1], ``eta > 0`` without a key, ``clip <= 0``, a prediction of another
        shape than ``x``, a schedule that is not one, or one without any signal at its last step
        if ``predicts`` is ``eps``, which then tells nothing of x0.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"ddim: eta must be in [0, 1], got {eta}")
    if eta and key is None:
        raise ValueError(f"ddim: eta={eta} draws noise at every step; pass a key (eta 1 is ddpm)")
    times, path = _visited(schedule, steps)
    return _sample(denoise, times, path, ddim_steps(path, eta), x, predicts, clip, key)


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

    With ``lambda = log(alpha / sigma)``, ``h = lambda' - lambda`` and r the last h over this::

        D  = x0 + (x0 - x0_before) / (2 r)
        x' = sigma'/sigma x + alpha' (1 - exp(-h)) D

    The first step, and the last to the clean example, where h is infinite, take ``D = x0``,
    and are those of `ddim`. Nothing is drawn.

    Args:
      denoise, schedule, x, steps, predicts, clip: as for `ddim`.
      key: not read.

    Returns:
      Examples [B, ...], of the shape and dtype of ``x``.

    Raises:
      TypeError, ValueError: as `ddim`.
    """
    del key
    times, path = _visited(schedule, steps)
    return _sample(denoise, times, path, dpm_solver_steps(path), x, predicts, clip, None)


SAMPLERS: dict[str, Callable[..., Array]] = {"ddpm": ddpm, "ddim": ddim, "dpm_solver": dpm_solver}
"""By name."""


def get(name: str) -> Callable[..., Array]:
    """The sampler of that name, ``sampler(denoise, schedule, x, steps, *, predicts, clip, key)``.

    Args:
      name: ``ddpm``, ``ddim`` or ``dpm_solver``.

    Raises:
      ValueError: if it is none of `SAMPLERS`.
    """
    if name not in SAMPLERS:
        raise ValueError(f"sampler: expected one of {tuple(SAMPLERS)}, got {name!r}")
    return SAMPLERS[name]


class Steps(NamedTuple):
    """The numbers of n steps, ``x' = a x + b x0 + c x0_before + d noise``.

    Attributes:
      a: of x, float64 [n], as all of them.
      b: of the denoiser's x0.
      c: of the x0 of the step before.
      d: of noise.
    """

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray


def ddim_steps(path: Schedule, eta: float = 0.0) -> Steps:
    """The numbers of `ddim`.

    Args:
      path: signal and noise at the n + 1 points between the n steps [n + 1], the first the
        noisiest; with noise at all but the last.
      eta: in [0, 1].
    """
    (alpha, alpha_next), (sigma, sigma_next) = ((p[:-1], p[1:]) for p in path)
    drawn = eta**2 * (1 - (alpha / alpha_next) ** 2) / sigma**2  # (d / sigma')^2
    drawn = np.clip(drawn, 0, 1)  # 1 is where it ends without eta; a rounding more has no root
    a = sigma_next / sigma * np.sqrt(1 - drawn)
    return Steps(a, alpha_next - alpha * a, np.zeros_like(a), sigma_next * np.sqrt(drawn))


def dpm_solver_steps(path: Schedule) -> Steps:
    """The numbers of `dpm_solver`; ``path`` as for `ddim_steps`."""
    a, b, _, d = ddim_steps(path)  # alpha' (1 - exp(-h)) = alpha' - alpha sigma'/sigma
    # Infinite where there is no noise, or no signal.
    with np.errstate(divide="ignore"):
        log_snr = np.log(path.alpha) - np.log(path.sigma)
    h, extrapolation = np.diff(log_snr), np.zeros_like(a)
    finite = np.isfinite(h[1:])
    extrapolation[1:][finite] = h[1:][finite] / (2 * h[:-1][finite])
    return Steps(a, b * (1 + extrapolation), -b * extrapolation, d)


def _visited(schedule: Schedule, steps: int) -> tuple[np.ndarray, Schedule]:
    """The steps visited [n], and signal and noise at them and at the clean end [n + 1]."""
    schedules.check(schedule)
    times = schedules.sampling_times(schedule, steps)
    alpha, sigma = (np.asarray(a, np.float64)[times] for a in schedule)
    return times, Schedule(np.append(alpha, 1.0), np.append(sigma, 0.0))


def _sample(
    denoise: Denoise,
    times: np.ndarray,
    path: Schedule,
    numbers: Steps,
    x: Array,
    predicts: str,
    clip: float | None,
    key: Array | None,
) -> Array:
    """Takes the steps, each with the denoiser's x0 there."""
    _check(x, path, predicts, clip)
    # What no step needs is neither carried nor drawn.
    remembers, draws = bool(numbers.c.any()), bool(numbers.d.any())
    before_end = Schedule(path.alpha[:-1], path.sigma[:-1])
    rows = jax.tree.map(lambda a: jnp.asarray(a, x.dtype), (before_end, numbers))

    def step(carry: tuple[Array, Array | None], row: tuple[Any, ...]) -> tuple[Any, None]:
        x, before = carry
        t, ((alpha, sigma), (a, b, c, d)) = row
        prediction = denoise(x, jnp.full(x.shape[:1], t))
        x0, _ = denoised(predicts, prediction, x, alpha, sigma, clip=clip)
        after = a * x + b * x0
        if before is not None:
            after = after + c * before
        if draws and key is not None:
            after = after + d * jax.random.normal(jax.random.fold_in(key, t), x.shape, x.dtype)
        return (after, x0 if remembers else None), None

    # Before the first step there is no x0, and its number is 0: any array of that shape.
    first = (x, x if remembers else None)
    return jax.lax.scan(step, first, (jnp.asarray(times), rows))[0][0]


def _check(x: Array, path: Schedule, predicts: str, clip: float | None) -> None:
    check_target(predicts)
    check_clip(clip)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 4:
        raise TypeError(f"sampling: x must be float32 or float64, got {x.dtype}")
    if not x.ndim:
        raise ValueError("sampling: x must be a batch of examples [B, ...], got a scalar")
    if predicts == "eps" and path.alpha[0] == 0:
        raise ValueError(
            "sampling: the schedule has no signal at its last step, where a prediction of eps "
            'tells nothing of x0; train a model of "x0" or "v" on it'
        )
