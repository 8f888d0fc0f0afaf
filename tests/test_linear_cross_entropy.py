"""Golden: optax's cross-entropy of whole logits, and the defining formulas through autodiff."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_cross_entropy_cases import (
    ALL_OPTIONS,
    D,
    V,
    arrays,
    from_whole_logits,
    whole_logits,
    with_gradients,
)

from fnet import losses
from fnet.losses import linear_cross_entropy


def of_optax(x, kernel, labels, *, bias):
    logits = whole_logits(x, kernel, bias)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@pytest.mark.parametrize(
    ("tokens", "chunk"),
    [((), 8), ((6,), 1), ((6,), V), ((2, 3), 10), ((2, 1, 3), None)],
)
@pytest.mark.usefixtures("float64")
def test_losses_and_gradients_are_those_of_optax(tokens, chunk):
    x, kernel, bias, labels, weights = arrays(*tokens)
    got = with_gradients(linear_cross_entropy, labels, weights, chunk=chunk)(x, kernel, bias)
    want = with_gradients(of_optax, labels, weights)(x, kernel, bias)
    assert got[0].shape == tokens
    assert got[0].dtype == jnp.float64
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_float32_is_within_rounding_of_optax():
    x, kernel, bias, labels, weights = arrays(64, dtype=jnp.float32, width=32, words=1500)
    got = with_gradients(linear_cross_entropy, labels, weights)(x, kernel, bias)
    want = with_gradients(of_optax, labels, weights)(x, kernel, bias)
    chex.assert_trees_all_equal_dtypes(got, want)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel_dtype", [jnp.bfloat16, jnp.float32])
def test_bfloat16_has_float32_losses_and_gradients_as_good_as_one_rounding(kernel_dtype):
    x, kernel, bias, labels, weights = arrays(64, dtype=jnp.float32, width=32, words=500)
    # Numbers that bfloat16 has, so that only what is computed is rounded.
    x, kernel = (np.asarray(a).astype(jnp.bfloat16) for a in (x, kernel))
    got = with_gradients(linear_cross_entropy, labels, weights, chunk=64)(
        x, kernel.astype(kernel_dtype), bias
    )
    want = with_gradients(from_whole_logits, labels, weights)(
        x.astype(np.float32), kernel.astype(np.float32), bias
    )
    assert got[0].dtype == jnp.float32
    assert [g.dtype for g in got[1]] == [x.dtype, kernel_dtype, bias.dtype]
    chex.assert_trees_all_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for g, w in zip(got[1], want[1], strict=True):
        error = np.linalg.norm(np.asarray(g, np.float32) - w)
        assert error < 2**-8 * np.linalg.norm(w)


def test_the_kernels_gradient_is_summed_in_float32():
    # 4,096 equal parts: in bfloat16 a sum stops growing at 256 times a part.
    tokens, words = 4096, 4
    x, kernel = jnp.ones((tokens, 1), jnp.bfloat16), jnp.zeros((1, words), jnp.bfloat16)
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
def test_each_option_is_its_formula(options):
    x, kernel, bias, labels, weights = arrays(2, 3)
    got = with_gradients(linear_cross_entropy, labels, weights, chunk=8, **options)(x, kernel, bias)
    want = with_gradients(from_whole_logits, labels, weights, **options)(x, kernel, bias)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_smoothing_means_what_it_means_to_cross_entropy():
    x, kernel, _, labels, _ = arrays(6, dtype=jnp.float32)

    @jax.jit
    def both(x, kernel):
        fused = linear_cross_entropy(x, kernel, labels, smoothing=0.1, chunk=8)
        return fused, losses.cross_entropy(x @ kernel, labels, smoothing=0.1)

    chex.assert_trees_all_close(*both(x, kernel), rtol=1e-5)


@pytest.mark.usefixtures("float64")
def test_an_embeddings_matrix_is_taken_as_it_is():
    x, kernel, bias, labels, weights = arrays(2, 3)
    flipped = with_gradients(
        linear_cross_entropy, labels, weights, vocab_axis=0, chunk=8, **ALL_OPTIONS
    )
    losses_, (dx, dembedding, dbias) = flipped(x, kernel.T, bias)
    want = with_gradients(from_whole_logits, labels, weights, **ALL_OPTIONS)(x, kernel, bias)
    chex.assert_trees_all_close((losses_, (dx, dembedding.T, dbias)), want, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_masked_tokens_count_nothing_whatever_they_hold():
    x, kernel, bias, labels, weights = (np.array(a) for a in arrays(8))
    real = np.array([1, 0, 1, 1, 0, 1, 0, 0], bool)
    x[1], x[4] = np.nan, np.inf
    labels[~real] = [-100, V, 3, -1]
    options = ALL_OPTIONS | {"chunk": 8}
    got, (dx, dkernel, dbias) = with_gradients(
        linear_cross_entropy, labels, weights, mask=jnp.asarray(real), **options
    )(x, kernel, bias)
    fewer, (dx_fewer, dkernel_fewer, dbias_fewer) = with_gradients(
        linear_cross_entropy, labels[real], weights[real], **options
    )(x[real], kernel, bias)
    got, dx = np.asarray(got), np.asarray(dx)
    assert (got[~real] == 0).all()
    assert (dx[~real] == 0).all()
    chex.assert_trees_all_close(
        (got[real], dx[real], dkernel, dbias),
        (fewer, dx_fewer, dkernel_fewer, dbias_fewer),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.usefixtures("float64")
def test_words_with_bias_minus_infinity_have_no_probability(soft_cap):
    x, kernel, bias, labels, weights = (np.array(a) for a in arrays(6))
    labels = labels % (V - 20) + 20  # none of the first 20 words, which fill two chunks and a half
    bias[:20] = -np.inf
    options = {"chunk": 8, "soft_cap": soft_cap}
    got, (dx, dkernel, dbias) = with_gradients(linear_cross_entropy, labels, weights, **options)(
        x, kernel, bias
    )
    fewer, (dx_fewer, dkernel_fewer, dbias_fewer) = with_gradients(
        linear_cross_entropy, labels - 20, weights, **options
    )(x, kernel[:, 20:], bias[20:])
    chex.assert_trees_all_close((got, dx), (fewer, dx_fewer), rtol=1e-10, atol=1e-12)
    chex.assert_trees_all_close(dkernel, np.pad(dkernel_fewer, ((0, 0), (20, 0))), atol=1e-12)
    chex.assert_trees_all_close(dbias, np.pad(dbias_fewer, (20, 0)), atol=1e-12)


def test_logits_far_beyond_what_exp_can_hold_give_finite_losses():
    x, kernel = jnp.asarray([[1000.0]]), jnp.asarray([[-1.0, 0, 1, 0.5]])
    labels = jnp.asarray([0])
    got, gradients = jax.jit(
        jax.value_and_grad(
            lambda x, k: linear_cross_entropy(x, k, labels, chunk=1).sum(), argnums=(0, 1)
        )
    )(x, kernel)
    chex.assert_trees_all_close(got, 2000.0)
    chex.assert_trees_all_close(
        gradients, (jnp.asarray([[2.0]]), jnp.asarray([[-1000.0, 0, 1000, 0]]))
    )


def test_logits_far_below_what_exp_can_hold_give_finite_losses():
    x, kernel = jnp.asarray([[1000.0]]), jnp.asarray([[-3.0, -1, -2, -1.5]])
    got = linear_cross_entropy(x, kernel, jnp.asarray([2]), chunk=1)
    chex.assert_trees_all_close(got, jnp.asarray([1000.0]))


def test_a_label_that_int32_does_not_hold_is_no_word():
    labels = np.asarray([2**32 + 1, 1])
    got = linear_cross_entropy(jnp.ones((2, 4)), jnp.ones((4, 3)), labels)
    assert np.isnan(got).tolist() == [True, False]


def test_a_label_that_is_no_word_gives_nan_and_only_there():
    x, kernel, *_ = arrays(6, dtype=jnp.float32)
    labels = jnp.asarray([0, -1, V - 1, -100, V, 10 * V])
    got = linear_cross_entropy(x, kernel, labels, chunk=8)
    assert np.isnan(got).tolist() == [False, True, False, True, True, True]


def test_labels_may_be_narrower_than_the_vocabulary():
    x, kernel, _, labels, _ = arrays(3, dtype=jnp.float32, words=300)
    labels = labels % 256
    got = linear_cross_entropy(x, kernel, labels.astype(jnp.uint8), chunk=8)
    chex.assert_trees_all_equal(got, linear_cross_entropy(x, kernel, labels, chunk=8))


BAD = {
    "kernel of another width": (
        {"kernel": jnp.ones((4, V))},
        r"x \(6, 5\) and vocab_axis=1 kernel must have shape \(5, V\), got \(4, 37\)",
    ),
    "kernel the other way round": (
        {"kernel": jnp.ones((V, D))},
        r"kernel must have shape \(5, V\), got \(37, 5\)",
    ),
    "embedding the other way round": (
        {"vocab_axis": 0},
        r"vocab_axis=0 kernel must have shape \(V, 5\), got \(5, 37\)",
    ),
    "no words": ({"kernel": jnp.ones((D, 0))}, r"a word and a feature, got \(5, 0\)"),
    "no axis": ({"x": jnp.ones(())}, r"rank >= 1, got shape \(\)"),
    "labels": (
        {"labels": jnp.zeros((6, 1), int)},
        r"labels must have shape \(6,\), that of x \(6, 5\) .*, got \(6, 1\)",
    ),
    "bias": ({"bias": jnp.ones(D)}, r"bias must have shape \(37,\), .*\(5, 37\), got \(5,\)"),
    "mask's shape": (
        {"mask": jnp.ones(5, bool)},
        r"mask must be bool of shape \(6,\), got bool \(5,\)",
    ),
    "mask's dtype": ({"mask": jnp.ones(6)}, r"mask must be bool of shape \(6,\), got float32"),
    "vocab_axis": ({"vocab_axis": -1}, "vocab_axis must be 0 or 1, got -1"),
    "chunk": ({"chunk": 0}, r"chunk must be an integer >= 1, .*, got 0"),
    "chunk's type": ({"chunk": 8.0}, r"chunk must be an integer >= 1, .*, got 8.0"),
    "smoothing": ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
    "z_loss": ({"z_loss": -0.1}, "z_loss must be >= 0, got -0.1"),
    "soft_cap": ({"soft_cap": 0.0}, r"soft_cap must be > 0, or None for no cap, got 0.0"),
}
BAD_TYPES = {
    "labels": ({"labels": jnp.zeros(6)}, "labels must be integers, .*, got float32"),
    "x": ({"x": jnp.ones((6, D), int)}, "x must be floating, got int32"),
    "kernel": ({"kernel": jnp.ones((D, V), int)}, "kernel must be floating, got int32"),
    "bias": ({"bias": jnp.ones(V, int)}, "bias must be floating, got int32"),
}


def call_with(changes):
    x, kernel, _, labels, _ = arrays(6, dtype=jnp.float32)
    linear_cross_entropy(**({"x": x, "kernel": kernel, "labels": labels} | changes))


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_with_both_values(changes, message):
    with pytest.raises(ValueError, match=f"linear_cross_entropy: .*{message}"):
        call_with(changes)


@pytest.mark.parametrize(("changes", "message"), BAD_TYPES.values(), ids=BAD_TYPES)
def test_other_dtypes_are_refused(changes, message):
    with pytest.raises(TypeError, match=f"linear_cross_entropy: {message}"):
        call_with(changes)
