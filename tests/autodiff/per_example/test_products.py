"""Sums and matrix products of parameters, such as low-rank updates, before they meet data."""

import chex
import jax
import jax.numpy as jnp
import pytest
from example_losses import B, Case, assert_clipped_like_a_loop, normal, row_losses, tree

import fnet
from fnet.autodiff import gradient_strategies

N, M, R = 16, 12, 2
X = normal(9, B, 4, N)
FROZEN = normal(8, N, M)
LOW_RANK = tree(a=(N, R), b=(R, M))
TRAINED = tree(w=(N, M), a=(N, R), b=(R, M))


def dense(weight):
    """The loss of a layer whose weight is computed from parameters."""
    return lambda p, x: row_losses(jnp.tanh(x @ weight(p)))


def scanned(p, x):
    def layer(x, p):
        return jnp.tanh(x @ (p["w"] + 0.5 * (p["a"] @ p["b"]))), None

    return row_losses(jax.lax.scan(layer, x, p)[0])


def shared_factor(p, x):
    x = jnp.tanh(x @ (normal(5, N, N) + p["a"] @ p["b"]))
    return row_losses(x @ (normal(6, N, N) + p["a"] @ p["c"]))


def used_twice(p, x):
    weight = FROZEN + p["a"] @ p["b"]
    return row_losses(jnp.tanh(x @ weight) @ weight.T)


def also_used_directly(p, x):
    return row_losses(jnp.tanh(x @ (p["w"] - p["a"] @ p["b"])) + x @ p["w"]) + row_losses(
        x @ p["a"]
    )


def of_heads(p, x):
    kernel = jnp.einsum("nr,rhm->nhm", p["a"], p["b"])
    return row_losses(jnp.einsum("btn,nhm->bthm", x, kernel))


def in_checkpoint(p, x):
    layer = jax.checkpoint(lambda x, p: jnp.tanh(x @ (FROZEN + p["a"] @ p["b"])))
    return row_losses(layer(x, p))


CASES = {
    "low-rank update": (dense(lambda p: FROZEN + p["a"] @ p["b"]), LOW_RANK),
    "transposed": (
        dense(lambda p: (FROZEN.T + p["b"] @ p["a"]).T), tree(a=(R, N), b=(M, R)),
    ),
    "trained kernel": (dense(lambda p: p["w"] - p["a"] @ p["b"]), TRAINED),
    "frozen parameter": (
        dense(lambda p: jax.lax.stop_gradient(p["w"]) + p["a"] @ p["b"]), TRAINED,
    ),
    "sum of kernels": (dense(lambda p: p["w"] + 2 * p["v"].T), tree(w=(N, M), v=(M, N))),
    "kernel plus its transpose": (dense(lambda p: p["w"] + p["w"].T), tree(w=(N, N))),
    "product with itself": (dense(lambda p: p["a"] @ p["a"].T), tree(a=(N, R))),
    "three factors": (
        dense(lambda p: p["a"] @ (2 * p["c"]) @ p["b"]), tree(a=(N, 3), c=(3, R), b=(R, M)),
    ),
    "sum as a factor": (
        dense(lambda p: (p["a"] - p["c"]) @ p["b"]), tree(a=(N, R), c=(N, R), b=(R, M)),
    ),
    "parts of one parameter": (
        dense(lambda p: p["ab"][:N] @ p["ab"][N:].T), tree(ab=(N + M, R)),
    ),
    "shared factor": (shared_factor, tree(a=(N, R), b=(R, N), c=(R, N))),
    "used twice": (used_twice, LOW_RANK),
    "also used directly": (also_used_directly, TRAINED),
    "heads": (of_heads, tree(a=(N, R), b=(R, 3, 4))),
    "scanned": (scanned, tree(w=(3, N, N), a=(3, N, R), b=(3, R, N))),
    "in jax.checkpoint": (in_checkpoint, LOW_RANK),
}  # fmt: skip
"""Losses whose gradients all follow from shorter factors."""

DERIVED = {
    "broadcast term": (
        dense(lambda p: p["c"] + p["a"] @ p["b"]), tree(c=(M,), a=(N, R), b=(R, M)),
    ),
    "nonlinear": (dense(lambda p: jnp.tanh(p["a"] @ p["b"])), LOW_RANK),
    "elementwise product": (dense(lambda p: p["w"] * (p["a"] @ p["b"])), TRAINED),
    "columns of a product": (dense(lambda p: (p["a"] @ p["b"])[:, :5]), LOW_RANK),
    "also used elementwise": (
        lambda p, x: used_twice(p, x) + row_losses(x[:, 0, :1] * (p["a"] @ p["b"])[0]), LOW_RANK,
    ),
    "product of large matrices": (
        dense(lambda p: p["a"] @ p["b"]), tree(a=(6, 64), b=(64, 6)),
    ),
}  # fmt: skip
"""Losses whose gradients are materialized for norms."""


@pytest.mark.parametrize(
    "name",
    ["kernel plus its transpose", "parts of one parameter", "heads", "columns of a product"],
)
def test_matches_a_loop_over_examples(name):
    loss, params = (CASES | DERIVED)[name]
    assert_clipped_like_a_loop(Case(loss, params, (X,)))


def test_each_factor_is_clipped_on_its_own():
    loss, params = CASES["trained kernel"]
    bounds = {"w": 0.1, "a": 0.2, "b": 0.3}
    assert_clipped_like_a_loop(Case(loss, params, (X,)), bounds, per_layer=True)


def test_gradients_are_derived_if_they_do_not_follow_from_factors():
    for name, (loss, params) in (CASES | DERIVED).items():
        x = X if name in CASES else jnp.tile(X, (1, 10, 1))[..., : len(params["a"])]
        strategies = jax.tree.leaves(gradient_strategies(loss, params, x))
        assert ("derived" in strategies) == (name in DERIVED), name


def test_factors_of_bfloat16_are_multiplied_in_float32():
    """The gradient of b is (x a)^T 1, and a sum of 257 is no number of bfloat16."""
    params = {"a": jnp.ones((N, R)), "b": jnp.ones((R, M))}
    x = jnp.full((B, 1, N), 16.0).at[..., 0].set(17)

    def loss(p, x):
        p, x, frozen = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x, FROZEN))
        return (x @ (frozen + p["a"] @ p["b"])).astype(jnp.float32).sum((1, 2))

    _, info = jax.jit(fnet.clipped_grad(loss, 1.0))(params, x)
    expected = (R * M * 257**2 + R * M**2 * (17**2 + 15 * 16**2)) ** 0.5
    chex.assert_trees_all_close(info.norms, jnp.full(B, expected), rtol=1e-5)


def test_gradients_of_the_merged_kernel_are_not_materialized():
    width, batch = 256, 64
    params, x = tree(a=(width, R), b=(R, width)), normal(0, batch, 4, width)
    gradient = fnet.clipped_grad(dense(lambda p: p["a"] @ p["b"]), 1.0)
    program = jax.jit(gradient).lower(params, x).compile()
    # Inputs, activations and cotangents of the layer, and the kernel once or twice.
    allowed = 4 * (4 * batch * 4 * width + 4 * width**2)
    assert program.memory_analysis().temp_size_in_bytes <= allowed
