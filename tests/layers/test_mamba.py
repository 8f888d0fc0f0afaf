"""Recurrent layers: `mamba`, `mamba2`, `gated_delta_net`, `rg_lru`, `short_conv`, `causal_conv`."""

import functools

import chex
import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
from example_losses import Case, assert_clipped_like_a_loop
from pretrained_cases import MIXERS

from fnet.layers.causal_conv import causal_conv, causal_conv_layer
from fnet.layers.gated_delta import gated_delta_net, gated_delta_rule
from fnet.layers.mamba import mamba, selective_scan
from fnet.layers.mamba2 import mamba2, state_space_dual
from fnet.layers.norm import rms_norm
from fnet.layers.rg_lru import rg_lru
from fnet.optim import weight_decay_mask

B, T, D = 2, 5, 8

LAYERS = MIXERS | {"causal_conv": causal_conv_layer(D)}


def initial(name):
    params, state = layer_cases.initial(LAYERS[name])
    assert state == {}
    return params


def wide(name):
    return jax.tree.map(np.float64, initial(name))


def inputs(dtype=np.float32, b=B, t=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(b, t, D)), dtype)


@functools.partial(jax.jit, static_argnums=0)
def applied(name, params, x):
    return LAYERS[name].apply(params, {}, x, train=False)[0]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def extended(name, params, cache, x, position):
    return LAYERS[name].decode.extend(params, {}, cache, x, position)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", LAYERS)
def test_decoding_a_prompt_then_tokens_matches_apply(name):
    params, x = initial(name), inputs()
    expected = applied(name, params, x)
    for prompt in (1, T - 1):
        cache = LAYERS[name].decode.init_cache(B, T, x.dtype)
        spec = jax.eval_shape(lambda c: c, cache)
        y, cache = extended(name, params, cache, x[:, :prompt], 0)
        parts = [y]
        for t in range(prompt, T):
            y, cache = extended(name, params, cache, x[:, t : t + 1], t)
            parts.append(y)
        chex.assert_trees_all_equal_shapes_and_dtypes(cache, spec)
        chex.assert_trees_all_close(jnp.concatenate(parts, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", MIXERS)
def test_output_and_cache_keep_their_dtypes_in_bfloat16(name):
    params, x = initial(name), inputs(jnp.bfloat16)
    y = applied(name, params, x)
    wide = applied(name, params, x.astype(np.float32))
    assert y.dtype == jnp.bfloat16
    assert jnp.abs(y.astype(np.float32) - wide).max() <= 0.05 * jnp.abs(wide).max()
    for dtype in (jnp.bfloat16, jnp.float32):
        cache = LAYERS[name].decode.init_cache(B, T, dtype)
        _, updated = jax.eval_shape(
            lambda c, x: LAYERS[name].decode.extend(params, {}, c, x, 0), cache, x
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(updated, cache)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_causal(name):
    params, x = initial(name), inputs()
    gradient = jax.jit(jax.grad(lambda x, t: applied(name, params, x)[:, t].sum()))
    for t in (0, 2):
        g = gradient(x, t)
        assert (g[:, t + 1 :] == 0).all()
        assert (g[:, t] != 0).all()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", LAYERS)
def test_padding_at_the_end_does_not_change_real_tokens(name):
    params, x = initial(name), inputs()
    mask = jnp.arange(T)[None] < jnp.array([[T], [3]])
    apply = jax.jit(functools.partial(LAYERS[name].apply, train=True))
    y, state = apply(params, {}, jnp.where(mask[..., None], x, 1e3), mask=mask)
    assert state == {}
    real = applied(name, params, x)
    chex.assert_trees_all_close(y[0], real[0], rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(y[1, :3], real[1, :3], rtol=1e-6, atol=1e-6)


def test_vmap_over_layers_matches_each_layer():
    name = "mamba"
    params, x = initial(name), inputs()
    both = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), params)
    together = jax.jit(jax.vmap(functools.partial(applied, name)))(both, jnp.stack([x, 2 * x]))
    for i in range(2):
        expected = applied(name, jax.tree.map(lambda a, i=i: a[i], both), (1 + i) * x)
        chex.assert_trees_all_close(together[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", MIXERS)
def test_clipped_grad_matches_a_loop_over_examples(name):
    def losses(params, x):
        y, _ = LAYERS[name].apply(params, {}, x, train=True)
        return jnp.square(y - 0.5).mean((1, 2))

    with jax.numpy_rank_promotion("allow"):
        assert_clipped_like_a_loop(Case(losses, initial(name), (inputs(b=3, t=4),)))


def test_weight_decay_applies_to_kernels_only():
    for name, expected in (
        ("mamba", {"in", "conv", "select", "dt", "out"}),
        ("mamba2", {"in", "conv", "out"}),
        ("gated_delta_net", {"query_key_value", "gate", "beta", "decay", "conv", "out"}),
        ("rg_lru", {"gate", "recurrent", "conv", "recurrence_gate", "input_gate", "out"}),
        ("short_conv", {"in", "conv", "out"}),
    ):
        decay_mask = jax.tree.leaves_with_path(weight_decay_mask(initial(name)))
        assert {path[0].key for path, decays in decay_mask if decays} == expected
        assert all(path[-1].key == "kernel" for path, decays in decay_mask if decays)


def test_default_head_size_of_mamba2_is_the_largest_divisor_up_to_64():
    for width, head in ((8, 16), (64, 64), (33, 33)):  # of 16, 128 and 66 channels
        cache = jax.eval_shape(lambda w=width: mamba2(w).decode.init_cache(1, 1, np.float32))
        assert cache["state"].shape == (1, 2 * width // head, 64, head)


def test_mamba_matches_its_formula(float64):
    params, x = wide("mamba"), inputs(np.float64)
    u, z = jnp.split(x @ params["in"]["kernel"], 2, axis=-1)
    u = jax.nn.silu(causal_conv(u, **params["conv"])[0])
    r, b_in, c_out = jnp.split(u @ params["select"]["kernel"], [1, 1 + 3], axis=-1)
    dt = jax.nn.softplus(r @ params["dt"]["kernel"] + params["dt_bias"][None, None])
    y, _ = selective_scan(u, dt, -jnp.exp(params["A_log"]), b_in, c_out, params["D"])
    y = (y * jax.nn.silu(z)) @ params["out"]["kernel"]
    chex.assert_trees_all_close(applied("mamba", params, x), y, rtol=1e-10, atol=1e-12)


def test_mamba2_matches_its_formula(float64):
    params, x = wide("mamba2"), inputs(np.float64)
    z, u, r = jnp.split(x @ params["in"]["kernel"], [16, 16 + 16 + 2 * 6], axis=-1)
    u = jax.nn.silu(causal_conv(u, **params["conv"])[0])
    u, b_in, c_out = jnp.split(u, [16, 16 + 6], axis=-1)
    dt = jax.nn.softplus(r + params["dt_bias"][None, None])
    b_in, c_out = (a.reshape(B, T, 2, 3) for a in (b_in, c_out))
    u = u.reshape(B, T, 4, 4)
    y, _ = state_space_dual(u, dt, -jnp.exp(params["A_log"]), b_in, c_out, params["D"])
    y = rms_norm(y.reshape(B, T, 16) * jax.nn.silu(z), params["norm"]["scale"])
    y = y @ params["out"]["kernel"]
    chex.assert_trees_all_close(applied("mamba2", params, x), y, rtol=1e-10, atol=1e-12)


def test_gated_delta_net_matches_its_formula(float64):
    params, x = wide("gated_delta_net"), inputs(np.float64)

    def project(name):
        return x @ params[name]["kernel"]

    mixed = jax.nn.silu(causal_conv(project("query_key_value"), **params["conv"])[0])
    q, k, v = jnp.split(mixed, [6, 12], axis=-1)
    q, k = (a.reshape(B, T, 2, 3) for a in (q, k))
    q, k = (a / jnp.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    dt = jax.nn.softplus(project("decay") + params["dt_bias"][None, None])
    y, _ = gated_delta_rule(
        q / np.sqrt(3),
        k,
        v.reshape(B, T, 4, 2),
        -jnp.exp(params["A_log"])[None, None] * dt,
        jax.nn.sigmoid(project("beta")),
    )
    y = rms_norm(y, params["norm"]["scale"]).reshape(B, T, 8) * jax.nn.silu(project("gate"))
    y = y @ params["out"]["kernel"]
    chex.assert_trees_all_close(applied("gated_delta_net", params, x), y, rtol=1e-10, atol=1e-12)


def test_rg_lru_matches_its_formula(float64):
    params, x = wide("rg_lru"), inputs(np.float64)

    def linear(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"][None, None]

    def gate(name, u):
        blocks = params[name]["kernel"]
        matrix = jax.scipy.linalg.block_diag(*blocks)
        return jax.nn.sigmoid(u @ matrix + params[name]["bias"][None, None])

    u, _ = causal_conv_layer(D).apply(params["conv"], {}, linear("recurrent", x), train=True)
    r, i = gate("recurrence_gate", u), gate("input_gate", u)
    a = jnp.exp(-8 * jnp.logaddexp(params["L"], 0)[None, None] * r)
    h, states = jnp.zeros((B, D)), []
    for t in range(T):
        h = a[:, t] * h + jnp.sqrt(1 - a[:, t] ** 2) * i[:, t] * u[:, t]
        states.append(h)
    y = linear("out", jnp.stack(states, 1) * jax.nn.gelu(linear("gate", x)))
    chex.assert_trees_all_close(applied("rg_lru", params, x), y, rtol=1e-10)


@pytest.mark.parametrize("bias", [-200.0, 200.0])
def test_rg_lru_gradients_are_finite_for_saturated_gates(bias):
    params = initial("rg_lru")
    gate = params["recurrence_gate"] | {"bias": jnp.full(D, bias)}
    params = params | {"recurrence_gate": gate, "L": jnp.linspace(-100.0, 20.0, D)}
    grads = jax.jit(jax.grad(lambda p, x: applied("rg_lru", p, x).sum(), (0, 1)))(params, inputs())
    chex.assert_tree_all_finite(grads)


@pytest.mark.parametrize("name", MIXERS)
def test_rejects_inputs_of_the_wrong_shape(name):
    params = initial(name)
    for shape in ((B, T, D + 1), (B, D), (B, 0, D)):
        where = name.removesuffix("_first")
        with pytest.raises(ValueError, match=rf"{where}: expected \[B, T, {D}\] with T >= 1, got"):
            LAYERS[name].apply(params, {}, jnp.zeros(shape), train=False)


def test_rejects_invalid_sizes():
    for make, message in (
        (lambda: mamba(0), "mamba: width must be at least 1, got 0"),
        (lambda: mamba(8, state=0), "mamba: state must be at least 1, got 0"),
        (lambda: mamba(8, conv=0), "mamba: conv must be at least 1, got 0"),
        (lambda: mamba(8, chunk=0), "mamba: chunk must be at least 1, got 0"),
        (lambda: mamba(8, dt_rank=0), "mamba: dt_rank must be at least 1, got 0"),
        (lambda: mamba2(8, head=5), "head must divide .* = 16, got head=5"),
        (lambda: mamba2(8, head=4, groups=3), "groups=3 and 4 heads of 4 channels"),
        (lambda: mamba2(8, norm_groups=3), "norm_groups must divide .* = 16, got 3"),
        (lambda: mamba2(8, chunk=0), "mamba2: chunk must be at least 1, got 0"),
        (lambda: gated_delta_net(8, heads=4, head_dim=0), "head_dim must be at least 1, got 0"),
        (lambda: gated_delta_net(8, heads=4, head_dim=2, groups=3), "groups=3, heads=4"),
        (lambda: rg_lru(8, heads=3), "heads must divide .* = 8, got heads=3"),
        (lambda: rg_lru(8, heads=0), "rg_lru: heads must be at least 1, got 0"),
        (lambda: causal_conv_layer(0), "causal_conv: channels must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
