"""Transformers with residual and with reversible blocks."""

import functools

import chex
import jax
import numpy as np
import pytest
from layer_cases import initial

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
