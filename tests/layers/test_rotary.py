"""Golden equations: Su et al. 2021, as rotations of the complex plane."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet.layers.rotary import rotary

B, T, H, D = 2, 9, 3, 8


def inputs(dtype=np.float64, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, H, D)), dtype)


def as_complex(x):
    return np.asarray(x[..., : D // 2]) + 1j * np.asarray(x[..., D // 2 :])


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_rotary_matches_complex_rotation(scale, float64):
    x, positions = inputs(), jnp.arange(T) + 5
    theta = 10000.0 ** (-2 * np.arange(D // 2) / D)
    rotated = scale * as_complex(x) * np.exp(1j * np.asarray(positions)[:, None, None] * theta)
    y = as_complex(rotary(x, positions, scale=scale))
    np.testing.assert_allclose(y, rotated, rtol=1e-12, atol=1e-12)


def test_interleaved_pairs_are_those_of_halves_in_another_order():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    order = jnp.array([0, 2, 4, 1, 3, 5, 6, 7])  # of the first six features, in three pairs
    frequencies = (1.0, 0.3, 0.1)
    y = rotary(x, jnp.arange(5), frequencies, interleaved=True)
    expected = rotary(x[..., order], jnp.arange(5), frequencies)
    chex.assert_trees_all_close(y[..., order], expected, atol=1e-6)


def test_rotary_preserves_norms_and_position_0(float64):
    x = inputs()
    chex.assert_trees_all_close(
        jnp.linalg.norm(rotary(x, jnp.arange(T)), axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-12
    )
    chex.assert_trees_all_equal(rotary(x, jnp.zeros(T, int)), x)


def test_scores_depend_only_on_relative_positions(float64):
    q, k = inputs(), inputs(seed=1)

    def scores(query_offset, key_offset):
        offsets = (q, query_offset), (k, key_offset)
        rotated = (rotary(a, jnp.arange(T) + offset, 100.0) for a, offset in offsets)
        return jnp.einsum("bthd,bshd->bhts", *rotated)

    chex.assert_trees_all_close(scores(0, 0), scores(37, 37), rtol=1e-9, atol=1e-9)
    assert float(abs(scores(1, 0) - scores(0, 0)).max()) > 0.1


def test_positions_may_be_per_example_and_fractional(float64):
    x = inputs()
    positions = jnp.asarray(np.random.default_rng(2).uniform(0, 50, size=(B, T)))
    each = jnp.concatenate([rotary(x[i : i + 1], positions[i]) for i in range(B)])
    chex.assert_trees_all_close(rotary(x, positions), each, rtol=1e-12)


def test_angles_are_float32_for_bfloat16_inputs():
    x, positions = inputs(jnp.bfloat16), jnp.arange(T) + 30_001  # not representable in bfloat16
    y = rotary(x, positions)
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_close(
        y.astype(np.float32), rotary(x.astype(np.float32), positions), atol=2e-2
    )


def test_backward_pass_saves_nothing_of_the_size_of_x():
    x = inputs(np.float32)
    _, back = jax.vjp(lambda x: rotary(x, jnp.arange(T)), x)
    assert sum(a.size for a in jax.tree.leaves(back)) <= 2 * T * D // 2
    chex.assert_trees_all_close(back(x)[0], rotary(x, -jnp.arange(T)), rtol=1e-5, atol=1e-6)


def test_rejects_invalid_arguments():
    x = inputs(np.float32)
    with pytest.raises(ValueError, match=r"even D, got \(2, 9, 3, 7\)"):
        rotary(x[..., :7], jnp.arange(T))
    with pytest.raises(ValueError, match=r"expected x \[B, T, H, D\] .* got \(9, 3, 8\)"):
        rotary(x[0], jnp.arange(T))
    with pytest.raises(
        ValueError, match=r"positions must have shape \(9,\) or \(2, 9\).*got \(8,\)"
    ):
        rotary(x, jnp.arange(8))
    with pytest.raises(ValueError, match=r"base must be > 0, got 0\.0"):
        rotary(x, jnp.arange(T), 0.0)
