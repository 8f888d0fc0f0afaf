"""Inputs and losses shared by the tests of in-place batch norm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import fnet

C = 3


def arrays(*shape, seed=0):
    """x [*shape], gamma, beta, running mean and variance [C], weights of the loss [*shape]."""
    rng = np.random.default_rng(seed)
    x, weights = rng.normal(size=shape) * 2 + 1, rng.normal(size=shape)
    gamma, beta, mean = rng.normal(size=(3, shape[-1]))
    variance = rng.uniform(0.5, 2, size=shape[-1])
    return [jnp.asarray(a) for a in (x, gamma, beta, mean, variance, weights)]


def norm(x, gamma, beta, mean, variance, mask=None, *, train=True, **options):
    return fnet.abn(
        x, gamma, beta, mean, variance, train=train, mask=mask,
        **({"activation": "elu", "activation_param": 0.7} | options),
    )  # fmt: skip


def loss(x, gamma, beta, mean, variance, weights, mask=None, **options):
    """The loss, and as auxiliary data everything that the norm returns."""
    out = norm(x, gamma, beta, mean, variance, mask, **options)
    return (out[0] * weights).sum(), out


def with_gradients(f, **options):
    """((loss, aux), gradients of x, gamma and beta) of a loss."""
    return jax.value_and_grad(functools.partial(f, **options), (0, 1, 2), has_aux=True)


def compiled(*functions):
    """Compile functions of the same arguments into one program."""
    return jax.jit(lambda *a: tuple(f(*a) for f in functions))


def wide(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float64), tree)
