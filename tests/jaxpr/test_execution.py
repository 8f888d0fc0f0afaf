"""Everyone who executes programs on values of his own gets what the program computes.

Programs are chains of steps with loops, branches, calls, checkpoints and rules, drawn anew each
day. Users are the rows of a batch, rows of an axis and weights in parts.
"""

import datetime

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, PartitionSpec

from fnet import quantization, represented
from fnet.autodiff.per_example.batching import Rows, rows_of, run_for_batch
from fnet.jaxpr import find_equations
from fnet.jaxpr.batch_axis import BatchAxis, Shared
from fnet.memory.rows import Part, RowAxes, run_rows
from fnet.memory.rows import Value as RowValue

B, D = 4, 8
pytestmark = pytest.mark.usefixtures("allow_key_reuse")  # whose check has no parameter ``prim``
POLICY = jax.checkpoint_policies.dots_saveable

twice = Primitive("twice")  # with the parameter of Equinox's primitives
twice.def_impl(lambda x, prim: 2 * x)
twice.def_abstract_eval(lambda x, prim: x)
mlir.register_lowering(twice, mlir.lower_fun(lambda x, prim: 2 * x, multiple_results=False))
ad.deflinear2(twice, lambda ct, x, prim: [twice.bind(ct, prim=prim)])
batching.primitive_batchers[twice] = lambda args, dims, prim: (twice.bind(*args, prim=prim), *dims)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


sine.defjvp(lambda primals, tangents: (sine(*primals), tangents[0] * jnp.cos(primals[0])))


@jax.custom_vjp
def doubled(x, w):
    return 2 * x @ w


doubled.defvjp(
    lambda x, w: (2 * x @ w, (x, w)), lambda saved, ct: (2 * ct @ saved[1].T, 2 * saved[0].T @ ct)
)


def on_four_devices(x, w):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    spec = PartitionSpec(None, "d")
    f = jax.shard_map(lambda w: jnp.tanh(w), mesh=mesh, in_specs=spec, out_specs=spec)
    return x @ f(w)


def effect(x, w):
    jax.debug.callback(lambda _: None, x.sum())
    return x


def until_small(x, w):
    return jax.lax.while_loop(lambda h: jnp.abs(h).max() > 0.5, lambda h: h / 2, x @ w)


STEPS = {
    "product": lambda x, w: x @ w,
    "scan": lambda x, w: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h[0]), x, None, 3)[0],
    "scan over weights": lambda x, w: jax.lax.scan(
        lambda h, v: (jnp.tanh(h @ v), v), x, jnp.stack([w, w.T])
    )[0],
    "backwards": lambda x, w: jax.lax.scan(lambda h, r: (h + r @ w, h), x[0], x, reverse=True)[1],
    "scalars": lambda x, w: x * jax.lax.scan(lambda h, r: (h + r.sum(), h), 0.0, x)[1][:, None],
    "while": lambda x, w: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)
    )[1],
    "while of data": until_small,
    "cond of weights": lambda x, w: jax.lax.cond(w.sum() > 0, lambda: x @ w, lambda: x),
    "cond of data": lambda x, w: jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: w[: len(x)]),
    "calls": lambda x, w: jax.jit(lambda x: jax.jit(jnp.sin)(x) @ w)(x),
    "checkpoint": lambda x, w: jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w),
    "policy": lambda x, w: jax.checkpoint(
        lambda x: twice.bind(jnp.sin(x @ w), prim="twice"), policy=lambda p, *_, **__: p == twice
    )(x),
    "checkpoint of a scan": lambda x, w: jax.checkpoint(
        lambda x: jax.lax.scan(lambda h, _: (jnp.sin(h @ w), h), x, None, 2)[0], policy=POLICY
    )(x),
    "custom_jvp": lambda x, w: sine(x) @ w,
    "custom_vjp": doubled,
    "shard_map": on_four_devices,
    "hijax": lambda x, w: x @ w + jnp.searchsorted(jnp.arange(-2.0, 2.0), x),  # since JAX 0.12
    "effect": effect,
}


def drawn(number):
    """The steps of a program; each is in one of them each day."""
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    names = np.random.default_rng(day).permutation(list(STEPS))
    return [str(names[(3 * number + k) % len(names)]) for k in range(3)]


def chain(names):
    def program(w, x):
        for name in names:
            x = STEPS[name](x, w) * 0.5
        return x

    return program


def inputs():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((D, D), dtype=np.float32) / D**0.5
    return jnp.asarray(w), jnp.asarray(rng.standard_normal((B, 3, D), dtype=np.float32))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def of_a_batch(program, w, x):
    closed = jax.make_jaxpr(program)(w, x[0])
    [got] = jax.jit(
        lambda w, x: [
            rows_of(v, (3, D), B) for v in run_for_batch(closed, [w, Rows(x.reshape(-1, D), 0)], B)
        ]
    )(w, x)
    close(got, jnp.stack([jaxpr_as_fun(closed)(w, row)[0] for row in x]))


def of_an_axis(program, w, x):
    many = jax.vmap(program, (None, 0))
    closed, states = jax.make_jaxpr(many)(w, x), [Shared(), BatchAxis(0)]
    axes = RowAxes(B)
    if axes.run(closed, states) != [BatchAxis(0)]:
        return  # of a step that is unknown
    for start in range(0, B, 2):
        values = [RowValue(states[0], w), RowValue(states[1], x[start : start + 2])]
        executor, results = run_rows(closed, values, Part(start, 2, B), axes)
        close(
            executor.lowered(results, [BatchAxis(0)], closed.jaxpr.outvars)[0],
            many(w, x)[start : start + 2],
        )


def of_weights_in_parts(program, w, x):
    quantized = quantization.quantize({"kernel": w}, "int8")

    def loss(p, x):
        return (program(p["kernel"], x) ** 2).sum()

    whole = quantization.dequantize(quantized)
    close(represented.wrap(loss)(quantized, x[0]), loss(whole, x[0]))
    if not any(find_equations(jax.make_jaxpr(loss)(whole, x[0]), "while")):
        gradient = jax.grad(represented.wrap(loss), 1)(quantized, x[0])
        close(gradient, jax.grad(loss, 1)(whole, x[0]))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("user", [of_a_batch, of_an_axis, of_weights_in_parts])
def test_executed_programs_compute_what_they_computed(user, number):
    user(chain(drawn(number)), *inputs())
