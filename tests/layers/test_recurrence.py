"""Scans over the sequence, compared with loops over the sequence in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fnet.layers.causal_conv import causal_conv
from fnet.layers.gated_delta import gated_delta_rule
from fnet.layers.mamba import selective_scan
from fnet.layers.mamba2 import state_space_dual
from fnet.layers.recurrence import linear_recurrence
from fnet.memory import peak
from fnet.memory.peak import CANDIDATE_OPTIONS

B, E, N = 2, 6, 3
HEADS, P, GROUPS = 4, 3, 2


def normal(rng, *shape, dtype=np.float64):
    return jnp.asarray(rng.normal(size=shape), dtype)


def steps(rng, *shape, dtype=np.float64):
    """Time steps between 0.01 and 1."""
    return jnp.asarray(np.exp(rng.uniform(np.log(0.01), 0, size=shape)), dtype)


def recurrence_inputs(t, dtype=np.float64):
    rng = np.random.default_rng(t)
    a = jnp.asarray(rng.uniform(0, 1, size=(B, t, E, N)), dtype)
    return {"a": a, "b": normal(rng, B, t, E, N, dtype=dtype), "initial": a[:, 0] + 1}


def selective_inputs(t, dtype=np.float64):
    rng = np.random.default_rng(t)
    draw = functools.partial(normal, rng, dtype=dtype)
    return {
        "x": draw(B, t, E),
        "dt": steps(rng, B, t, E, dtype=dtype),
        "A": -4 * steps(rng, E, N, dtype=dtype),
        "B": draw(B, t, N),
        "C": draw(B, t, N),
        "D": draw(E),
        "initial": draw(B, N, E),
    }


def dual_inputs(t, dtype=np.float64):
    rng = np.random.default_rng(t)
    draw = functools.partial(normal, rng, dtype=dtype)
    return {
        "x": draw(B, t, HEADS, P),
        "dt": steps(rng, B, t, HEADS, dtype=dtype),
        "A": -4 * steps(rng, HEADS, dtype=dtype),
        "B": draw(B, t, GROUPS, N),
        "C": draw(B, t, GROUPS, N),
        "D": draw(HEADS),
        "initial": draw(B, HEADS, N, P),
    }


def delta_inputs(t, dtype=np.float64):
    rng = np.random.default_rng(t)
    draw = functools.partial(normal, rng, dtype=dtype)
    return {
        "q": draw(B, t, GROUPS, N),
        "k": draw(B, t, GROUPS, N),
        "v": draw(B, t, HEADS, P),
        "log_decay": -steps(rng, B, t, HEADS, dtype=dtype),
        "beta": steps(rng, B, t, HEADS, dtype=dtype),
        "initial": draw(B, HEADS, N, P),
    }


def conv_inputs(t, dtype=np.float64):
    rng = np.random.default_rng(t)
    draw = functools.partial(normal, rng, dtype=dtype)
    return {"x": draw(B, t, E), "kernel": draw(4, E), "bias": draw(E), "past": draw(B, 3, E)}


def scan_steps(step, h, *arrays):
    """Run ``step(h, *arrays[:, t]) -> (h, y)`` for each t; return y [B, T, ...] and the last h."""
    rows = tuple(jnp.moveaxis(a, 1, 0) for a in arrays)
    h, y = jax.lax.scan(lambda h, inputs: step(h, *inputs), h, rows)
    return jnp.moveaxis(y, 0, 1), h


def loop_recurrence(a, b, initial):
    def step(h, a, b):
        return a * h + b, a * h + b

    return scan_steps(step, initial, a, b)[0]


def loop_selective(x, dt, A, B, C, D, initial):
    def step(h, x, dt, b_in, c_out):
        h = jnp.exp(jnp.einsum("be,en->bne", dt, A)) * h + jnp.einsum("bn,be->bne", b_in, dt * x)
        return h, jnp.einsum("bn,bne->be", c_out, h) + D[None] * x

    return scan_steps(step, initial, x, dt, B, C)


def loop_dual(x, dt, A, B, C, D, initial):
    def step(h, x, dt, b_in, c_out):
        h = jnp.exp(dt * A[None])[..., None, None] * h
        h = h + jnp.einsum("bh,bhn,bhp->bhnp", dt, b_in, x)
        return h, jnp.einsum("bhn,bhnp->bhp", c_out, h) + D[None, :, None] * x

    each_head = functools.partial(jnp.repeat, repeats=HEADS // GROUPS, axis=2)
    return scan_steps(step, initial, x, dt, each_head(B), each_head(C))


def loop_delta(q, k, v, log_decay, beta, initial):
    def step(h, q, k, v, log_decay, beta):
        h = jnp.exp(log_decay)[..., None, None] * h
        written = beta[..., None] * (v - jnp.einsum("bhnp,bhn->bhp", h, k))
        h = h + jnp.einsum("bhn,bhp->bhnp", k, written)
        return h, jnp.einsum("bhn,bhnp->bhp", q, h)

    each_head = functools.partial(jnp.repeat, repeats=HEADS // GROUPS, axis=2)
    return scan_steps(step, initial, each_head(q), each_head(k), v, log_decay, beta)


def loop_conv(x, kernel, bias, past):
    inputs = jnp.concatenate([past, x], 1)
    y = [
        jnp.einsum("bwc,wc->bc", inputs[:, t : t + 4], kernel) + bias[None]
        for t in range(x.shape[1])
    ]
    return jnp.stack(y, 1), inputs[:, -3:]


SCANS = {
    "linear": (linear_recurrence, loop_recurrence, recurrence_inputs),
    "selective": (selective_scan, loop_selective, selective_inputs),
    "dual": (state_space_dual, loop_dual, dual_inputs),
    "delta": (gated_delta_rule, loop_delta, delta_inputs),
    "conv": (causal_conv, loop_conv, conv_inputs),
}
# (steps, chunk): a single step, fewer steps than a chunk, a chunk that does not divide the steps.
LENGTHS = {
    "linear": [(5, None)],
    "selective": [(1, 4), (3, None), (7, 3)],
    "dual": [(7, 3), (1, None)],
    "delta": [(7, 3), (1, None)],
    "conv": [(5, None)],
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(ours, loop, given, cotangents):
    def value_and_vjp(f):
        y, back = jax.vjp(lambda given: f(**given), given)
        return y, back(cotangents)[0]

    return value_and_vjp(ours), value_and_vjp(loop)


def random_cotangents(f, given):
    """Random cotangents for the outputs of ``f``, including the last state."""
    rng = np.random.default_rng(100)
    outputs = jax.eval_shape(lambda: f(**given))
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), outputs)


@pytest.mark.sweep(2)  # one of each scan
@pytest.mark.parametrize(
    ("name", "t", "chunk"), [(name, *case) for name in SCANS for case in LENGTHS[name]]
)
def test_values_and_gradients_match_a_loop(name, t, chunk, float64):
    scan, loop, inputs = SCANS[name]
    given = inputs(t)
    ours = functools.partial(scan, chunk=chunk) if chunk else scan
    got, expected = values_and_gradients(ours, loop, given, random_cotangents(loop, given))
    assert all(a.dtype == np.float64 for a in jax.tree.leaves(got))
    chex.assert_trees_all_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", ["linear", "selective", "delta"])
def test_second_order_gradients_match_a_loop(name, float64):
    scan, loop, inputs = SCANS[name]
    given = inputs(5)
    cotangents = random_cotangents(loop, given)

    def twice(f):
        def slope(given):
            _, back = jax.vjp(lambda given: f(**given), given)
            return sum(jnp.sin(g).sum() for g in jax.tree.leaves(back(cotangents)))

        return jax.jit(jax.grad(slope))(given)

    chex.assert_trees_all_close(twice(scan), twice(loop), rtol=1e-9, atol=1e-9)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", ["selective", "dual", "delta", "conv"])
def test_initial_state_is_zero_by_default(name):
    scan, _, inputs = SCANS[name]
    given = inputs(5, np.float32)
    state = "past" if name == "conv" else "initial"
    zeros = jnp.zeros_like(given.pop(state))
    run = jax.jit(lambda given: scan(**given))
    chex.assert_trees_all_equal(run(given), run(given | {state: zeros}))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", SCANS)
def test_an_empty_batch_gives_empty_outputs(name):
    scan, _, inputs = SCANS[name]
    given = {k: v[:0] if v.shape[0] == B else v for k, v in inputs(5, np.float32).items()}
    y = jax.tree.leaves(jax.jit(lambda given: scan(**given))(given))[0]
    assert y.shape[:2] == (0, 5)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", SCANS)
def test_bfloat16_inputs_give_bfloat16_outputs_and_float32_states(name):
    scan, _, inputs = SCANS[name]
    wide = inputs(11, np.float32)
    # Both calls get the same numbers, rounded to bfloat16.
    narrow = {
        k: v
        if k in ("A", "D", "initial", "past") and name in ("selective", "dual", "delta")
        else v.astype(jnp.bfloat16)
        for k, v in wide.items()
    }
    rounded = {k: v.astype(jnp.float32) for k, v in narrow.items()}
    run = jax.jit(lambda given: scan(**given))
    got, expected = (jax.tree.leaves(run(given)) for given in (narrow, rounded))
    assert got[0].dtype == jnp.bfloat16
    if name in ("selective", "dual", "delta"):
        assert got[1].dtype == jnp.float32
        chex.assert_trees_all_close(got[1], expected[1], rtol=1e-6)
    difference = jnp.abs(got[0].astype(jnp.float32) - expected[0]).max()
    assert difference <= 2**-6 * jnp.abs(expected[0]).max()
    gradients = jax.eval_shape(jax.grad(lambda given: jax.tree.leaves(run(given))[0].sum()), narrow)
    assert {k: v.dtype for k, v in gradients.items()} == {k: v.dtype for k, v in narrow.items()}


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("name", "check_vma"), [("linear", True), ("selective", False), ("dual", True), ("delta", True)]
)
def test_gradients_inside_shard_map_match_the_whole_batch(name, check_vma, float64):
    scan, _, inputs = SCANS[name]
    given = inputs(5)
    shared = {k: given.pop(k) for k in ("A", "D") if k in given}
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, everywhere = PartitionSpec("data"), PartitionSpec()

    def outputs(given, shared):
        return scan(**given, **shared)

    sharded = jax.shard_map(
        outputs, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows, check_vma=check_vma
    )
    cotangents = random_cotangents(scan, given | shared)
    got, expected = (
        jax.jit(lambda *a, f=f: jax.vjp(f, *a)[1](cotangents)) for f in (sharded, outputs)
    )
    chex.assert_trees_all_close(got(given, shared), expected(given, shared), rtol=1e-10)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("name", "options"),
    [("selective", {}), ("selective", CANDIDATE_OPTIONS["cpu"][-1]), ("dual", {}), ("delta", {})],
)
def test_backward_pass_holds_a_fraction_of_the_states(name, options):
    channels, states = 64, 64

    def temporaries(t):
        f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        if name == "selective":
            x, dt, bc = f32((1, t, channels)), f32((1, t, channels)), f32((1, t, states))
            scan, given = selective_scan, (x, dt, f32((channels, states)), bc, bc)
        else:
            x, dt = f32((1, t, 4, channels // 4)), f32((1, t, 4))
            bc = f32((1, t, 1, states))
            scan, given = {
                "dual": (state_space_dual, (x, dt, f32((4,)), bc, bc)),
                "delta": (gated_delta_rule, (bc, bc, x, dt, dt)),
            }[name]

        def gradient(dy, *given):
            return jax.vjp(lambda *a: scan(*a)[0], *given)[1](dy)

        lowered = jax.jit(gradient).lower(x, *given)
        return peak(lowered.compile(compiler_options=dict(options))).temporaries

    short, long = 256, 1024
    state_bytes = 4 * channels * states
    at_short, at_long = temporaries(short), temporaries(long)
    assert at_long < 0.2 * long * state_bytes
    assert (at_long - at_short) / (long - short) < 0.15 * state_bytes


@pytest.mark.sweep(5)
def test_linear_recurrence_saves_decays_and_output_only():
    given = recurrence_inputs(5, np.float32)
    _, back = jax.vjp(linear_recurrence, *given.values())
    saved = sorted(a.shape for a in jax.tree.leaves(back) if hasattr(a, "shape"))
    assert saved == [(B, 5, E, N), (B, 5, E, N), (B, E, N)]


F = functools.partial(jnp.ones, dtype=jnp.float32)
INTEGERS = jnp.ones(3, int)


def test_rejects_invalid_arrays():
    for name, change, error, message in (
        ("linear", {"b": F((B, 3, E, N))}, ValueError, "one shape"),
        ("linear", {"initial": F((B, E))}, ValueError, "initial"),
        ("linear", {"a": F((B, 0)), "b": F((B, 0)), "initial": None}, ValueError, "T >= 1"),
        ("linear", {"a": INTEGERS}, TypeError, "a must be"),
        ("selective", {"chunk": 0}, ValueError, "chunk must be at least 1"),
        ("selective", {"x": F((B, 0, E))}, ValueError, "must have shape"),
        ("selective", {"A": F((E, 0))}, ValueError, "must have shape"),
        ("selective", {"dt": F((B, 4, 1))}, ValueError, "dt must have"),
        ("selective", {"C": F((B, 4, E))}, ValueError, "C must have"),
        ("selective", {"initial": F((B, E, N))}, ValueError, "initial"),
        ("selective", {"B": INTEGERS}, TypeError, "B must be"),
        ("dual", {"chunk": 0}, ValueError, "chunk must be at least 1"),
        ("dual", {"B": F((B, 4, 3, N)), "C": F((B, 4, 3, N))}, ValueError, "B's groups"),
        ("dual", {"A": F((1,))}, ValueError, "A must have"),
        ("dual", {"x": F((B, 0, HEADS, P))}, ValueError, "B must have shape"),
        ("dual", {"dt": INTEGERS}, TypeError, "dt must be"),
        ("delta", {"chunk": 0}, ValueError, "chunk must be at least 1"),
        ("delta", {"beta": F((B, 4, 1))}, ValueError, "beta must have"),
        ("delta", {"v": F((B, 4, 3, P))}, ValueError, "log_decay must"),
        ("delta", {"q": F((B, 4, 3, N)), "k": F((B, 4, 3, N))}, ValueError, "k's groups"),
        ("delta", {"k": INTEGERS}, TypeError, "k must be"),
        ("conv", {"kernel": F((4, 1))}, ValueError, "expected x"),
        ("conv", {"bias": F((1,))}, ValueError, "bias must have"),
        ("conv", {"past": F((B, 4, E))}, ValueError, "past must have"),
    ):
        scan, _, inputs = SCANS[name]
        with pytest.raises(error, match=message):
            scan(**inputs(4, np.float32) | change)
