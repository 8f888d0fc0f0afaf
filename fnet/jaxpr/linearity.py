"""Which results of a program are linear and homogeneous in some of its arguments.

`f` is if ``f(a x + b y) = a f(x) + b f(y)``. ``x + 1`` is not, nor is rounding to few bits. A sum
of gradients may be passed through a backward rule that is shown to be, in place of each gradient.
"""

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.jaxpr.axes import is_identity, is_linear_in
from fnet.jaxpr.interpreter import aval, custom_function, inner_jaxprs
from fnet.jaxpr.propagation import Propagation, Site

T = TypeVar("T")


class Linear(enum.Enum):
    """How a value depends on the arguments in question."""

    ZERO = "zero"
    LINEAR = "linear"
    CONSTANT = "constant"
    UNKNOWN = "unknown"


_ZERO, _LINEAR, _CONSTANT, _UNKNOWN = Linear
_CONSTANT_SIZE = 2**20
"""Constants up to this many elements are looked at."""


def is_linear(closed: ClosedJaxpr, selected: Sequence[bool]) -> bool:
    """Whether all results of a program are shown to be linear in the selected arguments jointly.

    Rounding to bfloat16 counts as linear: its error is proportional to the value. Rounding to
    types of fewer bits, or of a smaller range, does not.

    Args:
      closed: The program.
      selected: Whether each argument is selected.
    """
    states = [_LINEAR if s else _CONSTANT for s in selected]
    return set(_Linearity().run(closed, states)) <= {_ZERO, _LINEAR}


def rounds_coarsely(eqn: JaxprEqn) -> bool:
    """Whether an equation may round a value to fewer bits than bfloat16 has."""
    bits = [info.nmant for info in _infos(eqn)]
    return min([*bits, eqn.params.get("mantissa_bits", 7)], default=7) < 7


def has_backward_rule(eqn: JaxprEqn) -> bool:
    """Whether a rule gives the backward pass of an equation, which need not be linear.

    The transpose of any other equation is linear in the cotangent, except for rounding.
    """
    solvers = "custom_linear_solve", "custom_transpose_call"
    return eqn.primitive.name in solvers or custom_function(eqn) is not None


def solver(eqn: JaxprEqn, inputs: Sequence[T]) -> tuple[ClosedJaxpr, list[T]] | None:
    """Return the program that a linear solve runs, and its inputs; None for other equations."""
    if eqn.primitive.name != "custom_linear_solve":
        return None
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts, right = inputs[start : start + lengths.solve], inputs[sum(lengths) :]
    return eqn.params["jaxprs"].solve, [*consts, *right]


def has_small_range(eqn: JaxprEqn) -> bool:
    """Whether large values may become infinite, or small ones 0, before they do in bfloat16."""
    exponents = [info.maxexp for info in _infos(eqn)]
    is_small = min(exponents, default=128) < 128 or eqn.params.get("exponent_bits", 8) < 8
    return is_small or any(has_small_range(e) for j in inner_jaxprs(eqn) for e in j.eqns)


def _infos(eqn: JaxprEqn) -> list[Any]:
    dtypes = (aval(v).dtype for v in (*eqn.invars, *eqn.outvars))
    return [jnp.finfo(d) for d in dtypes if jnp.issubdtype(d, jnp.floating)]


class _Linearity(Propagation[Linear]):
    def constant(self, value: Any) -> Linear:
        is_plain = not isinstance(value, jax.core.Tracer) and np.size(value) <= _CONSTANT_SIZE
        is_key = jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)
        return _ZERO if is_plain and not is_key and not np.any(np.asarray(value)) else _CONSTANT

    def equation(self, eqn: JaxprEqn, states: list[Linear], site: Site) -> Sequence[Linear]:
        if is_identity(eqn):
            return states[: len(eqn.outvars)]
        if eqn.primitive.name == "custom_linear_solve":
            return self._solve(eqn, states, site)
        return [self._plain(eqn, states)] * len(eqn.outvars)

    def _plain(self, eqn: JaxprEqn, states: list[Linear]) -> Linear:
        if _UNKNOWN in states:
            return _UNKNOWN
        zeros = [k for k, s in enumerate(states) if s is _ZERO]
        linear = [k for k, s in enumerate(states) if s is _LINEAR]
        if any(is_linear_in(eqn, [k]) for k in zeros):
            return _ZERO
        # An index of 0 is no zero that counts.
        zeros = [k for k in zeros if jnp.issubdtype(aval(eqn.invars[k]).dtype, jnp.inexact)]
        if zeros and is_linear_in(eqn, zeros):
            return _ZERO
        if not linear:
            return _CONSTANT
        # Constants that are zero may join the linear operands, such as in a sum.
        is_shown = is_linear_in(eqn, linear) or is_linear_in(eqn, [*linear, *zeros])
        is_exact = not rounds_coarsely(eqn) and not has_small_range(eqn)
        return _LINEAR if is_shown and is_exact else _UNKNOWN

    def _solve(self, eqn: JaxprEqn, states: list[Linear], site: Site) -> Sequence[Linear]:
        """Follow how a linear solve is computed: iterations may depend on what they solve for."""
        consts = states[: sum(eqn.params["const_lengths"])]
        solve = solver(eqn, states)
        if solve is None or not {*consts} <= {_ZERO, _CONSTANT}:
            return [_UNKNOWN] * len(eqn.outvars)
        return self.run(*solve, site)

    def join(self, states: Sequence[Linear]) -> Linear:
        found = {*states} - {_ZERO}
        return next(iter(found), _ZERO) if len(found) < 2 else _UNKNOWN

    def chosen(self, predicate: Linear, states: Sequence[Linear]) -> Sequence[Linear]:
        is_fixed = predicate in (_ZERO, _CONSTANT)
        return states if is_fixed else [_UNKNOWN] * len(states)
