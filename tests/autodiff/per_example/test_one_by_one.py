"""Clipped gradients of one example, or a few, at a time: they equal those of all at once."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from private_programs import random_program, run

import fnet
from fnet import privacy
from fnet.autodiff import gradient_strategies
from fnet.autodiff.per_example import backward
from fnet.cpu.tracing import traced_for
from fnet.privacy import sensitivity

B, T, D, ROWS = 5, 6, 4, 200
RNG = np.random.default_rng(0)
PARAMS = {
    "table": jnp.asarray(RNG.normal(size=(ROWS, D)), jnp.float32),
    "read twice": jnp.cos(jnp.arange(1.0 * ROWS * D)).reshape(ROWS, D),
    "kernels": jnp.asarray(RNG.normal(size=(2, D, D)), jnp.float32),
    "bias": jnp.zeros(D),
    "unused": jnp.zeros(3),
}
TOKENS = jnp.asarray(RNG.integers(-2, ROWS + 2, (B, T))).at[:, 1].set(3).at[:, 3].set(3)


def loss(p, tokens, weight, key):
    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w + p["bias"]), None

    h = p["table"][tokens] * jax.random.bernoulli(key, 0.8, (len(tokens), T, D))
    h += p["read twice"][tokens] * jnp.sin(p["read twice"][tokens[:, ::-1]])
    h, _ = jax.lax.scan(layer, h, p["kernels"])
    return weight * h.sum((1, 2)), {"mean": h.mean(1), "constant": jnp.arange(3.0) * p["bias"][0]}


BATCH = (TOKENS, jnp.array([1.0, 1e-3, 30.0, 1.0, 2.0]), jax.random.key(1))
OPTIONS = {
    "plain": {},
    "per layer": {"per_layer": True},
    "unit norm": {"rescale_to_unit_norm": True},
    "automatic": {"automatic": 0.1},
}


@pytest.mark.parametrize(
    ("name", "size"), [("plain", 9), ("per layer", 1), ("unit norm", 2), ("automatic", 1)]
)
def test_equals_all_examples_at_once(name, size):
    def clipped(size):
        gradient = fnet.clipped_grad(loss, 0.5, has_aux=True, microbatch_size=size, **OPTIONS[name])
        with jax.debug_key_reuse(False):
            return jax.jit(gradient)(PARAMS, *BATCH, mask=jnp.arange(B) != 3)

    (total, info), expected = clipped(size), clipped(B)
    chex.assert_trees_all_equal_shapes_and_dtypes((total, info), expected)
    chex.assert_trees_all_close((total, info), expected, rtol=1e-5, atol=1e-6)
    assert info.norms[3] == 0


def test_examples_that_are_not_finite_contribute_nothing():
    gradient = jax.jit(fnet.clipped_grad(loss, 0.5, has_aux=True, microbatch_size=1))
    bad = (BATCH[0], BATCH[1].at[2].set(np.nan), BATCH[2])
    total, info = gradient(PARAMS, *bad)
    expected, _ = gradient(PARAMS, *BATCH, mask=jnp.arange(B) != 2)
    assert info.nonfinite == 1
    chex.assert_trees_all_close(total, expected, rtol=1e-6)


def test_adds_to_mutable_arrays():
    gradient = fnet.clipped_grad(loss, 0.5, has_aux=True, microbatch_size=1)
    expected, _ = jax.jit(gradient)(PARAMS, *BATCH)

    @jax.jit
    def twice():
        totals = jax.tree.map(lambda p: jax.new_ref(jnp.zeros(p.shape)), PARAMS)
        for _ in range(2):
            gradient.add_to(totals, PARAMS, *BATCH)
        return jax.tree.map(jax.freeze, totals)

    chex.assert_trees_all_close(
        twice(), jax.tree.map(lambda g: 2 * g, expected), rtol=1e-6, atol=1e-7
    )


def test_no_array_per_example_has_the_size_of_the_table():
    rows, tokens = 50_000, jnp.zeros((8, 16), int)
    table = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    for size in (1, 8):
        gradient = fnet.clipped_grad(lambda p, t: p[t].sum((1, 2)), 1.0, microbatch_size=size)
        compiled = jax.jit(lambda p, t, f=gradient: f(p, t)[0]).lower(table, tokens).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * rows * 8 * 1.1


@pytest.mark.parametrize("seed", [3, 17])
def test_the_bound_holds_for_random_programs(monkeypatch, seed):
    def one_by_one(loss, clip):
        return fnet.clipped_grad(loss, clip, microbatch_size=1)

    monkeypatch.setattr(sensitivity, "clipped_grad", one_by_one)
    program = random_program(seed)
    moved = privacy.check_sensitivity(
        lambda p, x: run(program, p, x), program.params, program.x, trials=8, seed=seed
    )
    assert moved.worst <= 1.001, (program.layers, moved)


def squares(w, x):
    return jnp.square(jnp.tanh(x @ w)).sum(range(1, x.ndim))


def test_is_chosen_for_long_sequences_on_a_cpu():
    for length, size, platform, is_chosen in (
        (1, 8, "cpu", False), (4096, 8, "cpu", True), (4096, 1, "cpu", False), (4096, 8, "gpu", False),
    ):  # fmt: skip
        w, x = jnp.ones((16, 16)), jax.ShapeDtypeStruct((size, length, 16), jnp.float32)
        with traced_for(jax.sharding.AbstractDevice("", None, platform)):
            strategy = gradient_strategies(squares, w, x)
        assert (strategy == "one example at a time") == is_chosen


def test_is_not_chosen_with_a_width_effects_or_convolutions(monkeypatch):
    def printed(w, x):
        jax.debug.print("{}", x[0, 0, 0])
        return squares(w, x)

    w, x = jnp.ones((16, 16)), jax.ShapeDtypeStruct((8, 4096, 16), jnp.float32)
    assert gradient_strategies(squares, w, x, width=2) != "one example at a time"
    assert gradient_strategies(printed, w, x) != "one example at a time"

    def convolved(stride, w, x):
        patches = jax.lax.conv(jnp.swapaxes(x, 1, 2), jnp.ones((16, 16, 2)), (stride,), "SAME")
        return squares(w, x) + squares(w, jnp.swapaxes(patches, 1, 2))

    for stride, chosen in ((1, False), (2, True)):  # products of patches are no slow convolutions
        strategy = gradient_strategies(functools.partial(convolved, stride), w, x)
        assert (strategy == "one example at a time") == chosen
    monkeypatch.setattr(backward, "ELEMENTS_PER_EQUATION", 1e9)
    assert gradient_strategies(squares, w, x) != "one example at a time"


def test_rejects_a_microbatch_of_no_examples():
    with pytest.raises(ValueError, match="clipped_grad: microbatch_size must be at least 1, got 0"):
        fnet.clipped_grad(squares, 1.0, microbatch_size=0)


def test_one_example_at_a_time_needs_no_analysis():
    w, x = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((D,), (4, D)))

    def loss(w, x, **options):
        return jax.lax.map(lambda row: jnp.tanh(row @ w), x, **options)

    in_twos = functools.partial(loss, batch_size=2)
    total, info = fnet.clipped_grad(in_twos, 0.5, microbatch_size=1)(w, x)
    expected, same = fnet.clipped_grad(loss, 0.5)(w, x)
    chex.assert_trees_all_close((total, info.norms), (expected, same.norms), rtol=1e-5)
    with pytest.raises(ValueError, match="it is not known whether reshape"):
        fnet.clipped_grad(in_twos, 0.5)(w, x)
