"""Rotary positions: queries and keys are turned by angles that grow along time."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Real

from fnet.layer import check_floating
from fnet.precision import wide, widened


def rotary(
    x: Float[Array, "b t h d"],
    positions: Real[Array, " t"] | Real[Array, "b t"],
    base: float = 10000.0,
) -> Float[Array, "b t h d"]:
    """Turns each pair of features by an angle proportional to the position.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    Feature i and feature i + D / 2 are a pair (the half-split convention of GPT-NeoX and
    Llama's public weights; the paper pairs neighbours, which is another order of the
    features), i = 0 ... D / 2 - 1::

        angle = position * base^(-2 i / D)
        y[i]         = x[i] cos(angle) - x[i + D / 2] sin(angle)
        y[i + D / 2] = x[i + D / 2] cos(angle) + x[i] sin(angle)

    The product of a query and a key, both turned, depends on the difference of their
    positions alone, and lengths stay as they are. Nothing of the size of ``x`` is kept
    for the backward pass.

    Args:
      x: queries or keys [B, T, H, D], D even; floating.
      positions: [T], or [B, T] where examples differ; integers or floating.
      base: of the wavelengths, which grow from 2 pi to nearly 2 pi base; > 0.

    Returns:
      [B, T, H, D], in the dtype of ``x``. Angles are computed in float32 (float64 for a
      float64 ``x``).

    Raises:
      ValueError: if ``x`` does not have rank 4, D is odd, positions do not fit, or
        ``base`` is not > 0.
      TypeError: if ``x`` is not floating.
    """
    check_floating("rotary", x=x)
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ValueError(f"rotary: expected x [B, T, H, D] with an even D, got {x.shape}")
    if positions.shape not in (x.shape[1:2], x.shape[:2]):
        raise ValueError(
            f"rotary: positions must have shape {x.shape[1:2]} or {x.shape[:2]}, "
            f"[T] or [B, T] of x {x.shape}, got {positions.shape}"
        )
    if not base > 0:
        raise ValueError(f"rotary: base must be > 0, got {base}")
    dtype = wide(x)
    half = x.shape[-1] // 2
    speed = base ** (-jnp.arange(half, dtype=dtype) / half)
    angle = jnp.atleast_2d(positions.astype(dtype))[:, :, None] * speed[None, None]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]  # [B or 1, T, 1, D / 2]
    a, b = widened(x[..., :half]), widened(x[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
