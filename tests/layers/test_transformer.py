"""Transformers with residual and with reversible blocks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import initial, shapes

import fnet
from fnet import layers
from fnet.layers.reversible import GRID

reversible_transformer = functools.partial(layers.transformer, reversible=True)


def normed(p, x):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def attended(p, x):
    """Norm and causal attention with two heads."""
    b, t, width = x.shape
    z = dense(p["attention"]["query_key_value"], normed(p["norm"], x))
    q, k, v = (a.reshape(b, t, 2, width // 2) for a in np.split(z, 3, axis=-1))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(width / 2)
    scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    mixed = np.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
    return dense(p["attention"]["output"], mixed)


def fed_forward(p, x):
    return dense(p["contract"], np.tanh(dense(p["expand"], normed(p["norm"], x))))


def applied(make, width):
    """Params of two blocks, an input of that width, and the output."""
    layer = make(6, 2, 2, causal=True, activation="tanh")
    params = jax.tree.map(np.float64, initial(layer)[0])
    x = np.random.default_rng(1).normal(size=(3, 5, width))
    y = jax.jit(lambda p, x: layer.apply(p, {}, x, train=True)[0])(params, x)
    return params.values(), x, y


def test_block_matches_its_formula(float64):
    params, x, y = applied(layers.transformer, 6)
    for p in params:
        x = x + attended(p["0"]["body"], x)
        x = x + fed_forward(p["1"]["body"], x)
    chex.assert_trees_all_close(y, x, rtol=1e-9, atol=1e-9)


def test_reversible_block_matches_its_formula(float64):
    params, x, y = applied(reversible_transformer, 12)
    x1, x2 = np.split(x, 2, axis=-1)
    for p in params:
        x1 = x1 + attended(p["f"], x2)
        x2 = x2 + fed_forward(p["g"], x1)
    chex.assert_trees_all_close(y, np.concatenate([x1, x2], -1), atol=50 * GRID)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"blocks": 0}, "blocks must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
    ],
)
def test_rejects_invalid_sizes(sizes, message):
    with pytest.raises(ValueError, match=f"transformer: {message}"):
        layers.transformer(**{"width": 8, "heads": 2, "blocks": 1} | sizes)


@pytest.mark.slow
def test_reversible_transformer_equals_itself_without_restoration():
    restored = reversible_transformer(8, 2, 3, causal=True)
    saved = reversible_transformer(8, 2, 3, causal=True, restore=False)
    params, state = initial(restored)
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))

    def gradient(layer):
        f = lambda p, x: jnp.sin(layer.apply(p, state, x, train=True)[0]).sum()  # noqa: E731
        return jax.jit(jax.grad(f, argnums=(0, 1)))(params, x)

    chex.assert_trees_all_close(gradient(restored), gradient(saved), rtol=1e-6, atol=1e-7)


def transformer_activations(make, blocks, width):
    """Temporaries of the compiled gradient in units of one activation, with the best options."""
    layer = make(64, 4, blocks)
    params, state = shapes(layer)
    x = jax.ShapeDtypeStruct((8, 128, width), jnp.float32)
    f = lambda p, s, x: jnp.square(layer.apply(p, s, x, train=True)[0]).mean()  # noqa: E731
    compiled, _ = fnet.memory.compile_min_memory(jax.jit(jax.grad(f)).lower(params, state, x))
    return fnet.memory.peak(compiled).temporaries / (8 * 128 * width * 4)


@pytest.mark.slow
def test_memory_of_a_reversible_transformer_does_not_grow_with_depth():
    few, many = (transformer_activations(reversible_transformer, n, 128) for n in (2, 5))
    assert many - few < 0.75
    few, many = (transformer_activations(layers.transformer, n, 64) for n in (1, 3))
    assert many - few > 10
