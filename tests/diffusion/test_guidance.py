"""Classifier-free guidance, and dropping labels for it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import one_rounding

from fnet.diffusion import ddim, denoised, drop_labels, guided, schedules, target


def noise(n, seed=1, size=3, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (n, size), dtype)


def conditional_denoise(x, t, labels):
    """A prediction that depends on x, t and labels."""
    return jnp.sin(x + labels[:, None]) + t[:, None]


def test_guided_prediction_matches_the_paper():
    """Ho & Salimans 2022, equation 6: (1 + w) with - w without, w = scale - 1."""
    x, t, labels = noise(3), jnp.asarray([5, 6, 7]), jnp.asarray([2, 0, 1])
    conditional, unconditional = (
        conditional_denoise(x, t, labels),
        conditional_denoise(x, t, jnp.full(3, 9)),
    )
    got = guided(conditional_denoise, labels, 9, 3.0)(x, t)
    chex.assert_trees_all_close(got, 3 * conditional - 2 * unconditional, atol=1e-5)
    per_example = guided(conditional_denoise, labels, 9, jnp.asarray([1.0, 0.0, 3.0]))(x, t)
    expected = jnp.stack([conditional[0], unconditional[1], got[2]])
    chex.assert_trees_all_close(per_example, expected, atol=1e-5)


@pytest.mark.parametrize("scale", [1, 1.0, np.float32(1.0), jnp.ones(()), jnp.ones(3)])
def test_scale_1_is_exactly_the_conditional_prediction(scale):
    x, t, labels = noise(3), jnp.asarray([5, 6, 7]), jnp.asarray([2, 0, 1])
    chex.assert_trees_all_equal(
        guided(conditional_denoise, labels, 9, scale)(x, t), conditional_denoise(x, t, labels)
    )


@pytest.mark.parametrize(("scale", "batch"), [(2.0, 6), (0.0, 6), (1.0, 3), (jnp.ones(()), 6)])
def test_calls_the_model_once_on_twice_the_batch(scale, batch):
    calls = []

    def denoise(x, t, labels):
        calls.append((x.shape[0], t.shape[0], labels.shape[0]))
        return x

    guided(denoise, jnp.arange(3), 9, scale)(noise(3), jnp.zeros(3, jnp.int32))
    assert calls == [(batch, batch, batch)]


def test_guided_samples_do_not_depend_on_the_target():
    schedule, labels = schedules.cosine(50), jnp.asarray([0, 1, 1])
    alphas, sigmas = (jnp.asarray(a, jnp.float32) for a in schedule)

    def sample(predicts):
        def denoise(x, t, labels):
            x0 = 0.5 * jnp.tanh(x) + 0.1 * labels[:, None]
            _, eps = denoised("x0", x0, x, alphas[t], sigmas[t])
            return target(predicts, x0, eps, alphas[t], sigmas[t])

        return ddim(guided(denoise, labels, 2, 3.0), schedule, noise(3), 10, predicts=predicts)

    chex.assert_trees_all_close(sample("v"), sample("x0"), atol=1e-4)
    # With little signal, x0 computed from eps amplifies rounding errors.
    chex.assert_trees_all_close(sample("eps"), sample("x0"), atol=1e-2)


def test_drop_labels_drops_at_the_given_rate():
    labels = jnp.arange(10_000) % 10
    got = np.asarray(drop_labels(jax.random.key(1), labels, 10, 0.1))
    dropped = got == 10
    assert abs(dropped.mean() - 0.1) < 5 * np.sqrt(0.09 / 10_000)
    np.testing.assert_array_equal(got[~dropped], np.asarray(labels)[~dropped])
    chex.assert_trees_all_equal(drop_labels(jax.random.key(2), labels, 10, 0.0), labels)
    assert (np.asarray(drop_labels(jax.random.key(3), labels, 10, 1.0)) == 10).all()
    bytes_ = labels.astype("uint8")
    assert drop_labels(jax.random.key(1), bytes_, np.int64(10), 0.1).dtype == bytes_.dtype


def test_rejects_invalid_labels_and_scales():
    for call, error, message in (
        (
            lambda n: guided(conditional_denoise, n, 9, jnp.ones(2)),
            ValueError,
            r"one per label, \(3,\)",
        ),
        (
            lambda n: guided(conditional_denoise, n[None], 9, 2.0),
            ValueError,
            r"a vector, got shape \(1, 3\)",
        ),
        (lambda n: guided(conditional_denoise, n / 2, 9, 2.0), TypeError, "integers, got float32"),
        (
            lambda n: guided(conditional_denoise, n, 9, 2.0)(noise(4), jnp.zeros(4, int)),
            ValueError,
            "3 label",
        ),
        (lambda n: drop_labels(jax.random.key(1), n, 9, 1.5), ValueError, r"\[0, 1\], got 1.5"),
        (lambda n: drop_labels(jax.random.key(1), n / 2, 9, 0.1), TypeError, "integers"),
        (
            lambda n: guided(conditional_denoise, n.astype("uint8"), 256, 2.0),
            ValueError,
            "255.*uint8, got 256",
        ),
        (
            lambda n: drop_labels(jax.random.key(1), n.astype("int8"), 128, 0.1),
            ValueError,
            "127.*int8, got 128",
        ),
    ):
        with pytest.raises(error, match=message):
            call(jnp.arange(3))


def test_null_labels_are_all_numbers_of_the_dtype_of_labels_and_no_others():
    for dtype in ("int8", "uint8", "int16", "uint32", "int32"):
        labels, limits = jnp.arange(3, dtype=dtype), jnp.iinfo(dtype)
        for number in (int(limits.min), int(limits.max)):
            got = np.asarray(drop_labels(jax.random.key(1), labels, number, 1.0))
            assert (got == number).all()
        for number in (int(limits.min) - 1, int(limits.max) + 1):
            with pytest.raises(ValueError, match=f"got {number}; pass labels of a wider dtype"):
                drop_labels(jax.random.key(1), labels, number, 1.0)


def test_scale_near_1_is_not_rounded_in_bfloat16():
    def denoise(x, t, labels):
        gap = jnp.where(labels == 9, -1.0, 0.0)[:, None]
        return jnp.broadcast_to(gap, x.shape).astype(jnp.bfloat16)

    x = jnp.zeros((2, 3))
    for scale in (1.1, 1.003):
        got = guided(denoise, jnp.arange(2), 9, scale)(x, jnp.zeros(2, jnp.int32))
        np.testing.assert_allclose(np.float32(got), scale - 1, one_rounding(got.dtype) / 2)
