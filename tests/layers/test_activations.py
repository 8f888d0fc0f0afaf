"""Activations by name: formulas, default parameters, and activations added by a user."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import initial

from fnet import layers
from fnet.layers.activations import ACTIVATIONS, Activation

X = jnp.linspace(-3, 3, 12).reshape(3, 4)

DEFAULTS = {"elu": jax.nn.elu, "leaky_relu": lambda x: jnp.where(x < 0, 0.01 * x, x)}


@pytest.mark.parametrize("name", DEFAULTS)
def test_activation_and_mlp_use_the_default_parameter(name):
    expected = DEFAULTS[name](X)
    chex.assert_trees_all_close(layers.activation(name).apply({}, {}, X, train=True)[0], expected)
    eye = {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}
    mlp = layers.mlp((4, 4, 4), name)
    y, _ = mlp.apply({"dense_0": eye, "dense_1": eye}, {}, X, train=True)
    chex.assert_trees_all_close(y, expected, rtol=1e-6)


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("norm", [layers.abn, layers.batch_norm])
def test_norm_layers_use_the_default_parameter(norm, name):
    params, state = initial(norm(4))
    z, _ = norm(4, activation="identity").apply(params, state, X, train=True)
    y, _ = norm(4, activation=name).apply(params, state, X, train=True)
    chex.assert_trees_all_close(y, DEFAULTS[name](z), rtol=1e-6)


@pytest.mark.parametrize("gated", [True, False])
def test_feed_forward_uses_alpha_1(gated):
    layer = layers.feed_forward(4, 4, activation="elu", gated=gated)
    up = jnp.concatenate([jnp.eye(4)] * (1 + gated), axis=1)
    params = {"expand": {"kernel": up}, "contract": {"kernel": jnp.eye(4)}}
    y, _ = layer.apply(params, {}, X, train=True)
    chex.assert_trees_all_close(y, jax.nn.elu(X) * (X if gated else 1), rtol=1e-6)


@pytest.mark.parametrize("parameter", ["slope", "beta"])
def test_a_custom_activation_without_inverse_takes_any_parameter(parameter, monkeypatch):
    swish = Activation(lambda z, beta: z * jax.nn.sigmoid(beta * z), parameter=parameter)
    monkeypatch.setitem(ACTIVATIONS, "swish", swish)
    layer = layers.abn(4, activation="swish", activation_param=-1.5)
    params, state = initial(layer)
    y, _ = layer.apply(params, state, X, train=True)
    identity = layers.abn(4, activation="identity")
    z, _ = identity.apply(params, state, X, train=True)
    chex.assert_trees_all_close(y, z * jax.nn.sigmoid(-1.5 * z), rtol=1e-5)


@pytest.mark.parametrize(
    ("parameter", "instead"), [("slope", "relu"), ("alpha", "silu"), ("beta", "silu")]
)
def test_a_custom_activation_with_inverse_needs_a_positive_parameter(
    parameter, instead, monkeypatch
):
    scaled = Activation(lambda z, b: b * z, lambda y, b: (y / b, jnp.full_like(y, b)), parameter)
    monkeypatch.setitem(ACTIVATIONS, "scaled", scaled)
    with pytest.raises(ValueError, match=rf'{parameter} must be > 0 .* got 0\.0; .*="{instead}"'):
        layers.abn(4, activation="scaled", activation_param=0.0)
    layers.abn(4, activation="scaled", activation_param=0.5)


FORMULAS = {
    "identity": lambda z: z,
    "leaky_relu": lambda z: np.where(z < 0, 0.3 * z, z),
    "elu": lambda z: np.where(z < 0, 0.3 * np.expm1(z), z),
    "softplus": lambda z: np.log1p(np.exp(z)),
    "relu": lambda z: np.maximum(z, 0),
    "relu_squared": lambda z: np.maximum(z, 0) ** 2,
    "gelu": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: z / 2 * (1 + np.vectorize(math.erf)(z / np.sqrt(2))),
    "hard_swish": lambda z: z * np.clip(z + 3, 0, 6) / 6,
    "hard_sigmoid": lambda z: np.clip(z + 3, 0, 6) / 6,
    "quick_gelu": lambda z: z / (1 + np.exp(-1.702 * z)),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
}


def test_activations_match_their_formulas():
    for name in ACTIVATIONS:
        z = np.linspace(-3, 3, 24, dtype=np.float32)
        y, _ = layers.activation(name, 0.3).apply({}, {}, jnp.asarray(z), train=True)
        chex.assert_trees_all_close(y, FORMULAS[name](z).astype(np.float32), rtol=1e-5, atol=1e-6)
