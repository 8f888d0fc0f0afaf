"""Prediction targets of a denoiser (noise, clean example, velocity) and their conversions."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from fnet import checks

TARGETS = ("eps", "x0", "v")
"""Noise (Ho et al. 2020), clean example, and velocity (Salimans & Ho 2022)."""


def add_noise(
    x0: Float[Array, "b ..."], noise: Float[Array, "b ..."], alpha: ArrayLike, sigma: ArrayLike
) -> Float[Array, "b ..."]:
    """Forward diffusion process: ``x = alpha x0 + sigma noise``.

    Ho et al. 2020, equation 4.

    Args:
      x0: clean examples [B, ...], floating.
      noise: standard normal noise, of the shape of ``x0``.
      alpha: signal level, one number or one per example [B].
      sigma: noise level, one number or one per example [B].

    Returns:
      Noisy examples [B, ...], in the dtype of ``x0``.

    Raises:
      ValueError: if shapes do not match.
      TypeError: if the examples are not floating.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> x0 = noise = jnp.ones((2, 1))
      >>> fnet.diffusion.add_noise(x0, noise, alpha=0.5, sigma=1.0).tolist()
      [[1.5], [1.5]]
    """
    return _linear_combination(x0, noise.astype(x0.dtype), alpha, sigma)


def target(
    name: str,
    x0: Float[Array, "b ..."],
    noise: Float[Array, "b ..."],
    alpha: ArrayLike,
    sigma: ArrayLike,
) -> Float[Array, "b ..."]:
    """Target that the denoiser should predict for ``add_noise(x0, noise, alpha, sigma)``.

    By name (Ho et al. 2020; Salimans & Ho 2022)::

        eps: noise        x0: x0        v: alpha noise - sigma x0

    Args:
      name: one of `TARGETS`.
      x0, noise, alpha, sigma: as for `add_noise`.

    Returns:
      The target [B, ...], in the dtype of ``x0`` and ``noise``.

    Raises:
      ValueError: for an unknown name, or, for ``v``, if shapes do not match.
      TypeError: for ``v``, if the examples are not floating.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> x0, noise = jnp.zeros((2, 1)), jnp.ones((2, 1))
      >>> fnet.diffusion.target("v", x0, noise, alpha=0.5, sigma=0.75).tolist()
      [[0.5], [0.5]]
    """
    check_target(name)
    if name == "v":
        return _linear_combination(noise, x0, alpha, -jnp.asarray(sigma))
    return noise if name == "eps" else x0


def denoised(
    name: str,
    prediction: Float[Array, "b ..."],
    x: Float[Array, "b ..."],
    alpha: ArrayLike,
    sigma: ArrayLike,
    *,
    clip: float | None = None,
) -> tuple[Float[Array, "b ..."], Float[Array, "b ..."]]:
    """Convert a prediction to the clean example and the noise (Salimans & Ho 2022).

    With ``x = alpha x0 + sigma eps``::

        eps: x0 = (x - sigma eps) / alpha
        x0:                                 eps = (x - alpha x0) / sigma
        v:   x0 = alpha x - sigma v,        eps = sigma x + alpha v

    The last line needs ``alpha^2 + sigma^2 = 1``.

    Args:
      name: prediction target, one of `TARGETS`.
      prediction: prediction of the denoiser, of the shape of ``x``.
      x: noisy examples [B, ...], floating.
      alpha: signal level, one number or one per example [B]. Must not be 0 for ``eps``.
      sigma: noise level, one number or one per example [B]. Must not be 0 for ``x0`` or with
        ``clip``.
      clip: clip x0 to [-clip, clip] ("static thresholding", Saharia et al. 2022) and compute the
        noise from the clipped x0. None: no clipping.

    Returns:
      ``(x0, eps)``, of the shape and dtype of ``x``.

    Raises:
      ValueError: for an unknown name, ``clip <= 0``, or if shapes do not match.
      TypeError: if ``x`` is not floating.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> x0, noise = jnp.full((2, 1), 0.5), jnp.ones((2, 1))
      >>> x = fnet.diffusion.add_noise(x0, noise, 0.6, 0.8)
      >>> v = fnet.diffusion.target("v", x0, noise, 0.6, 0.8)
      >>> got = fnet.diffusion.denoised("v", v, x, 0.6, 0.8)
      >>> bool(jnp.allclose(got[0], x0)), bool(jnp.allclose(got[1], noise))
      (True, True)
    """
    check_target(name)
    checks.numbers("denoised", "> 0", clip=clip)
    a, s = _per_example(alpha, x), _per_example(sigma, x)
    checks.shapes("denoised", f"x {x.shape}", prediction=(prediction, x.shape))
    prediction = prediction.astype(x.dtype)
    if name == "eps":
        x0, eps = (x - s * prediction) / a, prediction
    elif name == "x0":
        x0, eps = prediction, (x - a * prediction) / s
    else:
        x0, eps = a * x - s * prediction, s * x + a * prediction
    if clip is None:
        return x0, eps
    x0 = jnp.clip(x0, -clip, clip)
    return x0, (x - a * x0) / s


def check_target(name: str) -> None:
    """Raise ValueError unless ``name`` is one of `TARGETS`."""
    checks.choice("diffusion", TARGETS, target=name)


def _linear_combination(x: Array, y: Array, a: ArrayLike, b: ArrayLike) -> Array:
    checks.shapes("diffusion", f"x0 {x.shape}", noise=(y, x.shape))
    return _per_example(a, x) * x + _per_example(b, x) * y


def _per_example(a: ArrayLike, like: Array) -> Array:
    """Reshape ``a`` from [] or [B] to [] or [B, 1, ...], in the dtype of ``like`` [B, ...]."""
    checks.floating("diffusion", examples=like)
    a = jnp.asarray(a, like.dtype)
    if a.ndim and a.shape != like.shape[:1]:
        raise ValueError(
            "diffusion: alpha and sigma must be one number or one per example, "
            f"{like.shape[:1]}, got shape {a.shape}"
        )
    return a.reshape(a.shape + (1,) * (like.ndim - 1)) if a.ndim else a
