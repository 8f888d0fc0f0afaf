"""A folded layer equals the layer followed by its batch norm in evaluation mode."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import layers
from fnet.layers import fold

TOLERANCE = 1e-5  # of the largest output


def trained_abn(linear, x, *, activation="leaky_relu", affine=True, eps=1e-5, steps=3):
    """A linear layer, the batch norm after it, and running statistics of a few train steps."""
    params, _ = linear.init(jax.random.key(0))
    if "bias" in params:
        params["bias"] = jax.random.normal(jax.random.key(1), params["bias"].shape)
    channels = params["kernel"].shape[-1]
    norm = layers.abn(channels, activation=activation, affine=affine, eps=eps)
    norm_params, state = norm.init(jax.random.key(2))
    if affine:
        gamma = jax.random.normal(jax.random.key(3), (channels,))  # of both signs
        norm_params["gamma"] = gamma.at[0].set(0.0).at[1].set(-0.7)
        norm_params["beta"] = jax.random.normal(jax.random.key(4), (channels,))
    step = jax.jit(
        lambda state, x: norm.apply(
            norm_params, state, linear.apply(params, {}, x, train=True)[0], train=True
        )[1]
    )
    for i in range(steps):
        state = step(state, x * (1 + 0.3 * i) + 0.2 * i)
    return params, norm, norm_params, state


def fold_params(params, norm_params, state, **options):
    """`fold` for the params of a linear layer and the params and state of its norm."""
    affine = {"gamma": None, "beta": None} | norm_params
    kernel, bias = fold(params["kernel"], params.get("bias"), **affine, **state, **options)
    return {"kernel": kernel, "bias": bias}


def assert_close_to_the_largest(got, expected):
    chex.assert_trees_all_close(got, expected, rtol=0.0, atol=TOLERANCE * jnp.abs(expected).max())


def assert_folded_equals_unfolded(make, x, *, bias, activation="leaky_relu", **options):
    @jax.jit
    def folded_and_unfolded(x):
        linear = make(bias=bias)
        params, norm, norm_params, state = trained_abn(linear, x, activation=activation, **options)
        y, _ = linear.apply(params, {}, x, train=False)
        expected, _ = norm.apply(norm_params, state, y, train=False)

        folded = fold_params(params, norm_params, state, eps=options.get("eps", 1e-5))
        z, _ = make(bias=True).apply(folded, {}, x, train=False)
        got, _ = layers.activation(activation).apply({}, {}, z, train=False)
        return got, expected

    assert_close_to_the_largest(*folded_and_unfolded(x))


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({"window": (3, 1), "groups": 2}, True),
        ({"window": 3, "groups": 4, "stride": 2}, False),
    ],
)
def test_folded_convolution_equals_convolution_and_norm(options, bias):
    x = jax.random.normal(jax.random.key(5), (4, 7, 6, 4))
    assert_folded_equals_unfolded(
        lambda bias: layers.conv(4, 8, **options, bias=bias), x, bias=bias
    )


@pytest.mark.parametrize(("activation", "bias"), [("identity", True), ("gelu", False)])
def test_folded_dense_layer_equals_dense_layer_and_norm(activation, bias):
    x = jax.random.normal(jax.random.key(5), (16, 5))
    assert_folded_equals_unfolded(
        lambda bias: layers.dense(5, 6, bias=bias), x, bias=bias, activation=activation
    )


def test_norm_without_gamma_folds_with_scale_1():
    x = jax.random.normal(jax.random.key(5), (16, 5))
    make = lambda bias: layers.dense(5, 6, bias=bias)  # noqa: E731
    assert_folded_equals_unfolded(make, x, bias=True, affine=False, eps=0.1)
    kernel, bias = fold(jnp.eye(2), None, None, None, jnp.zeros(2), jnp.full(2, 0.75), eps=0.25)
    chex.assert_trees_all_equal((kernel, bias), (jnp.eye(2), jnp.zeros(2)))


def test_eps_is_added_to_the_variance_and_to_gamma():
    x = jax.random.normal(jax.random.key(5), (16, 5))
    make = lambda bias: layers.dense(5, 6, bias=bias)  # noqa: E731
    assert_folded_equals_unfolded(make, x, bias=True, eps=0.1)


def test_plain_batch_norm_folds_with_signed_gamma():
    generator = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(generator.normal(size=(5, 4)), jnp.float32)}
    norm_params = {"gamma": jnp.asarray([1.5, -0.7, 0.0, 0.3]), "beta": jnp.arange(4.0)}
    state = {"running_mean": jnp.arange(4.0) - 1, "running_var": jnp.arange(4.0) + 0.5}
    x = jnp.asarray(generator.normal(size=(6, 5)), jnp.float32)
    norm = layers.batch_norm(4, eps=0.1)
    expected, _ = norm.apply(norm_params, state, x @ params["kernel"], train=False)
    folded = fold_params(params, norm_params, state, eps=0.1, norm="batch")
    assert_close_to_the_largest(x @ folded["kernel"] + folded["bias"][None], expected)


def test_abn_folds_with_the_magnitude_of_gamma_plus_eps():
    kernel, vectors = jnp.eye(3), (jnp.zeros(3), jnp.ones(3))
    gamma = jnp.asarray([2.0, -2.0, 0.0])
    folded, bias = fold(kernel, None, gamma, jnp.asarray([1.0, 2.0, 3.0]), *vectors, eps=1e-3)
    scale = (np.asarray([2.0, 2.0, 0.0]) + 1e-3) / np.sqrt(1 + 1e-3)
    chex.assert_trees_all_close(folded, jnp.diag(jnp.asarray(scale, jnp.float32)), rtol=1e-6)
    chex.assert_trees_all_close(bias, jnp.asarray([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
@pytest.mark.usefixtures("float64")
def test_result_has_the_dtype_of_the_kernel_and_is_rounded_once(dtype):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(3, 3, 2, 4)), dtype)
    gamma, beta, mean, var = (
        jnp.asarray(rng.uniform(0.5, 2.0, size=4), jnp.float32) for _ in "1234"
    )
    got = fold(kernel, None, gamma, beta, mean, var)
    chex.assert_type(got, dtype)
    wide = [a.astype(jnp.float64) for a in (kernel, gamma, beta, mean, var)]
    exact = fold(wide[0], None, *wide[1:])
    rounding = float(jnp.finfo(dtype).eps) + (1e-6 if dtype == jnp.float32 else 0)
    chex.assert_trees_all_close(
        [a.astype(jnp.float64) for a in got], list(exact), rtol=rounding, atol=rounding
    )


def test_numpy_arrays_fold_to_the_same_values():
    arrays = [np.linspace(0.1, 1.0, 6, dtype=np.float32).reshape(2, 3)]
    arrays += [np.linspace(0.5, 1.5, 3, dtype=np.float32) + i for i in range(5)]
    chex.assert_trees_all_equal(fold(*arrays), fold(*(jnp.asarray(a) for a in arrays)))


def test_stacked_layers_fold_under_vmap():
    stacked = [jnp.linspace(0.1, 1.0, 12).reshape(2, 2, 3)]
    stacked += [jnp.linspace(0.5, 1.5, 6).reshape(2, 3) + i for i in range(5)]
    one_by_one = [fold(*(a[i] for a in stacked)) for i in range(2)]
    chex.assert_trees_all_close(
        jax.vmap(fold)(*stacked), jax.tree.map(lambda *a: jnp.stack(a), *one_by_one), rtol=1e-6
    )


BAD = [
    ({"kernel": jnp.ones(3)}, ValueError, r"kernel must have rank >= 2, channels last, got \(3,\)"),
    ({"kernel": jnp.ones((2, 3), int)}, TypeError, "kernel must be floating, got int32"),
    ({"bias": jnp.ones(2)}, ValueError, r"bias must have shape \(3,\) for kernel \(2, 3\), .* got \(2,\)"),
    ({"gamma": jnp.ones((3, 1))}, ValueError, r"gamma must have shape \(3,\) .* got \(3, 1\)"),
    ({"beta": jnp.ones(3, int)}, TypeError, "beta must be floating, got int32"),
    ({"running_mean": jnp.ones(4)}, ValueError, r"running_mean must have shape \(3,\) .* got \(4,\)"),
    ({"running_var": jnp.ones(())}, ValueError, r"running_var must have shape \(3,\) .* got \(\)"),
    ({"norm": "group"}, ValueError, r"norm must be one of \('abn', 'batch'\), got 'group'"),
]  # fmt: skip


def test_rejects_invalid_arguments():
    for change, error, message in BAD:
        names = ["bias", "gamma", "beta", "running_mean", "running_var"]
        arguments = {"kernel": jnp.ones((2, 3))} | {name: jnp.ones(3) for name in names} | change
        with pytest.raises(error, match=message):
            fold(**arguments)
