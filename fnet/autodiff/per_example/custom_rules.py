"""Equations that are known by their derivative rules: custom derivatives, and any other equation.

`has_linear_rules` says whether backward rules of `jax.custom_vjp` are linear in the cotangent. A
weighted sum of gradients may then be computed from weighted cotangents. `scale_of_rule` finds
straight-through estimators, whose rule returns the cotangent itself. `AnyEquation` gives the
per-example gradients of an equation that is not linear in its parameter, such as
`fnet.linear_cross_entropy`, from its operands and the cotangents of its results.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn, Literal

from fnet.jaxpr import (
    aval,
    called_jaxpr,
    evaluate,
    find_equations,
    inner_jaxprs,
    interpret,
    is_linear_in,
    slope,
)
from fnet.precision import upcast

OWN_TRANSPOSES = ("custom_vjp_call", "linear_call", "custom_transpose_call")
"""Primitives whose backward pass need not be linear in the cotangent."""


def has_linear_rules(eqn: JaxprEqn) -> bool:
    """Whether the backward pass of an equation is linear in the cotangent."""
    if eqn.primitive.name in OWN_TRANSPOSES:
        return is_linear(eqn)
    inner = (e for jaxpr in inner_jaxprs(eqn) for e in find_equations(jaxpr, OWN_TRANSPOSES))
    return all(map(is_linear, inner))


def is_linear(eqn: JaxprEqn) -> bool:
    """Whether the backward rule of a `jax.custom_vjp` is linear in the cotangent.

    It is if JAX can transpose it.
    """
    if eqn.primitive.name != "custom_vjp_call":
        return False
    inputs, outputs = (_shapes(variables) for variables in (eqn.invars, eqn.outvars))

    def transpose(inputs: list[Any], cotangents: list[Any]) -> Any:
        closed = jax.make_jaxpr(functools.partial(_backward, eqn))(inputs, cotangents)

        def of_cotangents(cotangents: list[Any]) -> list[Any]:
            return interpret(closed, [*inputs, *cotangents], _without_barriers)

        gradients = jax.eval_shape(of_cotangents, cotangents)
        zeros = [jnp.zeros(a.shape, a.dtype) for a in gradients]
        return jax.linear_transpose(of_cotangents, cotangents)(zeros)

    try:
        jax.eval_shape(transpose, inputs, outputs)
    except Exception:  # Whatever JAX says of a rule that is not linear.
        return False
    return True


def scale_of_rule(eqn: JaxprEqn, operand: int) -> float | None:
    """The number ``c`` if the backward rule of a `jax.custom_vjp` returns ``c ct``, else None.

    Args:
      eqn: The equation.
      operand: Number of the operand whose cotangent it is.
    """
    shape = aval(eqn.invars[operand])
    is_single = len(eqn.outvars) == 1 and aval(eqn.outvars[0]).shape == shape.shape
    if eqn.primitive.name != "custom_vjp_call" or not is_single:
        return None
    inputs, cotangents = _shapes(eqn.invars), _shapes(eqn.outvars)
    try:
        closed = jax.make_jaxpr(functools.partial(_backward, eqn))(inputs, cotangents)
    except Exception:  # Whatever JAX says of a rule that it cannot trace.
        return None

    def follow(eqn: JaxprEqn, scales: list[float | None]) -> list[float | None]:
        operands = [k for k, scale in enumerate(scales) if scale is not None]
        if not operands:
            return [None] * len(eqn.outvars)
        if (inner := called_jaxpr(eqn)) is not None:
            return interpret(inner, scales, follow, lambda constant: None)
        # With a constant term, the rule would not be linear.
        factor = slope(eqn, operands[0]) if is_linear_in(eqn, operands) else None
        if factor is None or len(operands) > 1:
            raise _NotAMultiple
        return [factor * (scales[operands[0]] or 0.0)]

    states = [None] * len(inputs) + [1.0]
    try:
        gradients = interpret(closed, states, follow, lambda constant: None)
    except _NotAMultiple:
        return None
    floating = [jnp.issubdtype(a.dtype, jnp.inexact) for a in inputs]
    return gradients[sum(floating[:operand])]


class _NotAMultiple(Exception):  # noqa: N818 - It is no error.
    """A rule does more than multiply the cotangent by a number."""


def _shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]


def _backward(eqn: JaxprEqn, inputs: Sequence[Any], cotangents: list[Any]) -> Any:
    """Cotangents of the floating inputs of an equation."""
    floating = [jnp.issubdtype(a.dtype, jnp.inexact) for a in inputs]

    def function(*selected: Any) -> list[Any]:
        given = iter(selected)
        return evaluate(
            eqn, [next(given) if f else a for f, a in zip(floating, inputs, strict=True)]
        )

    selected = (a for f, a in zip(floating, inputs, strict=True) if f)
    return jax.vjp(function, *selected)[1](cotangents)


def _without_barriers(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    # A barrier of cotangents and other values would make these depend on the cotangents.
    if eqn.primitive.name == "optimization_barrier":
        return values
    inner = called_jaxpr(eqn)
    return evaluate(eqn, values) if inner is None else interpret(inner, values, _without_barriers)


class AnyEquation(NamedTuple):
    """An equation of one parameter and data that need not be linear in the parameter.

    The gradient of an example follows from the operands and the cotangents of the results. It is
    materialized, so `squared_norms`, `weighted_sum` and `term_norms` of
    `fnet.autodiff.per_example.ghost_norm.LinearEquation` are not needed.

    Attributes:
      eqn: The equation.
      operand: Number of the operand that is the parameter.
      shared: Values of the operands that all examples share, by their number.
      width: Largest number of examples at a time, or None.
    """

    eqn: JaxprEqn
    operand: int
    shared: Mapping[int, Any]
    width: int | None = None
    requires_unique_elements: bool = False

    @classmethod
    def read(cls, eqn: JaxprEqn, operand: int) -> "AnyEquation | None":
        """Read the equation; None if it has random keys or results that are not floating."""
        avals = [aval(v) for v in (*eqn.invars, *eqn.outvars)]
        is_plain = not any(jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
        floating = all(jnp.issubdtype(aval(v).dtype, jnp.floating) for v in eqn.outvars)
        return cls(eqn, operand, {}) if is_plain and floating else None

    @property
    def data(self) -> tuple[int, ...]:
        """Numbers of the operands that the gradient depends on: all of them."""
        return tuple(k for k, v in enumerate(self.eqn.invars) if not isinstance(v, Literal))

    def materialize(self, x: Sequence[Array], ct: Sequence[Array]) -> Array:
        """Per-example gradients [1, batch, *parameter].

        Args:
          x: The operands that are not shared, [1, batch, 1, *shape] each.
          ct: Cotangents of the results, [1, batch, 1, *shape] each.
        """
        rows = [k for k in self.data if k not in self.shared]
        literals = {k: v.val for k, v in enumerate(self.eqn.invars) if isinstance(v, Literal)}

        def gradient(own: Sequence[Array], cotangents: Sequence[Array]) -> Array:
            values = literals | dict(self.shared) | dict(zip(rows, own, strict=True))

            def function(parameter: Array) -> list[Array]:
                inputs = values | {self.operand: parameter}
                return evaluate(self.eqn, [inputs[k] for k in range(len(self.eqn.invars))])

            _, backward = jax.vjp(function, values[self.operand])
            (parameter,) = backward(list(cotangents))
            return upcast(parameter)

        xs, cts = ([a[0, :, 0] for a in arrays] for arrays in (x, ct))
        if len(cts[0]) == 1:
            return gradient([a[0] for a in xs], [a[0] for a in cts])[None, None]
        return jax.vmap(gradient)(xs, cts)[None]
