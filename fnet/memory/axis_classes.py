"""Which axes of a program belong together, and how many bytes each class of them runs through."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from fnet.jaxpr import Propagation, Site, aval, factors, nbytes

Axis = tuple[Any, int]
"""A variable, or another object, and the number of one of its axes."""
Group = tuple[Axis, int]
"""The axes of a class that have one size: an axis of the class, and the size."""


class AxisClasses(Propagation[tuple[Axis, ...]]):
    """Classes of axes of which an equation makes one of the other.

    Two axes are in one class if a factor of an equation names both: the examples of an image, of
    its label and of each feature are. Axes that meet elsewhere, such as rows and columns of
    ``x @ x.T``, are in one class, too. So a class tells which arrays may be cut together, and
    `RowAxes` whether they can be.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.memory.axis_classes import AxisClasses
      >>> f = lambda w, x, y: ((x @ w) * y).sum()
      >>> jaxpr = jax.make_jaxpr(f)(
      ...     jnp.ones((2, 3)), jnp.ones((5, 2)), jnp.ones((5, 3))
      ... ).jaxpr
      >>> w, x, y = jaxpr.invars
      >>> classes = AxisClasses(jaxpr.eqns)
      >>> classes.of(x)[0] == classes.of(y)[0], classes.of(w)[0] == classes.of(x)[1]
      (True, True)
    """

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self._parents: dict[Axis, Axis] = {}
        self._bytes: Counter[Axis] = Counter()
        for eqn in eqns:
            given = [
                self.constant(v.val) if isinstance(v, Literal) else _axes(v) for v in eqn.invars
            ]
            results = self.visit(eqn, given, Site())
            self._unite_all(zip(map(_axes, eqn.outvars), results, strict=True))

    def of(self, v: Var) -> list[Group]:
        """Return the group of each axis of a variable."""
        return list(zip(map(self._root, _axes(v)), aval(v).shape, strict=True))

    def bytes(self) -> Counter[Group]:
        """Return the bytes of all arrays with an axis of a group.

        Arrays in loops count for every iteration.
        """
        total: Counter[Group] = Counter()
        for (v, k), made in self._bytes.items():
            total[self._root((v, k)), aval(v).shape[k]] += made
        return total

    def constant(self, value: Any) -> tuple[Axis, ...]:
        """A constant has axes of its own."""
        return tuple((object(), k) for k in range(np.ndim(value)))

    def equation(
        self, eqn: JaxprEqn, states: list[tuple[Axis, ...]], site: Site
    ) -> Sequence[tuple[Axis, ...]]:
        """Unite the axes of each factor."""
        results = [_axes(v) for v in eqn.outvars]
        for factor in factors(eqn):
            pairs = [*zip(states, factor.operands), *zip(results, factor.results)]  # noqa: B905
            named = [axes[k] for axes, k in pairs if k is not None and k < len(axes)]
            self._unite_all(((a,), (b,)) for a, b in itertools.pairwise(named))
        for v, axes in zip(eqn.outvars, results, strict=True):
            self._bytes.update(dict.fromkeys(axes, math.prod(site.lengths) * nbytes(v)))
        return results

    def join(self, states: Sequence[tuple[Axis, ...]]) -> tuple[Axis, ...]:
        """The axes of one of several values are theirs."""
        first, *others = states
        self._unite_all((first, other) for other in others)
        return first

    def chosen(
        self, predicate: tuple[Axis, ...], states: Sequence[tuple[Axis, ...]]
    ) -> Sequence[tuple[Axis, ...]]:
        """A choice moves nothing."""
        return states

    def sliced(self, state: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """A row has the other axes."""
        return state[1:]

    def stacked(self, state: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Rows get a new axis."""
        return ((object(), 0), *state)

    def _unite_all(self, pairs: Iterable[tuple[Sequence[Axis], Sequence[Axis]]]) -> None:
        for first, other in pairs:
            for a, b in zip(first, other, strict=True):
                if (root := self._root(a)) != (child := self._root(b)):
                    self._parents[child] = root

    def _root(self, axis: Axis) -> Axis:
        while axis in self._parents:
            axis = self._parents[axis]
        return axis


def _axes(v: Any) -> tuple[Axis, ...]:
    return tuple((v, k) for k in range(aval(v).ndim))
