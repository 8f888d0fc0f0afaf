"""Inner products of per-example gradients that are not materialized."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import CASES, loop_over_examples
from jax.flatten_util import ravel_pytree

from fnet.autodiff.examples import examples
from fnet.autodiff.per_example import parameter_gradients
from fnet.autodiff.per_example.backward import per_example_gradients

pytestmark = pytest.mark.usefixtures("allow_rank_promotion")


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        *((name, 32) for name in ("dense", "tied_embedding", "views", "scaled_parameters")),
        *((name, 0) for name in ("recurrent", "convolution_layouts", "frozen_abn")),
    ],
)
def test_products_match_a_loop_over_examples(name, reads, monkeypatch):
    monkeypatch.setattr(parameter_gradients, "_READS_AND_WRITES", reads)
    case = CASES[name]()
    weights = jnp.array([0.5, 0.0, -1.0, 2.0, 0.0, 0.1])
    expected_grads = loop_over_examples(case)

    def direction_of(p, g):
        key = jax.random.key(p.size)
        return jax.random.normal(key, p.shape, p.dtype)

    direction = jax.tree.map(direction_of, case.params, expected_grads)

    @jax.jit
    def products(params, *batch):
        grads = per_example_gradients("test", case.loss, params, examples("test", batch))
        return grads.inner_products(direction), *grads.sum_and_products(weights, grads, weights)

    def dot(tree):
        return jax.vmap(optax.tree.vdot, (0, None))(expected_grads, tree)

    mean = jax.tree.map(lambda g: jnp.tensordot(weights, g, 1), expected_grads)
    of_direction, total, of_mean = products(case.params, *case.batch)
    got = ravel_pytree(total)[0], of_direction, of_mean
    for one, expected in zip(got, (ravel_pytree(mean)[0], dot(direction), dot(mean)), strict=True):
        scale = float(np.abs(expected).max()) + 1e-6
        error = 5e-3 if name == "views" else 1e-4  # products of bfloat16
        chex.assert_trees_all_close(one / scale, expected / scale, rtol=0, atol=error)


def product(p, x):
    return jnp.square(jnp.tanh(x @ p)).sum((1, 2))


def product_of_slice(p, x):
    return product(p[:, 64:128], x)


@pytest.mark.parametrize(
    ("loss", "other", "positions"),
    [
        (product, product, 2),
        (product, lambda p, x: product(p, x) + jnp.sin(2 * x @ p).sum((1, 2)), 2),
        (product, lambda p, x: product(p[:, ::-1], x), 2),
        (product, lambda p, x: x.sum((1, 2)), 2),
        (product_of_slice, product_of_slice, 40),
    ],
    ids=["one use", "two uses", "another use", "no use", "slice"],
)
def test_products_with_gradients_of_a_loss(loss, other, positions, monkeypatch):
    monkeypatch.setattr(parameter_gradients, "_MATERIALIZED", 0)
    draw = np.random.default_rng(0).normal
    p, x = jnp.asarray(draw(size=(64, 192)) / 8), jnp.asarray(draw(size=(6, positions, 64)))
    scales, weights = jnp.arange(6.0), jnp.array([0.5, 0.0, -1.0, 2.0, 0.0, 0.1])
    own, others = (
        per_example_gradients("test", f, p, examples("test", (x,))) for f in (loss, other)
    )
    total, products = own.sum_and_products(scales, others, weights)
    grads = jax.jacobian(loss)(p, x)
    direction = jnp.tensordot(weights, jax.jacobian(other)(p, x), 1)
    chex.assert_trees_all_close(total, jnp.tensordot(scales, grads, 1), rtol=1e-4, atol=1e-3)
    expected = jnp.tensordot(grads, direction, 2)
    chex.assert_trees_all_close(products, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("groups", [1, 2])
def test_products_of_a_convolution_match_its_jacobian(groups, monkeypatch):
    monkeypatch.setattr(parameter_gradients, "_MATERIALIZED", 0)

    def loss(p, x):
        names = "NHWC", "HWIO", "NHWC"
        y = jax.lax.conv_general_dilated(
            x, p, (2, 1), "SAME", dimension_numbers=names, feature_group_count=groups
        )
        return jnp.sin(y).sum((1, 2, 3))

    draw = np.random.default_rng(0).normal
    kernel, direction = (jnp.asarray(draw(size=(3, 2, 4 // groups, 6))) for _ in "pd")
    x = jnp.asarray(draw(size=(5, 7, 6, 4)))
    grads = per_example_gradients("test", loss, kernel, examples("test", (x,)))
    expected = jnp.tensordot(jax.jacobian(loss)(kernel, x), direction, 4)
    chex.assert_trees_all_close(grads.inner_products(direction), expected, rtol=1e-4, atol=1e-4)
