"""Denoising loss per example, at random timesteps with random noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, PRNGKeyArray

from fnet import checks
from fnet.diffusion.schedules import Schedule
from fnet.diffusion.targets import add_noise, check_target, target
from fnet.precision import upcast

WEIGHTINGS = ("uniform", "min_snr")
"""Weightings of timesteps: ``uniform``, or ``min_snr`` (`min_snr_weight`)."""


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
    """Weighted mean squared error of a denoiser, at one random timestep per example.

    Each example gets a uniform timestep ``t`` and standard normal noise ``eps`` (Ho et al. 2020,
    equation 14, for any target and weight)::

        x = alpha[t] x0 + sigma[t] eps
        loss = weight[t] * mean((denoise(x, t) - target)^2)

    Args:
      denoise: ``denoise(x [B, ...], t [B] int32) -> prediction [B, ...]``; ``x`` has the dtype
        of ``x0``.
      x0: clean examples [B, ...] with variance about 1 or within [-1, 1]; any floating dtype.
      key: random key for timesteps and noise.
      schedule: noise schedule, from `fnet.diffusion.schedules`.
      predicts: target that ``denoise`` predicts: ``eps``, ``x0`` or ``v``
        (`fnet.diffusion.targets.TARGETS`).
      weighting: ``uniform``: 1; ``min_snr``: `min_snr_weight`.
      gamma: gamma of ``min_snr``.
      stratified: whether to spread the timesteps of a batch evenly (`sample_timesteps`).
      has_aux: whether ``denoise`` returns ``(prediction, aux)``, where ``aux`` may be the updated
        model state.

    Returns:
      losses [B], float32 (float64 for float64); with ``has_aux``, ``(losses, aux)``.

    Raises:
      TypeError: if ``x0`` is not floating.
      ValueError: for an unknown target or weighting, ``gamma <= 0``, an invalid schedule, or a
        prediction whose shape differs from ``x0``.

    Example:
      >>> import fnet, jax, jax.numpy as jnp
      >>> schedule = fnet.diffusion.schedules.cosine(100)
      >>> denoise = lambda x, t: jnp.zeros_like(x)  # predicts no noise
      >>> x0, key = jnp.zeros((4, 8, 8, 1)), jax.random.key(0)
      >>> losses = fnet.diffusion.denoising_losses(denoise, x0, key, schedule)
      >>> losses.shape, bool(jnp.allclose(losses, 1, atol=0.5))
      ((4,), True)
    """
    check_target(predicts)
    schedule.check()
    checks.choice("denoising_losses", WEIGHTINGS, weighting=weighting)
    checks.numbers("denoising_losses", "> 0", gamma=gamma)
    checks.floating("denoising_losses", x0=x0)
    clean = upcast(x0)
    t_key, noise_key = jax.random.split(key)
    t = sample_timesteps(t_key, x0.shape[0], schedule.steps, stratified=stratified)
    noise = jax.random.normal(noise_key, clean.shape, clean.dtype)
    alpha, sigma = (jnp.asarray(a, clean.dtype)[t] for a in schedule)
    out = denoise(add_noise(clean, noise, alpha, sigma).astype(x0.dtype), t)
    prediction, aux = out if has_aux else (out, None)
    checks.shapes("denoising_losses", f"x0 {x0.shape}", prediction=(prediction, x0.shape))
    error = prediction.astype(clean.dtype) - target(predicts, clean, noise, alpha, sigma)
    losses = jnp.square(error).mean(range(1, error.ndim))
    if weighting == "min_snr":
        losses = losses * min_snr_weight(predicts, alpha, sigma, gamma=gamma)
    return (losses, aux) if has_aux else losses


def min_snr_weight(
    predicts: str, alpha: ArrayLike, sigma: ArrayLike, *, gamma: float = 5.0
) -> Array:
    """Min-SNR weight of a squared error (Hang et al., ICCV 2023).

    With ``snr = alpha^2 / sigma^2``::

        x0: min(snr, gamma)      eps: min(snr, gamma) / snr      v: min(snr, gamma) / (snr + 1)

    The weighted error is the same for every target. Without noise or without signal, the weight
    is its limit, which is finite.

    Args:
      predicts: prediction target, one of `fnet.diffusion.targets.TARGETS`.
      alpha: signal level [...], with ``alpha^2 + sigma^2 = 1``.
      sigma: noise level [...], of the same shape.
      gamma: largest weight of an error of x0, > 0.

    Returns:
      Weights [...], in the dtype of ``alpha`` and ``sigma``.

    Raises:
      ValueError: for an unknown target, or ``gamma <= 0``.

    Example:
      >>> import fnet
      >>> float(fnet.diffusion.min_snr_weight("x0", 0.6, 0.8))  # snr is 0.5625
      0.5625
    """
    check_target(predicts)
    checks.numbers("min_snr_weight", "> 0", gamma=gamma)
    signal, noise = jnp.square(jnp.asarray(alpha)), jnp.square(jnp.asarray(sigma))
    clipped = jnp.minimum(signal, gamma * noise)  # min(snr, gamma) sigma^2
    if predicts == "v":
        return clipped  # snr + 1 = 1 / sigma^2
    power, limit = (signal, 1.0) if predicts == "eps" else (noise, gamma)
    return jnp.where(power > 0, clipped / jnp.where(power > 0, power, 1), limit)


def sample_timesteps(
    key: PRNGKeyArray, examples: int, steps: int, *, stratified: bool = False
) -> Int[Array, " b"]:
    """Sample timesteps uniformly from 0 ... steps - 1, one per example.

    Args:
      key: random key.
      examples: B, the number of timesteps.
      steps: number of steps of the schedule.
      stratified: False: independent timesteps. True: one number u is drawn for the batch, and
        example i gets ``floor(steps * frac(u + i / B))``. Each timestep is still uniform, and the
        batch covers the range evenly (Kingma et al., "Variational Diffusion Models", NeurIPS 2021).

    Returns:
      int32 [B].

    Example:
      >>> import fnet, jax
      >>> key = jax.random.key(0)
      >>> t = fnet.diffusion.sample_timesteps(key, 4, 100, stratified=True)
      >>> sorted((t // 25).tolist())  # one per quarter
      [0, 1, 2, 3]
    """
    if not stratified:
        return jax.random.randint(key, (examples,), 0, steps, jnp.int32)
    u = jax.random.uniform(key) + jnp.arange(examples) / max(examples, 1)
    return jnp.minimum(jnp.floor(steps * (u % 1)), steps - 1).astype(jnp.int32)
