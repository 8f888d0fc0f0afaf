"""Networks, tangents and cotangents for the tests of `fnet.autodiff.batched`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

WIDTHS = [1, 2, 3, 4, 7, "auto"]


def square(x):
    return x**2


def double(x):
    return 2.0 * x.sum(1)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def network(params, x):
    for w, b in params["layers"]:
        x = jnp.tanh(x @ w + b[None])
    return {"y": x, "energy": (x**2).sum()}


def params_of(sizes, seed=0):
    return {
        "layers": [
            (normal(seed + 2 * i, a, b) / np.float32(a**0.5), normal(seed + 2 * i + 1, b))
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        ]
    }


def tangents_of(tree, n, seed=50):
    """N random tangents of a tree, stacked."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, [normal(seed + i, n, *jnp.shape(a)) for i, a in enumerate(leaves)]
    )


def one_of(tree, i):
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[i]), tree)


def stack(trees):
    return jax.tree.map(lambda *a: np.stack(a), *trees)


def pack(tree, like):
    """Concatenate the tangents of each leaf along its leading axis."""
    return jax.tree.map(lambda a, p: a.reshape(-1, *p.shape[1:]) if p.ndim else a, tree, like)
