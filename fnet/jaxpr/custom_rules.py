"""Equations that are known by their derivative rules: custom derivatives, and any other equation.

`has_linear_rules` says whether backward rules are shown to be linear in the cotangent. A weighted
sum of gradients may then be computed from weighted cotangents. `scale_of_rule` finds
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
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fnet.jaxpr import (
    aval,
    called_jaxpr,
    differentiate,
    evaluate,
    has_backward_rule,
    inner_jaxprs,
    interpret,
    is_linear_in,
    rounds_coarsely,
    slope,
)
from fnet.jaxpr import is_linear as is_linear_program
from fnet.precision import upcast


def has_linear_rules(eqn: JaxprEqn) -> bool:
    """Whether the backward pass of an equation is shown to be linear in the cotangent.

    A weighted sum of gradients may then be computed from the weighted sum of cotangents.
    """
    if has_backward_rule(eqn) or rounds_coarsely(eqn):
        return is_linear(eqn)
    return all(has_linear_rules(e) for jaxpr in inner_jaxprs(eqn) for e in jaxpr.eqns)


def is_narrow(v: Any) -> bool:
    """Whether a variable is of a floating dtype with fewer bits than float32."""
    dtype = aval(v).dtype
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def is_linear(eqn: JaxprEqn) -> bool:
    """Whether the backward rule of an equation is shown to be linear in the cotangent."""
    closed, inputs = _backward_of(eqn), len(eqn.invars)
    if closed is None:
        return False
    return is_linear_program(closed, [False] * inputs + [True] * len(eqn.outvars))


def scale_of_rule(eqn: JaxprEqn, operand: int) -> float | None:
    """The number ``c`` if the backward rule of a `jax.custom_vjp` returns ``c ct``, else None."""
    shape = aval(eqn.invars[operand]).shape
    is_single = len(eqn.outvars) == 1 and aval(eqn.outvars[0]).shape == shape
    if eqn.primitive.name != "custom_vjp_call" or not is_single:
        return None
    closed = _backward_of(eqn)
    if closed is None:
        return None

    def follow(eqn: JaxprEqn, scales: list[float | None]) -> list[float | None]:
        operands = [k for k, scale in enumerate(scales) if scale is not None]
        if not operands:
            return [None] * len(eqn.outvars)
        if (inner := called_jaxpr(eqn)) is not None:
            return interpret(inner, scales, follow, lambda constant: None)
        # With a constant term, the rule would not be linear.
        is_exact = is_linear_in(eqn, operands) and not rounds_coarsely(eqn)
        factor = slope(eqn, operands[0]) if is_exact else None
        if factor is None or len(operands) > 1:
            raise _NotAMultiple
        return [factor * (scales[operands[0]] or 0.0)]

    states = [None] * len(eqn.invars) + [1.0]
    try:
        gradients = interpret(closed, states, follow, lambda constant: None)
    except _NotAMultiple:
        return None
    floating = [jnp.issubdtype(aval(v).dtype, jnp.inexact) for v in eqn.invars]
    return gradients[sum(floating[:operand])]


class _NotAMultiple(Exception):  # noqa: N818 - It is no error.
    """A rule does more than multiply the cotangent by a number."""


def _backward_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Trace ``(*operands, *cotangents) -> cotangents`` of floating operands; None if it fails."""
    inputs, cotangents = (
        [jax.ShapeDtypeStruct(aval(v).shape, aval(v).dtype) for v in variables]
        for variables in (eqn.invars, eqn.outvars)
    )
    try:
        return jax.make_jaxpr(functools.partial(_backward, eqn))(inputs, cotangents)
    except Exception:  # Whatever JAX says of a rule that it cannot trace.
        return None


def _backward(eqn: JaxprEqn, inputs: Sequence[Any], cotangents: list[Any]) -> Any:
    floating = [i for i, a in enumerate(inputs) if jnp.issubdtype(a.dtype, jnp.inexact)]
    _, vjp = differentiate(eqn, inputs, floating)
    return vjp([ct for ct in cotangents if jnp.issubdtype(ct.dtype, jnp.inexact)])


class AnyEquation(NamedTuple):
    """An equation of one parameter and data that need not be linear in the parameter.

    The gradient of an example follows from the operands and the cotangents of the results. It is
    materialized, so `squared_norms`, `weighted_sum` and `term_norms` of
    `fnet.autodiff.per_example.ghost_norm.LinearEquation` are not needed.

    Attributes:
      eqn: The equation.
      operand: Index of the operand that is the parameter.
      shared: Values of the operands that all examples share, by their index.
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
        """Indices of the operands that the gradient depends on: all of them."""
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
