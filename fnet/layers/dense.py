"""The dense layer."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from fnet.backward_pass import params_first
from fnet.layer import Layer, Params, State, check_floating, check_sizes, serial
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
    """``y = x W + b`` on the last axis.

    Args:
      n_in: size of the input's last axis.
      n_out: size of the output's last axis.
      bias: whether ``b`` is added; without it, normalisation usually follows.
      kernel_init: initial ``W``; He et al. 2015 by default.

    Returns:
      A layer with params ``kernel`` [n_in, n_out] and ``bias`` [n_out] (float32; when
      applied, the kernel is cast to the input's dtype and the bias added in float32 or
      wider), no state; ``x`` [..., n_in] -> [..., n_out], in the input's dtype.

    Raises:
      ValueError: for a size below 1; when applied, if ``x`` does not end in ``n_in``.
      TypeError: if ``x`` is of integers, to which the kernel would be cast.
    """
    check_sizes("dense", n_in=n_in, n_out=n_out)

    def init(key: Array) -> tuple[Params, State]:
        kernel = kernel_init(key, (n_in, n_out), jnp.float32)
        return {"kernel": kernel} | ({"bias": jnp.zeros(n_out, jnp.float32)} if bias else {}), {}

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "... n_in"],
        *,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "... n_out"], State]:
        del key, train
        if x.shape[-1:] != (n_in,):
            raise ValueError(f"dense: expected [..., {n_in}], got {x.shape}")
        check_floating("dense", x=x)
        x, params = params_first(x, params)
        y = x @ params["kernel"].astype(x.dtype)
        return add_bias(y, params), state

    return Layer(init, apply)


def mlp(sizes: Sequence[int], activation: str = "relu") -> Layer:
    """Dense layers with an activation between each two.

    Args:
      sizes: [n_in, hidden, ..., n_out], at least two.
      activation: name of the activation between layers; none follows the last.

    Returns:
      A layer; ``x`` [..., sizes[0]] -> [..., sizes[-1]]. Params are
      ``{"dense_0": {"kernel", "bias"}, ...}``, no state.

    Raises:
      ValueError: if fewer than two sizes are given, one is below 1, or the activation is unknown.
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp: expected at least an input and an output size, got {list(sizes)}")
    between = activations.activation(activation)
    layers: dict[str, Layer] = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        if i:
            layers[f"activation_{i}"] = between
        layers[f"dense_{i}"] = dense(n_in, n_out)
    return serial(**layers)


def add_bias(y: Array, params: Params) -> Array:
    """``y + params["bias"]`` along the last axis in ``y``'s dtype, or ``y`` where there is none."""
    b = params.get("bias")
    return y if b is None else add(y, jnp.expand_dims(b, range(y.ndim - 1)))
