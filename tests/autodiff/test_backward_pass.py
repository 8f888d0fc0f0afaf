"""`recompute` saves what norms name; `params_first` orders the backward pass."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import fnet
from fnet import layers, serial
from fnet.memory.peak import CANDIDATE_OPTIONS

FOR_MEMORY = CANDIDATE_OPTIONS["cpu"][1]


def stack(blocks, activation, channels=32):
    block = serial(
        conv=layers.conv(channels, channels, bias=False),
        abn=layers.abn(channels, activation=activation),
    )
    return serial(*[block] * blocks)


def test_recompute_saves_one_activation_per_block():
    def temporaries(blocks, wrap):
        """Of the compiled gradient, in activations."""
        layer = stack(blocks, "gelu")
        params, state = jax.eval_shape(layer.init, jax.random.key(0))
        apply = wrap(lambda p, s, x: layer.apply(p, s, x, train=True)[0])
        f = jax.jit(jax.grad(lambda p, s, x: jnp.square(apply(p, s, x)).mean()))
        x = jax.ShapeDtypeStruct((8, 16, 16, 32), jnp.float32)
        compiled = f.lower(params, state, x).compile(compiler_options=dict(FOR_MEMORY))
        return fnet.memory.peak(compiled).temporaries / (4 * x.size)

    plain, recomputed = (
        (temporaries(8, wrap) - temporaries(4, wrap)) / 4 for wrap in (lambda f: f, fnet.recompute)
    )
    assert recomputed == pytest.approx(1.0, abs=0.05)
    assert plain > 1.9


def test_recompute_changes_no_gradient_and_repeats_no_convolution():
    layer = stack(3, "gelu", 8)
    params, state = jax.jit(layer.init)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 8))

    def gradient(wrap):
        apply = wrap(lambda p, x: layer.apply(p, state, x, train=True)[0])
        f = jax.jit(jax.grad(lambda p: jnp.sin(apply(p, x)).sum()))
        return f.lower(params).compile(compiler_options=dict(FOR_MEMORY))

    plain, recomputed = gradient(lambda f: f), gradient(fnet.recompute)
    chex.assert_trees_all_close(plain(params), recomputed(params), rtol=1e-4, atol=1e-5)
    flops = [f.cost_analysis()["flops"] for f in (plain, recomputed)]
    assert flops[1] < 1.1 * flops[0]


def test_params_first_is_the_identity_in_values_and_derivatives():
    x, params = jnp.arange(3.0), {"w": jnp.ones((2, 3))}
    chex.assert_trees_all_equal(fnet.params_first(x, params), (x, params))

    def f(x, params):
        x, params = fnet.params_first(x, params)
        return jnp.sin(params["w"] @ x).sum()

    def plain(x, params):
        return jnp.sin(params["w"] @ x).sum()

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(f, x, batch, params):
        transforms = (jax.grad, jax.jacfwd, jax.hessian)
        mapped = jax.vmap(jax.grad(f, argnums=(0, 1)), (0, None))(batch, params)
        return [t(f, argnums=(0, 1))(x, params) for t in transforms], mapped

    batch = jnp.arange(12.0).reshape(4, 3)
    got, expected = (derivatives(g, x, batch, params) for g in (f, plain))
    chex.assert_trees_all_close(got, expected)


@pytest.mark.parametrize(("argnum", "products"), [(0, 2), (1, 2), ((0, 1), 3)])
def test_params_first_adds_no_unneeded_derivative(argnum, products):
    layer = layers.dense(200, 200)
    params, _ = layer.init(jax.random.key(0))
    f = jax.jit(jax.grad(lambda p, x: jnp.sin(layer.apply(p, {}, x, train=True)[0]).sum(), argnum))
    compiled = f.lower(params, jnp.ones((64, 200))).compile()
    one = 2 * 64 * 200 * 200
    assert compiled.cost_analysis()["flops"] / one == pytest.approx(products, abs=0.1)


def test_params_first_works_inside_shard_map():
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = layers.dense(3, 2)
    params, _ = layer.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 3))

    def loss(params, x):
        return jnp.sin(layer.apply(params, {}, x, train=True)[0]).sum()

    for check_vma in (True, False):
        sharded = jax.shard_map(
            lambda p, x: jax.lax.psum(loss(p, x), "data"),
            mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma,
        )  # fmt: skip
        got = jax.jit(jax.grad(sharded, argnums=(0, 1)))(params, x)
        expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
        chex.assert_trees_all_close(got, expected, atol=1e-6)
