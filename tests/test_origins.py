"""An array is named by the equation that made it, however deep that lies."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from fnet.memory.residuals import residuals

F32 = jnp.float32
X = jax.ShapeDtypeStruct((8, 16), F32)
W = jax.ShapeDtypeStruct((16, 16), F32)


def test_a_jitted_function_is_seen_through():
    @jax.jit
    def block(w, x):
        with jax.named_scope("inner"):
            return jnp.sin(x @ w)

    @jax.jit
    def loss(w, x):
        with jax.named_scope("one"):
            x = block(w, x)
        with jax.named_scope("two"):
            return block(w, x).sum()

    found = [r for r in residuals(loss, W, X) if not r.alias_of]
    assert sorted((r.layer, r.operation) for r in found) == [
        ("one/inner", "cos"),
        ("one/inner", "sin"),
        ("two/inner", "cos"),
    ]
    assert all(r.source.endswith("block)") for r in found)


def test_a_function_of_jax_counts_as_made_where_it_was_called():
    def first(x):
        return jax.nn.logsumexp(jnp.sin(x), axis=-1, keepdims=True)

    def second(x):
        return jax.nn.logsumexp(jnp.sin(x), axis=-1, keepdims=True)

    for f in (first, second):
        found = [r for r in residuals(lambda x, f=f: f(x).sum(), X) if not r.alias_of]
        assert found
        assert all(f"{f.__name__})" in r.source for r in found)


def test_branches_of_a_cond_and_devices_of_a_mesh_are_seen_through():
    def branches(w, x, p):
        def one(y):
            with jax.named_scope("one"):
                return jnp.sin(y)

        return jax.lax.cond(p > 0, one, lambda y: 2 * y, x @ w).sum()

    found = residuals(branches, W, X, jax.ShapeDtypeStruct((), F32))
    assert ("one", "cos") in [(r.layer, r.operation) for r in found]

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_devices(w, x):
        def each(w, x):
            with jax.named_scope("each"):
                return jax.lax.psum(jnp.sin(x @ w).sum(), "data")

        return jax.shard_map(each, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)

    kept = [r for r in residuals(on_devices, W, X) if not r.alias_of]
    assert [(r.layer, r.operation, r.shape) for r in kept] == [("each", "cos", (8, 16))]


def test_what_a_scan_only_carries_along_is_kept_once():
    def loss(w, x):
        def step(carry, _):
            x, w = carry
            with jax.named_scope("step"):
                return (jnp.sin(x @ w), w), None

        return jax.lax.scan(step, (x, w), None, length=4)[0][0].sum()

    found = residuals(loss, W, X)
    assert [r.alias_of for r in found if r.shape == W.shape] == ["argument w"]
    assert {r.layer for r in found if r.shape == (4, 8, 16)} == {"step"}


def test_flax_modules_name_their_layers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sin(nn.Dense(16, name="dense")(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Block(name="one")(x)
            x = nn.remat(Block)(name="two")(x)
            return nn.Dense(4, name="head")(x)

    model = Net()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    found = residuals(model.apply, variables, X)
    assert [r.layer for r in found if not r.alias_of] == ["Net/one", "Net/one", "Net/two"]
    assert "argument variables['params']['head']['kernel']" in {r.alias_of for r in found}


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


def sine_fwd(x):
    with jax.named_scope("rule"):
        cosine = jnp.cos(x)
    unread = jnp.exp(x)
    return jnp.sin(x), (cosine, cosine.reshape(-1), checkpoint_name(cosine, "c"), x, unread)


def sine_bwd(saved, dy):
    return (dy * (saved[0] + saved[1].reshape(dy.shape) + saved[2] + saved[3]),)


sine.defvjp(sine_fwd, sine_bwd)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(jax.vmap(f))])
def test_an_array_that_a_rule_saves_twice_counts_once_and_an_unread_one_not(transform):
    def loss(x):
        with jax.named_scope("loss"):
            return transform(sine)(x).sum()

    assert [(r.layer, r.operation, r.shape, r.alias_of) for r in residuals(loss, X)] == [
        ("", "", (8, 16), "argument x"),
        ("loss/rule", "cos", (8, 16), ""),
    ]
