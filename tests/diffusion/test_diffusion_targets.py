"""Prediction targets, and their conversion to the clean example and the noise."""

import chex
import jax
import jax.numpy as jnp
import pytest
from diffusion_cases import images

from fnet.diffusion import add_noise, denoised, target
from fnet.diffusion.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("per_example", [False, True])
def test_denoised_inverts_target(float64, name, per_example):
    x0, noise = images(2, 1, dtype=jnp.float64), images(2, 2, dtype=jnp.float64)
    angle = jnp.asarray([0.3, 1.2]) if per_example else jnp.asarray(0.7)
    alpha, sigma = jnp.cos(angle), jnp.sin(angle)
    x = add_noise(x0, noise, alpha, sigma)
    prediction = target(name, x0, noise, alpha, sigma)
    chex.assert_trees_all_close(
        jax.jit(denoised, static_argnums=0)(name, prediction, x, alpha, sigma),
        (x0, noise),
        atol=1e-13,
    )


def test_noisy_examples_and_velocity_match_the_papers():
    """Ho et al. 2020, equation 4; Salimans & Ho 2022, section 4: v = alpha eps - sigma x."""
    x0, noise = jnp.asarray([[2.0], [3.0]]), jnp.asarray([[5.0], [7.0]])
    alpha, sigma = jnp.asarray([0.6, 0.0]), jnp.asarray([0.8, 1.0])
    chex.assert_trees_all_close(add_noise(x0, noise, alpha, sigma), jnp.asarray([[5.2], [7.0]]))
    chex.assert_trees_all_close(target("v", x0, noise, alpha, sigma), jnp.asarray([[1.4], [-3.0]]))
    chex.assert_trees_all_equal(target("eps", x0, noise, alpha, sigma), noise)
    chex.assert_trees_all_equal(target("x0", x0, noise, alpha, sigma), x0)


@pytest.mark.parametrize("name", TARGETS)
def test_noise_is_computed_from_the_clipped_example(name):
    x0, noise = 2 * images(2, 1), images(2, 2)
    x = add_noise(x0, noise, 0.6, 0.8)
    clipped, eps = denoised(name, target(name, x0, noise, 0.6, 0.8), x, 0.6, 0.8, clip=1.0)
    assert float(jnp.abs(x0).max()) > 1.0
    chex.assert_trees_all_close(clipped, jnp.clip(x0, -1, 1), atol=1e-5)
    chex.assert_trees_all_close(add_noise(clipped, eps, 0.6, 0.8), x, atol=1e-6)


def test_add_noise_supports_vmap_and_preserves_the_dtype():
    x0, noise = images(4, 1), images(4, 2)
    alpha, sigma = jnp.full(4, 0.6), jnp.full(4, 0.8)
    vmapped = jax.vmap(lambda *a: add_noise(*(v[None] for v in a[:2]), *a[2:])[0])
    chex.assert_trees_all_close(
        vmapped(x0, noise, alpha, sigma), add_noise(x0, noise, alpha, sigma), atol=1e-6
    )
    half = add_noise(x0.astype(jnp.bfloat16), noise.astype(jnp.bfloat16), alpha, sigma)
    assert half.dtype == jnp.bfloat16
    narrowed = add_noise(x0.astype(jnp.bfloat16), noise, alpha, sigma)
    chex.assert_trees_all_equal(narrowed, half)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("predicted", "dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)]
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_denoised_returns_the_dtype_of_x(name, predicted, dtype, clip):
    x, prediction = images(2, 1, dtype=dtype), images(2, 2, dtype=predicted)
    got = denoised(name, prediction, x, jnp.float32(0.6), jnp.float32(0.8), clip=clip)
    chex.assert_type([*got], dtype)
    # As precise as the narrower of the two dtypes.
    wide = denoised(
        name, prediction.astype(jnp.float32), x.astype(jnp.float32), 0.6, 0.8, clip=clip
    )
    got = tuple(a.astype(jnp.float32) for a in got)
    chex.assert_trees_all_close(got, wide, atol=1e-6 if dtype == jnp.float32 else 0.1)


def test_rejects_invalid_arguments():
    for call, message in (
        (lambda x: target("u", x, x, 0.6, 0.8), r"one of \('eps', 'x0', 'v'\), got 'u'"),
        (lambda x: denoised("u", x, x, 0.6, 0.8), r"one of \('eps', 'x0', 'v'\), got 'u'"),
        (lambda x: denoised("v", x[1:], x, 0.6, 0.8), "prediction must have shape"),
        (lambda x: denoised("v", x, x, 0.6, 0.8, clip=0.0), "clip must be > 0"),
        (lambda x: add_noise(x, x[1:], 0.6, 0.8), "noise must have shape"),
        (lambda x: add_noise(x, x, jnp.ones(2), 0.8), r"per example, \(3,\), got shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call(images(3))
