"""Activation functions by name, with stable inverses for those that have one."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.backward_pass import save
from fnet.layer import Layer, stateless


class Activation(NamedTuple):
    """An elementwise activation with an optional parameter.

    Attributes:
      forward: ``(z, param) -> y``.
      inverse: ``(y, param) -> (z, dy/dz)``, both computed from the output alone. None if
        there is no stable inverse.
      parameter: Name of the parameter, or None if there is none. The inverse exists only
        for a positive parameter.
      default: Value of the parameter if the user gives none.
      min_output: ``(param, dtype) -> y``, the smallest output in that dtype that still
        determines z. None if every output does.
    """

    forward: Callable[[Array, float], Array]
    inverse: Callable[[Array, float], tuple[Array, Array]] | None = None
    parameter: str | None = None
    default: float = 1.0
    min_output: Callable[[float, Any], float] | None = None


def _invert_leaky_relu(y: Array, slope: float) -> tuple[Array, Array]:
    # The sign bit, not y < 0: a small negative z may have underflowed to -0.0.
    negative = jnp.signbit(y)
    return jnp.where(negative, y / slope, y), jnp.where(negative, slope, 1.0).astype(y.dtype)


def _invert_elu(y: Array, alpha: float) -> tuple[Array, Array]:
    # A saturated output rounds to -alpha, whose logarithm is infinite. Stop one rounding
    # step above it. There dy/dz is 0, but the gradient of a norm still reads z.
    below = jnp.maximum(jnp.minimum(y, 0) / alpha, _min_elu(1, y.dtype))
    return jnp.where(y > 0, y, jnp.log1p(below)), jnp.where(y > 0, 1.0, y + alpha).astype(y.dtype)


def _min_elu(alpha: float, dtype: Any) -> float:
    return -alpha * (1 - float(jnp.finfo(dtype).epsneg))


def _invert_softplus(y: Array, _: float) -> tuple[Array, Array]:
    # z = y + log(1 - exp(-y)); an output that underflowed to 0 has slope 0.
    positive = jnp.maximum(y, jnp.finfo(y.dtype).tiny)
    return positive + jnp.log(-jnp.expm1(-positive)), -jnp.expm1(-y)


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(lambda z, _: z, lambda y, _: (y, jnp.ones_like(y))),
    "leaky_relu": Activation(jax.nn.leaky_relu, _invert_leaky_relu, "slope", 0.01),
    "elu": Activation(jax.nn.elu, _invert_elu, "alpha", 1.0, _min_elu),
    "softplus": Activation(
        lambda z, _: jax.nn.softplus(z),
        _invert_softplus,
        min_output=lambda _, dtype: float(jnp.finfo(dtype).smallest_subnormal),
    ),
    "relu": Activation(lambda z, _: jax.nn.relu(z)),
    "relu_squared": Activation(lambda z, _: jnp.square(jax.nn.relu(z))),
    "gelu": Activation(lambda z, _: jax.nn.gelu(z)),
    "gelu_exact": Activation(lambda z, _: jax.nn.gelu(z, approximate=False)),
    "quick_gelu": Activation(lambda z, _: z * jax.nn.sigmoid(1.702 * z)),
    "silu": Activation(lambda z, _: jax.nn.silu(z)),
    "hard_swish": Activation(lambda z, _: jax.nn.hard_swish(z)),
    "hard_sigmoid": Activation(lambda z, _: jax.nn.hard_sigmoid(z)),
    "tanh": Activation(lambda z, _: jnp.tanh(z)),
    "sigmoid": Activation(lambda z, _: jax.nn.sigmoid(z)),
}
"""The activations that layers know by name."""


def get(name: str) -> Activation:
    """Look up an activation of `ACTIVATIONS`; ValueError for an unknown name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {sorted(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


def parameter_of(name: str, param: float | None) -> float:
    """Return ``param``, or the default of the activation if ``param`` is None."""
    return get(name).default if param is None else param


def invertible(name: str, param: float) -> bool:
    """Whether the activation has an inverse for this parameter."""
    act = get(name)
    return act.inverse is not None and (act.parameter is None or param > 0)


def check_parameter(where: str, name: str, param: float | None) -> float:
    """Return `parameter_of` the activation; ValueError if its inverse needs another one."""
    act, param = get(name), parameter_of(name, param)
    if act.inverse and not invertible(name, param):
        instead = "relu" if act.parameter == "slope" else "silu"
        raise ValueError(
            f"{where}: {act.parameter} must be > 0 to be inverted, got {param}; "
            f'use activation="{instead}", which needs no inverse'
        )
    return param


def activation(name: str, param: float | None = None) -> Layer:
    """Apply an activation elementwise.

    Args:
      name: ``identity``, ``leaky_relu``, ``elu``, ``softplus``, ``relu``,
        ``gelu`` (tanh approximation), ``gelu_exact`` (by the error function), ``quick_gelu``
        (``z sigmoid(1.702 z)``), ``silu``, ``hard_swish``, ``hard_sigmoid`` (Howard et al. 2019,
        "Searching for MobileNetV3"), ``tanh`` or ``sigmoid``.
      param: slope of ``leaky_relu`` (0.01 by default) or alpha of ``elu`` (1 by default).
        Other activations ignore it.

    Returns:
      A layer without params or state. It maps x [...], floating, to [...] in the dtype of x.

    Raises:
      ValueError: if the name is unknown.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> relu = fnet.layers.activation("relu")
      >>> y, _ = relu.apply({}, {}, jnp.array([-1.0, 2.0]), train=False)
      >>> y.tolist()
      [0.0, 2.0]
    """
    act, param = get(name), parameter_of(name, param)
    if invertible(name, param):
        return stateless(lambda x: in_place(x, name, param))
    return stateless(lambda x: act.forward(x, param))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def in_place(z: Array, name: str, param: float) -> Array:
    """Apply an invertible activation whose derivative is computed from its output.

    If the next layer saves the output anyway, this saves nothing of its own. Under
    `fnet.recompute` the output is saved.
    """
    return save(get(name).forward(z, param))


@in_place.defjvp
def _in_place_jvp(
    name: str, param: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    y = in_place(primals[0], name, param)
    inverse = get(name).inverse
    assert inverse is not None
    return y, tangents[0] * inverse(y, param)[1]
