"""Dense layers and the multilayer perceptron."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet import checks
from fnet.backward_pass import params_first
from fnet.layer import Layer, Params, from_function, serial
from fnet.layers import activations
from fnet.precision import add

HE_NORMAL = jax.nn.initializers.he_normal()


def dense(
    n_in: int,
    n_out: int,
    *,
    bias: bool = True,
    kernel_init: jax.nn.initializers.Initializer = HE_NORMAL,
) -> Layer:
    """Apply ``y = x W + b`` to the last axis.

    Args:
      n_in: size of the last axis of the input.
      n_out: size of the last axis of the output.
      bias: whether to add ``b``. It is usually left out before a norm.
      kernel_init: initializer of ``W``; He et al. 2015 by default.

    Returns:
      A layer, x [..., n_in] -> [..., n_out] in the dtype of x, without state. Its params are
      ``kernel`` [n_in, n_out] and ``bias`` [n_out], float32. The kernel is cast to the dtype
      of x; the bias is added in float32 or wider.

    Raises:
      ValueError: for a size below 1; when applied, if ``x`` does not end in ``n_in``.
      TypeError: when applied, if ``x`` is not floating.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.dense(3, 8)
      >>> params, state = layer.init(jax.random.key(0))
      >>> layer.apply(params, state, jnp.ones((2, 3)), train=True)[0].shape
      (2, 8)
    """
    checks.sizes("dense", n_in=n_in, n_out=n_out)

    def apply(params: Params, x: Float[Array, "... n_in"]) -> Float[Array, "... n_out"]:
        checks.last_axis("dense", x, n_in)
        x, params = params_first(x, params)
        y = x @ params["kernel"].astype(x.dtype)
        return add_bias(y, params)

    init = functools.partial(init_linear, (n_in, n_out), bias, kernel_init)
    return from_function(init, apply)


def mlp(sizes: Sequence[int], activation: str = "relu") -> Layer:
    """Multilayer perceptron: dense layers with an activation between them.

    Args:
      sizes: [n_in, hidden, ..., n_out], at least two.
      activation: name of the activation, as for `fnet.layers.activation`. The last dense
        layer has none.

    Returns:
      A layer, x [..., sizes[0]] -> [..., sizes[-1]] in the dtype of x, without state. Its
      params are ``{"dense_0": {"kernel", "bias"}, "dense_1": ...}``.

    Raises:
      ValueError: for fewer than two sizes, a size below 1, or an unknown activation.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> net = fnet.layers.mlp([4, 16, 3])
      >>> params, state = net.init(jax.random.key(0))
      >>> sorted(params)
      ['dense_0', 'dense_1']
      >>> net.apply(params, state, jnp.ones((2, 4)), train=True)[0].shape
      (2, 3)
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp: expected at least an input and an output size, got {list(sizes)}")
    act = activations.activation(activation)
    layers: dict[str, Layer] = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        if i:
            layers[f"activation_{i}"] = act
        layers[f"dense_{i}"] = dense(n_in, n_out)
    return serial(**layers)


def init_linear(
    shape: tuple[int, ...], bias: bool, kernel_init: jax.nn.initializers.Initializer, key: Array
) -> Params:
    """Draw a kernel of this shape, outputs last, and a bias of zeros if there is one."""
    kernel = kernel_init(key, shape, jnp.float32)
    return {"kernel": kernel} | ({"bias": jnp.zeros(shape[-1], jnp.float32)} if bias else {})


def add_bias(y: Array, params: Params) -> Array:
    """Add ``params["bias"]``, if there is one, to the last axis in the dtype of ``y``."""
    b = params.get("bias")
    return y if b is None else add(y, jnp.expand_dims(b, range(y.ndim - 1)))
