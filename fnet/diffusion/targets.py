"""What a denoiser predicts: the noise, the example, or the velocity; each tells the other two."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

TARGETS = ("eps", "x0", "v")
"""The noise (Ho et al. 2020), the clean example, and the velocity (Salimans & Ho 2022)."""


def add_noise(
    x0: Float[Array, "b ..."],
    noise: Float[Array, "b ..."],
    alpha: ArrayLike,
    sigma: ArrayLike,
) -> Float[Array, "b ..."]:
    """``alpha x0 + sigma noise``: the example as it is at a step of a schedule.

    Ho et al. 2020, equation 4.

    Args:
      x0: clean examples [B, ...], floating.
      noise: standard normal, of the shape of ``x0``.
      alpha: signal, one number or one per example [B].
      sigma: noise, likewise.

    Returns:
      Noisy examples [B, ...], in the dtype of ``x0``.

    Raises:
      ValueError: if a shape does not fit.
      TypeError: if the examples are not floating.
    """
    return _mix(x0, noise.astype(x0.dtype), alpha, sigma)


def target(
    name: str,
    x0: Float[Array, "b ..."],
    noise: Float[Array, "b ..."],
    alpha: ArrayLike,
    sigma: ArrayLike,
) -> Float[Array, "b ..."]:
    """What the denoiser should say for ``add_noise(x0, noise, alpha, sigma)``.

    By name (Ho et al. 2020; Salimans & Ho 2022)::

        eps: noise        x0: x0        v: alpha noise - sigma x0

    Args:
      name: one of `TARGETS`.
      x0, noise, alpha, sigma: as for `add_noise`.

    Returns:
      The target [B, ...], in the dtype of ``x0`` and ``noise``.

    Raises:
      ValueError: for an unknown name, or, for ``v``, if a shape does not fit.
      TypeError: for ``v``, if the examples are not floating.
    """
    check_target(name)
    if name == "v":
        return _mix(noise, x0, alpha, -jnp.asarray(sigma))
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
    """The example and the noise that a prediction stands for (Salimans & Ho 2022).

    With ``x = alpha x0 + sigma eps``::

        eps: x0 = (x - sigma eps) / alpha
        x0:                                 eps = (x - alpha x0) / sigma
        v:   x0 = alpha x - sigma v,        eps = sigma x + alpha v

    The last line needs ``alpha^2 + sigma^2 = 1``.

    Args:
      name: which of `TARGETS` the prediction is.
      prediction: of the shape of ``x``.
      x: noisy examples [B, ...], floating.
      alpha: signal, one number or one per example [B]; not 0 for ``eps``.
      sigma: noise, likewise; not 0 for ``x0``, nor with ``clip``.
      clip: bounds x0 to [-clip, clip] ("static thresholding", Saharia et al. 2022); the noise
        is then what is left of ``x``. None: no bounds.

    Returns:
      ``(x0, eps)``, of the shape and dtype of ``x``.

    Raises:
      ValueError: for an unknown name, ``clip <= 0``, or if a shape does not fit.
      TypeError: if ``x`` is not floating.
    """
    check_target(name)
    check_clip(clip)
    a, s = _per_example(alpha, x), _per_example(sigma, x)
    if prediction.shape != x.shape:
        raise ValueError(
            f"denoised: the prediction must have the shape of x, {x.shape}, got {prediction.shape}"
        )
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
    """Refuses a name that is not in `TARGETS`.

    Raises:
      ValueError: for such a name.
    """
    if name not in TARGETS:
        raise ValueError(f"target: expected one of {TARGETS}, got {name!r}")


def check_clip(clip: float | None) -> None:
    """Refuses bounds that leave nothing between them.

    Raises:
      ValueError: if ``clip <= 0``.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: must be > 0, the largest |x0|, got {clip}; or None for no bounds")


def _mix(x: Array, y: Array, a: ArrayLike, b: ArrayLike) -> Array:
    """``a x + b y``."""
    if x.shape != y.shape:
        raise ValueError(f"diffusion: x0 and noise must have one shape, got {x.shape}, {y.shape}")
    return _per_example(a, x) * x + _per_example(b, x) * y


def _per_example(a: ArrayLike, like: Array) -> Array:
    """``a`` [] or [B] -> [] or [B, 1, ...], in the dtype of ``like`` [B, ...]."""
    if not jnp.issubdtype(like.dtype, jnp.floating):
        raise TypeError(f"diffusion: examples must be floating, got {like.dtype}")
    a = jnp.asarray(a, like.dtype)
    if a.ndim and a.shape != like.shape[:1]:
        raise ValueError(
            "diffusion: signal and noise must be one number or one per example, "
            f"{like.shape[:1]}, got shape {a.shape}"
        )
    return a.reshape(a.shape + (1,) * (like.ndim - 1)) if a.ndim else a
