"""The training loss of a denoiser, one per example: a step and noise are drawn for each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, PRNGKeyArray

from fnet.diffusion import schedules
from fnet.diffusion.schedules import Schedule
from fnet.diffusion.targets import add_noise, check_target, target
from fnet.precision import widened

WEIGHTINGS = ("uniform", "min_snr")
"""By name: every step counts the same; or `min_snr_weight`."""


def denoising_losses(
    denoise: Callable[[Array, Array], Any],
    x0: Float[Array, "b ..."],
    key: PRNGKeyArray,
    schedule: Schedule,
    *,
    predicts: str = "eps",
    weighting: str = "uniform",
    gamma: float = 5.0,
    stratified: bool = False,
    has_aux: bool = False,
) -> Any:
    """The weighted mean square error of a denoiser, at one random step per example.

    With ``t`` uniform and ``eps`` standard normal, one of each per example (Ho et al. 2020,
    equation 14, for any target and weight)::

        x = alpha[t] x0 + sigma[t] eps
        loss = weight[t] * mean((denoise(x, t) - target)^2)

    Args:
      denoise: ``denoise(x [B, ...], t [B] int32) -> prediction [B, ...]``; ``x`` has the dtype
        of ``x0``.
      x0: clean examples, of variance about 1 or within [-1, 1]; any floating dtype.
      key: for steps and noise.
      schedule: its steps are those drawn.
      predicts: what ``denoise`` gives: ``eps``, ``x0`` or ``v`` (`fnet.diffusion.TARGETS`).
      weighting: ``uniform``: 1; ``min_snr``: `min_snr_weight`.
      gamma: of ``min_snr``.
      stratified: spread the steps of a batch evenly (`draw_times`).
      has_aux: whether ``denoise`` returns ``(prediction, aux)``, such as a renewed state.

    Returns:
      losses [B], float32 (float64 for float64); with ``has_aux``, ``(losses, aux)``.

    Raises:
      TypeError: if ``x0`` is not floating.
      ValueError: for an unknown target or weighting, ``gamma <= 0``, a schedule that is not one,
        or a prediction of another shape than ``x0``.
    """
    check_target(predicts)
    schedules.check(schedule)
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting: expected one of {WEIGHTINGS}, got {weighting!r}")
    _check_gamma(gamma)
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        raise TypeError(f"denoising_losses: x0 must be floating, got {x0.dtype}")
    clean = widened(x0)
    time_key, noise_key = jax.random.split(key)
    t = draw_times(time_key, x0.shape[0], schedule.steps, stratified=stratified)
    noise = jax.random.normal(noise_key, clean.shape, clean.dtype)
    alpha, sigma = (jnp.asarray(a, clean.dtype)[t] for a in schedule)
    out = denoise(add_noise(clean, noise, alpha, sigma).astype(x0.dtype), t)
    prediction, aux = out if has_aux else (out, None)
    if prediction.shape != x0.shape:
        raise ValueError(
            f"denoising_losses: the prediction must have the shape of x0, {x0.shape}, "
            f"got {prediction.shape}"
        )
    error = prediction.astype(clean.dtype) - target(predicts, clean, noise, alpha, sigma)
    losses = jnp.square(error).mean(range(1, error.ndim))
    if weighting == "min_snr":
        losses = losses * min_snr_weight(predicts, alpha, sigma, gamma=gamma)
    return (losses, aux) if has_aux else losses


def min_snr_weight(
    predicts: str, alpha: ArrayLike, sigma: ArrayLike, *, gamma: float = 5.0
) -> Array:
    """The Min-SNR weight of a square error (Hang et al., ICCV 2023).

    With ``snr = alpha^2 / sigma^2``::

        x0: min(snr, gamma)      eps: min(snr, gamma) / snr      v: min(snr, gamma) / (snr + 1)

    An error of one target weighs the same as the error of x0 that it stands for. Without noise
    or without signal the weights are their limits, which are finite.

    Args:
      predicts: the target whose error it weighs, one of `fnet.diffusion.TARGETS`.
      alpha: signal [...]; ``alpha^2 + sigma^2 = 1``.
      sigma: noise [...], of the same shape.
      gamma: the largest weight of an error of x0, > 0.

    Returns:
      Weights [...], in the dtype of ``alpha`` and ``sigma``.

    Raises:
      ValueError: for an unknown target, or ``gamma <= 0``.
    """
    check_target(predicts)
    _check_gamma(gamma)
    signal, noise = jnp.square(jnp.asarray(alpha)), jnp.square(jnp.asarray(sigma))
    least = jnp.minimum(signal, gamma * noise)  # min(snr, gamma) sigma^2
    if predicts == "v":
        return least  # snr + 1 = 1 / sigma^2
    power, limit = (signal, 1.0) if predicts == "eps" else (noise, gamma)
    return jnp.where(power > 0, least / jnp.where(power > 0, power, 1), limit)


def draw_times(
    key: PRNGKeyArray, examples: int, steps: int, *, stratified: bool = False
) -> Int[Array, " b"]:
    """Steps of a schedule, uniform over 0 ... steps - 1, one per example.

    Args:
      key: what they are drawn from.
      examples: B, how many.
      steps: of the schedule.
      stratified: False: each is drawn by itself. True: one number u is drawn for all, and
        example i takes ``floor(steps * frac(u + i / B))``: each is uniform still, and together
        they are spread evenly (Kingma et al., "Variational Diffusion Models", NeurIPS 2021).

    Returns:
      int32 [B].
    """
    if not stratified:
        return jax.random.randint(key, (examples,), 0, steps, jnp.int32)
    u = jax.random.uniform(key) + jnp.arange(examples) / max(examples, 1)
    return jnp.minimum(jnp.floor(steps * (u % 1)), steps - 1).astype(jnp.int32)


def _check_gamma(gamma: float) -> None:
    if not gamma > 0:
        raise ValueError(f"min_snr: gamma must be > 0, got {gamma}")
