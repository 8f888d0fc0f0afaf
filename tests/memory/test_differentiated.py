"""A backward pass of our own refuses a gradient that it does not have."""

import chex
import jax
import jax.numpy as jnp
import pytest

from fnet.memory.regions import cut
from fnet.memory.remat import remat_nested


def loss(w, x):
    for _ in range(3):
        x = jnp.tanh(jnp.tanh(x @ w) * x)
    return x.sum()


W, X = jnp.eye(4) / 2, jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
WAYS = pytest.mark.parametrize("way", [lambda f: cut(f, 4), remat_nested], ids=["cut", "nested"])


@WAYS
def test_a_gradient_with_respect_to_another_argument_is_refused(way):
    for wrap in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.raises(
            ValueError, match=r"first argument alone, but here also to float32\[8,4\]"
        ):
            jax.grad(wrap(way(loss)), argnums=1)(W, X)
        with pytest.raises(ValueError, match=r"here also to float32\[8,4\]"):
            jax.grad(lambda x, wrap=wrap: wrap(way(lambda w: loss(w, x)))(W))(X)


@WAYS
def test_what_is_stopped_before_is_not_differentiated(way):
    def stopped(f):
        return lambda w: f(w, jax.lax.stop_gradient(X * w[0, 0]))

    expected = jax.grad(stopped(loss))(W)
    chex.assert_trees_all_close(jax.grad(stopped(way(loss)))(W), expected, rtol=1e-6)
    assert jnp.any(expected)
