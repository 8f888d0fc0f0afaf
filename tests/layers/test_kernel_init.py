"""Initializers of convolution kernels."""

import jax
import numpy as np
import pytest
import scipy.fft

from fnet import layers
from fnet.layers.kernel_init import cosine_patches, partly_identity


def test_cosine_patches_are_the_orthonormal_dct_and_its_negative():
    kernel = cosine_patches(jax.random.key(0), (2, 3, 3, 36))
    patch = np.random.default_rng(0).normal(size=(2, 3, 3))
    got = np.einsum("ijc,ijcn->n", patch, kernel)
    expected = scipy.fft.dctn(patch, type=2, norm="ortho").ravel()
    np.testing.assert_allclose(got, np.concatenate([expected, -expected]), atol=1e-5)


def test_cosine_patches_reject_another_number_of_channels():
    with pytest.raises(ValueError, match=r"\(2, 2, 3\) need 24 output channels, got 16"):
        cosine_patches(jax.random.key(0), (2, 2, 3, 16))


@pytest.mark.parametrize(("n_in", "n_out", "window"), [(3, 5, 3), (5, 3, 2)])
def test_partly_identity_copies_channels(n_in, n_out, window):
    conv = layers.conv(n_in, n_out, window, bias=False, kernel_init=partly_identity)
    params, state = conv.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4, 4, n_in))
    y, _ = conv.apply(params, state, x, train=True)
    same = min(n_in, n_out)
    np.testing.assert_allclose(y[..., :same], x[..., :same], rtol=1e-6)
    others = jax.nn.initializers.he_normal()(jax.random.key(0), (window, window, n_in, n_out))
    np.testing.assert_array_equal(params["kernel"][..., same:], others[..., same:])
