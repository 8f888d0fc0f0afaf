"""Initial kernels of convolutions that carry an image on, where random ones mix it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fnet.layers.dense import HE_NORMAL


def cosine_patches(
    key: Array, shape: Sequence[int], dtype: DTypeLike | None = None, out_sharding: Any = None
) -> Array:
    """The orthonormal DCT-II of a patch, and its negative: a first kernel for natural images.

    ::

        K[i, j, c, (a, b, k)] = D_kh[a, i] D_kw[b, j] D_C[k, c],    K[..., n:] = -K[..., :n]
        D_n[a, i] = sqrt((1 + [a > 0]) / n) cos(pi a (2 i + 1) / (2 n))

    Neighbouring pixels are alike, and so are an image's red, green and blue: of a patch's
    components along these axes none tells of another, nearly (Ahmed, Natarajan, Rao 1974); along
    the channels of colour they are brightness, red against blue, and green against both. With a
    norm behind it this whitens patches, which Page ("How to Train Your ResNet", part 8, 2019)
    and Jordan ("94% on CIFAR-10 in 3.29 Seconds", 2024) do with a kernel found from the data:
    for CIFAR-10's patches of 2 x 2 the variances agree with those of its principal
    components in three digits. The negatives are for an activation that lets one sign pass.

    Args:
      key: unused; the kernel is always the same.
      shape: [kh, kw, C, 2 kh kw C].
      dtype: of the kernel; float32 by default.
      out_sharding: not used; JAX's initializers have it.

    Returns:
      The kernel [kh, kw, C, 2 kh kw C].

    Raises:
      ValueError: for another shape.
    """
    del key, out_sharding
    *patch, n_out = shape
    n = math.prod(patch)
    if n_out != 2 * n:
        raise ValueError(f"cosine_patches: {tuple(patch)} make {2 * n} channels, got {n_out}")
    rows, columns, colours = (
        jax.scipy.fft.dct(jnp.eye(size), norm="ortho", axis=0) for size in patch
    )
    kernel = jnp.einsum("ai,bj,kc->ijcabk", rows, columns, colours).reshape(*patch, n)
    return jnp.concatenate([kernel, -kernel], -1).astype(dtype or jnp.float32)


def partly_identity(
    key: Array, shape: Sequence[int], dtype: DTypeLike | None = None, out_sharding: Any = None
) -> Array:
    """A kernel whose first outputs are its inputs; the others are those of He et al. 2015.

    ::

        K[i, j, c, d] = [i = (kh - 1) // 2] [j = (kw - 1) // 2] [c = d]    for d < min(n_in, n_out)

    Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), after the Dirac kernels of
    Zagoruyko, Komodakis, "DiracNets" (2017).

    Args:
      key: of the others.
      shape: [kh, kw, n_in, n_out].
      dtype: of the kernel; float32 by default.
      out_sharding: not used; JAX's initializers have it.

    Returns:
      The kernel [kh, kw, n_in, n_out].
    """
    del out_sharding
    height, width, n_in, n_out = shape
    same = jnp.arange(min(n_in, n_out))
    kernel = HE_NORMAL(key, shape, dtype or jnp.float32).at[..., : same.size].set(0)
    return kernel.at[(height - 1) // 2, (width - 1) // 2, same, same].set(1)
