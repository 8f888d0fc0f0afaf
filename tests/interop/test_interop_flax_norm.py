"""Options and errors of `InPlaceABN` in linen and nnx, compared with BatchNorm."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fnet.interop import linen as fnet_linen
from fnet.interop import nnx as fnet_nnx


def images():
    return jnp.asarray(np.random.default_rng(0).normal(size=(6, 5, 5, 3)), jnp.float32)


def linen_norm(x, batch_norm=False, **options):
    """A norm as ``(x, use_running_average, mask) -> y`` that drops its updated statistics."""
    module = (nn.BatchNorm if batch_norm else fnet_linen.InPlaceABN)(**options)
    init = functools.partial(module.init, use_running_average=False)
    variables = jax.jit(init)(jax.random.key(0), x)

    @functools.partial(jax.jit, static_argnums=1)
    def call(x, frozen, mask=None):
        return module.apply(variables, x, frozen, mask=mask, mutable=["batch_stats"])[0]

    return call


def nnx_norm(x, batch_norm=False, axis=-1, **options):
    """The same for nnx."""
    make = nnx.BatchNorm if batch_norm else fnet_nnx.InPlaceABN
    module = make(x.shape[axis], use_running_average=None, axis=axis, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(module)

    @functools.partial(jax.jit, static_argnums=1)
    def call(x, frozen, mask=None):
        return nnx.merge(graph, state, copy=True)(x, frozen, mask=mask)

    return call


NORMS = pytest.mark.parametrize("norm", [linen_norm, nnx_norm], ids=["linen", "nnx"])


@NORMS
@pytest.mark.parametrize(("use_scale", "use_bias"), [(True, False), (False, True)])
def test_scale_and_bias_are_optional_as_in_batch_norm(norm, use_scale, use_bias):
    x = images()
    options = {
        "use_scale": use_scale,
        "use_bias": use_bias,
        "scale_init": jax.nn.initializers.constant(1.5),
        "bias_init": jax.nn.initializers.constant(-0.3),
        "axis": 1,
    }
    expected = nn.leaky_relu(norm(x, batch_norm=True, **options)(x, False))
    chex.assert_trees_all_close(norm(x, **options)(x, False), expected, atol=1e-4)


@NORMS
@pytest.mark.parametrize(
    ("input_dtype", "given"), [(jnp.bfloat16, None), (jnp.float32, jnp.bfloat16)]
)
def test_output_dtype_matches_batch_norm(norm, input_dtype, given):
    x, options = images().astype(input_dtype), {"dtype": given}
    y = norm(x, **options)(x, False)
    expected = nn.leaky_relu(norm(x, batch_norm=True, **options)(x, False))
    chex.assert_type(y, expected.dtype)
    chex.assert_trees_all_close(
        y.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=0.02
    )  # fmt: skip


@NORMS
@pytest.mark.usefixtures("float64")
def test_float32_stays_float32_with_x64_enabled(norm):
    x = images()
    assert norm(x, use_scale=False, use_bias=False)(x, False).dtype == jnp.float32
    variables = fnet_linen.InPlaceABN(use_running_average=False).init(jax.random.key(0), x)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)


@NORMS
def test_masked_examples_do_not_enter_the_statistics(norm):
    x, mask = images(), jnp.arange(6) < 4
    elu = norm(x, activation="elu", activation_param=0.5)
    y = elu(jnp.where(mask[:, None, None, None], x, jnp.nan), False, mask=mask)
    chex.assert_trees_all_close(y[:4], elu(x[:4], False), atol=1e-6)
    chex.assert_trees_all_equal(y[4:], jnp.zeros_like(x[4:]))


@NORMS
def test_activation_and_its_parameter(norm):
    x = images()
    z = norm(x, activation="identity")(x, False)
    y = norm(x, activation="elu", activation_param=0.5)(x, False)
    chex.assert_trees_all_close(y, nn.elu(z, 0.5), atol=1e-6)


@NORMS
def test_axis_name_averages_statistics_in_training_only(norm):
    x = images()
    synced, plain = norm(x, axis_name="replica"), norm(x)
    halves = x.reshape(2, 3, *x.shape[1:])
    y = jax.vmap(lambda x: synced(x, False), axis_name="replica")(halves)
    chex.assert_trees_all_close(y.reshape(x.shape), plain(x, False), atol=1e-5)
    chex.assert_trees_all_equal(synced(x, True), plain(x, True))


@NORMS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_param": 0.0}, r"InPlaceABN: slope must be > 0 to be inverted, got 0.0"),
        ({"activation": "swish"}, r"expected one of .*'silu'.*, got 'swish'"),
    ],
)
def test_rejects_activation_without_inverse_at_construction(norm, options, message):
    with pytest.raises(ValueError, match=message):
        norm(images(), **options)


@NORMS
def test_use_running_average_is_required(norm):
    module = norm(images())
    with pytest.raises(ValueError, match="use_running_average"):
        module(images(), None)


@NORMS
@pytest.mark.parametrize(
    ("shape", "options", "error", "message"),
    [
        ((4, 3), {"param_dtype": jnp.bfloat16}, TypeError, "float32 or wider, got bfloat16"),
        ((4, 3), {"dtype": jnp.int32}, TypeError, "x must be floating, got int32"),
        ((1, 3), {}, ValueError, r"one sample per channel .*: x has shape \(1, 3\)"),
    ],
)
def test_rejects_input_that_abn_rejects(norm, shape, options, error, message):
    x = jnp.ones(shape)
    with pytest.raises(error, match=message):
        norm(x, **options)(x, False)


def test_rejects_wrong_axis_or_width():
    x = jnp.ones((4, 3))
    with pytest.raises(ValueError, match=r"x has no axis 2, got shape \(4, 3\)"):
        fnet_linen.InPlaceABN(axis=2).init(jax.random.key(0), x, use_running_average=True)
    with pytest.raises(ValueError, match=r"must have shape \(3,\) .* got \(5,\)"):
        fnet_nnx.InPlaceABN(5, rngs=nnx.Rngs(0))(x)
