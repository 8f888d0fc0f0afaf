import chex
import example_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import CASES, B, one_by_one
from hypothesis import given, settings
from hypothesis import strategies as st

import fnet
from fnet.autodiff import influence, noise_scale, per_example_grad, per_example_norms

as_users_write = pytest.fixture(autouse=True)(example_losses.as_users_write)


LOSSES = "tied_embedding", "convolutions", "stacked_layers", "unusual", "dropout"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "convolutions")) for n in LOSSES]
)
def test_gradients_are_those_of_a_loop_over_examples(name):
    case = CASES[name]()
    expected = one_by_one(case)
    for width in (None, 1, 4):
        found = jax.jit(per_example_grad(case.loss, width=width))(case.params, *case.batch)
        chex.assert_trees_all_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2),
    st.integers(1, 2), st.sampled_from(["SAME", "VALID"]),
)  # fmt: skip
def test_gradients_and_norms_of_convolutions_of_all_shapes_are_those_of_single_examples(
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
    def both_ways(kernel, x):
        one = jax.grad(lambda k, x: loss(k, x[None])[0])
        singly = jnp.stack([one(kernel, x[i]) for i in range(3)])
        return per_example_grad(loss)(kernel, x), per_example_norms(loss)(kernel, x), singly

    found, norms, expected = both_ways(kernel, x)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)
    lengths = jnp.linalg.norm(expected.reshape(3, -1), axis=1)
    chex.assert_trees_all_close(norms, lengths, rtol=1e-4, atol=1e-4)


def test_what_the_loss_returns_beside_comes_along():
    def loss(p, x, shared):
        return p * x, {"doubled": 2 * x, "same": shared}

    x = jnp.arange(3.0)
    grads, aux = jax.jit(per_example_grad(loss, has_aux=True, width=2))(
        jnp.float32(2), x, jnp.float32(7)
    )
    chex.assert_trees_all_close(grads, x)
    chex.assert_trees_all_equal(aux, {"doubled": 2 * x, "same": jnp.full(3, 7.0)})


def test_norms_bring_along_what_the_loss_returns_beside():
    x = jnp.arange(3.0)
    norms, aux = jax.jit(
        per_example_norms(lambda p, x: (p * x, (2 * x, jnp.ones(2))), has_aux=True)
    )(jnp.float32(2), x)
    chex.assert_trees_all_close(norms, x)
    chex.assert_trees_all_equal(aux, (2 * x, jnp.ones(2)))


@pytest.mark.parametrize("how", ["at once", "on batches of one"])
def test_what_is_returned_beside_has_an_axis_of_examples_even_if_its_first_is_merged(how):
    def loss(p, x):
        h = x @ p if how == "at once" else jnp.roll(x @ p, 1, 0)
        return h.sum(1), x.reshape(-1, 4)

    p, x = jnp.ones(4), jax.random.normal(jax.random.key(0), (B, 3, 4))
    for width in (None, 2):
        _, aux = jax.jit(per_example_grad(loss, width=width, has_aux=True))(p, x)
        chex.assert_trees_all_equal(aux, x)
    _, info = jax.jit(fnet.clipped_grad(loss, 1.0, has_aux=True))(p, x)
    chex.assert_trees_all_equal(info.aux, x)


def test_what_follows_from_parameters_alone_comes_along_once():
    def loss(p, x):
        aux = {"squares": jnp.square(p["w"]).sum(), "seen": jnp.eye(2) @ p["v"]}
        return jnp.tanh(x @ p["v"]) @ p["w"], aux

    p, x = {"v": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "w": jnp.array([3.0, 4.0])}, jnp.ones((3, 2))
    _, info = jax.jit(fnet.clipped_grad(loss, 1.0, has_aux=True))(p, x)
    chex.assert_trees_all_equal_shapes(info.aux, loss(p, x)[1])
    chex.assert_trees_all_close(info.aux, loss(p, x)[1])


def test_influence_is_the_dot_product_with_each_gradient():
    case = CASES["heads"]()
    direction = jax.tree.map(jnp.ones_like, case.params)
    expected = jax.vmap(optax.tree.vdot, (0, None))(one_by_one(case), direction)
    found = jax.jit(influence(case.loss))(direction, case.params, *case.batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_influence_goes_through_what_has_a_backward_rule_alone():
    case = CASES["fnet_transformer"]()  # with fnet's layer norms
    direction = jax.tree.map(jnp.cos, case.params)
    expected = jax.vmap(optax.tree.vdot, (0, None))(one_by_one(case), direction)
    found = jax.jit(influence(case.loss))(direction, case.params, *case.batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def test_influence_is_that_of_each_example_with_its_own_key():
    case = CASES["dropout"]()
    direction = jax.tree.map(jnp.ones_like, case.params)
    each = jax.jit(per_example_grad(case.loss))(case.params, *case.batch)
    expected = jax.vmap(optax.tree.vdot, (0, None))(each, direction)
    found = jax.jit(influence(case.loss))(direction, case.params, *case.batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("reduced", "got"), [(jnp.mean, r"\(\)"), (lambda losses: (losses, losses), "tuple")]
)
def test_influence_on_what_is_not_one_loss_an_example_is_refused(reduced, got):
    x = jnp.ones((B, 3))
    with pytest.raises(ValueError, match=rf"influence: .* shape \[{B}\], got {got}; "):
        influence(lambda p, x: reduced((x * p).sum(1)))(x[0], x[0], x)


def test_the_noise_scale_is_unbiased():
    true = np.array([1.0, -2.0, 0.5])
    deviation = np.array([0.5, 1.0, 2.0])
    g = true + deviation * np.random.default_rng(0).standard_normal((20_000, 8, 3))
    norms = jnp.asarray(np.linalg.norm(g, axis=-1))
    mean = jnp.asarray(np.linalg.norm(g.mean(1), axis=-1))
    found = jax.vmap(noise_scale)(norms, mean)
    chex.assert_trees_all_close(found.grad_sq.mean(), (true**2).sum(), rtol=0.02)
    chex.assert_trees_all_close(found.grad_var.mean(), (deviation**2).sum(), rtol=0.02)


def test_padding_is_no_part_of_the_noise_scale():
    norms, weight = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0])
    found = noise_scale(norms, jnp.float32(1.2), weight)
    chex.assert_trees_all_close(found, noise_scale(norms[:2], jnp.float32(1.2)))


@pytest.mark.parametrize(
    ("width", "error", "message"),
    [
        (0, ValueError, "must be at least 1, got 0"),
        (-1, ValueError, "must be at least 1, got -1"),
        (1.5, TypeError, "must be an int or None, got 1.5"),
        (True, TypeError, "must be an int or None, got True"),
    ],
)
def test_a_width_is_a_whole_number(width, error, message):
    with pytest.raises(error, match=message):
        per_example_grad(lambda p, x: p * x, width=width)
