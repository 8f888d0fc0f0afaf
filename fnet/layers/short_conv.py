"""The gated short convolution of LFM2."""

import functools

import jax.numpy as jnp
from jax import Array

from fnet import checks
from fnet.layer import Layer
from fnet.layers.causal_conv import causal_conv_layer
from fnet.layers.recurrence import Step, recurrent, torch_linear


def short_conv(width: int, *, conv: int = 3, bias: bool = False) -> Layer:
    """Short causal convolution between two gates.

    Amini et al. 2025, "LFM2 Technical Report"::

        B, C, u = split(x W_in)
        y       = (C * causal_conv(B * u)) W_out

    Each output depends on the last ``conv`` positions. Blocks with attention see further.

    Args:
      width: D, size of the last axis of input and output.
      conv: width of the causal convolution.
      bias: whether both matrices and the convolution have a bias.

    Returns:
      A causal layer, [B, T, D] -> [B, T, D]. Its params are ``in``, ``conv`` and ``out``; ``mask``,
      ``segments`` and `fnet.layer.Decode` are as for `fnet.layers.mamba`; it caches the last
      ``conv - 1`` inputs of the convolution, [B, conv - 1, D].

    Raises:
      ValueError: for a size below 1; when applied, if ``x`` does not end in ``width``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.short_conv(8)
      >>> params, state = jax.jit(layer.init)(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 16, 8)), train=True)[0].shape
      (2, 16, 8)
    """
    checks.sizes("short_conv", width=width, conv=conv)

    def mix(step: Step) -> tuple[Array, None]:
        B, C, u = jnp.split(step("in"), 3, axis=-1)
        return step("out", C * step.convolve(B * u)), None

    return recurrent(
        "short_conv",
        width,
        mix,
        inputs={"in": 3 * width},
        conv=causal_conv_layer(width, conv, bias=bias),
        inner=width,
        state_shape=None,
        linear=functools.partial(torch_linear, bias=bias),
    )
