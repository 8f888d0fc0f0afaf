"""Transformers of residual and of reversible blocks, and the attention in them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import initial, shapes

import fnet
from fnet import layers


def test_attention_equals_a_plain_softmax():
    with jax.enable_x64(True):
        layer = layers.attention(6, 2, causal=True)
        params = jax.tree.map(lambda p: np.asarray(p, np.float64), initial(layer)[0])
        x = np.random.default_rng(1).normal(size=(3, 5, 6))
        y = jax.jit(lambda p, x: layer.apply(p, {}, x, train=True)[0])(params, x)
        qkv = x @ params["query_key_value"]["kernel"] + params["query_key_value"]["bias"]
        q, k, v = (a.reshape(3, 5, 2, 3) for a in np.split(qkv, 3, axis=-1))
        scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(3)
        scores = np.where(np.tril(np.ones((5, 5), bool)), scores, -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        mixed = np.einsum("bhts,bshd->bthd", weights, v).reshape(3, 5, 6)
        expected = mixed @ params["output"]["kernel"] + params["output"]["bias"]
        chex.assert_trees_all_close(y, expected, atol=1e-6)


@pytest.mark.parametrize("make", [layers.transformer, layers.reversible_transformer])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"blocks": 0}, "blocks must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
    ],
)
def test_a_transformer_without_size_is_refused(make, sizes, message):
    with pytest.raises(ValueError, match=f"{make.__name__}: {message}"):
        make(**{"width": 8, "heads": 2, "blocks": 1} | sizes)


@pytest.mark.slow
def test_a_reversible_transformer_equals_itself_without_reversal():
    restored = layers.reversible_transformer(8, 2, 3, causal=True)
    kept = layers.reversible_transformer(8, 2, 3, causal=True, restore=False)
    params, state = initial(restored)
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))

    def gradient(layer):
        f = lambda p, x: jnp.sin(layer.apply(p, state, x, train=True)[0]).sum()  # noqa: E731
        return jax.jit(jax.grad(f, argnums=(0, 1)))(params, x)

    chex.assert_trees_all_close(gradient(restored), gradient(kept), rtol=1e-6, atol=1e-7)


def transformer_activations(make, blocks, width):
    """Temporaries of the gradient's program in activations, under the better options."""
    layer = make(64, 4, blocks)
    params, state = shapes(layer)
    x = jax.ShapeDtypeStruct((8, 128, width), jnp.float32)
    f = lambda p, s, x: jnp.square(layer.apply(p, s, x, train=True)[0]).mean()  # noqa: E731
    compiled, _ = fnet.memory.compile_smallest(jax.jit(jax.grad(f)).lower(params, state, x))
    return fnet.memory.peak(compiled).temporaries / (8 * 128 * width * 4)


@pytest.mark.slow
def test_a_reversible_transformer_needs_no_more_memory_when_it_is_deeper():
    few, many = (transformer_activations(layers.reversible_transformer, n, 128) for n in (2, 5))
    assert many - few < 0.75
    few, many = (transformer_activations(layers.transformer, n, 64) for n in (1, 3))
    assert many - few > 10
