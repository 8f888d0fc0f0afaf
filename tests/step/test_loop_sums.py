"""Sums and stacks of loops wait for what the loop reads, and values stay."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import Literal
from jax.sharding import AxisType, PartitionSpec

import fnet
from fnet.jaxpr import Scan, find_equations, nbytes
from fnet.loop_sums import late_sums

W = jnp.linspace(-1, 1, 512 * 512).reshape(512, 512)  # 1 MiB
X = jnp.linspace(0, 1, 4 * 8 * 512).reshape(4, 8, 512)


def mapped(w, x):
    return jax.lax.map(lambda x: jnp.tanh(x @ w), x)


def reverse(w, x):
    def step(carry, x):
        return carry + x @ w, (x.T @ (x + carry), carry.argmax())

    return jax.lax.scan(step, jnp.zeros((8, 512)), x, reverse=True)


def keys(w, x):
    def step(key, x):
        key, new = jax.random.split(key)
        return key, (new, w * x.sum())

    key, (made, products) = jax.lax.scan(step, jax.random.key(0), x)
    return *map(jax.random.key_data, (key, made)), products


def nested(w, x):
    def outer(total, x):
        add = functools.partial(jax.lax.scan, lambda total, x: (total + w * x.sum(), None))
        return total + add(jnp.full_like(w, 2), x)[0], None

    return jax.lax.scan(outer, jnp.ones_like(w), x)[0]


def on_a_mesh(w, x):
    mesh, whole = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec()
    specs = whole, PartitionSpec(None, "data")
    gradient = jax.grad(lambda w, x: mapped(w, x).sum(), argnums=(0, 1))
    on_devices = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs)
    return on_devices(w, jnp.repeat(x, 64, axis=1))


PROGRAMS = {
    "map": mapped,
    "gradient": jax.grad(lambda w, x: mapped(w, x).sum()),
    "second derivative": jax.grad(lambda w, x: jax.grad(lambda x: mapped(w, x).sum())(x).sum()),
    "remat": jax.grad(lambda w, x: jax.checkpoint(mapped)(w, x).sum()),
    "reverse": reverse,
    "integers": lambda w, x: reverse((9 * w).astype(int), (9 * x).astype(int))[1],
    "nested": nested,
    "unrolled": lambda w, x: jax.lax.scan(lambda s, x: (s + w * x.sum(), s), 0 * w, x, unroll=2),
    "random keys": keys,
    "shard_map": on_a_mesh,
}


def early(closed):
    """Carries of loops of at least a megabyte that are filled with a constant."""
    filled = {e.outvars[0]: e.invars[0] for e in find_equations(closed, "broadcast_in_dim")}
    for eqn in find_equations(closed, "scan"):
        carry = Scan.of(eqn).split(eqn.invars)[1]
        large = [v for v in carry if not isinstance(v, Literal) and nbytes(v) >= 2**20]
        yield from (v for v in large if isinstance(filled.get(v), Literal))


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_stay(name):
    f = PROGRAMS[name]
    chex.assert_trees_all_equal(jax.jit(late_sums(f))(W, X), jax.jit(f)(W, X))


@pytest.mark.parametrize("name", ["gradient", "remat", "nested"])
def test_no_large_sum_of_a_loop_is_filled_with_a_constant(name):
    f = PROGRAMS[name]
    assert [*early(jax.make_jaxpr(f)(W, X))]
    assert not [*early(jax.make_jaxpr(late_sums(f))(W, X))]


def test_a_stack_is_updated_in_the_loop():
    f, x = functools.partial(jax.lax.map, jnp.tanh), jnp.zeros((16, 256, 256))
    programs = (jax.make_jaxpr(g)(x) for g in (f, late_sums(f)))
    assert [Scan.of(e).num_carry for p in programs for e in find_equations(p, "scan")] == [0, 2]
    peaks = [fnet.memory.peak(jax.jit(g).lower(x).compile()).total for g in (f, late_sums(f))]
    assert peaks[1] <= 1.01 * peaks[0]


def test_steps_on_accelerators_have_late_sums():
    def loss(params, model_state, batch, key):
        return mapped(params, batch["x"]).sum((1, 2))

    step = fnet.make_step(loss, optax.sgd(0.1))
    state = fnet.TrainState.create(params=W, optimizer=optax.sgd(0.1), key=jax.random.key(0))
    on_cpu, on_gpu = (step.jitted.trace(state, {"x": X}, cpus=cpus).jaxpr for cpus in (1, 0))
    assert [*early(on_cpu)]
    assert not [*early(on_gpu)]
