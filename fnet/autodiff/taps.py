"""Where parameters meet data in a traced function, and the cotangents there."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fnet import jaxprs
from fnet.autodiff.products import Product, product
from fnet.autodiff.views import View
from fnet.backward_pass import is_params_first

Path = tuple[int, ...]
"""An equation's place: its number, after those of the calls and loops it is in."""


class Use(NamedTuple):
    """An equation in which data meets a parameter.

    Attributes:
      path: of the equation.
      view: of the parameter.
      product: what they make together.
      loops: lengths of the scans around it, the outermost first.
      out: shape and dtype of the equation's result, in one round.
    """

    path: Path
    view: View
    product: Product
    loops: tuple[int, ...]
    out: jax.ShapeDtypeStruct

    @property
    def stacked(self) -> tuple[int, ...]:
        """The axes of a cotangent that stand for rounds with other elements of the parameter."""
        return self.view.loops


class Uses(NamedTuple):
    """How a function uses its parameters.

    Attributes:
      known: uses as one product each, in order.
      other: parameters that are used in another way too.
    """

    known: tuple[Use, ...]
    other: frozenset[int]


def find_uses(closed: ClosedJaxpr, params: int) -> Uses:
    """Looks where the first arguments of a traced function meet its other values.

    It follows them through casts, transposes, reshapes and slices, into `jax.jit`,
    `jax.checkpoint` and `jax.lax.scan`; custom derivatives count as other uses.

    Args:
      closed: ``jax.make_jaxpr(f)(*params, *data)``.
      params: how many of its arguments are parameters.
    """
    search = _Search()
    views = [View.whole(i, v.aval.shape) for i, v in enumerate(closed.jaxpr.invars[:params])]
    search.visit(closed, [*views, *[None] * (len(closed.jaxpr.invars) - params)], (), ())
    known = tuple(use for use in search.uses if use.view.param not in search.other)
    return Uses(known, frozenset(search.other))


class _Search:
    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.other: set[int] = set()

    def visit(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[View | None],
        path: Path,
        loops: tuple[int, ...],
    ) -> list[View | None]:
        """Follows views through a jaxpr; those that come out of it."""
        seen: dict[Any, View | None] = dict(zip(closed.jaxpr.invars, inputs, strict=True))

        def views_of(atoms: Sequence[Any]) -> list[View | None]:
            return [None if isinstance(a, Literal) else seen.get(a) for a in atoms]

        for i, eqn in enumerate(closed.jaxpr.eqns):
            views = views_of(eqn.invars)
            if any(views) and eqn.primitive.name != "stop_gradient":
                out = self._equation(eqn, views, (*path, i), loops)
                seen |= zip(eqn.outvars, out, strict=True)
        return views_of(closed.jaxpr.outvars)

    def _equation(
        self, eqn: JaxprEqn, views: list[View | None], path: Path, loops: tuple[int, ...]
    ) -> list[View | None]:
        if (inner := jaxprs.called(eqn)) is not None:
            return self.visit(inner, views, path, loops)
        if eqn.primitive.name == "scan":
            self._scan(eqn, views, path, loops)
        elif eqn.primitive.name == "optimization_barrier" or is_params_first(eqn):
            return views
        elif sum(view is not None for view in views) == 1:
            (operand,) = (k for k, view in enumerate(views) if view is not None)
            view: Any = views[operand]
            found = product(eqn, operand)
            if found and not (found.once and view.repeats):
                aval = jaxprs.aval(eqn.outvars[0])
                out = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
                self.uses.append(Use(path, view, found, loops, out))
            elif changed := view.through(eqn):
                return list(changed)
            else:
                self._lose(views)
        else:
            self._lose(views)
        return [None] * len(eqn.outvars)

    def _scan(
        self, eqn: JaxprEqn, views: list[View | None], path: Path, loops: tuple[int, ...]
    ) -> None:
        s = jaxprs.scan(eqn)
        before = s.constants + s.carry
        self._lose(views[s.constants : before])
        rows = [view and view.rows(len(loops)) for view in views[before:]]
        inputs = [*views[: s.constants], *[None] * s.carry, *rows]
        self._lose(self.visit(s.body, inputs, path, (*loops, eqn.params["length"])))

    def _lose(self, views: Sequence[View | None]) -> None:
        self.other |= {view.param for view in views if view}


def tapped(
    closed: ClosedJaxpr, uses: Sequence[Use], taps: Sequence[Array], args: Sequence[Any]
) -> tuple[list[Any], list[Array]]:
    """Evaluates a traced function with a tap behind every use.

    Args:
      closed: the traced function.
      uses: of its parameters.
      taps: of each use, zeros [*loops, *out.shape]. The cotangent of a tap is that
        of the result behind which it stands.
      args: of the function.

    Returns:
      Its results; and of each use the data that met the parameter, [*loops, ...].
    """
    at = {use.path: number for number, use in enumerate(uses)}
    results, data = _Evaluation(at, uses).run(closed, args, (), dict(enumerate(taps)))
    return results, [data[number] for number in range(len(uses))]


class _Evaluation(NamedTuple):
    at: dict[Path, int]
    uses: Sequence[Use]

    def run(
        self, closed: ClosedJaxpr, args: Sequence[Any], path: Path, taps: Mapping[int, Array]
    ) -> tuple[list[Any], dict[int, Array]]:
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= zip(jaxpr.invars, args, strict=True)
        data: dict[int, Array] = {}

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [a.val if isinstance(a, Literal) else values[a] for a in atoms]

        for i, eqn in enumerate(jaxpr.eqns):
            here, inputs = (*path, i), read(eqn.invars)
            inside = {n: taps[n] for n, use in self._inside(here) if use.path != here}
            if (number := self.at.get(here)) is not None:
                (out,) = jaxprs.run(jaxpr, eqn, inputs)
                outputs = [tap(out, taps[number])]
                operand = self.uses[number].product.data
                data[number] = jnp.zeros(0) if operand is None else inputs[operand]
            elif inside:
                enter = self._scan if eqn.primitive.name == "scan" else self._call
                outputs, found = enter(eqn, inputs, here, inside)
                data |= found
            else:
                outputs = jaxprs.run(jaxpr, eqn, inputs)
            values |= zip(eqn.outvars, outputs, strict=True)
        return read(jaxpr.outvars), data

    def _inside(self, path: Path) -> list[tuple[int, Use]]:
        return [(n, use) for n, use in enumerate(self.uses) if use.path[: len(path)] == path]

    def _call(
        self, eqn: JaxprEqn, inputs: list[Any], path: Path, taps: Mapping[int, Array]
    ) -> tuple[list[Any], dict[int, Array]]:
        inner: Any = jaxprs.called(eqn)

        def call(inputs: list[Any], taps: Any) -> tuple[list[Any], dict[int, Array]]:
            return self.run(inner, inputs, path, taps)

        if eqn.primitive.name in jaxprs.CHECKPOINT:
            p = eqn.params
            call = jax.checkpoint(call, prevent_cse=p["prevent_cse"], policy=p["policy"])
        return call(inputs, taps)

    def _scan(
        self, eqn: JaxprEqn, inputs: list[Any], path: Path, taps: Mapping[int, Array]
    ) -> tuple[list[Any], dict[int, Array]]:
        s = jaxprs.scan(eqn)
        before = s.constants + s.carry
        constants, carry = inputs[: s.constants], inputs[s.constants : before]
        rows = inputs[before:]

        def body(carry: list[Any], slices: Any) -> tuple[list[Any], Any]:
            rows, taps = slices
            out, data = self.run(s.body, [*constants, *carry, *rows], path, taps)
            return out[: s.carry], (out[s.carry :], data)

        carry, (stacked, data) = s.run(body, carry, (rows, taps))
        return [*carry, *stacked], data


@jax.custom_jvp
def tap(x: Array, zero: Array) -> Array:
    """``x``, whose cotangent is also that of ``zero``, which is not read and so not made."""
    return x


@tap.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return primals[0], tangents[0] + tangents[1]
