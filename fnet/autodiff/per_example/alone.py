"""An equation in the midst of a batch, evaluated for each example alone."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fnet import jaxprs
from fnet.autodiff.examples import by_example
from fnet.autodiff.per_example.batch_axis import BatchAxis, State


class Alone(NamedTuple):
    """An equation that treats every example alike, vectorised over them.

    Each example may then have its own copy of an operand that all share.

    Attributes:
      jaxpr: of a batch of one, in which the equation is.
      eqn: the equation.
      size: how many examples there are.
      given: of each operand the axis that counts examples, None if all share it.
      out: of each result likewise.
    """

    jaxpr: Jaxpr
    eqn: JaxprEqn
    size: int
    given: Sequence[int | None]
    out: Sequence[int]

    def __call__(self, operands: Sequence[Array], copies: Mapping[int, Array]) -> list[Array]:
        """Its results for the whole batch.

        Args:
          operands: of the whole batch.
          copies: [size, ...] of operands that all share, by number: one for each example.
        """
        rows = [
            copies[k] if k in copies else a if axis is None else by_example(a, axis, self.size)
            for k, (a, axis) in enumerate(zip(operands, self.given, strict=True))
        ]
        axes = [
            None if axis is None and k not in copies else 0 for k, axis in enumerate(self.given)
        ]
        one = functools.partial(jaxprs.run, self.jaxpr, self.eqn)
        results = jax.vmap(one, (axes,))(rows)
        return [_joined(a, axis) for a, axis in zip(results, self.out, strict=True)]


def alone(
    whole: ClosedJaxpr,
    one: ClosedJaxpr,
    path: Sequence[int],
    size: int,
    states: tuple[list[State], list[State]],
) -> Alone | None:
    """The equation of that path; None where it cannot be told how it treats one example.

    Args:
      whole: a function of a batch, traced.
      one: the same function of a batch of one.
      path: of the equation, the same in both.
      size: of the batch.
      states: which axis counts examples, of its operands and results.
    """
    given, out = states
    if not all(isinstance(s, BatchAxis) for s in out):
        return None
    if not all(s is None or isinstance(s, BatchAxis) for s in given):
        return None
    found = _equations(whole, one, path)
    if found is None:
        return None
    (_, eqn), (jaxpr, small) = found
    pairs = [*zip(eqn.invars, small.invars, given, strict=True)]
    pairs += zip(eqn.outvars, small.outvars, out, strict=True)
    for a, b, state in pairs:
        shape = list(jaxprs.aval(a).shape)
        if isinstance(state, BatchAxis):
            shape[state.axis] //= size
        if tuple(shape) != jaxprs.aval(b).shape:
            return None
    axes = [s.axis if isinstance(s, BatchAxis) else None for s in given]
    return Alone(jaxpr, small, size, axes, [s.axis for s in out if isinstance(s, BatchAxis)])


_Found = tuple[tuple[Jaxpr, JaxprEqn], tuple[Jaxpr, JaxprEqn]]


def _equations(whole: ClosedJaxpr, one: ClosedJaxpr, path: Sequence[int]) -> _Found | None:
    """The equation in both functions, if they consist of the same ones all the way."""
    names = [[e.primitive.name for e in c.jaxpr.eqns] for c in (whole, one)]
    if names[0] != names[1]:
        return None
    pair = whole.jaxpr.eqns[path[0]], one.jaxpr.eqns[path[0]]
    if len(path) == 1:
        return (whole.jaxpr, pair[0]), (one.jaxpr, pair[1])
    inner: Any = [
        jaxprs.scan(e).body if e.primitive.name == "scan" else jaxprs.called(e) for e in pair
    ]
    return _equations(inner[0], inner[1], path[1:])


def _joined(a: Array, axis: int) -> Array:
    """The inverse of `by_example`."""
    return jax.lax.collapse(jnp.moveaxis(a, 0, axis), axis, axis + 2)
