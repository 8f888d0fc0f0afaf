"""In-place batch norm under JAX's transforms: results do not change."""

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from abn_cases import C, arrays, compiled, loss, norm, wide

import fnet
from fnet import layers


def small_network():
    """A network with both forms of the norm: one saves its output, one saves z."""
    return fnet.serial(
        layers.conv(2, C, bias=False),
        layers.abn(C),
        layers.conv(C, C, bias=False),
        layers.abn(C, activation="gelu", decay=None),
        layers.global_avg_pool(),
        layers.dense(C, 2),
    )


def images(n=4):
    return jnp.asarray(np.random.default_rng(3).normal(size=(n, 5, 5, 2)))


def test_exported_network_matches_the_network():
    network = small_network()
    params, state = network.init(jax.random.key(0))
    state["1"]["running_mean"] = jnp.arange(C) / 10
    state["3"]["running_var"] = jnp.arange(C) + 0.5
    evaluate = jax.jit(lambda *a: network.apply(*a, train=False)[0])
    shape = jax.export.symbolic_shape("n, 5, 5, 2")
    exported = jax.export.export(evaluate)(params, state, jax.ShapeDtypeStruct(shape, jnp.float32))
    exported = jax.export.deserialize(exported.serialize())
    for x in (images(6), images(1)):
        chex.assert_trees_all_close(
            exported.call(params, state, x), evaluate(params, state, x), atol=1e-6
        )


def training_loss(apply):
    """((loss, new state), gradients of params and x) of a network's ``apply``."""

    def f(params, x, state):
        y, new_state = apply(params, state, x, train=True)
        return jnp.square(y).sum(), new_state

    return jax.value_and_grad(f, (0, 1), has_aux=True)


@pytest.mark.usefixtures("float64")
def test_rematerialization_changes_neither_gradients_nor_state():
    network = small_network()
    params, state = wide(jax.jit(network.init)(jax.random.key(0)))
    x = images()

    def remembering(params, state, x, *, train):
        return fnet.recompute(functools.partial(network.apply, train=train))(params, state, x)

    def mean_after_one_update(params, x, state):
        y, _ = layers.conv(2, C, bias=False).apply(params["0"], {}, x, train=True)
        return 0.9 * state["1"]["running_mean"] + 0.1 * y.mean((0, 1, 2))

    got, expected, mean = compiled(
        training_loss(remembering), training_loss(network.apply), mean_after_one_update
    )(params, x, state)
    chex.assert_trees_all_close(got, expected, atol=1e-11)
    (_, new_state), _ = got
    chex.assert_trees_all_close(new_state["1"]["running_mean"], mean, atol=1e-11)
    assert float(new_state["3"]["count"]) == 1


# Forward mode


@pytest.mark.parametrize("train", [True, False])
def test_forward_mode_raises_type_error(train):
    x, gamma, beta, mean, variance, _ = arrays(6, C)
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp"):
        jax.jvp(lambda x: norm(x, gamma, beta, mean, variance, train=train), (x,), (x,))


@pytest.mark.parametrize("activation", ["elu", "gelu"])
@pytest.mark.usefixtures("float64")
def test_forward_over_reverse_matches_reverse_over_reverse(activation):
    x, gamma, beta, *rest = arrays(6, C)
    directions = tuple(arrays(6, C, seed=5)[:3])
    gradient = jax.grad(lambda *a: loss(*a, *rest, activation=activation)[0], (0, 1, 2))

    def along(*a):
        return sum((g * d).sum() for g, d in zip(gradient(*a), directions, strict=True))

    def difference(*a):
        step = 1e-5
        ahead, behind = (
            gradient(*(p + s * d for p, d in zip(a, directions, strict=True)))
            for s in (step, -step)
        )
        return jax.tree.map(lambda p, q: (p - q) / (2 * step), ahead, behind)

    forward, reverse, differences = compiled(
        lambda *a: jax.jvp(gradient, a, directions)[1], jax.grad(along, (0, 1, 2)), difference
    )(x, gamma, beta)
    chex.assert_trees_all_close(forward, reverse, atol=1e-11)
    chex.assert_trees_all_close(forward, differences, rtol=1e-5, atol=1e-6)
