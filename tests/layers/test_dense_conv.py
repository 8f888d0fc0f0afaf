"""Dense layers, convolutions and multilayer perceptrons."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import layers
from fnet.layers.activations import ACTIVATIONS


def test_dense_is_affine_on_the_last_axis():
    layer = layers.dense(3, 2)
    params, state = layer.init(jax.random.key(0))
    params["bias"] = jnp.asarray([1.0, -1.0])
    x = jax.random.normal(jax.random.key(1), (4, 5, 3))
    y, _ = layer.apply(params, state, x, train=False)
    chex.assert_trees_all_close(
        y, np.einsum("abi,io->abo", x, params["kernel"]) + np.array([1.0, -1.0]), atol=1e-5
    )


def test_dense_without_bias_has_none():
    params, _ = layers.dense(3, 2, bias=False).init(jax.random.key(0))
    assert set(params) == {"kernel"}


def test_layers_compute_in_the_dtype_of_the_input_with_float32_params():
    for layer, x in (
        (layers.dense(3, 2), jnp.ones((2, 3), jnp.bfloat16)),
        (layers.conv(3, 2), jnp.ones((2, 4, 4, 3), jnp.bfloat16)),
    ):
        params, state = layer.init(jax.random.key(0))
        chex.assert_type(jax.tree.leaves(params), jnp.float32)
        y, _ = layer.apply(params, state, x, train=True)
        chex.assert_type(y, jnp.bfloat16)


def applied(layer, *shape):
    return layer.apply(*layer.init(jax.random.key(0)), jnp.ones(shape), train=True)


def test_rejects_sizes_that_do_not_fit():
    for call, message in (
        (lambda: applied(layers.dense(3, 2), 2, 4), r"expected \[..., 3\], got \(2, 4\)"),
        (lambda: applied(layers.dense(3, 2)), r"expected \[..., 3\], got \(\)"),
        (lambda: layers.conv(4, 6, groups=3), "groups=3, n_in=4, n_out=6"),
        (lambda: layers.conv(4, 6, groups=0), "groups=0, n_in=4, n_out=6"),
        (lambda: applied(layers.conv(3, 2), 2, 4, 4, 1), r"\[N, H, W, 3\], got \(2, 4, 4, 1\)"),
        (lambda: layers.mlp([3, 2], "tanhh"), "expected one of"),
        (lambda: layers.mlp([3]), r"at least an input and an output size, got \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (layers.dense(3, 2), jnp.ones((2, 3), int)),
        (layers.conv(3, 2), jnp.ones((2, 4, 4, 3), jnp.uint8)),
    ],
)
def test_rejects_integer_inputs(layer, x):
    params, state = layer.init(jax.random.key(0))
    with pytest.raises(TypeError, match=f"x must be floating, got {x.dtype}"):
        layer.apply(params, state, x, train=True)


def reference_conv(x, kernel, stride, dilation, groups, pad):
    """A loop over outputs, as in the definition."""
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    kh, kw, per_group, n_out = kernel.shape
    h = (x.shape[1] - dilation * (kh - 1) - 1) // stride + 1
    w = (x.shape[2] - dilation * (kw - 1) - 1) // stride + 1
    y = np.zeros((x.shape[0], h, w, n_out))
    for o in range(n_out):
        first = (o // (n_out // groups)) * per_group
        for i in range(h):
            for j in range(w):
                rows = i * stride + dilation * np.arange(kh)
                columns = j * stride + dilation * np.arange(kw)
                patch = x[:, rows][:, :, columns, first : first + per_group]
                y[:, i, j, o] = (patch * kernel[..., o]).sum((1, 2, 3))
    return y


@settings(max_examples=8)
@given(
    window=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    pad=st.integers(0, 2),
)
def test_conv_matches_its_definition(window, stride, dilation, groups, pad):
    layer = layers.conv(
        4, 6, window, stride=stride, dilation=dilation, groups=groups, padding=[(pad, pad)] * 2
    )
    x = np.random.default_rng(0).normal(size=(2, 6, 7, 4)).astype(np.float32)

    @jax.jit
    def kernel_and_output(key, x):
        params, state = layer.init(key)
        return params["kernel"], layer.apply(params, state, x, train=True)[0]

    kernel, y = kernel_and_output(jax.random.key(0), x)
    expected = reference_conv(x, np.asarray(kernel), stride, dilation, groups, pad)
    chex.assert_trees_all_close(y, expected, atol=1e-5)


def test_rejects_invalid_sizes():
    for make, message in (
        (lambda: layers.dense(0, 2), "dense: n_in must be at least 1, got 0"),
        (lambda: layers.dense(2, -1), "dense: n_out must be at least 1, got -1"),
        (lambda: layers.conv(3, 0), "conv: n_out must be at least 1, got 0"),
        (lambda: layers.conv(3, 2, (3, 0)), "conv: window must be at least 1, got 0"),
        (lambda: layers.conv(3, 2, stride=0), "conv: stride must be at least 1, got 0"),
        (lambda: layers.conv(3, 2, dilation=0), "conv: dilation must be at least 1, got 0"),
        (lambda: layers.avg_pool(0), "avg_pool: window must be at least 1, got 0"),
        (lambda: layers.max_pool(0), "max_pool: window must be at least 1, got 0"),
        (lambda: layers.max_pool(2, stride=0), "max_pool: stride must be at least 1, got 0"),
        (lambda: layers.max_pool(2, padding=2), "less than window=2, got 2"),
        (lambda: layers.max_pool(2, padding=-1), "max_pool: padding .* got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_gradients_match_their_formulas(name):
    z = jnp.linspace(-3, 3, 25)  # includes 0

    def with_gradient(f):
        return jax.value_and_grad(lambda z: (y := f(z), (y * jnp.cos(z)).sum())[::-1], has_aux=True)

    layer = layers.activation(name, 0.3)
    got = with_gradient(lambda z: layer.apply({}, {}, z, train=True)[0])(z)
    expected = with_gradient(lambda z: ACTIVATIONS[name].forward(z, 0.3))(z)
    others = jnp.arange(25) != 12  # the derivative at a kink is not unique
    chex.assert_trees_all_close(got[0], expected[0], rtol=1e-6)
    chex.assert_trees_all_close(got[1][others], expected[1][others], rtol=1e-5, atol=1e-6)


def test_mlp_has_activations_between_layers_only():
    layer = layers.mlp([3, 4, 2], activation="tanh")
    params, state = layer.init(jax.random.key(0))
    assert set(params) == {"dense_0", "dense_1"}
    x = jax.random.normal(jax.random.key(1), (5, 3))
    y, _ = layer.apply(params, state, x, train=True)
    hidden = np.tanh(x @ params["dense_0"]["kernel"])
    chex.assert_trees_all_close(y, hidden @ params["dense_1"]["kernel"], atol=1e-6)


def test_conv_has_the_given_window_and_adds_a_bias_per_channel():
    layer = layers.conv(1, 2, (1, 3), stride=(1, 2), padding="VALID")
    params, state = layer.init(jax.random.key(0))
    params["bias"] = jnp.asarray([1.0, -1.0])
    x = np.random.default_rng(0).normal(size=(2, 4, 7, 1)).astype(np.float32)
    y, _ = layer.apply(params, state, jnp.asarray(x), train=True)
    seen = np.stack([x[:, :, j : j + 3, 0] for j in (0, 2, 4)], 2)
    expected = seen @ np.asarray(params["kernel"])[0, :, 0] + np.array([1.0, -1.0])
    np.testing.assert_allclose(y, expected, atol=1e-5)
