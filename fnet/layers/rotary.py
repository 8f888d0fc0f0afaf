"""Rotary position embedding (RoPE)."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Real

from fnet.layer import check_floating
from fnet.precision import sum_dtype, upcast


def rotary(
    x: Float[Array, "b t h d"],
    positions: Real[Array, " t"] | Real[Array, "b t"],
    base: float = 10000.0,
) -> Float[Array, "b t h d"]:
    """Apply rotary position embedding to queries or keys.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding". Each
    pair of features is rotated by an angle proportional to the position. Features i and
    i + D / 2 form a pair, for i = 0 ... D / 2 - 1. GPT-NeoX and the public
    Llama weights use this half-split convention; the paper pairs neighboring features::

        angle = position * base^(-2 i / D)
        y[i]         = x[i] cos(angle) - x[i + D / 2] sin(angle)
        y[i + D / 2] = x[i + D / 2] cos(angle) + x[i] sin(angle)

    The product of a rotated query and a rotated key depends only on the difference of
    their positions. Norms do not change. The backward pass saves no array of the size of
    ``x``.

    Args:
      x: queries or keys [B, T, H, D] with D even; floating.
      positions: [T], or [B, T] if they differ between examples; integers or floating.
      base: base of the wavelengths, which range from 2 pi to about 2 pi base; > 0.

    Returns:
      [B, T, H, D], in the dtype of ``x``. Angles are computed in float32 (float64 for a
      float64 ``x``).

    Raises:
      ValueError: if ``x`` does not have rank 4, D is odd, the shape of ``positions`` does
        not match, or ``base`` is not > 0.
      TypeError: if ``x`` is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet import layers
      >>> q = jnp.ones((1, 3, 2, 4))
      >>> y = layers.rotary(q, jnp.arange(3))
      >>> y.shape, bool((y[:, 0] == q[:, 0]).all())
      ((1, 3, 2, 4), True)
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
    dtype = sum_dtype(x)
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=dtype) / half)
    angle = jnp.atleast_2d(positions.astype(dtype))[:, :, None] * frequency[None, None]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]  # [B or 1, T, 1, D / 2]
    a, b = upcast(x[..., :half]), upcast(x[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
