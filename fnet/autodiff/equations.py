"""A traced function as flat equations: what an output needs, and its value from that alone."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend

Variable = int | jax.extend.core.Literal
"""A variable's number, or a literal in its place."""

ELEMENTWISE = frozenset(
    (  # noqa: SIM905
        "abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp conj "
        "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor "
        "ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg "
        "nextafter not or pow real reduce_precision rem round rsqrt select_n shift_left "
        "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor"
    ).split()
)
"""Primitives whose every output element depends on one element of each input, or on scalars."""


class Equation(NamedTuple):
    """``outputs = primitive(*inputs, **params)``."""

    primitive: jax.extend.core.Primitive
    params: dict[str, Any]
    inputs: tuple[Variable, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Equations:
    """A function of arrays, calls to other functions written out.

    Attributes:
      inputs: its arguments' variables, one a leaf.
      outputs: its results, one a leaf.
      constants: variables of the arrays it closes over, and those arrays.
      body: in an order in which each can be computed.
      shapes: of every variable.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Variable, ...]
    constants: dict[int, Any]
    body: tuple[Equation, ...]
    shapes: dict[int, tuple[int, ...]]

    def needs(
        self, wanted: Iterable[Variable], given: Collection[int] = ()
    ) -> tuple[set[int], list[Equation]]:
        """What ``wanted`` is computed from, and by which equations.

        Args:
          wanted: variables.
          given: variables not to look behind.

        Returns:
          The given variables, inputs and constants that are needed, and the
          equations between, in order.
        """
        open_ = {v for v in wanted if isinstance(v, int)}
        equations = []
        for equation in reversed(self.body):
            made = open_.intersection(equation.outputs).difference(given)
            if made:
                open_ -= made
                open_ |= {v for v in equation.inputs if isinstance(v, int)}
                equations.append(equation)
        return open_, equations[::-1]

    def evaluate(self, wanted: Sequence[Variable], values: Mapping[int, Any]) -> list[Any]:
        """The values of ``wanted``, computed from those of other variables.

        Args:
          wanted: variables.
          values: of all that ``needs(wanted, values)`` names.
        """
        known = dict(values)

        def value(v: Variable) -> Any:
            return known[v] if isinstance(v, int) else v.val

        for equation in self.needs(wanted, values)[1]:
            out = equation.primitive.bind(*map(value, equation.inputs), **equation.params)
            out = out if equation.primitive.multiple_results else [out]
            known |= {v: a for v, a in zip(equation.outputs, out, strict=True) if v not in values}
        return [value(v) for v in wanted]


def equations_of(closed: jax.extend.core.ClosedJaxpr) -> Equations:
    """The equations of ``jax.make_jaxpr(f)(*args)``."""
    return _Flattening().of(closed)


class _Flattening:
    """Numbers the variables of a jaxpr and of those that it calls, each call anew."""

    def __init__(self) -> None:
        self.body: list[Equation] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.constants: dict[int, Any] = {}

    def of(self, closed: jax.extend.core.ClosedJaxpr) -> Equations:
        inputs = tuple(self._new(v) for v in closed.jaxpr.invars)
        outputs = self._call(closed, inputs)
        return Equations(inputs, outputs, self.constants, tuple(self.body), self.shapes)

    def _new(self, v: Any) -> int:
        number = len(self.shapes)
        self.shapes[number] = getattr(v.aval, "shape", ())
        return number

    def _call(
        self, closed: jax.extend.core.ClosedJaxpr, inputs: Sequence[Variable]
    ) -> tuple[Variable, ...]:
        jaxpr = closed.jaxpr
        number: dict[Any, Variable] = dict(zip(jaxpr.invars, inputs, strict=True))
        for v, constant in zip(jaxpr.constvars, closed.consts, strict=True):
            number[v] = constant_number = self._new(v)
            self.constants[constant_number] = constant

        def find(v: Any) -> Variable:
            return v if isinstance(v, jax.extend.core.Literal) else number[v]

        for eqn in jaxpr.eqns:
            arguments = tuple(map(find, eqn.invars))
            callee = _CALLED.get(eqn.primitive.name)
            if callee is not None:
                results = self._call(callee(eqn.params), arguments)
                number |= zip(eqn.outvars, results, strict=True)
                continue
            outputs = tuple(map(self._new, eqn.outvars))
            number |= zip(eqn.outvars, outputs, strict=True)
            self.body.append(Equation(eqn.primitive, eqn.params, arguments, outputs))
        return tuple(map(find, jaxpr.outvars))


# Where a call keeps what it calls. Derivatives are taken before, never of equations.
_CALLED: dict[str, Callable[[dict[str, Any]], jax.extend.core.ClosedJaxpr]] = {
    "jit": lambda params: params["jaxpr"],
    "pjit": lambda params: params["jaxpr"],
    "custom_jvp_call": lambda params: params["call_jaxpr"],
    "custom_vjp_call": lambda params: params["call_jaxpr"],
}
