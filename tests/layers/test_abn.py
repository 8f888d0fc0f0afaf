"""Golden equations: Rota Bulo et al. 2018 and mapillary/inplace_abn, checked through autodiff."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abn_cases import compiled
from hypothesis import given, settings
from hypothesis import strategies as st

import fnet
from fnet import layers
from fnet.layers.activations import ACTIVATIONS

INVERTIBLE = [name for name, a in ACTIVATIONS.items() if a.inverse]


def defining_formula(x, gamma, beta, *, activation="leaky_relu", param=0.01, eps=1e-5, axis=-1):
    """The equations of `fnet.abn` under ordinary autodiff."""
    axis %= x.ndim
    others = tuple(i for i in range(x.ndim) if i != axis)

    def spread(v):
        return jnp.expand_dims(v, others)

    mean = x.mean(others)
    var = jnp.square(x - spread(mean)).mean(others)
    z = (x - spread(mean)) / jnp.sqrt(spread(var) + eps)
    if gamma is not None:
        g = jnp.where(gamma < 0, -gamma, gamma) + eps
        z = z * spread(g) + spread(beta)
    return ACTIVATIONS[activation].forward(z, param), mean, var


def in_place(x, gamma, beta, *, activation="leaky_relu", param=0.01, **options):
    return fnet.abn(
        x, gamma, beta, None, None, train=True, activation=activation, activation_param=param,
        **options,
    )[0]  # fmt: skip


def inputs(shape, channels, seed=0, dtype=jnp.float64, spread=1.0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=shape) * spread + rng.normal(size=1), dtype)
    gamma = jnp.asarray(rng.normal(size=channels), dtype)
    beta = jnp.asarray(rng.normal(size=channels) * 0.5, dtype)
    dy = jnp.asarray(rng.normal(size=shape), dtype)
    return x, gamma, beta, dy


def pullback(f):
    """The vjp of ``f`` as a function of x, gamma, beta and dy."""
    return lambda x, gamma, beta, dy: jax.vjp(f, x, gamma, beta)[1](dy)


def gradients(f, *arguments):
    return jax.jit(pullback(f))(*arguments)


def both_gradients(f, g, *arguments):
    """The gradients of two functions, compiled in one program."""
    return compiled(pullback(f), pullback(g))(*arguments)


@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    samples=st.integers(2, 6),
    axis=st.integers(0, 4),
    activation=st.sampled_from(INVERTIBLE),
    param=st.floats(0.01, 2.0),
    affine=st.booleans(),
    seed=st.integers(0, 99),
)
def test_output_and_gradients_match_autodiff_on_random_shapes_and_axes(
    shape, samples, axis, activation, param, affine, seed
):
    shape = [samples, *shape]
    axis %= len(shape)
    if np.prod(shape) // shape[axis] < 2:
        shape.append(2)
    options = {"activation": activation, "param": param, "axis": axis}

    def with_gradients(f):
        def run(x, gamma, beta, dy):
            y, vjp = jax.vjp(f, x, *((gamma, beta) if affine else (None, None)))
            return y, vjp(dy)

        return run

    with jax.enable_x64(True):
        got, expected = compiled(
            with_gradients(lambda *a: in_place(*a, **options)),
            with_gradients(lambda *a: defining_formula(*a, **options)[0]),
        )(*inputs(shape, shape[axis], seed))
        chex.assert_trees_all_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_pass_saves_one_array_and_that_is_an_invertible_output(activation):
    x, gamma, beta, _ = inputs((8, 4, 4, 3), 3, dtype=jnp.float32)
    y, vjp = jax.vjp(functools.partial(in_place, activation=activation), x, gamma, beta)
    (saved,) = (leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "size", 0) >= x.size)
    if activation in INVERTIBLE:
        chex.assert_trees_all_equal(saved.reshape(y.shape), y)


@pytest.mark.parametrize("gamma", [0.0, -0.0, 1e-8, -1e-3])
@pytest.mark.usefixtures("float64")
def test_derivative_at_gamma_0_is_one_sided(gamma):
    x, _, _, dy = inputs((9, 1), 1)
    gamma, beta = jnp.asarray([gamma]), jnp.zeros(1)
    (_, dgamma, dbeta), (_, expected, expected_beta) = both_gradients(
        in_place, lambda *a: defining_formula(*a)[0], x, gamma, beta, dy
    )
    chex.assert_trees_all_close(dgamma, expected, rtol=1e-6)
    chex.assert_trees_all_close(dbeta, expected_beta, rtol=1e-10)


@pytest.mark.parametrize(("gamma", "error"), [(1.0, 1e-6), (1e-2, 1e-5), (1e-5, 5e-3)])
def test_gradient_of_a_tiny_gamma_has_the_documented_error(gamma, error):
    x, _, beta, dy = inputs((1024, 4), 4, seed=2, dtype=jnp.float32)
    gamma = jnp.full(4, gamma, jnp.float32)
    got = gradients(in_place, x, gamma, beta, dy)[1]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in (x, gamma, beta, dy)]
        exact = gradients(lambda *a: defining_formula(*a)[0], *wide)[1]
        assert float(jnp.abs(got - exact).max() / jnp.abs(exact).max()) < error


@pytest.mark.parametrize(("activation", "outlier"), [("elu", 1e6), ("softplus", 1e3)])
def test_gradients_are_finite_with_a_huge_outlier(activation, outlier):
    x, gamma, beta, dy = inputs((64, 2), 2, dtype=jnp.float32)
    gamma = gamma * 40
    x = x.at[0, 0].set(-outlier).at[1, 1].set(outlier)
    y = in_place(x, gamma, beta, activation=activation, param=1.0)
    grads = gradients(lambda *a: in_place(*a, activation=activation, param=1.0), x, gamma, beta, dy)
    chex.assert_tree_all_finite((y, grads))


def test_gradients_are_finite_for_a_saturated_elu():
    # z = -40 rounds to y = -alpha, whose inverse is minus infinity.
    x = jnp.asarray([[-1.0], [1.0], [1.0], [1.0]])
    gamma, beta = jnp.asarray([20.0]), jnp.asarray([-10.0])
    norm = functools.partial(in_place, activation="elu", param=1.0)
    assert float(norm(x, gamma, beta).min()) == -1.0
    chex.assert_tree_all_finite(gradients(norm, x, gamma, beta, jnp.ones_like(x)))


def test_constant_channel_gives_beta_and_finite_gradients():
    x, beta = jnp.full((6, 1), 3.0), jnp.asarray([0.5])
    y = in_place(x, jnp.ones(1), beta)
    chex.assert_trees_all_close(y, jnp.full((6, 1), 0.5))
    grads = gradients(in_place, x, jnp.ones(1), beta, jnp.arange(6.0)[:, None])
    chex.assert_tree_all_finite(grads)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float64])
@pytest.mark.usefixtures("float64")
def test_output_has_the_dtype_of_the_input_and_statistics_are_float32_or_wider(dtype):
    x, gamma, beta, dy = inputs((32, 3), 3)
    wide = jnp.promote_types(dtype, jnp.float32)
    narrow = x.astype(dtype), gamma.astype(wide), beta.astype(wide)
    (y, mean, var), (expected, _, _) = jax.jit(
        lambda narrow, exact: (
            fnet.abn(*narrow, jnp.zeros(3, wide), jnp.ones(3, wide), train=True),
            defining_formula(*exact),
        )
    )(narrow, (x, gamma, beta))
    chex.assert_type([y, mean, var], [dtype, wide, wide])
    tolerance = 4 * float(jnp.finfo(dtype).eps) + 1e-12
    chex.assert_trees_all_close(y.astype(jnp.float64), expected, rtol=tolerance, atol=tolerance)
    grads = gradients(in_place, *narrow, dy.astype(dtype))
    chex.assert_type(grads, [dtype, wide, wide])
    exact = gradients(lambda *a: defining_formula(*a)[0], x, gamma, beta, dy)
    for got, want in zip(grads, exact, strict=True):
        error = jnp.abs(got.astype(jnp.float64) - want).max() / jnp.abs(want).max()
        assert error < 16 * float(jnp.finfo(dtype).eps) + 1e-10


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_statistics_of_16_bit_inputs_are_computed_in_float32(dtype):
    x, _, _, _ = inputs((64, 3), 3, dtype=dtype)
    _, *got = fnet.abn(x, None, None, jnp.zeros(3), jnp.ones(3), train=True, decay=0.0)
    wide = np.asarray(x, np.float64)
    chex.assert_trees_all_close(got, [wide.mean(0), wide.var(0, ddof=1)], rtol=1e-5)


def test_running_statistics_are_updated_with_the_unbiased_variance():
    x, _, _, _ = inputs((5, 4, 3), 3, dtype=jnp.float32)
    mean0, var0 = jnp.full(3, 2.0), jnp.full(3, 4.0)
    (mean, var), pull = jax.vjp(
        lambda x: fnet.abn(x, None, None, mean0, var0, train=True, decay=0.75)[1:], x
    )
    assert not jnp.any(pull((mean0, var0))[0])  # they are no function of the batch to a gradient
    flat = np.asarray(x).reshape(-1, 3)
    chex.assert_trees_all_close(mean, 0.75 * 2.0 + 0.25 * flat.mean(0), rtol=1e-5)
    chex.assert_trees_all_close(var, 0.75 * 4.0 + 0.25 * flat.var(0, ddof=1), rtol=1e-5)


def test_cumulative_average_is_the_mean_over_batches():
    layer = layers.abn(2, decay=None)
    params, state = layer.init(jax.random.key(0))
    batches = [jax.random.normal(jax.random.key(i), (8, 2)) + i for i in range(3)]
    for x in batches:
        _, state = layer.apply(params, state, x, train=True)
    chex.assert_trees_all_close(
        state["running_mean"], jnp.stack([x.mean(0) for x in batches]).mean(0), atol=1e-5
    )
    assert float(state["count"]) == 3


def test_evaluation_uses_and_does_not_update_running_statistics():
    x, gamma, beta, dy = inputs((6, 3), 3, dtype=jnp.float32)
    mean, var = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([0.5, 1.0, 2.0])

    def frozen(x, gamma, beta):
        y, new_mean, new_var = fnet.abn(x, gamma, beta, mean, var, train=False)
        assert new_mean is mean
        assert new_var is var
        return y

    def formula(x, gamma, beta):
        z = (x - mean[None]) / jnp.sqrt(var + 1e-5)[None] * (jnp.abs(gamma) + 1e-5)[None]
        return jax.nn.leaky_relu(z + beta[None], 0.01)

    chex.assert_trees_all_close(*compiled(frozen, formula)(x, gamma, beta), atol=1e-5)
    got, expected = both_gradients(frozen, formula, x, gamma, beta, dy)
    chex.assert_trees_all_close(got, expected, rtol=1e-4)


def test_untracked_evaluation_uses_batch_statistics():
    x, gamma, beta, _ = inputs((6, 3), 3, dtype=jnp.float32)
    trained = fnet.abn(x, gamma, beta, None, None, train=True)
    evaluated = fnet.abn(x, gamma, beta, None, None, train=False)
    chex.assert_trees_all_equal(trained, evaluated)
    assert evaluated[1:] == (None, None)


# sigmoid maps a padded 0 to 1/2, which must be masked again.
@pytest.mark.parametrize(
    ("activation", "train"), [("leaky_relu", True), ("sigmoid", True), ("sigmoid", False)]
)
@pytest.mark.usefixtures("float64")
def test_masked_batch_matches_a_smaller_batch(activation, train):
    x, gamma, beta, dy = (np.asarray(a) for a in inputs((7, 4, 3), 3))
    mask = np.asarray([True, False, True, True, False, True, True])
    padded = np.where(mask[:, None, None], x, np.nan)

    @jax.jit
    def run(x, gamma, beta, dy, mask=None):
        def norm(x, gamma, beta):
            y, *statistics = fnet.abn(
                x, gamma, beta, jnp.zeros(3), jnp.ones(3),
                train=train, activation=activation, mask=mask,
            )  # fmt: skip
            return y, statistics

        y, vjp, statistics = jax.vjp(norm, x, gamma, beta, has_aux=True)
        return y, statistics, vjp(dy)

    y, statistics, (dx, *parameters) = run(padded, gamma, beta, dy, mask)
    small, small_statistics, (small_dx, *small_parameters) = run(x[mask], gamma, beta, dy[mask])
    y, dx = np.asarray(y), np.asarray(dx)
    chex.assert_trees_all_close(y[mask], small, atol=1e-12)
    chex.assert_trees_all_close(statistics, small_statistics, atol=1e-12)
    chex.assert_trees_all_equal(y[~mask], np.zeros((2, 4, 3)))
    chex.assert_trees_all_close(dx[mask], small_dx, atol=1e-12)
    chex.assert_trees_all_close(parameters, small_parameters, atol=1e-12)
    chex.assert_trees_all_equal(dx[~mask], np.zeros((2, 4, 3)))


@pytest.mark.usefixtures("float64")
def test_vmap_matches_a_loop():
    x, gamma, beta, dy = inputs((3, 6, 2), 2)
    vjp = pullback(lambda x, g, b: in_place(x, g, b, activation="elu", param=1.0))
    grads = jax.jit(jax.vmap(vjp, (0, None, None, 0)))(x, gamma, beta, dy)
    one_by_one = [jax.jit(vjp)(x[i], gamma, beta, dy[i]) for i in range(3)]
    chex.assert_trees_all_close(
        grads, jax.tree.map(lambda *g: np.stack(g), *one_by_one), atol=1e-12
    )


BAD = [
    ({"activation_param": 0.0}, ValueError, r"slope must be > 0 to be inverted, got 0.0; use activation=\"relu\""),
    ({"activation": "elu", "activation_param": -1.0}, ValueError, r"alpha must be > 0 to be inverted, got -1.0"),
    ({"activation": "swish"}, ValueError, r"expected one of .*'silu'.*, got 'swish'"),
    ({"x": jnp.ones((1, 3))}, ValueError, r"one sample per channel .*: x has shape \(1, 3\), with channels on axis 1"),
    ({"x": jnp.ones((0, 3))}, ValueError, r"an empty batch .*: x has shape \(0, 3\)"),
    ({"x": jnp.ones(3)}, ValueError, r"rank >= 2 and an axis -1, got shape \(3,\)"),
    ({"axis": 2}, ValueError, r"an axis 2, got shape \(4, 3\)"),
    ({"x": jnp.ones((4, 3), int)}, TypeError, "x must be floating, got int32"),
    ({"gamma": jnp.ones(3, jnp.float16)}, TypeError, "gamma must be float32 or wider, got float16"),
    ({"beta": None}, ValueError, "got gamma without beta; give both or neither"),
    ({"running_mean": None}, ValueError, "got running_var without running_mean"),
    ({"gamma": jnp.ones(4), "beta": jnp.ones(4)}, ValueError, r"gamma must have shape \(3,\) .* got \(4,\)"),
    ({"decay": None}, ValueError, r"pass decay=1 - 1 / count"),
    ({"mask": jnp.ones(3, bool)}, ValueError, r"mask must be bool of shape \(4,\), got bool \(3,\)"),
    ({"mask": jnp.ones(4)}, ValueError, r"mask must be bool of shape \(4,\), got float32 \(4,\)"),
    ({"axis": 0, "mask": jnp.ones(4, bool), "gamma": None, "beta": None}, ValueError, "a mask needs examples on axis 0"),
]  # fmt: skip


def test_rejects_invalid_arguments():
    for change, error, message in BAD:
        arguments = {
            "x": jnp.ones((4, 3)),
            "gamma": jnp.ones(3),
            "beta": jnp.zeros(3),
            "running_mean": jnp.zeros(3),
            "running_var": jnp.ones(3),
        }
        with pytest.raises(error, match=message):
            fnet.abn(**(arguments | {"train": True} | change))


def test_batch_of_padding_only_does_not_update_running_statistics():
    mean, var = jnp.array([1.0, -2.0, 3.0]), jnp.array([0.5, 1.0, 2.0])
    y, *after = fnet.abn(
        jnp.ones((4, 3)), None, None, mean, var, train=True, mask=jnp.zeros(4, bool)
    )
    chex.assert_trees_all_equal(y, jnp.zeros((4, 3)))
    chex.assert_trees_all_equal(after, [mean, var])


def test_empty_batch_can_be_evaluated():
    zeros, ones = jnp.zeros(3), jnp.ones(3)
    for mask in (None, jnp.ones(0, bool)):
        y, *_ = fnet.abn(jnp.ones((0, 3)), ones, zeros, zeros, ones, train=False, mask=mask)
        chex.assert_shape(y, (0, 3))


def test_layer_rejects_an_invalid_slope_at_construction():
    with pytest.raises(ValueError, match=r"slope must be > 0 to be inverted, got -0.1"):
        layers.abn(3, activation_param=-0.1)


def test_underflowed_float16_output_keeps_the_negative_slope():
    # -1e-6 times the slope 0.01 underflows in float16.
    y = jnp.asarray([-0.0, 0.0, 1.0, -1.0], jnp.float16)
    _, slope = ACTIVATIONS["leaky_relu"].inverse(y, 0.01)
    chex.assert_trees_all_close(slope, jnp.asarray([0.01, 1.0, 1.0, 0.01], jnp.float16))


def test_saturated_16_bit_elu_is_inverted_at_its_saturation_point():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 1)), jnp.bfloat16)
    gamma, beta, options = jnp.full(1, 4.0), jnp.zeros(1), {"activation": "elu", "param": 1.0}
    y, vjp = jax.vjp(lambda x: in_place(x, gamma, beta, **options), x)
    wide, exact = jax.vjp(lambda x: defining_formula(x, gamma, beta, **options)[0], x.astype(float))
    (dx,), (expected,) = vjp(y), exact(wide)
    error = jnp.linalg.norm(dx.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    assert error < 0.35
