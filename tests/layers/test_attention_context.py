"""The attention context matches its formula and its documented properties."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from rounding import one_rounding

import fnet
from fnet.layers.attention_context import _sum_over_examples

update = jax.jit(fnet.update_context, static_argnames="rate")
apply = jax.jit(fnet.apply_context)
BOUND = np.tanh(1.0)  # 0.76159


def arrays(*shape, n=1, dtype=jnp.float32):
    rng = np.random.default_rng(7)
    made = [jnp.asarray(rng.standard_normal(shape).astype(dtype)) for _ in range(n)]
    return made if n > 1 else made[0]


def square(d=6, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(3).uniform(-0.5, 0.5, (d, d)).astype(dtype))


def naive_apply(x, context, strength):
    return x + strength / x.shape[-1] * (x @ context)


def naive_update(context, x, mixed, rate=0.01):
    """The formula in numpy float64, example by example."""
    x, mixed, context = (np.asarray(a, np.float64) for a in (x, mixed, context))
    t = x.shape[1]
    stride = max(1, t // min(t, 32))
    seen = []
    for rows, other in zip(x, mixed, strict=True):
        a, b = (r[::stride][:32] - r[::stride][:32].mean(0) for r in (rows, other))
        denominator = np.outer(np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=0))
        known = denominator > 1e-12
        corr = np.where(known, a.T @ b / np.where(known, denominator, 1), 0)
        seen.append(np.tanh(corr))
    return (1 - rate) * context + rate * np.mean(seen, 0)


@pytest.mark.parametrize("t", [1, 2, 31, 33, 64, 100])
def test_update_matches_the_formula(t):
    x, mixed = arrays(3, t, 6, n=2)
    new = update(square(), x, mixed)
    chex.assert_trees_all_close(new, naive_update(square(), x, mixed).astype("f"), atol=1e-6)


def test_update_matches_the_formula_in_float64(float64):
    x, mixed = arrays(3, 70, 6, n=2, dtype=jnp.float64)
    context = square(dtype=jnp.float64)
    new = update(context, x, mixed, rate=0.3)
    np.testing.assert_allclose(new, naive_update(context, x, mixed, rate=0.3), atol=1e-12)


def test_apply_and_its_gradients_match_the_formula():
    x, dy = arrays(2, 5, 6, n=2)
    strength = jnp.float32(1.7)

    def gradients(f):
        return jax.grad(lambda x, s: (f(x, square(), s) * dy).sum(), argnums=(0, 1))(x, strength)

    chex.assert_trees_all_close(
        apply(x, square(), strength), naive_apply(x, square(), strength), rtol=1e-5
    )
    chex.assert_trees_all_close(gradients(fnet.apply_context), gradients(naive_apply), rtol=1e-5)


def test_gradients_match_finite_differences(float64):
    x, dy = arrays(5, 6, n=2, dtype=jnp.float64)
    context = square(dtype=jnp.float64)
    jax.test_util.check_grads(
        lambda x, s: (apply(x, context, s) * dy).sum(),
        (x, jnp.float64(0.7)),
        order=2,
        modes=("fwd", "rev"),
        atol=1e-8,
        rtol=1e-8,
    )


def test_no_gradient_flows_into_or_through_a_context():
    x = arrays(2, 40, 6)
    into = jax.grad(lambda c: apply(x, c, jnp.float32(1)).sum())(square())
    chex.assert_trees_all_equal(into, jnp.zeros((6, 6)))
    through = jax.grad(lambda x: update(square(), x, 2 * x).sum())(x)
    chex.assert_trees_all_equal(through, jnp.zeros_like(x))


def test_backward_pass_has_one_product_and_saves_only_x_and_the_context():
    x = arrays(8, 6)
    _, pull = jax.vjp(lambda x, s: apply(x, square(), s), x, jnp.float32(1))
    saved = [a.shape for a in jax.tree.leaves(pull) if getattr(a, "ndim", 0) == 2]
    assert sorted(saved) == [(6, 6), (8, 6)]
    products = str(jax.make_jaxpr(pull)(x)).count("dot_general")
    # <x, g> is a sum of products, not a matrix product.
    assert products == 1


@pytest.mark.parametrize("value", [0.1, 1e8, -3.7])
def test_constant_columns_give_0(value):
    x, mixed = arrays(2, 40, 6, n=2)
    new = update(jnp.zeros((6, 6)), x.at[..., 2].set(value), mixed)
    assert (new[2] == 0).all()
    assert (new[jnp.arange(6) != 2] != 0).all()


@given(st.integers(0, 10**6), st.sampled_from([1e-20, 1e-3, 1.0, 1e3, 1e25]), st.floats(0, 1))
@settings(max_examples=15)
def test_entries_stay_within_the_bound(seed, size, rate):
    x = size * jax.random.normal(jax.random.key(seed), (2, 35, 4))
    context = BOUND * jax.random.uniform(jax.random.key(seed + 1), (4, 4), minval=-1)
    assert jnp.abs(update(context, x, x, rate=rate)).max() <= BOUND + 1e-6


def test_masked_examples_and_tokens_are_ignored():
    x, mixed = arrays(3, 20, 6, n=2)
    two = update(square(), x[:2], mixed[:2])
    mask = jnp.array([True, True, False])
    chex.assert_trees_all_close(
        update(square(), x.at[2].set(jnp.nan), mixed, mask=mask), two, atol=1e-7
    )
    chex.assert_trees_all_equal(update(square(), x, mixed, mask=jnp.zeros(3, bool)), square())
    short = update(square(), x[:, :11], mixed[:, :11])
    token_mask = jnp.broadcast_to(jnp.arange(20) < 11, (3, 20))
    padded = update(square(), x.at[:, 11:].set(99.0), mixed, mask=token_mask)
    chex.assert_trees_all_close(padded, short, atol=1e-7)


def test_empty_batch_does_not_change_the_context():
    nothing = jnp.ones((0, 4, 6))
    for mask in (None, jnp.ones(0, bool), jnp.ones((0, 4), bool)):
        chex.assert_trees_all_equal(update(square(), nothing, nothing, mask=mask), square())


def test_nonfinite_rows_count_as_zero():
    x, mixed = arrays(2, 20, 6, n=2)
    bad = update(square(), x.at[0, 3, 1].set(jnp.nan), mixed)
    chex.assert_trees_all_close(bad, update(square(), x.at[0, 3].set(0.0), mixed), atol=1e-7)
    assert jnp.isnan(apply(x.at[0, 3, 1].set(jnp.nan), square(), jnp.float32(1))).any()


def test_columns_whose_squares_overflow_have_correlation_0():
    x, mixed = arrays(1, 20, 6, n=2)
    got = update(jnp.zeros((6, 6)), x.at[..., 2].multiply(1e25), mixed.at[..., 3].multiply(1e25))
    chex.assert_tree_all_finite(got)
    assert (got[2] == 0).all()
    assert (got[:, 3] == 0).all()


def test_denominator_threshold_separates_zero_from_correlation():
    x, mixed = arrays(1, 20, 6, n=2)
    plain = update(jnp.zeros((6, 6)), x, mixed)
    faint = update(jnp.zeros((6, 6)), 1e-7 * x, 1e-7 * mixed)  # column norms of about 4e-7
    assert (faint == 0).all()
    small = update(jnp.zeros((6, 6)), 1e-5 * x, 1e-5 * mixed)
    chex.assert_trees_all_close(small, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("examples", "width"), [(6, 512), (5, 600)])
def test_sum_over_groups_of_examples_matches_one_sum(examples, width):
    x, y = arrays(examples, 8, width, n=2)
    each = sum(_sum_over_examples(x[i : i + 1], y[i : i + 1]) for i in range(examples))
    chex.assert_trees_all_close(_sum_over_examples(x, y), each, atol=1e-5)


def test_sum_over_groups_inside_shard_map_matches_one_device():
    x, y = arrays(10, 8, 600, n=2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    f = lambda x, y: jax.lax.psum(_sum_over_examples(x, y), "data")  # noqa: E731
    got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=everywhere))(x, y)
    chex.assert_trees_all_close(got, _sum_over_examples(x, y), atol=1e-5)


def test_memory_is_bounded_by_a_group_of_examples():
    x = jax.ShapeDtypeStruct((64, 32, 512), jnp.float32)
    context = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    compiled = jax.jit(fnet.update_context).lower(context, x, x).compile()
    whole = 64 * 512 * 512 * 4
    assert fnet.memory.peak(compiled).temporaries < whole / 3


def test_context_is_float32_for_bfloat16_activations():
    narrow = [a.astype(jnp.bfloat16) for a in arrays(2, 20, 6, n=2)]
    x, mixed = (a.astype(jnp.float32) for a in narrow)
    new, y = update(square(), *narrow), apply(narrow[0], square(), jnp.float32(1))
    chex.assert_type([new, y], [jnp.float32, jnp.bfloat16])
    chex.assert_trees_all_close(new, update(square(), x, mixed), atol=1e-6)
    expected = naive_apply(x, square(), 1)
    two = 2 * one_rounding(y.dtype)  # of the input and of the result
    np.testing.assert_allclose(np.float32(y), expected, two, two)


def test_rejects_invalid_arguments():
    for call, message in (
        (
            lambda: fnet.apply_context(jnp.ones((3, 4)), square(), jnp.ones(())),
            r"\(4, 4\).*\(6, 6\)",
        ),
        (lambda: fnet.apply_context(jnp.ones((3, 6)), square(), jnp.ones(6)), "must be a scalar"),
        (lambda: fnet.update_context(square(), jnp.ones((3, 4)), jnp.ones((3, 4))), r"\(4, 4\)"),
        (
            lambda: fnet.update_context(square(), jnp.ones((3, 6)), jnp.ones((2, 6))),
            r"got \(3, 6\) and \(2, 6\)",
        ),
        (
            lambda: fnet.update_context(square(), jnp.ones((3, 6)), jnp.ones((3, 6)), rate=2),
            r"rate must be in \[0, 1\], got 2",
        ),
        (
            lambda: fnet.update_context(
                square(), jnp.ones((2, 3, 6)), jnp.ones((2, 3, 6)), mask=jnp.ones(3, bool)
            ),
            r"mask must be bool of shape \(2,\) or \(2, 3\), got bool \(3,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_rejects_integer_inputs():
    with pytest.raises(TypeError, match="x must be floating, got int32"):
        fnet.apply_context(jnp.ones((3, 6), int), square(), jnp.ones(()))


def test_input_without_batch_axis_matches_a_batch_of_one():
    x, mixed = jax.random.normal(jax.random.key(0), (2, 6, 4))
    mask, context = jnp.arange(6) < 4, jnp.full((4, 4), 0.1)
    one = fnet.update_context(context, x, mixed, mask=mask)
    batch = fnet.update_context(context, x[None], mixed[None], mask=mask[None])
    chex.assert_trees_all_equal(one, batch)
    assert not jnp.array_equal(one, fnet.update_context(context, x, mixed))
