"""Effects, odd dtypes and odd structures within a budget: the same gradient, or a BudgetError."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import fnet
from fnet import memory

WIDTH, ROWS = 16, 64
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
KEY = jax.random.key(2)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
FIXED = jax.lax.stop_gradient


def weights(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    return [0.3 * jax.random.normal(k, (WIDTH, WIDTH), dtype) for k in keys]


def block(x, w):
    return jnp.tanh(jnp.tanh(x @ w) * x)


def chain(step):
    """A loss of blocks, each changed by ``step(x, batch)``."""

    def loss(params, batch):
        x = batch["x"]
        for w in params:
            x = step(block(x, w), batch)
        return jnp.square(jnp.abs(x)).mean()

    return loss


def in_scan(step):
    def loss(params, batch):
        def body(x, w):
            return step(block(x, w), batch), None

        return jnp.square(jax.lax.scan(body, batch["x"], jnp.stack(params))[0]).mean()

    return loss


def after(effect):
    """Calls a function for its effect alone."""

    def step(x, batch):
        effect(x)
        return x

    return step


def times_callback(x, batch, ordered=False):
    return x * io_callback(lambda x: np.float32(2), NUMBER, FIXED(x).mean(), ordered=ordered)


def plus_pure(x, batch):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x + 0.1 * jax.pure_callback(lambda x: 2 * np.asarray(x), shape, FIXED(x))


def spectrum(x, batch):
    return jnp.abs(jnp.fft.ifft(jnp.fft.fft(x) * (1 + 1j)))


def masked(x, batch):
    return x * jax.random.bernoulli(batch["key"], 0.9, x.shape)


def switched(x, batch):
    return jax.lax.cond(batch["t"] > 0, lambda x: jnp.sin(x) + x, jnp.cos, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def times(f, x, n):
    return f(x) * n


times.defvjp(
    lambda f, x, n: (f(x) * n, x), lambda f, n, x, g: (g * n * (1 - jnp.square(jnp.tanh(x))),)
)


def scaled_by_loop(params, batch):
    start = 0, FIXED(batch["x"]).mean()
    _, n = jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, 1.1 * c[1] + 1), start)
    return n * chain(lambda x, _: x)(params, batch)


def vmapped_scan(params, batch):
    def one(x):
        return jax.lax.scan(lambda x, w: (block(x, w), None), x, jnp.stack(params))[0].mean()

    return jnp.square(jax.vmap(one)(batch["x"])).mean()


def mapped(params, batch):
    return jax.lax.map(lambda x: jnp.square(chain(lambda x, _: x)(params, {"x": x})), X).mean()


def with_counts(params, batch):
    return chain(lambda x, _: x)(params["w"], batch) * params["n"].sum() + params["empty"].sum()


def with_key(params, batch):
    return chain(masked)(params["w"], batch | {"key": params["key"]})


def plain(x, batch):
    return x


CASES = {
    "debug print": (chain(after(lambda x: jax.debug.print("{}", x.mean()))), {}),
    "debug callback": (chain(after(lambda x: jax.debug.callback(lambda x: None, x))), {}),
    "print in a scan": (in_scan(after(lambda x: jax.debug.print("{}", x.mean()))), {}),
    "callback, no result": (
        chain(after(lambda x: io_callback(lambda x: None, None, FIXED(x)))),
        {},
    ),
    "ordered callback": (chain(functools.partial(times_callback, ordered=True)), {}),
    "callback in a scan": (in_scan(times_callback), {}),
    "pure callback": (chain(plus_pure), {}),
    "complex values": (chain(spectrum), {}),
    "complex parameters": (chain(plain), {"params": [w * (1 + 0.5j) for w in weights()]}),
    "integer and empty parameters": (
        with_counts,
        {"params": {"w": weights(), "n": jnp.arange(3), "empty": jnp.zeros((0, 4))}},
    ),
    "a key among parameters": (with_key, {"params": {"w": weights(), "key": KEY}}),
    "a key in the batch": (chain(masked), {"batch": {"key": KEY}}),
    "one row": (chain(plain), {"batch": {"x": X[:1]}}),
    "an empty leaf": (chain(plain), {"batch": {"none": jnp.zeros((ROWS, 0))}}),
    "rule with static arguments": (chain(lambda x, _: times(jnp.tanh, x, 2)), {}),
    "checkpoints": (chain(jax.checkpoint(lambda x, batch: jnp.sin(x) * x)), {}),
    "cond": (chain(switched), {"batch": {"t": jnp.float32(1)}}),
    "vmapped scan": (vmapped_scan, {}),
    "while": (scaled_by_loop, {}),
    "map": (mapped, {}),
}


def arguments(given):
    return given.get("params", weights()), {"x": X} | given.get("batch", {})


def gradient(loss, params, batch):
    """The gradient of the floating parameters."""
    leaves, structure = jax.tree.flatten(params)
    floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def of_floating(chosen):
        chosen = iter(chosen)
        merged = [next(chosen) if f else leaf for leaf, f in zip(leaves, floating, strict=True)]
        return loss(jax.tree.unflatten(structure, merged), batch)

    chosen = [leaf for leaf, f in zip(leaves, floating, strict=True) if f]
    return jax.jit(jax.grad(of_floating))(chosen)


def assert_equal(actual, expected, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if b.size and jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max()))


@pytest.fixture(autouse=True)
def _ranks_are_promoted():
    with jax.numpy_rank_promotion("allow"), jax.debug_key_reuse(False):
        yield


def check(loss, params, batch, rtol=1e-5):
    sgd = optax.sgd(0.1)
    _, plan = memory.remat_to_fit(loss, params, batch, optimizer=sgd, budget="1GiB")
    budget = int(0.7 * plan.chosen.peak.total)
    try:
        fitted, plan = memory.remat_to_fit(loss, params, batch, optimizer=sgd, budget=budget)
    except memory.BudgetError:
        return
    assert plan.chosen.peak.total <= budget
    assert_equal(gradient(fitted, params, batch), gradient(loss, params, batch), rtol)


@pytest.mark.sweep(7)
@pytest.mark.parametrize("name", CASES)
def test_odd_program_fits_with_the_same_gradient_or_is_refused(name):
    loss, given = CASES[name]
    check(loss, *arguments(given))


def step_of(name):
    """A train step of a case, its state and its batch."""
    loss, given = CASES[name]
    params, batch = arguments(given)
    batch.setdefault("key", KEY)

    def losses(params, model_state, batch, key):
        return jnp.broadcast_to(loss(params, batch), batch["x"].shape[:1])

    optimizer = optax.sgd(0.1)
    state = fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))
    return fnet.make_step(losses, optimizer), state, batch


def test_double_precision():
    with jax.enable_x64(True):
        params = weights(jnp.float64)
        check(chain(plain), params, {"x": X.astype(jnp.float64)}, 1e-12)


def test_an_odd_step_fits_with_the_same_update():
    step, state, batch = step_of("callback, no result")
    expected = fnet.compile_step(step, state, batch)
    fitted = fnet.compile_step(step, state, batch, budget=int(0.7 * expected.report.peak.total))
    new, old = (f(jax.tree.map(jnp.copy, state), batch)[0] for f in (fitted, expected))
    assert_equal(new.params, old.params)


def test_a_step_refuses_parameters_that_have_no_gradient():
    for name in ("integer and empty parameters", "a key among parameters"):
        step, state, batch = step_of(name)
        with pytest.raises(TypeError, match="real- or complex-valued"):
            fnet.compile_step(step, state, batch)
