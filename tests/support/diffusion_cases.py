"""Examples and noise for the tests of `fnet.diffusion`."""

import jax
import jax.numpy as jnp


def images(n, seed=1, size=3, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (n, size, size, 1), dtype)
