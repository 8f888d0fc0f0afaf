"""Token embedding and the tied output head."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fnet
from fnet import layers


def table_and_layer(vocab_size=7, width=4):
    layer = layers.embedding(vocab_size, width)
    params, state = layer.init(jax.random.key(0))
    return params, lambda params, tokens: layer.apply(params, state, tokens, train=True)[0]


def test_tokens_select_rows():
    params, embed = table_and_layer()
    tokens = jnp.asarray([[0, 6, 3], [3, 3, 1]])
    y = embed(params, tokens)
    chex.assert_trees_all_equal(y, np.asarray(params["embedding"])[np.asarray(tokens)])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int16, jnp.int32])
def test_accepts_all_integer_dtypes(dtype):
    params, embed = table_and_layer()
    y = embed(params, jnp.asarray([5, 1], dtype))
    chex.assert_trees_all_equal(y, params["embedding"][jnp.asarray([5, 1])])


def test_gradient_of_a_row_is_the_sum_over_its_tokens():
    params, embed = table_and_layer()
    tokens = np.asarray([[2, 2, 5], [2, 0, 5]])
    weights = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    got = jax.grad(lambda p: (embed(p, jnp.asarray(tokens)) * weights).sum())(params)
    expected = np.zeros((7, 4), np.float32)
    np.add.at(expected, tokens, weights)
    chex.assert_trees_all_close(got["embedding"], expected, atol=1e-6)


def test_tied_table_gets_gradients_from_both_uses():
    params, embed = table_and_layer()
    tokens, labels = jnp.asarray([[1, 2, 3]]), jnp.asarray([[2, 3, 4]])

    def loss(table_in, table_out):
        logits = layers.unembed(embed({"embedding": table_in}, tokens), table_out)
        return fnet.losses.cross_entropy(logits, labels).mean()

    table = params["embedding"]
    tied, apart = jax.jit(
        lambda t: (jax.grad(lambda t: loss(t, t))(t), jax.grad(loss, argnums=(0, 1))(t, t))
    )(table)
    chex.assert_trees_all_close(tied, sum(apart), atol=1e-6)


def test_linear_cross_entropy_matches_cross_entropy_of_unembed():
    table = table_and_layer()[0]["embedding"]
    x, labels = jax.random.normal(jax.random.key(1), (2, 3, 4)), jnp.asarray([[0, 1, 2], [3, 4, 6]])
    logits = layers.unembed(x, table)
    chex.assert_trees_all_close(
        fnet.linear_cross_entropy(x, table.T, labels),
        fnet.losses.cross_entropy(logits, labels),
        atol=1e-6,
    )


@pytest.mark.parametrize("token", [-1, 7, 1000])
def test_out_of_range_token_gives_nan_and_no_gradient(token):
    params, embed = table_and_layer()
    tokens = jnp.asarray([2, token])
    y = embed(params, tokens)
    assert jnp.isfinite(y[0]).all()
    assert jnp.isnan(y[1]).all()
    gradient = jax.grad(lambda p: embed(p, tokens).sum())(params)["embedding"]
    chex.assert_trees_all_equal(gradient, jnp.zeros((7, 4)).at[2].set(1.0))


def test_token_beyond_int32_gives_nan():
    params, embed = table_and_layer()
    assert jnp.isnan(embed(params, np.asarray([1, 2**32 + 1]))[:, 0]).tolist() == [False, True]


def test_output_has_the_explicit_sharding_of_the_tokens():
    params, embed = table_and_layer()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jnp.asarray([[1, 2], [3, 7], [0, 0], [6, 5]])
    got = jax.jit(embed)(params, jax.device_put(tokens, sharding))
    assert got.sharding.is_equivalent_to(sharding, 3)
    chex.assert_trees_all_equal(jax.device_get(got), np.asarray(embed(params, tokens)))


def test_table_is_float32_and_output_has_the_given_dtype():
    layer = layers.embedding(7, 4, dtype=jnp.bfloat16)
    params, state = layer.init(jax.random.key(0))
    assert params["embedding"].dtype == jnp.float32
    assert layer.apply(params, state, jnp.asarray([1]), train=False)[0].dtype == jnp.bfloat16
    assert layers.unembed(jnp.ones((2, 4), jnp.bfloat16), params["embedding"]).dtype == jnp.bfloat16


def test_rows_have_unit_norm_on_average():
    params, _ = layers.embedding(1000, 64).init(jax.random.key(0))
    assert float(jnp.square(params["embedding"]).sum(-1).mean()) == pytest.approx(1, abs=0.03)


def test_rejects_invalid_arguments():
    params, embed = table_and_layer()
    with pytest.raises(TypeError, match="tokens must be integers, got float32"):
        embed(params, jnp.ones(3))
    with pytest.raises(TypeError, match="tokens must be integers, got bool"):
        embed(params, jnp.ones(3, bool))
    with pytest.raises(ValueError, match=r"unembed: expected \[..., 4\], got \(2, 5\)"):
        layers.unembed(jnp.ones((2, 5)), params["embedding"])
    with pytest.raises(ValueError, match=r"unembed: expected \[..., 4\], got \(\)"):
        layers.unembed(jnp.ones(()), params["embedding"])
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        layers.embedding(0, 4)
