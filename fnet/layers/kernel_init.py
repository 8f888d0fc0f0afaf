"""Initializers of convolution kernels that preserve the image."""

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
    """Initialize a first convolution with the orthonormal DCT-II of a patch and its negative.

    ::

        K[i, j, c, (a, b, k)] = D_kh[a, i] D_kw[b, j] D_C[k, c],    K[..., n:] = -K[..., :n]
        D_n[a, i] = sqrt((1 + [a > 0]) / n) cos(pi a (2 i + 1) / (2 n))

    The cosine transform nearly decorrelates natural images (Ahmed, Natarajan, Rao 1974), so with a
    norm it whitens patches, as Page ("How to Train Your ResNet", part 8, 2019) and Jordan ("94% on
    CIFAR-10 in 3.29 Seconds", 2024) do with a kernel computed from the data. The negatives serve
    activations that pass one sign. The kernel is constant, [kh, kw, C, 2 kh kw C].
    """
    del key, out_sharding
    *patch, n_out = shape
    n = math.prod(patch)
    if n_out != 2 * n:
        raise ValueError(
            f"cosine_patches: patches {tuple(patch)} need {2 * n} output channels, got {n_out}"
        )
    rows, columns, colors = (
        jax.scipy.fft.dct(jnp.eye(size), norm="ortho", axis=0) for size in patch
    )
    kernel = jnp.einsum("ai,bj,kc->ijcabk", rows, columns, colors).reshape(*patch, n)
    return jnp.concatenate([kernel, -kernel], -1).astype(dtype or jnp.float32)


def partly_identity(
    key: Array, shape: Sequence[int], dtype: DTypeLike | None = None, out_sharding: Any = None
) -> Array:
    """Initialize a convolution whose first outputs copy its inputs; the rest is He et al. 2015.

    ::

        K[i, j, c, d] = [i = (kh - 1) // 2] [j = (kw - 1) // 2] [c = d]    for d < min(n_in, n_out)

    Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), after the Dirac kernels of
    Zagoruyko, Komodakis, "DiracNets" (2017).
    """
    del out_sharding
    height, width, n_in, n_out = shape
    copied = jnp.arange(min(n_in, n_out))
    kernel = HE_NORMAL(key, shape, dtype or jnp.float32).at[..., : copied.size].set(0)
    return kernel.at[(height - 1) // 2, (width - 1) // 2, copied, copied].set(1)
