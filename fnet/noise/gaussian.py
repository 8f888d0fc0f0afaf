"""Gaussian noise for sums of clipped gradients, and its factor at a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet.noise.schedules import Schedule
from fnet.precision import sum_dtype


def add_noise(tree: Any, stddev: Array | float, key: Array) -> Any:
    """Add independent Gaussian noise, ``tree + stddev * N(0, I)``.

    Add it once to a sum of clipped gradients, with ``stddev = noise_multiplier * sensitivity``
    (the Gaussian mechanism). Each array gets a key of its own. Noise is drawn and added in float32
    or wider, then cast to the dtype of the array. A complex number gets noise of this standard
    deviation in each part.

    Args:
      tree: Floating or complex arrays of any shapes.
      stddev: Standard deviation [].
      key: Random key, used for nothing else.

    Returns:
      The noisy tree, with the shapes and dtypes of ``tree``.

    Raises:
      TypeError: An array is neither floating nor complex: noise that is cast to integers is less.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.privacy import add_noise
      >>> noisy = add_noise({"w": jnp.zeros(10_000)}, 2.0, jax.random.key(0))
      >>> round(float(noisy["w"].std()), 1)
      2.0

    References:
      Dwork and Roth 2014, "The algorithmic foundations of differential privacy", Appendix A.
    """
    leaves, treedef = jax.tree.flatten(tree)
    noisy = [add_noise_to(g, stddev, key, i) for i, g in enumerate(leaves)]
    return jax.tree.unflatten(treedef, noisy)


def add_noise_to(array: Array, stddev: Array | float, key: Array, i: int) -> Array:
    """Add the noise of `add_noise` to the tree's array number ``i``."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(f"add_noise: expected floating or complex arrays, got {array.dtype}")
    noise = jax.random.normal(jax.random.fold_in(key, i), array.shape, sum_dtype(array))
    if jnp.iscomplexobj(array):  # JAX draws parts of variance 1/2.
        noise *= 2**0.5
    return (array + stddev * noise).astype(array.dtype)


def factor_at(schedule: Schedule, step: Array | int) -> Array | float:
    """Return the factor of a step, []."""
    if not schedule:
        return 1.0
    starts, factors = zip(*schedule, strict=True)
    # Comparisons: a search is another primitive in each version of JAX.
    index = (jnp.asarray(step) >= np.array(starts)).sum() - 1
    return jnp.asarray(factors, jnp.float32)[index]
