"""Parameters of which a loss uses parts: slices, and rows that indices select."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import B, Case, assert_clipped_like_a_loop, normal, tokens

from fnet.autodiff.per_example.clipped import clipped_grad, gradient_strategies
from fnet.autodiff.per_example.parameter_gradients import Box
from fnet.jaxpr import Layout
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


def column_blocks(p, x):
    q, k, v = (x @ p[:, 8 * i : 8 * i + 8] for i in range(3))
    return summed(q * k + v)


def transposed_blocks(p, x):
    a, b = p.T[:8], p.T[8:]
    return summed(x @ a.T) + summed(x @ b.T)


def heads(p, x):
    p = p.reshape(8, 3, 8)
    return summed(x @ p[:, 0]) + summed(x @ p[:, 1]) + summed(x @ p[:, 2])


def every_other_column(p, x):
    return summed(x @ p[:, ::2]) + summed(x @ p[:, 1::2])


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (layers_of_a_stack, (3, 8, 8)), (column_blocks, (8, 24)),
        (transposed_blocks, (8, 24)), (heads, (8, 24)), (every_other_column, (8, 24)),

    ],
    ids=lambda a: getattr(a, "__name__", ""),
)  # fmt: skip
def test_disjoint_slices_are_not_materialized(loss, shape):
    assert check_matches_a_loop(loss, normal(0, *shape), normal(1, B, 8)) == "ghost norm"


def test_overlapping_slices_are_materialized():
    def loss(p, x):
        return summed(x @ p[:, :16]) + summed(x @ p[:, 8:])

    strategy = check_matches_a_loop(loss, normal(0, 8, 24), normal(1, B, 8))
    assert strategy == "materialized in chunks"


def rounded(v):
    return v.astype(jnp.bfloat16).astype(jnp.float32)


@jax.checkpoint
def in_checkpoint(v):
    return v * 1.0


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "uses",
    [
        lambda p, x: x @ p["w"][:, ::2] + x @ (p["w"][:, ::2] + p["a"] @ p["b"]),
        lambda p, x: (
            x @ rounded(p["w"][:, 1::2]) + x @ in_checkpoint(p["w"].reshape(8, 8, 2)[..., 1])
        ),
        lambda p, x: (
            x @ in_checkpoint(p["w"].ravel()[:64].reshape(8, 8))
            + x @ rounded(p["w"].reshape(8, 8, 2)[..., 0])
        ),
        lambda p, x: (
            x @ rounded(p["w"][:, 4:12]) + x @ (p["w"].reshape(8, 8, 2)[..., 0] + p["a"] @ p["b"])
        ),
    ],
    ids=["sum_with_a_low_rank", "cast_and_in_a_checkpoint", "flat", "overlapping"],
)
def test_views_that_meet_data_in_different_ways_overlap(uses):
    params = {"w": normal(0, 8, 16), "a": normal(1, 8, 2), "b": normal(2, 2, 8)}
    # Autodiff rounds the gradient of a bfloat16 value to 2^-8 of it, fnet does not.
    check_matches_a_loop(
        lambda p, x: summed(uses(p, x)), params, normal(3, B, 4, 8), tolerance=2**-8
    )


def test_slices_take_no_memory_of_the_whole_parameter_per_layer():
    p, x = jax.ShapeDtypeStruct((16, 128, 128), jnp.float32), np.zeros((64, 128), np.float32)

    def loss(p, x):
        for i in range(16):
            x = jnp.tanh(x @ p[i])
        return summed(x)

    compiled = jax.jit(clipped_grad(loss, 1.0)).lower(p, x).compile()
    assert peak(compiled).temporaries < 2 * 16 * 128 * 128 * 4


def test_box_of_a_view():
    a = Layout.of((4, 6, 5))
    assert Box.of(a) == ((0, 0, 0), (4, 6, 5))
    assert Box.of(a[1]) == ((1, 0, 0), (1, 6, 5))
    assert Box.of(a[1:3, 2:, 4].transpose((1, 0))) == ((1, 2, 4), (2, 4, 1))
    assert Box.of(a.reshape((4, 30))[2:, :10]) == ((2, 0, 0), (2, 2, 5))
    assert Box.of(a.transpose((1, 0, 2)).reshape((24, 5))) == ((0, 0, 0), (4, 6, 5))
    for other in (
        a.reshape((4, 30))[2:, :11], a[::-1], a[:, ::2], a[:1].broadcast_to((4, 6, 5)), a[:0],
    ):  # fmt: skip
        assert Box.of(other) is None


def test_box_arranges_a_view_like_the_parameter():
    whole = jnp.arange(120).reshape(4, 6, 5)

    def view(a):
        return a[1:3, 2:, :3].transpose((2, 1, 0)).reshape((12, 2))

    layout = view(Layout.of(whole.shape))
    arranged = Box.of(layout).arrange(view(whole), layout)
    np.testing.assert_array_equal(arranged, whole[1:3, 2:, :3])


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("gather", "batch_axis"),
    [
        (lambda p, t: jax.vmap(jax.vmap(lambda i: p[i]))(t), 0),
        (lambda p, t: jnp.take(p, t, axis=1, mode="clip"), 1),
        (lambda p, t: jnp.take(p, t, axis=2), 2),
        (lambda p, t: p[t, t // 2 + 4], 0),  # Some are outside, and have no gradient.
        (lambda p, t: p[:, t, t // 2], 1),
        (lambda p, t: jax.vmap(lambda t: jax.lax.dynamic_slice(p, (t[0], 0, 0), (1, 6, 6)))(t), 0),
        (lambda p, t: p.at[t + 4].get(mode="fill", fill_value=0), 0),
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


@pytest.mark.sweep(6)
@pytest.mark.parametrize("slices", [(1, 3, 6), (2, 6, 6)])
def test_gathers_of_parts_of_slices_match_a_loop(slices):
    def loss(p, t):
        return summed(jax.vmap(lambda t: jax.lax.dynamic_slice(p, (t[0], 0, 0), slices))(t))

    assert check_matches_a_loop(loss, normal(0, 6, 6, 6), tokens(1, 6, B, 4)) != "ghost norm"
