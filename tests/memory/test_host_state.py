"""An optimizer's state in the memory of the host gives the same updates, block by block."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rounding import assert_equal_but_for_rounding

import fnet
from fnet import memory
from fnet.jaxpr import find_equations, nbytes

HOST = "pinned_host"


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def params():
    return {
        "kernel": normal(0, 517, 601),  # of many blocks, and a smaller one
        "stack": normal(1, 3, 300, 301),
        "half": normal(2, 1024, 1024, dtype=jnp.bfloat16),
        "bias": normal(3, 601),
    }


def gradients(params, seed):
    return jax.tree.map(lambda a: normal(seed, *a.shape, dtype=a.dtype), params)


def kinds(tree):
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree) if a.nbytes >= 2**20}


def trained(optimizer, steps=3):
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    p = params()
    state = optimizer.init(p)
    placed = kinds(state)
    for i in range(steps):
        p, state = step(p, state, gradients(p, i))
    assert kinds(state) == placed
    return p, state, placed


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(
        optax.cosine_decay_schedule(1e-2, 10),
        weight_decay=0.1,
        mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p),
    ),
    "a norm of all gradients": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(1e-2)
    ),
    "numbers in the state": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_optimizer(name):
    optimizer = OPTIMIZERS[name]()
    expected_params, expected, _ = trained(optimizer)
    found_params, found, placed = trained(memory.state_on_host(optimizer))
    # Numbers in the state turn moments in bfloat16 to float32: these stay on the device.
    assert placed == {HOST} | ({"device"} if name == "numbers in the state" else set())
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    results = jax.tree.leaves((found_params, found)), jax.tree.leaves((expected_params, expected))
    for a, b in zip(*results, strict=True):
        if a.dtype == jnp.bfloat16:
            assert_equal_but_for_rounding(a, b)
        else:
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_a_state_of_8_bits_comes_in_blocks_too():
    optimizer = fnet.optim.compact_adamw(1e-3)
    p = {"kernel": normal(0, 701, 1500, dtype=jnp.bfloat16)}
    grads = {"kernel": normal(1, 701, 1500, dtype=jnp.bfloat16)}
    on_host = memory.state_on_host(optimizer)
    state = on_host.init(p)
    assert kinds(state) == {HOST}
    found = jax.tree.leaves(jax.jit(on_host.update)(grads, state, p))
    expected = jax.tree.leaves(jax.jit(optimizer.update)(grads, optimizer.init(p), p))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert np.mean(np.float32(a) != np.float32(b)) < 0.02  # rounding to 8 bits at ties


def test_no_more_than_a_block_is_on_the_device():
    p = {"kernel": normal(0, 517, 601), "bias": normal(3, 601)}
    optimizer = memory.state_on_host(optax.adam(1e-2))
    state = optimizer.init(p)
    assert [state[0].mu[k].sharding.memory_kind for k in ("kernel", "bias")] == [HOST, "device"]
    traced = jax.make_jaxpr(optimizer.update)(p, state, p)
    moved = [v for eqn in find_equations(traced, "device_put") for v in eqn.outvars]
    to_device = [nbytes(v) for v in moved if v.aval.memory_space == jax.memory.Space.Device]
    assert max(to_device) == -(-65 // 4) * 601 * 4  # of 517 rows, an eighth, in four parts


def test_a_step_trains_with_it():
    def losses(params, model_state, batch, key):
        return ((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2).mean(-1)

    batch = {"x": normal(1, 8, 600), "y": normal(2, 8, 500)}

    def run(optimizer):
        state = fnet.TrainState.create(
            params={"w": normal(0, 600, 500)}, optimizer=optimizer, key=jax.random.key(0)
        )
        step = fnet.make_step(losses, optimizer)
        step = fnet.compile_step(step, state, batch, compiler_options={})
        assert step.report.donation.aliased_bytes >= memory.tree_bytes(state.opt_state)
        for _ in range(3):
            state, metrics = step(state, batch)
        return state, metrics["loss"]

    momentum = optax.sgd(0.1, momentum=0.9)
    plain, loss = run(momentum)
    found, found_loss = run(memory.state_on_host(momentum))
    assert (kinds(found.opt_state), kinds(found.params)) == ({HOST}, {"device"})
    np.testing.assert_allclose(found_loss, loss, 1e-5)
    np.testing.assert_allclose(found.params["w"], plain.params["w"], 1e-5, 1e-6)


def test_an_optimizer_that_mixes_rows_is_refused():
    adam, small = optax.adam(1e-3), {"w": jnp.ones(3)}
    for optimizer in (optax.lamb(1e-3), optax.MultiSteps(adam, 2), optax.apply_if_finite(adam, 2)):
        on_host = memory.state_on_host(optimizer)
        with pytest.raises(ValueError, match="state_on_host: no array of the state can be on the"):
            on_host.init(params())
        assert on_host.init(small) is not None  # nothing to move


def test_what_is_on_several_devices_is_refused():
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    if mesh.size == 1:
        pytest.skip("one device")
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    with pytest.raises(ValueError, match="state_on_host: parameters must be on one device"):
        memory.state_on_host(optax.adam(1e-3)).init(jax.device_put(jnp.ones((8, 2)), sharding))


def test_a_state_on_the_device_is_refused():
    optimizer = memory.state_on_host(optax.adam(1e-3))
    p = params()
    with pytest.raises(ValueError, match="expected a state in the memory of the host"):
        optimizer.update(p, optax.adam(1e-3).init(p), p)


def test_effects_and_missing_arguments_are_refused():
    def update(updates, state, params=None):
        jax.debug.print("norm {}", optax.tree.norm(updates))
        return updates, state

    printing = optax.chain(optax.stateless(lambda u, p: update(u, None)[0]), optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"state_on_host: optimizer\.update must have no effects"):
        memory.state_on_host(printing).init(params())
    with pytest.raises(TypeError, match=r"state_on_host: optimizer\.update fails"):
        memory.state_on_host(optax.polyak_sgd()).init(params())


def test_weak_numbers_of_the_state_stay_weak():
    scale = optax.GradientTransformation(
        lambda params: jnp.asarray(0.1),
        lambda u, s, params=None: (jax.tree.map(lambda a: -s * a, u), s),
    )
    optimizer = memory.state_on_host(optax.chain(optax.trace(0.9), scale))
    p = {"w": jnp.ones((1024, 1024), jnp.bfloat16)}
    updates, _ = optimizer.update(p, optimizer.init(p), p)
    assert updates["w"].dtype == jnp.bfloat16
