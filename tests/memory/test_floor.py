"""What every plan of a step holds, and why a part of a loss is not cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_losses import allow_rank_promotion
from hypothesis import HealthCheck, given, settings
from random_programs import ANY_PROGRAMS, BATCH, PARAMS, run

from benchmarks.foreign_programs import PROGRAMS
from fnet import memory

N, WIDTH = 128, 32
FOREIGN = (
    "LSTM, 512 steps", "CLIP", "batch norm by hand", "ranking in the batch", "a number in the batch",
)  # fmt: skip
QUICK = settings(
    max_examples=3, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
allow_rank_promotion = pytest.fixture(allow_rank_promotion)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def refused(loss, params, *batch):
    """The refusal of the smallest budget, and the lowest peak that was compiled."""
    peaks = []
    with pytest.raises(memory.BudgetError) as error:
        memory.remat_to_fit(
            loss, params, *batch, optimizer=optax.sgd(0.1), budget=1,
            progress=lambda c: peaks.append(c.peak.total),
        )  # fmt: skip
    return error.value, min(peaks)


def test_a_product_that_mixes_rows_is_named_with_its_line_and_shapes():
    def loss(w, x):
        return jnp.square(jnp.sort(jnp.tanh(x @ w), axis=0) @ w).mean()

    error, lowest = refused(loss, normal(0, WIDTH, WIDTH), normal(1, N, WIDTH))
    arguments = 4 * (WIDTH * WIDTH + N * WIDTH)
    assert arguments + 2 * 4 * N * WIDTH <= error.floor <= lowest
    assert f"dot_general at {__file__}" in str(error)
    assert f"f32[{N},{WIDTH}], f32[{WIDTH},{WIDTH}] -> f32[{N},{WIDTH}]" in str(error)


def test_a_cond_holds_the_largest_product_of_its_branches():
    def loss(w, x):
        x = jnp.sort(jnp.tanh(x @ w), axis=0)
        pairs = jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: jnp.zeros((N, N)), x)
        return jnp.square(pairs).mean()

    error, lowest = refused(loss, normal(0, WIDTH, WIDTH), normal(1, N, WIDTH))
    assert 4 * (WIDTH * WIDTH + N * WIDTH) + 4 * N * N <= error.floor <= lowest
    assert f"-> f32[{N},{N}]" in str(error)


def test_gradients_are_named_where_they_are_the_largest():
    def loss(w, x):
        return jnp.square(jnp.tanh(x @ w) @ w).mean()

    error, _ = refused(loss, normal(0, 64, 64), normal(1, 512, 64))
    assert "16.00 KiB for gradients of f32[64,64]" in str(error)


def with_sort(w, x):
    for axis in (0, 1) * 3:
        x = jnp.sort(x, axis=axis)
    return jnp.square(x @ w).mean()


def with_effect(w, x):
    def step(h, _):
        h = jnp.tanh(h @ w)
        jax.debug.print("{}", h.sum())
        return h, None

    return jnp.square(jax.lax.scan(step, x, None, 3)[0]).mean()


@pytest.mark.parametrize(
    ("loss", "rows", "reason"),
    [
        (with_sort, N, "sort mixes rows"),
        (with_effect, N, "scan at .* has an effect"),
        (with_sort, 1, "the batch has one row$"),
    ],
)
def test_the_reason_is_that_of_the_largest_arrays(loss, rows, reason):
    error, _ = refused(loss, normal(0, WIDTH, WIDTH), normal(1, rows, WIDTH))
    with pytest.raises(memory.BudgetError, match=f"not computed in chunks, because {reason}"):
        raise error


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", FOREIGN)
def test_no_plan_is_below_the_floor(name, allow_rank_promotion):
    with jax.numpy_dtype_promotion("standard"), jax.debug_key_reuse(False):
        program = PROGRAMS[name]()
        error, lowest = refused(program.loss, program.params, program.batch)
    assert 0 < error.floor <= lowest


def test_no_plan_of_a_random_program_is_below_the_floor(allow_rank_promotion):
    @QUICK
    @given(ANY_PROGRAMS)
    def check(program):
        def loss(params, *batch):
            leaves = jax.tree.leaves(run(program, params, *batch))
            return sum(jnp.sum(jnp.sin(a)) for a in leaves if jnp.issubdtype(a.dtype, jnp.floating))

        error, lowest = refused(loss, PARAMS, *BATCH)
        assert error.floor <= lowest

    with jax.debug_key_reuse(False):
        check()
