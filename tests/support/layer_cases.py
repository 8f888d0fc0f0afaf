"""Shapes and values of a layer's parameters and state, without a program to compile for each."""

import jax
import jax.numpy as jnp
import numpy as np


def shapes(layer):
    """(parameters, state) in the form of ``layer.init``, without values."""
    return jax.eval_shape(layer.init, jax.random.key(0))


def count(tree):
    """How many numbers a tree holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def initial(layer, scale=0.3, seed=0):
    """(parameters, state) in the form of ``layer.init``.

    Parameters are normal with deviation ``scale``; statistics lie in [0.5, 1.5], so that
    variances are positive; counters are 0.
    """
    rng = np.random.default_rng(seed)
    params, state = shapes(layer)

    def statistic(a):
        drawn = rng.uniform(0.5, 1.5, size=a.shape)
        return (drawn if jnp.issubdtype(a.dtype, jnp.floating) else 0 * drawn).astype(a.dtype)

    return (
        jax.tree.map(lambda a: rng.normal(scale=scale, size=a.shape).astype(a.dtype), params),
        jax.tree.map(statistic, state),
    )
