"""`linear_cross_entropy` against optax on materialized logits, and against its formula."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun
from linear_cross_entropy_cases import (
    ALL_OPTIONS,
    D,
    V,
    arrays,
    full_logits,
    reference_losses,
    value_and_gradients,
)

from fnet.cpu.tracing import examples_apart, traced_for
from fnet.jaxpr import find_equations
from fnet.losses.linear_cross_entropy import linear_cross_entropy


def optax_losses(x, kernel, labels, *, bias):
    logits = full_logits(x, kernel, bias)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@pytest.mark.parametrize(
    ("tokens", "chunk"), [((), 8), ((6,), 1), ((6,), V), ((2, 3), 10), ((2, 1, 3), None)]
)
@pytest.mark.usefixtures("float64")
def test_losses_and_gradients_match_optax(tokens, chunk):
    x, kernel, bias, labels, weights = arrays(*tokens)
    got = value_and_gradients(linear_cross_entropy, labels, weights, chunk=chunk)(x, kernel, bias)
    want = value_and_gradients(optax_losses, labels, weights)(x, kernel, bias)
    assert got[0].shape == tokens
    assert got[0].dtype == jnp.float64
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_float32_matches_optax_within_rounding():
    x, kernel, bias, labels, weights = arrays(64, dtype=jnp.float32, width=32, vocabulary=1500)
    got = value_and_gradients(linear_cross_entropy, labels, weights)(x, kernel, bias)
    want = value_and_gradients(optax_losses, labels, weights)(x, kernel, bias)
    chex.assert_trees_all_equal_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_losses_are_float32_and_gradients_are_rounded_once(kernel_dtype):
    x, kernel, bias, labels, weights = arrays(64, dtype=jnp.float32, width=32, vocabulary=500)
    # Exact in bfloat16, so that only the computation rounds.
    x, kernel = (np.asarray(a).astype(jnp.bfloat16) for a in (x, kernel))
    got = value_and_gradients(linear_cross_entropy, labels, weights, chunk=64)(
        x, kernel.astype(kernel_dtype), bias
    )
    want = value_and_gradients(reference_losses, labels, weights)(
        x.astype(np.float32), kernel.astype(np.float32), bias
    )
    assert got[0].dtype == jnp.float32
    assert [g.dtype for g in got[1]] == [x.dtype, kernel_dtype, bias.dtype]
    chex.assert_trees_all_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for g, w in zip(got[1], want[1], strict=True):
        error = np.linalg.norm(np.asarray(g, np.float32) - w)
        assert error < 2**-8 * np.linalg.norm(w)


def test_kernel_gradient_is_accumulated_in_float32():
    # Of 4,096 equal terms, a sum in bfloat16 stops growing after 256.
    tokens, vocabulary = 4096, 4
    x, kernel = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((1, vocabulary), jnp.bfloat16)
    labels = jnp.zeros(tokens, int)
    got = jax.jit(jax.grad(lambda k: linear_cross_entropy(x, k, labels, chunk=2).sum()))(kernel)
    chex.assert_trees_all_equal(
        np.asarray(got, np.float32), np.asarray([[-3072.0, 1024, 1024, 1024]], np.float32)
    )


OPTIONS = {
    "smoothing": {"smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "soft cap": {"soft_cap": 1.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.usefixtures("float64")
def test_options_match_their_formula(options):
    x, kernel, bias, labels, weights = arrays(2, 3)
    got = value_and_gradients(linear_cross_entropy, labels, weights, chunk=8, **options)(
        x, kernel, bias
    )
    want = value_and_gradients(reference_losses, labels, weights, **options)(x, kernel, bias)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)
    # As for each example's gradient on an accelerator, where a loop would hide the product.
    with traced_for(jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")), examples_apart():
        function = value_and_gradients(linear_cross_entropy, labels, weights, **options)
        program = jax.make_jaxpr(function)(x, kernel, bias)
    assert not list(find_equations(program, ("while", "scan")))
    logits = jax.tree.unflatten(jax.tree.structure(want), jaxpr_as_fun(program)(x, kernel, bias))
    chex.assert_trees_all_close(logits, want, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_vocab_axis_0_matches_the_transposed_kernel():
    x, kernel, bias, labels, weights = arrays(2, 3)
    transposed = value_and_gradients(
        linear_cross_entropy, labels, weights, vocab_axis=0, chunk=8, **ALL_OPTIONS
    )
    losses_, (dx, dembedding, dbias) = transposed(x, kernel.T, bias)
    want = value_and_gradients(reference_losses, labels, weights, **ALL_OPTIONS)(x, kernel, bias)
    chex.assert_trees_all_close((losses_, (dx, dembedding.T, dbias)), want, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_masked_tokens_are_ignored_even_if_nan():
    x, kernel, bias, labels, weights = (np.array(a) for a in arrays(8))
    is_real = np.array([1, 0, 1, 1, 0, 1, 0, 0], bool)
    x[1], x[4] = np.nan, np.inf
    labels[~is_real] = [-100, V, 3, -1]
    options = ALL_OPTIONS | {"chunk": 8}
    got, (dx, dkernel, dbias) = value_and_gradients(
        linear_cross_entropy, labels, weights, mask=jnp.asarray(is_real), **options
    )(x, kernel, bias)
    fewer, (dx_fewer, dkernel_fewer, dbias_fewer) = value_and_gradients(
        linear_cross_entropy, labels[is_real], weights[is_real], **options
    )(x[is_real], kernel, bias)
    got, dx = np.asarray(got), np.asarray(dx)
    assert (got[~is_real] == 0).all()
    assert (dx[~is_real] == 0).all()
    chex.assert_trees_all_close(
        (got[is_real], dx[is_real], dkernel, dbias),
        (fewer, dx_fewer, dkernel_fewer, dbias_fewer),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.usefixtures("float64")
def test_bias_of_minus_infinity_removes_tokens_from_the_vocabulary(soft_cap):
    x, kernel, bias, labels, weights = (np.array(a) for a in arrays(6))
    labels = labels % (V - 20) + 20  # the first 20 tokens, two chunks and a half, are not labels
    bias[:20] = -np.inf
    options = {"chunk": 8, "soft_cap": soft_cap}
    got, (dx, dkernel, dbias) = value_and_gradients(
        linear_cross_entropy, labels, weights, **options
    )(x, kernel, bias)
    fewer, (dx_fewer, dkernel_fewer, dbias_fewer) = value_and_gradients(
        linear_cross_entropy, labels - 20, weights, **options
    )(x, kernel[:, 20:], bias[20:])
    chex.assert_trees_all_close((got, dx), (fewer, dx_fewer), rtol=1e-10, atol=1e-12)
    chex.assert_trees_all_close(dkernel, np.pad(dkernel_fewer, ((0, 0), (20, 0))), atol=1e-12)
    chex.assert_trees_all_close(dbias, np.pad(dbias_fewer, (20, 0)), atol=1e-12)


def test_very_large_logits_give_finite_losses():
    x, kernel = jnp.asarray([[1000.0]]), jnp.asarray([[-1.0, 0, 1, 0.5]])
    labels = jnp.asarray([0])
    negative = linear_cross_entropy(x, kernel[:, ::-1] - 2, jnp.asarray([0]), chunk=1)
    chex.assert_trees_all_close(negative, jnp.asarray([500.0]))
    got, gradients = jax.jit(
        jax.value_and_grad(
            lambda x, k: linear_cross_entropy(x, k, labels, chunk=1).sum(), argnums=(0, 1)
        )
    )(x, kernel)
    chex.assert_trees_all_close(got, 2000.0)
    chex.assert_trees_all_close(
        gradients, (jnp.asarray([[2.0]]), jnp.asarray([[-1000.0, 0, 1000, 0]]))
    )


def test_label_out_of_range_gives_nan_at_its_token_only():
    x, kernel, *_ = arrays(6, dtype=jnp.float32)
    labels = np.asarray([0, -1, V - 1, -100, V, 2**32 + 1])
    got = linear_cross_entropy(x, kernel, labels, chunk=8)
    assert np.isnan(got).tolist() == [False, True, False, True, True, True]


def test_labels_may_have_a_dtype_narrower_than_the_vocabulary():
    x, kernel, _, labels, _ = arrays(3, dtype=jnp.float32, vocabulary=300)
    labels = labels % 256
    got = linear_cross_entropy(x, kernel, labels.astype(jnp.uint8), chunk=8)
    chex.assert_trees_all_equal(got, linear_cross_entropy(x, kernel, labels, chunk=8))


BAD = {
    "kernel width": ({"kernel": jnp.ones((4, V))}, r"x \(6, 5\) and vocab_axis=1, kernel must have shape \(5, V\), got \(4, 37\)"),
    "transposed kernel": ({"kernel": jnp.ones((V, D))}, r"kernel must have shape \(5, V\), got \(37, 5\)"),
    "transposed embedding": ({"vocab_axis": 0}, r"vocab_axis=0, kernel must have shape \(V, 5\), got \(5, 37\)"),
    "empty vocabulary": ({"kernel": jnp.ones((D, 0))}, r"must not be empty, got \(5, 0\)"),
    "scalar x": ({"x": jnp.ones(())}, r"rank >= 1, got shape \(\)"),
    "labels": ({"labels": jnp.zeros((6, 1), int)}, r"labels must have shape \(6,\) for x \(6, 5\), got \(6, 1\)"),
    "bias": ({"bias": jnp.ones(D)}, r"bias must have shape \(37,\) for kernel \(5, 37\), got \(5,\)"),
    "mask's shape": ({"mask": jnp.ones(5, bool)}, r"mask must be bool of shape \(6,\), got bool \(5,\)"),
    "mask's dtype": ({"mask": jnp.ones(6)}, r"mask must be bool of shape \(6,\), got float32"),
    "vocab_axis": ({"vocab_axis": -1}, r"vocab_axis must be one of \(0, 1\), got -1"),
    "chunk": ({"chunk": 0}, r"chunk must be an integer >= 1, .*, got 0"),
    "chunk's type": ({"chunk": 8.0}, r"chunk must be an integer >= 1, .*, got 8.0"),
    "smoothing": ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
    "z_loss": ({"z_loss": -0.1}, "z_loss must be >= 0, got -0.1"),
    "soft_cap": ({"soft_cap": 0.0}, r"soft_cap must be > 0, got 0.0"),
    "dtype of labels": ({"labels": jnp.zeros(6)}, "labels must be integers, got float32"),
    "dtype of x": ({"x": jnp.ones((6, D), int)}, "x must be floating, got int32"),
    "dtype of kernel": ({"kernel": jnp.ones((D, V), int)}, "kernel must be floating, got int32"),
    "dtype of bias": ({"bias": jnp.ones(V, int)}, "bias must be floating, got int32"),
}  # fmt: skip


def test_rejects_invalid_arguments_with_both_values():
    x, kernel, _, labels, _ = arrays(6, dtype=jnp.float32)
    for name, (changes, message) in BAD.items():
        error = TypeError if name.startswith("dtype") else ValueError
        with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
            linear_cross_entropy(**{"x": x, "kernel": kernel, "labels": labels} | changes)
