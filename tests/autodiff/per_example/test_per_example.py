"""Per-example gradients, norms, influence and the gradient noise scale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import CASES, B, loop_over_examples, normal

import fnet
from fnet.autodiff import (
    importance_sampling,
    influence,
    noise_scale,
    per_example_grad,
    per_example_norms,
)


@pytest.mark.parametrize("name", ["tied_embedding", "nonlinear_uses"])
def test_gradients_match_a_loop_over_examples(name):
    case = CASES[name]()
    expected = loop_over_examples(case)
    for width in (None, 1, 4):
        grads = jax.jit(per_example_grad(case.loss, width=width))(case.params, *case.batch)
        chex.assert_trees_all_close(grads, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("size", "window", "stride", "dilation", "groups", "features", "padding"),
    [(3, 2, 2, 1, 1, 2, "SAME"), (4, 3, 1, 2, 2, 1, "VALID")],
)
def test_convolutions_match_a_loop_over_examples(
    size, window, stride, dilation, groups, features, padding
):
    side = size + dilation * (window - 1)
    x = jax.random.normal(jax.random.key(0), (3, side, side + 1, groups * features))
    kernel = jax.random.normal(jax.random.key(1), (window, window, features, 2 * groups))

    def loss(kernel, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip
        return jnp.sin(y).sum((1, 2, 3))

    @jax.jit
    def both(kernel, x):
        one = jax.grad(lambda k, x: loss(k, x[None])[0])
        one_by_one = jnp.stack([one(kernel, x[i]) for i in range(3)])
        return per_example_grad(loss)(kernel, x), per_example_norms(loss)(kernel, x), one_by_one

    grads, norms, expected = both(kernel, x)
    chex.assert_trees_all_close(grads, expected, rtol=1e-4, atol=1e-4)
    lengths = jnp.linalg.norm(expected.reshape(3, -1), axis=1)
    chex.assert_trees_all_close(norms, lengths, rtol=1e-4, atol=1e-4)


def test_aux_is_returned_per_example():
    def loss(p, x, shared):
        return p * x, {"doubled": 2 * x, "same": shared}

    x = jnp.arange(3.0)
    for f in (per_example_grad(loss, has_aux=True, width=2), per_example_norms(loss, has_aux=True)):
        grads_or_norms, aux = jax.jit(f)(jnp.float32(2), x, jnp.float32(7))
        chex.assert_trees_all_close(grads_or_norms, x)
        chex.assert_trees_all_equal(aux, {"doubled": 2 * x, "same": jnp.full(3, 7.0)})


def test_aux_with_merged_axes_gets_a_batch_axis():
    def loss(p, x):
        return (x @ p).sum(1), x.reshape(-1, 4)

    p, x = jnp.ones(4), jax.random.normal(jax.random.key(0), (B, 3, 4))
    for width in (None, 2):
        _, aux = jax.jit(per_example_grad(loss, width=width, has_aux=True))(p, x)
        chex.assert_trees_all_equal(aux, x)
    _, info = jax.jit(fnet.clipped_grad(loss, 1.0, has_aux=True))(p, x)
    chex.assert_trees_all_equal(info.aux, x)


def test_aux_that_depends_on_parameters_only_has_no_batch_axis():
    def loss(p, x):
        aux = {"squares": jnp.square(p["w"]).sum(), "seen": jnp.eye(2) @ p["v"]}
        return jnp.tanh(x @ p["v"]) @ p["w"], aux

    p, x = {"v": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "w": jnp.array([3.0, 4.0])}, jnp.ones((3, 2))
    _, info = jax.jit(fnet.clipped_grad(loss, 1.0, has_aux=True))(p, x)
    chex.assert_trees_all_equal_shapes(info.aux, loss(p, x)[1])
    chex.assert_trees_all_close(info.aux, loss(p, x)[1])


@pytest.mark.parametrize("name", ["attention_heads", "dropout"])
def test_influence_is_the_dot_product_with_each_gradient(name):
    case = CASES[name]()
    direction = jax.tree.map(jnp.cos, case.params)
    expected = jax.vmap(optax.tree.vdot, (0, None))(loop_over_examples(case), direction)
    dot_products = jax.jit(influence(case.loss))(direction, case.params, *case.batch)
    chex.assert_trees_all_close(dot_products, expected, rtol=1e-4, atol=1e-4)


@jax.custom_vjp
def limited(p):
    return p * 1


limited.defvjp(lambda p: (limited(p), None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))


@pytest.mark.parametrize(
    "f",
    [
        lambda y: fnet.layer_norm(y, jnp.ones(4), jnp.zeros(4)) ** 3,
        lambda y: limited(y) ** 3,  # not linear in the cotangent
        lambda y: y / len(y),
    ],
)
def test_influence_is_that_of_an_example_alone(f):
    p, direction, x = normal(0, 8, 4), normal(1, 8, 4), normal(2, B, 8)

    def loss(p, x):
        return f(x @ p).sum(1)

    grads = [jax.grad(lambda p, i=i: loss(p, x[i : i + 1])[0])(p) for i in range(B)]
    expected = jnp.tensordot(jnp.stack(grads), direction, 2)
    chex.assert_trees_all_close(influence(loss)(direction, p, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("reduced", "got"), [(jnp.mean, r"\(\)"), (lambda losses: (losses, losses), "tuple")]
)
def test_influence_rejects_losses_that_are_not_per_example(reduced, got):
    x = jnp.ones((B, 3))
    with pytest.raises(ValueError, match=rf"influence: .* shape \[{B}\], got {got}; "):
        influence(lambda p, x: reduced((x * p).sum(1)))(x[0], x[0], x)


def test_noise_scale_is_unbiased():
    true = np.array([1.0, -2.0, 0.5])
    deviation = np.array([0.5, 1.0, 2.0])
    g = true + deviation * np.random.default_rng(0).standard_normal((20_000, 8, 3))
    norms = jnp.asarray(np.linalg.norm(g, axis=-1))
    mean = jnp.asarray(np.linalg.norm(g.mean(1), axis=-1))
    scale = jax.vmap(noise_scale)(norms, mean)
    chex.assert_trees_all_close(scale.grad_sq.mean(), (true**2).sum(), rtol=0.02)
    chex.assert_trees_all_close(scale.grad_var.mean(), (deviation**2).sum(), rtol=0.02)


@pytest.mark.parametrize("name", ["tied_embedding", "stacked_layers"])
def test_norms_of_each_layer_are_those_of_its_gradients(name):
    case = CASES[name]()
    norms = jax.jit(per_example_norms(case.loss, per_layer=True))(case.params, *case.batch)
    expected = jax.tree.map(
        lambda g: jnp.linalg.norm(g.reshape(len(g), -1), axis=1), loop_over_examples(case)
    )
    chex.assert_trees_all_close(norms, expected, rtol=1e-4, atol=1e-5)


def test_importance_sampling_is_unbiased_and_has_the_least_variance():
    rng = np.random.default_rng(0)
    g = rng.normal(size=(7, 3)) * 10.0 ** rng.uniform(-1, 1, (7, 1))
    g[2] = 0
    norms = np.linalg.norm(g, axis=1)
    indices, weights = importance_sampling(jax.random.key(0), jnp.asarray(norms), 20_000)
    p = norms / norms.sum()
    chex.assert_trees_all_close(weights, 1 / (7 * p[indices]), rtol=1e-5)
    share = np.bincount(indices, minlength=7) / len(indices)
    assert np.abs(share - p).max() < 0.01
    # With these weights, both the mean and its least variance (equation 5) follow from p.
    drawn = np.asarray(weights)[:, None] * g[indices]
    assert np.abs(drawn.mean(0) - g.mean(0)).max() < 0.02 * norms.mean()
    chex.assert_trees_all_close(
        np.square(drawn).sum(1), np.full(20_000, norms.mean() ** 2), rtol=1e-4
    )


def test_importance_sampling_without_any_norm_is_uniform():
    _, weights = importance_sampling(jax.random.key(0), jnp.zeros(3), 5)
    chex.assert_trees_all_close(weights, jnp.ones(5), rtol=1e-6)


def test_importance_sampling_leaves_out_what_is_not_finite():
    norms = jnp.array([jnp.nan, 1.0, jnp.inf, 0.0])
    indices, weights = importance_sampling(jax.random.key(0), norms, 5)
    chex.assert_trees_all_equal((indices, weights), (jnp.ones(5, jnp.int32), jnp.full(5, 0.25)))


def test_noise_scale_ignores_padding():
    norms, weight = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0])
    scale = noise_scale(norms, jnp.float32(1.2), weight)
    chex.assert_trees_all_close(scale, noise_scale(norms[:2], jnp.float32(1.2)))


def test_rejects_invalid_width():
    for width in (0, -1):
        with pytest.raises(ValueError, match=f"must be at least 1, got {width}"):
            per_example_grad(lambda p, x: p * x, width=width)
    for width in (1.5, True):
        with pytest.raises(TypeError, match=f"must be an int or None, got {width}"):
            per_example_grad(lambda p, x: p * x, width=width)
