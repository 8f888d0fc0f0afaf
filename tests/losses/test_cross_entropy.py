"""Cross-entropy and accuracy of logits."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import losses


def test_cross_entropy_is_in_nats_and_float32():
    logits = jnp.log(jnp.asarray([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])).astype(jnp.bfloat16)
    got = losses.cross_entropy(logits, jnp.asarray([0, 2]))
    chex.assert_type(got, jnp.float32)
    chex.assert_trees_all_close(got, -np.log([0.7, 0.1]), atol=2e-2)


def test_label_smoothing_matches_optax_without_a_class_by_class_matrix():
    classes = 29
    logits = np.random.default_rng(0).normal(size=(4, classes)).astype(np.float32)
    labels = np.asarray([0, 1, 2, 28])
    smoothed = functools.partial(losses.cross_entropy, smoothing=0.1)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
    expected = optax.softmax_cross_entropy(logits, targets)
    chex.assert_trees_all_close(jax.jit(smoothed)(logits, labels), expected, rtol=1e-6)
    assert f"[{classes},{classes}]" not in str(jax.make_jaxpr(smoothed)(logits, labels))


def test_cross_entropy_rejects_smoothing_out_of_range():
    for smoothing in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\), got"):
            losses.cross_entropy(jnp.ones((4, 3)), jnp.ones(4, int), smoothing=smoothing)


def test_accuracy_is_1_if_the_largest_logit_is_the_labels():
    logits = jnp.asarray([[[0, 2, 1], [3, 2, 1]]], jnp.bfloat16)
    got = losses.accuracy(logits, jnp.asarray([[1, 2]], jnp.uint8))
    chex.assert_type(got, jnp.float32)
    chex.assert_trees_all_equal(got, jnp.asarray([[1.0, 0.0]]))


def test_label_out_of_range_gives_nan():
    logits, labels = jnp.ones((4, 3)), np.asarray([-1, 2, 3, 2**32 + 1])
    for smoothing, dtype in ((0.0, np.int64), (0.1, np.int64), (0.0, np.uint64)):
        got = losses.cross_entropy(logits, labels.astype(dtype), smoothing=smoothing)
        assert jnp.isnan(got).tolist() == [True, False, True, True]


@pytest.mark.usefixtures("float64")
def test_losses_of_float64_logits_are_float64():
    logits = jnp.log(jnp.asarray([[0.7, 0.2, 0.1]], jnp.float64))
    got = losses.cross_entropy(logits, jnp.asarray([0]))
    chex.assert_type(got, jnp.float64)
    chex.assert_trees_all_close(got, -np.log([0.7]), rtol=1e-14)


@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.accuracy])
def test_rejects_labels_of_another_shape_and_labels_that_are_not_integers(loss):
    with pytest.raises(ValueError, match=rf"{loss.__name__}: .* shape \(4,\) .* got \(4, 1\)"):
        loss(jnp.ones((4, 3)), jnp.ones((4, 1), int))
    for dtype in (jnp.float32, jnp.bool_):
        with pytest.raises(TypeError, match="labels must be integers, got"):
            loss(jnp.ones((4, 3)), jnp.ones(4, dtype))
