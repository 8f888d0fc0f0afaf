"""What a refusal says: bytes that every plan needs, and why a part of a loss is not cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import memory

N, WIDTH = 128, 32


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


def test_arguments_and_results_are_what_every_plan_needs():
    def loss(w, x):
        return jnp.square(jnp.tanh(x @ w) @ w).mean()

    error, lowest = refused(loss, normal(0, 64, 64), normal(1, 512, 64))
    arguments = 4 * (64 * 64 + 512 * 64)
    assert arguments <= error.floor <= arguments + 4 * 64 * 64 + 1024 < lowest
    named = f"{memory.format_bytes(error.floor)} of it are arguments, results and constants"
    assert named in str(error)


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
