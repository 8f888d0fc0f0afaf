"""Pooling of NHWC images."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import layers
from fnet.layers.pooling import global_max_pool
from fnet.memory import compile_min_memory, peak

PATCHES = pytest.mark.parametrize(
    ("window", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 0), (2, 2, 1), (1, 2, 0)]
)


def pooled(layer, x):
    return layer.apply({}, {}, x, train=True)[0]


def reduction(window, stride, padding):
    def f(x):
        sides = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        spread, steps = (1, window, window, 1), (1, stride, stride, 1)
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, spread, steps, sides)

    return f


def max_pool(window, stride, padding):
    return lambda x: pooled(layers.max_pool(window, stride=stride, padding=padding), x)


@pytest.mark.parametrize(("window", "stride", "padding"), [(2, 2, 0), (3, 2, 1)])
def test_max_pool_derivatives_match_windowed_reductions(window, stride, padding):
    ours, theirs = (make(window, stride, padding) for make in (max_pool, reduction))
    x, dx = jax.random.normal(jax.random.key(0), (2, 2, 7, 6, 3))

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(f):
        gradient = jax.grad(lambda x: (f(x) ** 3).sum())
        return jax.jvp(f, (x,), (dx,)), jax.jvp(gradient, (x,), (dx,))

    chex.assert_trees_all_equal(derivatives(ours)[0], derivatives(theirs)[0])
    chex.assert_trees_all_close(derivatives(ours)[1], derivatives(theirs)[1], rtol=1e-6)


@PATCHES
def test_max_pool_gradient_on_tpu_is_one_instruction(window, stride, padding):
    x = jax.ShapeDtypeStruct((2, 7, 6, 3), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: max_pool(window, stride, padding)(x).sum()))
    for platform in ("tpu", "cpu", "cuda"):
        text = gradient.trace(x).lower(lowering_platforms=(platform,)).as_text()
        assert ("select_and_scatter" in text) == (platform == "tpu")


@pytest.mark.parametrize(("stride", "padding"), [(2, 0), (1, 0), (2, 1)])
def test_first_of_equal_maxima_gets_the_gradient_and_nan_propagates(stride, padding):
    x = jax.random.randint(jax.random.key(0), (1, 8, 8, 3), 0, 2).astype(float)  # with many ties
    ours, theirs = (make(2, stride, padding) for make in (max_pool, reduction))
    gradient = jax.jit(lambda f, x: jax.grad(lambda x: f(x).sum())(x), static_argnums=0)
    got, expected = (gradient(f, x) for f in (ours, theirs))
    chex.assert_trees_all_equal(got, expected)
    nan = x.at[0, 1, 1, 0].set(jnp.nan)
    got_nan = jnp.isnan(jax.vjp(ours, nan)[0])
    assert got_nan.any()
    chex.assert_trees_all_equal(got_nan, jnp.isnan(theirs(nan)))


def test_max_pool_of_minus_infinity_has_finite_gradients():
    x = jnp.full((1, 2, 2, 1), -jnp.inf)
    layer = max_pool(2, 2, 1)
    y, change = jax.jvp(layer, (x,), (jnp.ones_like(x),))
    chex.assert_trees_all_equal(y, jnp.full_like(y, -jnp.inf))
    chex.assert_tree_all_finite((change, jax.grad(lambda x: (2 * layer(x)).sum())(x)))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32, jnp.bfloat16])
def test_max_pool_preserves_the_dtype(dtype):
    x = jax.random.randint(jax.random.key(0), (2, 6, 6, 3), 0, 200).astype(dtype)
    y = max_pool(3, 2, 1)(x)
    chex.assert_type(y, dtype)
    expected = reduction(3, 2, 1)(x.astype(jnp.float32))
    chex.assert_trees_all_equal(y.astype(jnp.float32), expected)


@pytest.mark.parametrize(("window", "padding"), [(2, 0), (3, 1)])
def test_max_pool_after_a_convolution_saves_neither_input_nor_output(window, padding):
    def gradient(pool):
        conv = layers.conv(3, 32, bias=False)
        params, _ = jax.eval_shape(conv.init, jax.random.key(0))

        def loss(params, x):
            return jnp.sin(pool(conv.apply(params, {}, x, train=True)[0])).sum()

        x = jax.ShapeDtypeStruct((4, 64, 64, 3), jnp.float32)
        compiled, _ = compile_min_memory(jax.jit(jax.grad(loss)).lower(params, x))
        return peak(compiled).temporaries

    ours, theirs = (gradient(make(window, 2, padding)) for make in (max_pool, reduction))
    convolved = 4 * 64 * 64 * 32 * 4
    assert ours <= 2.7 * convolved  # it or its gradient, and half as much of rows and indices
    assert ours <= 0.4 * theirs


@pytest.mark.parametrize(("window", "stride", "padding"), [(3, 2, 1), (3, 1, 0), (2, 2, 1)])
def test_max_pool_of_overlapping_or_padded_patches(window, stride, padding):
    x = -1 - np.random.default_rng(0).random(
        (2, 7, 6, 3), np.float32
    )  # zero padding would be the maximum
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    wide = np.pad(x, pads, constant_values=-np.inf)
    rows, columns = (range(0, side - window + 1, stride) for side in wide.shape[1:3])
    expected = [
        [wide[:, i : i + window, j : j + window].max((1, 2)) for j in columns] for i in rows
    ]
    got = max_pool(window, stride, padding)(jnp.asarray(x))
    np.testing.assert_array_equal(got, np.moveaxis(np.asarray(expected), 2, 0))


def test_partial_patches_average_the_pixels_that_they_have():
    x = np.arange(35.0, dtype=np.float32).reshape(1, 5, 7, 1)
    whole = np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)], constant_values=np.nan)
    expected = np.nanmean(whole.reshape(1, 3, 2, 4, 2, 1), (2, 4))
    y = pooled(layers.avg_pool(2, partial=True), jnp.asarray(x))
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_avg_pool_and_global_avg_pool_are_means():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    chex.assert_trees_all_equal(
        pooled(layers.avg_pool(2), x)[0, ..., 0], jnp.asarray([[2.5, 4.5], [10.5, 12.5]])
    )
    chex.assert_trees_all_equal(pooled(layers.global_avg_pool(), x), jnp.asarray([[7.5]]))
    # The last row and column do not fill a window and are ignored, as in torch.
    odd = jnp.arange(25.0).reshape(1, 5, 5, 1)
    chex.assert_trees_all_equal(
        pooled(layers.avg_pool(2), odd), pooled(layers.avg_pool(2), odd[:, :4, :4])
    )


def test_pools_reject_an_image_without_batch_axis():
    for name in ("max_pool", "avg_pool", "global_max_pool", "global_avg_pool"):
        with pytest.raises(ValueError, match=rf"{name}: expected \[N, H, W, C\], got \(4, 4, 3\)"):
            pooled(getattr(layers.pooling, name)(), jnp.ones((4, 4, 3)))


def test_pools_reject_windows_larger_than_the_image():
    for name in ("avg_pool", "max_pool"):
        with pytest.raises(ValueError, match=f"{name}: window 5 is larger than the image 4 x 4"):
            pooled(getattr(layers, name)(5), jnp.ones((1, 4, 4, 1)))


def test_pools_treat_channels_independently():
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    np.testing.assert_array_equal(pooled(global_max_pool(), jnp.asarray(x)), x.max((1, 2)))
    means = pooled(layers.global_avg_pool(), jnp.asarray(x))
    np.testing.assert_allclose(means, x.mean((1, 2)), atol=1e-6)
    patches = x[:, :4].reshape(2, 2, 2, 2, 2, 3).mean((2, 4))
    np.testing.assert_allclose(pooled(layers.avg_pool(2), jnp.asarray(x)), patches, atol=1e-6)


def test_pools_reject_an_image_that_is_too_small_in_one_direction():
    for name in ("avg_pool", "max_pool"):
        for height, width in ((4, 1), (1, 4)):
            with pytest.raises(
                ValueError, match=f"{name}: window 2 is larger than .* {height} x {width}"
            ):
                pooled(getattr(layers, name)(2), jnp.ones((1, height, width, 1)))
