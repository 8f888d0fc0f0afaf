"""Rotary position embedding (RoPE)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Real

from fnet import checks
from fnet.precision import sum_dtype, upcast


def rotary(
    x: Float[Array, "b t h d"],
    positions: Real[Array, " t"] | Real[Array, "b t"],
    base: float | Sequence[float] = 10000.0,
    scale: float = 1.0,
    interleaved: bool = False,
) -> Float[Array, "b t h d"]:
    """Apply rotary position embedding to queries or keys.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding". Each pair of
    features is rotated by an angle proportional to the position. Features i and i + D / 2 form a
    pair, for i = 0 ... D / 2 - 1. GPT-NeoX and the public Llama weights use this half-split
    convention. The paper pairs neighboring features, as here with ``interleaved``::

        angle = position * base^(-2 i / D)
        y[i]         = x[i] cos(angle) - x[i + D / 2] sin(angle)
        y[i + D / 2] = x[i + D / 2] cos(angle) + x[i] sin(angle)

    In place of ``base^(-2 i / D)`` you may give the frequencies themselves. With fewer than D / 2
    of them, only the first features are rotated, twice as many as there are frequencies.

    The product of a rotated query and a rotated key depends only on the difference of
    their positions. With scale 1, norms do not change. The backward pass saves no array of the
    size of ``x``.

    Args:
      x: queries or keys [B, T, H, D] with D even; floating.
      positions: [T], or [B, T] if they differ between examples; integers or floating.
      base: base of the wavelengths, which range from 2 pi to about 2 pi base; > 0. Or the
        frequencies, in radians per position, at most D / 2.
      scale: factor of the rotated features, the attention factor of YaRN.
      interleaved: whether features 2 i and 2 i + 1 form a pair.

    Returns:
      [B, T, H, D], in the dtype of ``x``. Angles are computed in float32 (float64 for a
      float64 ``x``).

    Raises:
      ValueError: if ``x`` does not have rank 4, D is odd, the shape of ``positions`` does
        not match, ``base`` is not > 0, or there are no or too many frequencies.
      TypeError: if ``x`` is not floating.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> q = jnp.ones((1, 3, 2, 4))
      >>> y = fnet.layers.rotary(q, jnp.arange(3))
      >>> y.shape, bool((y[:, 0] == q[:, 0]).all())
      ((1, 3, 2, 4), True)
    """
    checks.floating("rotary", x=x)
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ValueError(f"rotary: expected x [B, T, H, D] with an even D, got {x.shape}")
    if positions.shape not in (x.shape[1:2], x.shape[:2]):
        raise ValueError(
            f"rotary: positions must have shape {x.shape[1:2]} or {x.shape[:2]}, "
            f"[T] or [B, T] of x {x.shape}, got {positions.shape}"
        )
    dtype = sum_dtype(x)
    if isinstance(base, Sequence):
        frequency = jnp.asarray(base, dtype)
        if not 0 < len(base) <= x.shape[-1] // 2:
            raise ValueError(
                f"rotary: expected 1 to {x.shape[-1] // 2} frequencies, for the {x.shape[-1]} "
                f"features of x {x.shape}, got {len(base)}"
            )
    else:
        checks.numbers("rotary", "> 0", base=base)
        half = x.shape[-1] // 2
        frequency = base ** (-jnp.arange(half, dtype=dtype) / half)
    half = len(frequency)
    angle = jnp.atleast_2d(positions.astype(dtype))[:, :, None] * frequency[None, None]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]  # [B or 1, T, 1, D / 2]
    if scale != 1:
        cos, sin = scale * cos, scale * sin
    if interleaved:
        a, b = upcast(x[..., 0 : 2 * half : 2]), upcast(x[..., 1 : 2 * half : 2])
        pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        rotated = pairs.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    else:
        a, b = upcast(x[..., :half]), upcast(x[..., half : 2 * half])
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., 2 * half :]], axis=-1)


class Rotary(NamedTuple):
    """A rotary position embedding of `fnet.layers.attention`.

    Attributes:
      base: base or frequencies, as for `rotary`. If they depend on the length: a function that
        returns the frequencies for a number of positions, T of a sequence or the positions that a
        cache can hold.
      scale, interleaved: as for `rotary`.
      restart_lengths: lengths up to which the frequencies are the same, as for `fnet.layer.Decode`.

    Example:
      >>> from fnet import layers
      >>> half = layers.Rotary([1.0, 0.1])  # of eight features, four rotate
      >>> layer = layers.attention(16, heads=2, causal=True, rotary=half)
    """

    base: float | Sequence[float] | Callable[[int], Sequence[float]] = 10000.0
    scale: float = 1.0
    interleaved: bool = False
    restart_lengths: tuple[int, ...] = ()
