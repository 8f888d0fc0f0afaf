"""Parameters of which a loss uses parts: slices, and rows that indices select."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import B, Case, assert_clipped_like_a_loop, normal, tokens

from fnet.autodiff.per_example.clipped import clipped_grad, gradient_strategies
from fnet.memory import peak


def check_matches_a_loop(loss, params, *batch, tolerance=1e-5):
    """Compare the clipped sum with per-example gradients; return the strategies."""
    assert_clipped_like_a_loop(Case(loss, params, batch), tolerance=tolerance)
    return gradient_strategies(loss, params, *batch)


def summed(y):
    return jnp.square(jnp.tanh(y)).sum(range(1, y.ndim))


def layers_of_a_stack(p, x):
    for i in range(3):
        x = jnp.tanh(x @ p[i])
    return summed(x)


def heads(p, x):
    p = p.reshape(8, 3, 8)
    return summed(x @ p[:, 0]) + summed(x @ p[:, 1]) + summed(x @ p[:, 2])


def every_other_column(p, x):
    return summed(x @ p[:, ::2]) + summed(x @ p[:, 1::2])


@pytest.mark.parametrize(
    ("loss", "shape"),
    [(layers_of_a_stack, (3, 8, 8)), (heads, (8, 24)), (every_other_column, (8, 24))],
    ids=lambda a: getattr(a, "__name__", ""),
)
def test_disjoint_slices_are_not_materialized(loss, shape):
    assert check_matches_a_loop(loss, normal(0, *shape), normal(1, B, 8)) == "ghost norm"


def test_overlapping_slices_are_materialized():
    def loss(p, x):
        return summed(x @ p[:, :16]) + summed(x @ p[:, 8:])

    strategy = check_matches_a_loop(loss, normal(0, 8, 24), normal(1, B, 8))
    assert strategy == "materialized in chunks"


def test_slices_take_no_memory_of_the_whole_parameter_per_layer():
    p, x = jax.ShapeDtypeStruct((16, 128, 128), jnp.float32), np.zeros((64, 128), np.float32)

    def loss(p, x):
        for i in range(16):
            x = jnp.tanh(x @ p[i])
        return summed(x)

    compiled = jax.jit(clipped_grad(loss, 1.0)).lower(p, x).compile()
    assert peak(compiled).temporaries < 2 * 16 * 128 * 128 * 4


@pytest.mark.parametrize(
    ("gather", "batch_axis"),
    [
        (lambda p, t: jnp.take(p, t, axis=1, mode="clip"), 1),
        (lambda p, t: p[t, t // 2 + 4], 0),  # Some are outside, and have no gradient.
        (lambda p, t: jax.vmap(lambda t: jax.lax.dynamic_slice(p, (t[0], 0, 0), (1, 6, 6)))(t), 0),
        (lambda p, t: p.at[t, t + 4].get(mode="fill", fill_value=0), 0),
    ],
)
def test_gathers_of_whole_slices_are_embeddings(gather, batch_axis):
    def loss(p, t):
        rows = jnp.moveaxis(gather(p, t), batch_axis, 0)
        return summed(rows * jnp.arange(rows[0].size).reshape(rows.shape[1:]))

    assert check_matches_a_loop(loss, normal(0, 6, 6, 6), tokens(1, 6, B, 4)) == "ghost norm"


def test_gathers_with_batch_dimensions_match_a_loop():
    def loss(p, t):
        indices = jnp.broadcast_to(t[:, :1, None], (len(t), 1, 7))
        return summed(jax.vmap(lambda i: jnp.take_along_axis(p, i, 0, mode="clip"))(indices))

    check_matches_a_loop(loss, normal(0, 6, 7), tokens(1, 6, B, 4))


@pytest.mark.parametrize("slices", [(1, 3, 6)])
def test_gathers_of_parts_of_slices_match_a_loop(slices):
    def loss(p, t):
        return summed(jax.vmap(lambda t: jax.lax.dynamic_slice(p, (t[0], 0, 0), slices))(t))

    assert check_matches_a_loop(loss, normal(0, 6, 6, 6), tokens(1, 6, B, 4)) != "ghost norm"
