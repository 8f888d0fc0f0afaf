"""Layer, its combinators, and what holds for all layers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pretrained_cases import MIXERS

import fnet
from fnet import Layer, layers, repeat, residual, serial
from fnet.layer import stateless


def noise() -> Layer:
    def apply(params, state, x, *, key=None, train):
        return x + jax.random.normal(key, x.shape), state

    return Layer(lambda key: ({}, {}), apply)


def test_serial_composes_in_order_and_names_children():
    layer = serial(layers.dense(3, 4), layers.activation("relu"), head=layers.dense(4, 2))
    params, state = layer.init(jax.random.key(0))
    assert set(params) == {"0", "head"}
    assert state == {}
    x = jnp.arange(6.0).reshape(2, 3)
    y, _ = layer.apply(params, state, x, train=True)
    hidden = jax.nn.relu(x @ params["0"]["kernel"])
    chex.assert_trees_all_close(y, hidden @ params["head"]["kernel"])


def test_serial_rejects_a_name_that_numbers_an_unnamed_layer():
    with pytest.raises(ValueError, match=r"serial: the names \['0'\] belong to unnamed layers"):
        serial(layers.dense(3, 4), **{"0": layers.dense(4, 2)})


def test_init_needs_no_data():
    layer = serial(layers.conv(3, 8), layers.abn(8), layers.global_avg_pool())
    params, state = jax.eval_shape(layer.init, jax.random.key(0))
    chex.assert_shape(params["0"]["kernel"], (3, 3, 3, 8))
    chex.assert_shape(state["1"]["running_mean"], (8,))


@pytest.mark.usefixtures("float64")
def test_params_and_state_are_float32_even_with_x64_enabled():
    for layer in (
        layers.dense(4, 4),
        layers.conv(4, 4),
        layers.embedding(4, 4),
        layers.causal_conv(4),
        layers.abn(4, decay=None),
        layers.batch_norm(4),
        layers.group_norm(4, 2),
        layers.layer_norm(4),
        layers.rms_norm(4),
        layers.dynamic_tanh(4, alpha=1),
        *MIXERS.values(),
        layers.stack(4, [layers.Block(layers.attention(4, 2))] * 2, context="lagged", condition=4),
    ):
        leaves = jax.tree.leaves(jax.eval_shape(layer.init, jax.random.key(0)))
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


def test_children_copies_and_blocks_are_initialized_with_different_keys():
    dense = layers.dense(4, 4)
    children, _ = serial(dense, dense).init(jax.random.key(0))
    copies, _ = repeat(dense, 2).init(jax.random.key(0))
    blocks, _ = layers.stack(4, [layers.Block(dense)] * 2).init(jax.random.key(0))
    of_children, of_blocks = ([of[i] for i in "01"] for of in (children, blocks))
    kernels = [[p["kernel"] for p in of_children], [p["mixer"]["kernel"] for p in of_blocks]]
    assert all(jnp.abs(a - b).min() > 0 for a, b in (*kernels, copies["kernel"]))


def test_appending_a_layer_keeps_initial_values_of_earlier_layers():
    short, _ = serial(layers.dense(4, 4)).init(jax.random.key(0))
    long, _ = serial(layers.dense(4, 4), layers.dense(4, 4)).init(jax.random.key(0))
    chex.assert_trees_all_equal(short["0"], long["0"])


@pytest.mark.parametrize("of", [lambda n: serial(*[noise()] * n), lambda n: repeat(noise(), n)])
def test_each_child_or_copy_gets_its_own_key(of):
    inputs = {}, {}, jnp.zeros(4)
    twice, once = (of(n).apply(*inputs, key=jax.random.key(2), train=True)[0] for n in (2, 1))
    assert not jnp.allclose(twice, 2 * once)


def test_serial_updates_the_state_of_every_child():
    layer = serial(a=layers.abn(2), b=layers.abn(2))
    params, state = layer.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 2)) + 3.0
    _, after = layer.apply(params, state, x, train=True)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert not jnp.allclose(state["a"]["running_mean"], after["a"]["running_mean"])
    assert not jnp.allclose(state["b"]["running_var"], after["b"]["running_var"])
    _, frozen = layer.apply(params, after, x, train=False)
    chex.assert_trees_all_equal(after, frozen)


def test_residual_adds_its_input_or_its_shortcut():
    x = jnp.ones((2, 3))
    layer = residual(layers.dense(3, 3))
    params, state = layer.init(jax.random.key(0))
    y, _ = layer.apply(params, state, x, train=True)
    chex.assert_trees_all_close(y, x + x @ params["body"]["kernel"])
    layer = residual(layers.dense(3, 4), layers.dense(3, 4))
    params, state = layer.init(jax.random.key(0))
    y, _ = layer.apply(params, state, x, train=True)
    kernels = params["body"]["kernel"] + params["shortcut"]["kernel"]
    chex.assert_trees_all_close(y, x @ kernels, atol=1e-6)


def test_residual_rejects_branches_of_different_shapes():
    layer = residual(layers.dense(3, 4))
    params, state = layer.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"body gives \(2, 4\), shortcut gives \(2, 3\)"):
        layer.apply(params, state, jnp.ones((2, 3)), train=True)


def test_repeat_matches_a_loop_over_copies():
    block = serial(layers.dense(3, 3), layers.abn(3))
    layer = repeat(block, 4)
    params, state = layer.init(jax.random.key(0))
    chex.assert_tree_shape_prefix((params, state), (4,))
    x = jax.random.normal(jax.random.key(1), (5, 3))

    @jax.jit
    def loop_over_copies(params, state, x):
        states = []
        for i in range(4):
            p, s = jax.tree.map(lambda a, i=i: a[i], (params, state))
            x, s = block.apply(p, s, x, train=True)
            states.append(s)
        return x, jax.tree.map(lambda *s: jnp.stack(s), *states)

    got = jax.jit(functools.partial(layer.apply, train=True))(params, state, x)
    chex.assert_trees_all_close(got, loop_over_copies(params, state, x), atol=1e-6)


def test_repeat_rejects_zero_copies():
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        repeat(layers.dense(2, 2), 0)


def test_layer_names_appear_in_the_compiled_program():
    layer = serial(stem=layers.dense(3, 3), head=stateless(jnp.sin))
    params, state = layer.init(jax.random.key(0))
    f = jax.jit(lambda p, x: layer.apply(p, state, x, train=True)[0])
    text = f.lower(params, jnp.ones((2, 3))).compile().as_text()
    assert "/stem/" in text
    assert "/head/" in text


def integers(*shape):
    return jnp.ones(shape, jnp.int32)


def test_rejects_integer_inputs():
    for call in (
        lambda: layers.causal_conv(3).apply({"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}, {}, integers(1, 5, 3), train=True),
        lambda: layers.unembed(integers(2, 4), jnp.ones((7, 4)) / 2),
        lambda: layers.dropout(0.5).apply({}, {}, integers(8), key=jax.random.key(0), train=True),
        lambda: layers.rotary(integers(1, 4, 1, 2), jnp.arange(4)),
        lambda: fnet.diffusion.add_noise(integers(2, 3), jnp.ones((2, 3)), 0.7, 0.7),
        lambda: fnet.diffusion.denoised("v", jnp.ones((2, 3)), integers(2, 3), 0.7, 0.7),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="floating, got int32"):
            call()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.avg_pool(2), (4, 4, 4, 2)),
        (layers.mamba2(4, state=3, head=2, groups=2, chunk=3), (4, 5, 4)),
        (layers.rg_lru(4, heads=2), (4, 5, 4)),
    ],
    ids=["avg_pool", "mamba2", "rg_lru"],
)
def test_explicit_sharding_over_examples_is_kept(layer, shape):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    params, state = layer.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), shape)
    f = lambda params, x: layer.apply(params, state, x, train=True)[0]  # noqa: E731
    expected = jax.jit(f)(params, x)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        y = jax.jit(f)(params, x)
        dx = jax.eval_shape(jax.grad(lambda params, x: f(params, x).sum(), 1), params, x)
    assert y.sharding.spec[0] == dx.sharding.spec[0] == "data"
    chex.assert_trees_all_close(jax.device_get(y), jax.device_get(expected), atol=1e-6)


def test_norms_reject_zero_channels():
    for norm, name in (
        (layers.abn, "channels"),
        (layers.batch_norm, "channels"),
        (lambda n: layers.group_norm(n, 1), "channels"),
        (layers.layer_norm, "d"),
        (layers.rms_norm, "d"),
        (layers.dynamic_tanh, "d"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            norm(0)


def test_batch_norm_errors_name_batch_norm():
    layer = layers.batch_norm(2)
    params, state = layer.init(jax.random.key(0))
    state["running_mean"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"^batch_norm: running_mean must have shape \(2,\)"):
        layer.apply(params, state, jnp.ones((4, 2)), train=True)


def test_each_branch_of_each_block_draws_its_own_dropout_mask():
    ones = stateless(jnp.ones_like)
    stack = layers.stack(16, [layers.Block(ones, ones)] * 2, dropout=0.5)
    params, _ = stack.init(jax.random.key(0))
    y, _ = stack.apply(params, {}, jnp.zeros((4, 16, 16)), key=jax.random.key(1), train=True)
    # The sum of four independent masks of 0 or 2 is binomial.
    values, counts = np.unique(y, return_counts=True)
    assert values.tolist() == [0, 2, 4, 6, 8]
    np.testing.assert_allclose(counts / y.size, np.array([1, 4, 6, 4, 1]) / 16, atol=0.06)
