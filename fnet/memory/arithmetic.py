"""Arithmetic and bytes of a traced program: what ranks programs that are never run."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fnet import jaxprs


class Arithmetic(NamedTuple):
    """What a program computes and moves.

    Attributes:
      flops: floating-point operations: 2 a multiply-add of matrix products and
        convolutions, 1 an element of every other result.
      bytes: read and written: operands and results of matrix products and
        convolutions, results alone of everything else, which is taken to be fused
        with what reads it.
    """

    flops: int
    bytes: int

    @property
    def time(self) -> float:
        """A relative time: `FLOPS_A_BYTE` operations take as long as moving one byte."""
        return self.flops / FLOPS_A_BYTE + self.bytes


FLOPS_A_BYTE = 20.0
"""The balance of arithmetic and bandwidth that candidates are ranked by: an H100's in float32."""


def arithmetic(program: ClosedJaxpr | Jaxpr) -> Arithmetic:
    """Counts a program's work as traced, so before any compiler, the same for every device.

    A ``scan`` counts as often as it goes round, a ``while`` loop once, of a
    ``cond`` the largest branch. Recomputation under `jax.checkpoint` counts.

    Args:
      program: ``jitted.trace(...).jaxpr`` or ``jax.make_jaxpr(f)(...)``.

    Returns:
      Operations and bytes of one run.
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    total = Arithmetic(0, 0)
    for equation in jaxpr.eqns:
        work = _of_equation(equation)
        total = Arithmetic(total.flops + work.flops, total.bytes + work.bytes)
    return total


def _of_equation(equation: JaxprEqn) -> Arithmetic:
    # A scatter's or a reduction's own little program is what it does to two numbers.
    combines = equation.primitive.name.startswith(("scatter", "reduce", "select_and"))
    inner = [] if combines else [arithmetic(j) for j in _programs(equation.params.values())]
    if equation.primitive.name == "cond":
        return max(inner)
    if inner:
        rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
        return Arithmetic(
            rounds * sum(work.flops for work in inner), rounds * sum(work.bytes for work in inner)
        )
    given, made = (sum(map(jaxprs.nbytes, a)) for a in (equation.invars, equation.outvars))
    elements = sum(math.prod(_shape(v)) for v in equation.outvars)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = _shape(equation.invars[0])
        return Arithmetic(2 * elements * math.prod(shape[i] for i in contracted), given + made)
    if equation.primitive.name == "conv_general_dilated":
        return Arithmetic(2 * elements * _window(equation), given + made)
    return Arithmetic(elements, made)


def _window(convolution: JaxprEqn) -> int:
    """Multiply-adds an element of a convolution's result takes, dilated zeros left out."""
    kernel = _shape(convolution.invars[1])
    out_channels = kernel[convolution.params["dimension_numbers"].rhs_spec[0]]
    # A gradient with respect to the input of a strided convolution dilates its
    # argument: most of what the window sees there is zero.
    zeros = math.prod(convolution.params["lhs_dilation"])
    work: int = max(math.prod(kernel) // out_channels // zeros, 1)
    return work


def _programs(values: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
