"""Activation functions by name, and the inverses of those that have a stable one."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.backward_pass import keep
from fnet.layer import Layer, stateless


class Activation(NamedTuple):
    """An activation, elementwise, with an optional parameter.

    Attributes:
      forward: ``(z, param) -> y``.
      inverse: ``(y, param) -> (z, dy/dz)``, both from the output alone, or None
        where no stable inverse exists.
      parameter: what the parameter is called, or None where there is none; an
        inverse exists only where the parameter is positive.
      least: ``(param, dtype) -> y``: the least output of that dtype that tells z; None where
        there is no such floor.
    """

    forward: Callable[[Array, float], Array]
    inverse: Callable[[Array, float], tuple[Array, Array]] | None = None
    parameter: str | None = None
    least: Callable[[float, Any], float] | None = None


def _invert_leaky_relu(y: Array, slope: float) -> tuple[Array, Array]:
    # By its sign bit, not by y < 0: a small negative z may have underflowed to -0.0.
    negative = jnp.signbit(y)
    return jnp.where(negative, y / slope, y), jnp.where(negative, slope, 1.0).astype(y.dtype)


def _invert_elu(y: Array, alpha: float) -> tuple[Array, Array]:
    # A saturated output rounds to -alpha, whose logarithm is infinite: stop one
    # rounding step before. There dy/dz is 0; a norm's gradient still reads z.
    below = jnp.maximum(jnp.minimum(y, 0) / alpha, _least_elu(1, y.dtype))
    return jnp.where(y > 0, y, jnp.log1p(below)), jnp.where(y > 0, 1.0, y + alpha).astype(y.dtype)


def _least_elu(alpha: float, dtype: Any) -> float:
    return -alpha * (1 - float(jnp.finfo(dtype).epsneg))


def _invert_softplus(y: Array, _: float) -> tuple[Array, Array]:
    # z = y + log(1 - exp(-y)); an output that underflowed to 0 has slope 0.
    positive = jnp.maximum(y, jnp.finfo(y.dtype).tiny)
    return positive + jnp.log(-jnp.expm1(-positive)), -jnp.expm1(-y)


ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(lambda z, _: z, lambda y, _: (y, jnp.ones_like(y))),
    "leaky_relu": Activation(jax.nn.leaky_relu, _invert_leaky_relu, "slope"),
    "elu": Activation(jax.nn.elu, _invert_elu, "alpha", _least_elu),
    "softplus": Activation(
        lambda z, _: jax.nn.softplus(z),
        _invert_softplus,
        least=lambda _, dtype: float(jnp.finfo(dtype).smallest_subnormal),
    ),
    "relu": Activation(lambda z, _: jax.nn.relu(z)),
    "gelu": Activation(lambda z, _: jax.nn.gelu(z)),
    "silu": Activation(lambda z, _: jax.nn.silu(z)),
    "tanh": Activation(lambda z, _: jnp.tanh(z)),
    "sigmoid": Activation(lambda z, _: jax.nn.sigmoid(z)),
}


def find(name: str) -> Activation:
    """The activation of that name.

    Raises:
      ValueError: if there is none; the message lists those there are.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {sorted(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


def invertible(name: str, param: float) -> bool:
    """Whether the activation of that name has an inverse with that parameter."""
    act = find(name)
    return act.inverse is not None and (act.parameter is None or param > 0)


def check_parameter(where: str, name: str, param: float) -> None:
    """Refuses a parameter with which the activation of that name has no inverse.

    Raises:
      ValueError: if ``name`` is unknown, or has an inverse and a parameter that is not > 0.
    """
    act = find(name)
    if act.inverse and not invertible(name, param):
        instead = "relu" if act.parameter == "slope" else "silu"
        raise ValueError(
            f"{where}: {act.parameter} must be > 0 to be inverted, got {param}; "
            f'use activation="{instead}", which recomputes instead'
        )


def default(name: str) -> float:
    """The parameter where none is given: 1 for an alpha, 0.01 for a slope.

    Raises:
      ValueError: if ``name`` is unknown.
    """
    return 1.0 if find(name).parameter == "alpha" else 0.01


def activation(name: str, param: float | None = None) -> Layer:
    """A layer that applies an activation elementwise: no params, no state.

    Args:
      name: ``identity``, ``leaky_relu``, ``elu``, ``softplus``, ``relu``,
        ``gelu`` (tanh form), ``silu``, ``tanh`` or ``sigmoid``.
      param: slope of ``leaky_relu``, 0.01 by default; alpha of ``elu``, 1 by default;
        otherwise unused.

    Returns:
      A layer, ``x`` [...], floating -> [...], in the input's dtype.

    Raises:
      ValueError: if the name is unknown.
    """
    act = find(name)
    param = default(name) if param is None else param
    if invertible(name, param):
        return stateless(lambda x: in_place(x, name, param))
    return stateless(lambda x: act.forward(x, param))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def in_place(z: Array, name: str, param: float) -> Array:
    """An activation that has an inverse; its derivative is taken from its output.

    Where the next layer keeps the output anyway, nothing is kept for this one
    (under `fnet.recompute`, which keeps the output and no derivative).
    """
    return keep(find(name).forward(z, param))


@in_place.defjvp
def _in_place_jvp(
    name: str, param: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    y = in_place(primals[0], name, param)
    inverse = find(name).inverse
    assert inverse is not None
    return y, tangents[0] * inverse(y, param)[1]
