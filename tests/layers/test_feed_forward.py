"""Feed-forward layer, dropout and dynamic tanh."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from layer_cases import initial

from fnet.layer import Layer, residual, serial
from fnet.layers.dropout import dropout
from fnet.layers.dynamic_tanh import dynamic_tanh
from fnet.layers.feed_forward import feed_forward
from fnet.layers.norm import rms_norm_layer
from fnet.memory import peak
from fnet.memory.peak import compile_min_memory

WIDTH, HIDDEN = 6, 10


def inputs(shape=(2, 5, WIDTH), dtype=np.float64, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def plain(params, x, act, gated):
    z = x @ params["expand"]["kernel"] + params["expand"].get("bias", jnp.zeros((1, 1, 1)))
    h = act(z[..., :HIDDEN]) * z[..., HIDDEN:] if gated else act(z)
    return h @ params["contract"]["kernel"] + params["contract"].get("bias", jnp.zeros((1, 1, 1)))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, params, x, dy):
    y, back = jax.vjp(f, params, x)
    return y, back(dy)


@pytest.mark.parametrize(
    ("activation", "act", "gated", "bias"),
    [
        ("silu", jax.nn.silu, True, False),
        ("gelu", jax.nn.gelu, True, True),
        ("relu", jax.nn.relu, False, True),
        ("leaky_relu", jax.nn.leaky_relu, False, False),
    ],
)
def test_feed_forward_matches_its_formula(activation, act, gated, bias, float64):
    layer = feed_forward(WIDTH, HIDDEN, activation=activation, gated=gated, bias=bias)
    params = jax.tree.map(np.float64, initial(layer)[0])
    expected = jax.tree.map(lambda a: a[None, None] if a.ndim == 1 else a, params)
    arrays = inputs(), inputs(seed=1)
    got = value_and_gradients(lambda p, x: layer.apply(p, {}, x, train=True)[0], params, *arrays)
    theirs = value_and_gradients(lambda p, x: plain(p, x, act, gated), expected, *arrays)
    theirs = jax.tree.map(lambda a, b: b.reshape(a.shape), got, theirs)
    chex.assert_trees_all_close(got, theirs, rtol=1e-10, atol=1e-12)


def test_backward_pass_saves_gate_and_up_only():
    layer = feed_forward(64, 256)
    params, _ = initial(layer)
    x = inputs((4, 32, 64), np.float32)
    _, back = jax.vjp(lambda p, x: layer.apply(p, {}, x, train=True)[0], params, x)
    weights = sum(a.size for a in jax.tree.leaves(params))
    rows = 4 * 32
    assert sum(a.size for a in jax.tree.leaves(back)) <= weights + rows * (64 + 2 * 256)


def written_out(width, hidden):
    """The same function under ordinary autodiff."""
    layer = feed_forward(width, hidden)

    def apply(params, state, x, *, key=None, train):
        gate, up = jnp.split(x @ params["expand"]["kernel"], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ params["contract"]["kernel"], state

    return Layer(layer.init, apply)


def temporaries_of_gradient(layer, blocks=6):
    net = serial(*[residual(serial(rms_norm_layer(64), layer))] * blocks)
    params, _ = jax.eval_shape(net.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((4, 128, 64), jnp.float32)
    loss = lambda p, x: jnp.sin(net.apply(p, {}, x, train=True)[0]).sum()  # noqa: E731
    return peak(compile_min_memory(jax.jit(jax.grad(loss)).lower(params, x))[0]).temporaries


def test_compiled_gradient_of_a_stack_needs_less_memory_than_autodiff():
    ours, plain = (temporaries_of_gradient(f(64, 256)) for f in (feed_forward, written_out))
    assert ours <= 0.65 * plain


def test_feed_forward_applies_dropout_in_training():
    layer = feed_forward(WIDTH, HIDDEN, dropout=0.5)
    params, _ = initial(layer)
    x = inputs((2, 50, WIDTH), np.float32)
    whole, _ = layer.apply(params, {}, x, train=False)
    dropped, _ = layer.apply(params, {}, x, key=jax.random.key(1), train=True)
    mask = dropped != 0
    assert 0.3 < float(mask.mean()) < 0.7
    chex.assert_trees_all_close(dropped, jnp.where(mask, 2 * whole, 0), rtol=1e-5)


def test_feed_forward_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        feed_forward(6, 0)
    with pytest.raises(ValueError, match=r"expected one of .* got 'swish'"):
        feed_forward(6, 10, activation="swish")
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got 1\.5"):
        feed_forward(6, 10, dropout=1.5)


def test_dropout_preserves_the_mean_and_its_gradient_uses_the_same_mask():
    layer = dropout(0.3)
    x = jnp.ones((200, 100))
    y, back = jax.vjp(lambda x: layer.apply({}, {}, x, key=jax.random.key(0), train=True)[0], x)
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.7], rtol=1e-6)
    assert abs(float(y.mean()) - 1) < 4 * (0.3 / 0.7 / x.size) ** 0.5  # four standard deviations
    chex.assert_trees_all_close(back(2 * x)[0], 2 * y)


def test_dropout_in_16_bits_scales_by_the_exact_rate():
    x = jnp.linspace(1, 2, 20_000).astype(jnp.bfloat16)
    y, _ = dropout(0.1).apply({}, {}, x, key=jax.random.key(0), train=True)
    mean_y, mean_x = (np.asarray(a[y != 0], np.float64).mean() for a in (y, x))
    np.testing.assert_allclose(mean_y / mean_x, 1 / 0.9, rtol=2e-4)


def test_dropout_saves_nothing_of_the_size_of_its_input():
    layer = dropout(0.3)
    f = lambda x: layer.apply({}, {}, x, key=jax.random.key(0), train=True)[0]  # noqa: E731
    _, back = jax.vjp(f, jnp.ones((200, 100)))
    assert sum(a.size for a in jax.tree.leaves(back)) <= 4


@pytest.mark.parametrize(("rate", "train"), [(0.3, False), (0.0, True)])
def test_dropout_is_the_identity_in_evaluation_and_at_rate_0(rate, train):
    x = inputs(dtype=np.float32)
    assert dropout(rate).apply({}, {}, x, train=train)[0] is x


def test_dropout_preserves_the_dtype_and_needs_a_key():
    x = inputs(dtype=jnp.bfloat16)
    y, _ = dropout(0.5).apply({}, {}, x, key=jax.random.key(0), train=True)
    assert y.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"needs a key in training with rate 0\.5"):
        dropout(0.5).apply({}, {}, x, train=True)
    for rate in (1.0, -0.1):
        with pytest.raises(ValueError, match=rf"rate must be in \[0, 1\), got {rate}"):
            dropout(rate)


def tanh_formula(params, x):
    """The formula of Zhu et al. 2025 under ordinary autodiff."""
    row = functools.partial(jnp.expand_dims, axis=(0, 1))
    return jnp.tanh(params["alpha"] * x) * row(params["scale"]) + row(params["bias"])


def tanh_case(dtype, alpha=0.7):
    rng = np.random.default_rng(0)
    params = {
        "alpha": np.asarray(alpha),
        "scale": rng.normal(size=WIDTH),
        "bias": rng.normal(size=WIDTH),
    }
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.tree.map(lambda a: jnp.asarray(a, wide), params), inputs(dtype=dtype)


def squash(params, x):
    return dynamic_tanh(WIDTH).apply(params, {}, x, train=True)[0]


@pytest.mark.parametrize("alpha", [0.7, -0.2, 3.0])
def test_dynamic_tanh_matches_autodiff_of_its_formula(alpha, float64):
    params, x = tanh_case(np.float64, alpha)
    dy = inputs(seed=1)
    got, expected = (value_and_gradients(f, params, x, dy) for f in (squash, tanh_formula))
    chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=1e-9)


def test_dynamic_tanh_matches_finite_differences_to_second_order(float64):
    params, x = tanh_case(np.float64)
    check_grads(jax.jit(squash), (params, x), order=2, modes=["rev"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["scale", "alpha"])
def test_dynamic_tanh_without_bias_has_exact_gradients_at_parameter_0(name, float64):
    params, x = tanh_case(np.float64)
    params |= {"bias": jnp.zeros(WIDTH), name: jnp.zeros_like(params[name])}
    dy = inputs(seed=1)
    got, expected = (value_and_gradients(f, params, x, dy) for f in (squash, tanh_formula))
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-9)


def test_dynamic_tanh_gradients_are_finite_for_saturated_and_lost_outputs():
    params, x = tanh_case(np.float32)
    params |= {"scale": params["scale"].at[0].set(1e-12), "alpha": jnp.float32(5)}
    with jax.debug_nans(True), jax.debug_infs(True):
        got = value_and_gradients(squash, params, jnp.sign(x) * 9, inputs(dtype=np.float32, seed=1))
    chex.assert_trees_all_close(got[1][1], jnp.zeros_like(x), atol=1e-5)


def test_dynamic_tanh_ignores_outputs_that_round_by_more_than_the_scale():
    params, x = tanh_case(np.float32)
    params |= {"scale": params["scale"].at[0].set(1e-7), "bias": params["bias"].at[0].set(1.0)}
    y, (gradients, _) = value_and_gradients(squash, params, x, inputs(dtype=np.float32, seed=1))
    assert len(np.unique(y[..., 0])) > 1  # rounding only
    assert gradients["scale"][0] == 0


def test_dynamic_tanh_saves_only_its_output():
    params, x = tanh_case(np.float32)
    _, back = jax.vjp(squash, params, x)
    assert sum(a.size for a in jax.tree.leaves(back)) == x.size + 2 * WIDTH + 1


def test_dynamic_tanh_in_bfloat16_is_close_to_float32():
    params, x = tanh_case(jnp.bfloat16)
    dy = inputs(dtype=jnp.bfloat16, seed=1)
    params["bias"] = jnp.zeros(WIDTH)
    y, (dparams, dx) = value_and_gradients(squash, params, x, dy)
    assert y.dtype == dx.dtype == jnp.bfloat16
    wide = value_and_gradients(tanh_formula, params, x.astype(np.float32), dy.astype(np.float32))
    chex.assert_trees_all_close(
        (y.astype(np.float32), (dparams, dx.astype(np.float32))), wide, rtol=2e-2, atol=3e-2
    )


def test_dynamic_tanh_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="alpha must not be 0"):
        dynamic_tanh(4, alpha=0.0)
    layer = dynamic_tanh(4)
    params, _ = layer.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 4\], got \(2, 5, 6\)"):
        layer.apply(params, {}, inputs(dtype=np.float32), train=True)
    with pytest.raises(TypeError, match="x must be floating, got int32"):
        layer.apply(params, {}, jnp.ones((2, 4), jnp.int32), train=True)
