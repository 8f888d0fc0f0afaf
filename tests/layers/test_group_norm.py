"""Group norm: the equation of Wu and He 2018, its rounding and its memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import one_rounding

import fnet
from fnet import layers
from fnet.layers.group_norm import group_norm


def inputs(shape, dtype=np.float32):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=shape) * 2 + 1, rng.normal(size=shape)
    scale, bias = rng.normal(size=shape[-1]), rng.normal(size=shape[-1])
    return tuple(jnp.asarray(a, dtype) for a in (x, scale, bias, dy))


def test_float32_matches_float64_up_to_rounding(float64):
    wide = inputs((4, 8, 8, 16), np.float64)

    @jax.jit
    def with_gradients(*arrays, dy):
        y, backward = jax.vjp(functools.partial(group_norm, groups=4), *arrays)
        return y, backward(dy)

    (y32, gradients32), (y, gradients) = (
        with_gradients(*arrays, dy=dy)
        for *arrays, dy in ([a.astype(jnp.float32) for a in wide], wide)
    )
    chex.assert_trees_all_close(y32, y, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(gradients32, gradients, atol=1e-4)


def test_variance_is_accurate_for_a_large_mean():
    x = 1e3 + jax.random.normal(jax.random.key(0), (4, 8, 8, 8))
    y = group_norm(x, None, None, groups=2)
    per_group = y.reshape(4, 64, 2, 4)
    chex.assert_trees_all_close(per_group.mean((1, 3)), jnp.zeros((4, 2)), atol=1e-3)
    chex.assert_trees_all_close(per_group.std((1, 3)), jnp.ones((4, 2)), atol=1e-3)


@settings(max_examples=10)
@given(
    n=st.integers(1, 3),
    positions=st.lists(st.integers(1, 4), max_size=3),
    groups=st.integers(1, 3),
    size=st.integers(1, 4),
)
def test_output_matches_the_formula(n, positions, groups, size):
    x, scale, bias, _ = inputs((n, *positions, groups * size))
    w = np.asarray(x, np.float64).reshape(n, -1, groups, size)
    mean, var = w.mean((1, 3), keepdims=True), w.var((1, 3), keepdims=True)
    expected = ((w - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
    expected = expected * np.asarray(scale) + np.asarray(bias)
    # A group of nearly equal elements has a small deviation, which amplifies rounding.
    atol = 1e-5 / np.sqrt(var.min() + 1e-5)
    norm = jax.jit(functools.partial(group_norm, groups=groups))
    chex.assert_trees_all_close(norm(x, scale, bias), expected, atol=atol)


def test_statistics_of_bfloat16_are_computed_in_float32():
    x, scale, bias, _ = inputs((2, 16, 16, 8))
    x = (x + 10).astype(jnp.bfloat16)
    y = group_norm(x, scale, bias, groups=2)
    assert y.dtype == jnp.bfloat16
    expected = group_norm(x.astype(jnp.float32), scale, bias, groups=2)
    np.testing.assert_allclose(np.float32(y), expected, one_rounding(y.dtype) / 2, 1e-6)


def test_empty_batch_gives_an_empty_output():
    x, scale, bias, _ = inputs((0, 4, 4, 6))
    assert group_norm(x, scale, bias, groups=3).shape == (0, 4, 4, 6)


def test_layer_is_initialized_without_scale_and_bias():
    layer = layers.group_norm(64)
    params, state = layer.init(jax.random.key(0))
    assert state == {}
    chex.assert_trees_all_equal(params, {"scale": jnp.ones(64), "bias": jnp.zeros(64)})
    x, *_ = inputs((2, 4, 4, 64))
    y, _ = layer.apply(params, state, x, train=True)
    chex.assert_trees_all_close(y, group_norm(x, None, None, groups=32), atol=1e-6)


@pytest.mark.parametrize("act", ["relu", "leaky_relu"])
def test_block_under_recompute_saves_one_array(act):
    shape = (8, 16, 16, 32)

    def activations_kept(blocks):
        parts = {}
        for i in range(blocks):
            parts[f"conv{i}"] = layers.conv(32, 32, bias=False)
            parts[f"norm{i}"] = layers.group_norm(32, 8)
            parts[f"act{i}"] = layers.activation(act)
        model = fnet.serial(**parts)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        apply = fnet.recompute(lambda p, x: model.apply(p, {}, x, train=True)[0])
        gradient = jax.jit(jax.grad(lambda p, x: jnp.square(apply(p, x)).mean()))
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        compiled, _ = fnet.memory.compile_min_memory(gradient.lower(params, x))
        return fnet.memory.peak(compiled).temporaries / (4 * np.prod(shape))

    assert (activations_kept(5) - activations_kept(3)) / 2 < 1.1


X, ONES = jnp.ones((2, 4, 6)), jnp.ones(6)


def test_rejects_invalid_arguments():
    for call, error, message in (
        (lambda: group_norm(X, ONES, ONES, groups=4), ValueError, "got groups=4, channels=6"),
        (lambda: group_norm(X, ONES, ONES, groups=0), ValueError, "got groups=0, channels=6"),
        (lambda: layers.group_norm(48), ValueError, "got groups=32, channels=48"),
        (lambda: group_norm(X, ONES[:5], ONES, groups=2), ValueError, r"scale must have shape \(6,\).*got \(5,\)"),
        (lambda: group_norm(ONES, ONES, ONES, groups=2), ValueError, r"x must be \[N, ..., C\], got shape \(6,\)"),
        (lambda: group_norm(X.astype(int), ONES, ONES, groups=2), TypeError, "x must be floating, got int32"),
        (lambda: group_norm(X, ONES, ONES.astype(jnp.bfloat16), groups=2), TypeError, "bias must be float32 or wider, got bfloat16"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
