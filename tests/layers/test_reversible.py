"""Reversible stacks: the coupling of Gomez et al. 2017, and exact restoration."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_cases import initial

import fnet
from fnet import Layer, layers, serial
from fnet.layers.reversible import GRID, LIMIT, reversible
from fnet.memory.peak import CANDIDATE_OPTIONS

OPTIONS = CANDIDATE_OPTIONS["cpu"][0]


def convolution_block(channels):
    return serial(conv=layers.conv(channels, channels, bias=False), abn=layers.abn(channels))


def dense_block(width):
    return serial(hidden=layers.dense(width, 2 * width), act=layers.activation("gelu"),
                  out=layers.dense(2 * width, width))  # fmt: skip


@functools.cache
def compiled(layer):
    """Loss, new state, and gradients of params and x, compiled with options that preserve rematerialization."""

    def loss(params, x, state, key):
        y, after = layer.apply(params, state, x, key=key, train=True)
        return jnp.mean(jnp.sin(y)), after

    return jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), compiler_options=dict(OPTIONS)
    )


def value_and_gradients(layer, params, state, x, key=None):
    return compiled(layer)(params, x, state, key)


def test_gradients_equal_those_without_restoration_bit_for_bit():
    pairs = [(convolution_block(4), convolution_block(4))] * 2
    restored, saved = reversible(pairs), reversible(pairs, restore=False)
    params, state = initial(restored)
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 8))
    chex.assert_trees_all_equal(
        value_and_gradients(restored, params, state, x),
        value_and_gradients(saved, params, state, x),
    )


def coupling(pairs, params, x, *, state=None, train=True):
    """The output of the stack without fixed-point rounding."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    for i, (f, g) in enumerate(pairs):
        p, s = params[str(i)], state[str(i)] if state else {"f": {}, "g": {}}
        x1 = x1 + f.apply(p["f"], s["f"], x2, train=train)[0]
        x2 = x2 + g.apply(p["g"], s["g"], x1, train=train)[0]
    return jnp.concatenate([x1, x2], -1)


def test_output_matches_the_coupling_up_to_rounding():
    pairs = [(dense_block(3), dense_block(3))] * 3
    layer = reversible(pairs)
    params, _ = initial(layer)
    x = jax.random.normal(jax.random.key(1), (5, 6))

    @jax.jit
    def both(params, x):
        y, _ = layer.apply(params, {}, x, train=True)
        return y, coupling(pairs, params, x)

    chex.assert_trees_all_close(*both(params, x), atol=50 * GRID)


def test_streams_are_rounded_to_multiples_of_2_to_the_minus_16():
    x = jax.random.normal(jax.random.key(1), (5, 6))
    y, _ = reversible([(scaled(0.0), scaled(0.0))]).apply({}, {}, x, train=True)
    chex.assert_trees_all_equal(y, jnp.round(x * 2**16) / 2**16)


@pytest.mark.usefixtures("float64")
def test_gradients_match_autodiff_of_the_coupling():
    pairs = [(dense_block(3), dense_block(3))] * 3
    layer = reversible(pairs)
    params = jax.tree.map(lambda p: p.astype(np.float64), initial(layer)[0])
    x = np.random.default_rng(1).normal(size=(5, 6))

    def plain(params, x):
        return jnp.mean(jnp.sin(coupling(pairs, params, x)))

    got = value_and_gradients(layer, params, {}, x)[1]
    expected = jax.jit(jax.grad(plain, argnums=(0, 1)))(params, x)
    chex.assert_trees_all_close(got, expected, atol=100 * GRID)


def test_running_statistics_are_updated_once():
    pairs = [(convolution_block(2), convolution_block(2))] * 2
    layer = reversible(pairs)
    params, state = initial(layer)
    x = 3 + jax.random.normal(jax.random.key(1), (4, 5, 5, 4))

    @jax.jit
    def forward_only(params, state, x):
        half = jnp.split(x, 2, axis=-1)[1]
        _, direct = pairs[0][0].apply(params["0"]["f"], state["0"]["f"], half, train=True)
        return layer.apply(params, state, x, train=True)[1], direct

    expected, direct = forward_only(params, state, x)
    (_, after), _ = value_and_gradients(layer, params, state, x)
    chex.assert_trees_all_close(after, expected, rtol=1e-6)
    chex.assert_trees_all_close(after["0"]["f"], direct, rtol=1e-4, atol=1e-4)


def test_evaluation_does_not_update_running_statistics():
    pairs = [(convolution_block(2), convolution_block(2))]
    layer = reversible(pairs)
    params, state = initial(layer)
    x = jax.random.normal(jax.random.key(1), (4, 5, 5, 4))

    @jax.jit
    def both(params, state, x):
        expected = coupling(pairs, params, x, state=state, train=False)
        return layer.apply(params, state, x, train=False), expected

    (y, after), expected = both(params, state, x)
    chex.assert_trees_all_close(y, expected, atol=50 * GRID)
    chex.assert_trees_all_equal(after, state)


def test_backward_pass_redraws_the_same_dropout_mask():
    dense, dropout = layers.dense(4, 4), layers.dropout(0.5)
    pairs = [(serial(dense, dropout), serial(dropout, dense))] * 2
    restored, saved = reversible(pairs), reversible(pairs, restore=False)
    params, state = initial(restored)
    x = jax.random.normal(jax.random.key(1), (6, 8))
    got = value_and_gradients(restored, params, state, x, jax.random.key(2))
    chex.assert_trees_all_equal(
        got, value_and_gradients(saved, params, state, x, jax.random.key(2))
    )
    other = value_and_gradients(restored, params, state, x, jax.random.key(3))
    assert float(got[0][0]) != float(other[0][0])


def test_each_block_draws_its_own_random_numbers():
    def noise(params, state, x, *, key=None, train):
        return jax.random.normal(key, x.shape), state

    pair = Layer(lambda key: ({}, {}), noise), scaled(0.0)
    x = jnp.zeros((3, 4))
    one, two = (
        reversible([pair] * n).apply({}, {}, x, key=jax.random.key(2), train=True)[0]
        for n in (1, 2)
    )
    first, second = one[:, :2], (two - one)[:, :2]
    assert float(jnp.abs(first).min()) > 0
    assert float(jnp.abs(second - first).max()) > 0.1


def test_16_bit_inputs_are_restored_exactly():
    pairs = [(dense_block(3), dense_block(3))] * 2
    restored, saved = reversible(pairs), reversible(pairs, restore=False)
    params, state = initial(restored)
    x = jax.random.normal(jax.random.key(1), (5, 6), jnp.bfloat16)
    y, _ = jax.eval_shape(functools.partial(restored.apply, train=True), params, state, x)
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(
        value_and_gradients(restored, params, state, x),
        value_and_gradients(saved, params, state, x),
    )


def scaled(factor):
    return Layer(lambda key: ({}, {}), lambda p, s, x, *, key=None, train: (factor * x, s))


@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf, 2 * LIMIT])
def test_output_of_an_example_is_nan_if_restoration_is_impossible(bad):
    layer = reversible([(scaled(1.0), scaled(1.0))])
    x = jnp.ones((2, 4)).at[0, 0].set(bad)
    y, _ = layer.apply({}, {}, x, train=True)
    assert jnp.isnan(y).tolist() == [[True] * 4, [False] * 4]
    y, _ = layer.apply({}, {}, x[0], train=True)
    assert bool(jnp.isnan(y).all())
    for pair in ((scaled(bad), scaled(0.0)), (scaled(0.0), scaled(bad))):
        y, _ = reversible([pair]).apply({}, {}, jnp.ones((2, 4)), train=True)
        assert bool(jnp.isnan(y).all())


def moved(*steps):
    """The first stream, ones at first, after adding multiples of the limit."""
    layer = reversible([(scaled(step * LIMIT), scaled(0.0)) for step in steps])
    return layer.apply({}, {}, jnp.ones((2, 4)), train=True)[0]


def test_output_is_nan_if_a_stream_left_the_range_and_returned():
    chex.assert_trees_all_equal(moved(0.75, -0.75, -0.75, 0.75), jnp.ones((2, 4)))
    assert bool(jnp.isnan(moved(0.75, 0.75, -0.75, -0.75)).all())


@pytest.mark.parametrize("step", [1.0, -1.5])
def test_output_is_nan_if_an_update_exceeds_32_bits(step):
    assert bool(jnp.isnan(moved(-0.75 if step > 0 else 0.75, step)).all())


def test_rejects_integer_inputs():
    with pytest.raises(TypeError, match="reversible: x must be floating, got int32"):
        reversible([(scaled(1.0), scaled(1.0))]).apply({}, {}, jnp.ones((2, 4), int), train=True)


def temporaries(blocks, layer_of=reversible):
    pairs = [(convolution_block(16), convolution_block(16))] * blocks
    layer = layer_of(pairs)
    params, state = jax.eval_shape(layer.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((8, 28, 28, 32), jnp.float32)
    loss = lambda p, s, x: jnp.square(layer.apply(p, s, x, train=True)[0]).mean()  # noqa: E731
    compiled = (
        jax.jit(jax.grad(loss)).lower(params, state, x).compile(compiler_options=dict(OPTIONS))
    )
    activation = 8 * 28 * 28 * 32 * 4
    return fnet.memory.peak(compiled).temporaries / activation


def test_memory_does_not_grow_with_depth():
    # Allow half an activation for how the compiler packs buffers.
    few, many = (temporaries(blocks) for blocks in (2, 8))
    assert abs(many - few) < 0.75
    assert many < 5.5
    saved = [temporaries(n, lambda p: reversible(p, restore=False)) for n in (2, 5)]
    assert (saved[1] - saved[0]) / 3 > 0.92


def test_gradients_of_sharded_examples_match_one_device():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = reversible([(dense_block(2), dense_block(2))] * 2)
    params, _ = initial(layer)
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    replicated, shared = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def loss(params, x):
        return jnp.sin(layer.apply(params, {}, x, train=True)[0]).sum()

    def per_device_gradients(params, x):
        return jax.grad(loss, argnums=(0, 1))(params, x)

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(replicated, shared))
    whole = mapped(lambda p, x: jax.lax.psum(loss(p, x), "data"), out_specs=replicated)
    inside = mapped(per_device_gradients, out_specs=(replicated, shared))
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    outside = jax.jit(jax.grad(whole, argnums=(0, 1)))(params, x)
    chex.assert_trees_all_close(outside, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(jax.jit(inside)(params, x), expected, rtol=1e-5, atol=1e-6)


def test_vmap_matches_a_loop():
    layer = reversible([(dense_block(2), dense_block(2))] * 2)
    params, _ = initial(layer)
    # No sum here is halfway between two multiples, where its order would decide the rounding.
    x = np.random.default_rng(10).normal(size=(3, 5, 4)).astype(np.float32)
    grad = jax.jit(jax.grad(lambda p, x: jnp.sin(layer.apply(p, {}, x, train=True)[0]).sum()))
    batched = jax.jit(jax.vmap(grad, in_axes=(None, 0)))(params, x)
    looped = jax.tree.map(lambda *g: np.stack(g), *[grad(params, x[i]) for i in range(3)])
    chex.assert_trees_all_close(batched, looped, rtol=1e-5, atol=1e-6)


def test_second_derivatives_raise_type_error():
    layer = reversible([(dense_block(2), dense_block(2))])
    params, _ = layer.init(jax.random.key(0))
    f = lambda x: jnp.sin(layer.apply(params, {}, x, train=True)[0]).sum()  # noqa: E731
    with pytest.raises(TypeError, match="second derivatives are not supported"):
        jax.grad(lambda x: jax.grad(f)(x).sum())(jnp.ones((3, 4)))


def test_rejects_invalid_arguments():
    with pytest.raises(ValueError, match=r"at least one block \(f, g\), got none"):
        reversible([])
    layer = reversible([(layers.dense(2, 3), layers.dense(2, 2))])
    params, state = layer.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"must be even to be halved, got \(2, 5\)"):
        layer.apply(params, state, jnp.ones((2, 5)), train=True)
    with pytest.raises(ValueError, match=r"must be even to be halved, got \(\)"):
        layer.apply(params, state, jnp.float32(1), train=True)
    with pytest.raises(ValueError, match=r"f of block 0 maps \(2, 2\) to \(2, 3\)"):
        layer.apply(params, state, jnp.ones((2, 4)), train=True)
