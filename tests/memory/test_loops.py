"""Loops in chunks: the same values and gradients, in fewer bytes."""

import functools
import re
from collections import defaultdict

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import memory
from fnet.jaxpr import CHECKPOINT, find_equations
from fnet.memory.apply import trace_inlined
from fnet.memory.loops import Chunks, _chunked, _promising, loop_choices, remat_loops


def chunk_loops(f, sizes):
    return _chunked(f, lambda part: defaultdict(lambda: Chunks(tuple(sizes))))


def integers(*shape, seed=0):
    """Small integers as floats: sums and products are exact in any order."""
    values = np.random.default_rng(seed).integers(-1, 2, shape)
    return jnp.asarray(values, jnp.float32)


def polynomial(params, xs, *, length, reverse):
    """A loop with a constant, a float, an integer and an unchanged carry, and two results."""

    def step(carry, x):
        h, i, offset = carry
        h = h * params["w"] + (1 if x is None else x) + jnp.where(i % 3 == 0, offset, 0)
        return (h, i + 1, offset), (h * h, i)

    start = params["h"], jnp.int32(0), params["offset"]
    (h, i, _), (squares, numbers) = jax.lax.scan(step, start, xs, length, reverse)
    weights = jnp.arange(length, dtype=jnp.float32)[:, None] % 5
    return (h + (weights * squares).sum(0)).sum(), (i, numbers)


CHUNKS = [(1,), (2,), (3,), (5,), (3, 1), (4, 2), (6, 3, 2), (8, 3, 1), (64,)]


def test_gradients_are_exact_for_any_length_and_any_chunks():
    params = {"w": jnp.asarray([1.0, -1.0]), "h": integers(2), "offset": integers(seed=2)}
    random = np.random.default_rng(0)
    cases = [
        (length, *map(bool, random.integers(2, size=2)), CHUNKS[random.integers(len(CHUNKS))])
        for length in range(1, 14, 2)
    ]

    @functools.partial(jax.jit, static_argnums=1)
    def gradients(params, in_chunks):
        found = []
        for length, has_xs, reverse, sizes in cases:
            run = functools.partial(polynomial, length=length, reverse=reverse)
            f = lambda given, run=run: run(*given)  # noqa: E731
            f = chunk_loops(f, sizes) if in_chunks else f
            given = params, integers(length, 2) if has_xs else None
            found.append(jax.value_and_grad(f, has_aux=True)(given))
        return found

    chex.assert_trees_all_equal(gradients(params, True), gradients(params, False))


def cell(params, h, x):
    z = jnp.tanh(h @ params["w"] + x)
    return jnp.sin(h) + z * jax.nn.sigmoid(h @ params["u"])


LENGTH, BATCH, WIDTH = 64, 32, 32


def recurrent(params, xs):
    h = jnp.zeros((BATCH, WIDTH))
    return jax.lax.scan(lambda h, x: (cell(params, h, x), None), h, xs)[0].sum()


def recurrent_from_the_end(params, xs):
    h = jnp.zeros((BATCH, WIDTH))
    return jax.lax.scan(lambda h, x: (cell(params, h, x), None), h, xs, reverse=True)[0].sum()


def fori(params, xs):
    def step(i, carry):
        h, x = carry
        return cell(params, h, x * i), x

    return jax.lax.fori_loop(0, LENGTH, step, (xs[0], xs[1]))[0].sum()


def loop_of_loops(params, xs):
    def inner(h, x):
        return jax.lax.fori_loop(0, 16, lambda i, h: cell(params, h, x), h), None

    return jax.lax.scan(inner, xs[0], xs[:16])[0].sum()


def checkpointed(params, xs):
    """Each part is under a jax.checkpoint, in which a loop saves everything."""
    part = jax.checkpoint(recurrent)
    return part(params, xs) + part(params, xs * 2)


def branch(params, xs):
    return jax.lax.cond(xs.sum() > 0, recurrent, lambda p, x: (x @ p["w"]).sum(), params, xs)


def dropout(params, xs):
    """The carry has a random key."""

    def step(carry, x):
        h, key = carry
        key, mine = jax.random.split(key)
        kept = jax.random.bernoulli(mine, 0.8, h.shape)
        return (cell(params, h * kept, x), key), None

    start = jnp.zeros((BATCH, WIDTH)), jax.random.key(3)
    return jax.lax.scan(step, start, xs)[0][0].sum()


def scanned_keys(params, xs):
    """Keys are scanned, and returned."""

    def step(h, x):
        kept = jax.random.bernoulli(jax.random.clone(x[1]), 0.8, h.shape)
        return cell(params, h * kept, x[0]), x[1]

    keys = jax.random.split(jax.random.key(3), LENGTH)
    h, _ = jax.lax.scan(step, jnp.zeros((BATCH, WIDTH)), (xs, keys), unroll=4)
    return h.sum()


# Temporaries with one and with two additional passes, in carries. Plain: 389 to 1651.
LOSSES = {
    recurrent: (50, 33),
    recurrent_from_the_end: (50, 33),
    fori: (49, 26),
    loop_of_loops: (136, 63),
    checkpointed: (131, 106),
    branch: (211, 203),
    dropout: (57, 37),
    scanned_keys: (50, 58),
}


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for name in "wu"}
    return params, rng.normal(size=(LENGTH, BATCH, WIDTH)).astype(np.float32)


def gradient(f):
    """In float64, because the loops are chaotic."""
    wide = jax.tree.map(lambda a: a.astype(np.float64), inputs())
    return jax.jit(jax.value_and_grad(f))(*wide)


def temporaries(f):
    """In carries."""
    compiled, _ = memory.compile_min_memory(jax.jit(jax.grad(f)).lower(*inputs()))
    return memory.peak(compiled).temporaries / (4 * BATCH * WIDTH)


def flops(f):
    return memory.estimate_cost(jax.make_jaxpr(jax.grad(f))(*inputs())).flops


@pytest.mark.sweep(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_loops_anywhere_keep_their_gradients(loss, float64):
    ours, expected = gradient(chunk_loops(loss, (12, 3, 1))), gradient(loss)
    chex.assert_trees_all_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("loss", LOSSES)
def test_chosen_chunks_need_a_fraction_of_the_bytes(loss):
    plain, plain_flops = temporaries(loss), flops(loss)
    for passes, most in enumerate(LOSSES[loss], 1):
        chosen = remat_loops(loss, passes)
        assert temporaries(chosen) < most < plain / 2
        assert flops(chosen) < (1 + 0.36 * passes) * plain_flops


def test_numbers_of_any_kind_keep_their_gradients():
    def loss(given):
        def step(carry, x):
            z, half, i = carry
            z = z * jnp.exp(0.1j * z) + x
            return (z, jnp.sin(half) * 2, i + given["i"]), half.astype(jnp.float32)

        start = given["x"].astype(jnp.complex64), given["x"].astype(jnp.bfloat16), given["i"]
        (z, _, _), ys = jax.lax.scan(step, start, jnp.arange(10.0))
        return (jnp.abs(z) + ys.sum(0)).sum()

    given = {"x": jnp.linspace(0.1, 1, 3), "i": jnp.arange(3)}
    gradients = [
        jax.jit(jax.grad(f, allow_int=True))(given)
        for f in (loss, chunk_loops(loss, [4, 1]), remat_loops(loss, 1), remat_loops(loss, 1, 0.5))
    ]
    for found in gradients:
        assert found["i"].dtype == jax.dtypes.float0
        chex.assert_trees_all_close(found["x"], gradients[0]["x"], rtol=1e-5)


def test_a_function_without_loops_has_no_choices():
    closed, _, _ = trace_inlined(lambda x: jnp.sin(x @ x).sum(), (jnp.ones((4, 4)),), {})
    assert not loop_choices(closed, [True])


@pytest.mark.sweep(9)
@pytest.mark.parametrize("loss", [recurrent_from_the_end, dropout, loop_of_loops, fori])
def test_iterations_between_chunks_keep_gradients(loss, float64):
    chosen = remat_loops(loss, 1, 0.3)
    chex.assert_trees_all_close(gradient(chosen), gradient(loss), rtol=1e-9, atol=1e-9)
    assert flops(chosen) < (1.05 + 0.3 / 3) * flops(loss)


def fitted_share(loss, share):
    """Share of the plain peak, and FLOPs, of a loss that is fitted to a share."""
    budget = int(share * peak_of(loss))
    # Three quarters of the parameters' bytes stay free.
    spare = 3 * memory.tree_bytes(inputs()[0]) // 4
    fitted, plan = memory.remat_to_fit(loss, budget + spare, *inputs())
    assert plan.chosen.peak.total <= budget
    return str(plan.chosen), flops(fitted) / flops(loss)


def peak_of(loss):
    _, plan = memory.remat_to_fit(loss, "1GiB", *inputs())
    assert str(plan.chosen) == "none"
    return plan.chosen.peak.total


@pytest.fixture
def without_regions(monkeypatch):
    """Chunks of the batch would be as small."""
    monkeypatch.setattr(memory.regions, "LEAST_SHARE", 2.0)


def test_a_budget_chooses_chunks_of_a_loop(without_regions):
    way, more_flops = fitted_share(recurrent, 0.28)
    assert way == "chunked loops"
    assert more_flops < 1.35


def test_the_most_levels_of_chunks_are_tried_before_a_refusal(without_regions):
    candidates = []
    with pytest.raises(memory.BudgetError, match="by chunked loops"):
        memory.remat_to_fit(fori, 100_000, *inputs(), progress=candidates.append)
    ways = [c.policy.saves for c in candidates]
    assert any("iterations of loops in chunks, 3 more passes" in way for way in ways)


def test_what_is_outside_of_chunked_loops_is_planned(without_regions):
    def both(params, xs):
        h = jax.lax.fori_loop(0, 512, lambda i, h: cell(params, h, xs[0]), xs[1])[None] + xs
        for w in (params["w"], params["u"]) * 2:
            h = jnp.tanh(jnp.sin(h @ w) * h)
        return h.sum()

    way, more_flops = fitted_share(both, 0.2)
    assert way == "planned with chunked loops"
    assert more_flops < 1.4


def test_other_loops_stay_whole():
    @jax.custom_vjp
    def own(x):
        return jax.lax.fori_loop(0, 8, lambda i, x: jnp.sin(x), x)

    own.defvjp(lambda x: (own(x), x), lambda x, g: (g * x,))

    def prints(x):
        def step(x, _):
            jax.debug.print("{x}", x=x)
            return jnp.sin(x), None

        return jax.lax.scan(step, x, length=8)[0]

    def constant(x):
        return x * jax.lax.fori_loop(0, 8, lambda i, y: jnp.sin(y), 1.0)

    def until_small(x):
        return jax.lax.while_loop(lambda x: x > 0.5, jnp.sin, x)

    for f in (own, prints, constant, until_small):
        traced = jax.make_jaxpr(chunk_loops(f, [2]))(1.0)
        assert not list(find_equations(traced, CHECKPOINT)), f
    assert list(find_equations(jax.make_jaxpr(chunk_loops(recurrent, [2]))(*inputs()), CHECKPOINT))


def test_named_scopes_stay():
    def loss(x):
        def step(x, _):
            with jax.named_scope("inner"):
                return jnp.sin(x), None

        with jax.named_scope("outer"):
            return jax.lax.scan(step, x, length=9)[0]

    text = jax.jit(chunk_loops(loss, [2])).lower(1.0).compile().as_text()
    assert re.search(r"outer/while/body/.*/while/body/.*/inner/sin", text)


def test_composes_with_vmap_and_jvp():
    params, xs = inputs()
    f, tangents = chunk_loops(recurrent, [12, 4]), jax.tree.map(np.ones_like, inputs())

    @functools.partial(jax.jit, static_argnums=0)
    def transformed(f):
        scaled = jax.vmap(lambda s: jax.grad(f)(params, xs * s))(jnp.array([0.1, 0.2]))
        return scaled, jax.jvp(lambda *a: f(*a) / 100, inputs(), tangents)

    chex.assert_trees_all_close(transformed(f), transformed(recurrent), rtol=1e-3, atol=1e-3)


def test_sizes_that_are_tried_are_divisors_and_some_between():
    for length in (1, 2, 35, 89 * 97, 2**12):
        sizes = _promising(length)
        assert {n for n in range(1, length) if length % n == 0} <= sizes <= {*range(1, length)}
        assert all(any(n < m <= 2 * n for m in sizes) for n in sizes if 2 * n < length)
