"""Where parameters meet data in a traced function, and the cotangents there."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from fnet import jaxprs
from fnet.autodiff.per_example.alone import Alone
from fnet.autodiff.per_example.ghost_norm import BiasAdd, LinearEquation, linear_equation
from fnet.autodiff.per_example.views import View
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
      out: shape and dtype of the equation's result, in one round; or of the operand.
      operand: the number of an operand that the equation uses in a way that is not
        looked into. Each example is given a copy of its own: the tap [batch, ...]
        stands before the equation.
    """

    path: Path
    view: View
    product: LinearEquation
    loops: tuple[int, ...]
    out: jax.ShapeDtypeStruct
    operand: int | None = None

    @property
    def stacked(self) -> tuple[int, ...]:
        """The axes of a cotangent that stand for rounds with other elements of the parameter."""
        return self.view.loops


class Uses(NamedTuple):
    """How a function uses its parameters.

    Attributes:
      every: all uses, in order.
      other: parameters that are used otherwise than in products.
      lost: those of them that are used by themselves, apart from the data.
    """

    every: tuple[Use, ...]
    other: frozenset[int]
    lost: frozenset[int]

    @property
    def known(self) -> tuple[Use, ...]:
        """Uses of parameters that are in products alone."""
        return tuple(use for use in self.every if use.view.param not in self.other)


def find_uses(closed: ClosedJaxpr, params: int) -> Uses:
    """Looks where the first arguments of a traced function meet its other values.

    It follows them through casts, transposes, reshapes, slices and scales, into `jax.jit`,
    `jax.checkpoint` and `jax.lax.scan`; custom derivatives count as other uses.

    Args:
      closed: ``jax.make_jaxpr(f)(*params, *data)``.
      params: how many of its arguments are parameters.
    """
    search = _Search()
    views = [View.whole(i, v.aval.shape) for i, v in enumerate(closed.jaxpr.invars[:params])]
    others = [None] * (len(closed.jaxpr.invars) - params)
    # A loss that is itself nothing but a view; of aux nobody asks for a gradient.
    search.lose(search.visit(closed, [*views, *others], (), ())[:1])
    other = {use.view.param for use in search.uses if use.operand is not None}
    return Uses(tuple(search.uses), frozenset(other | search.lost), frozenset(search.lost))


class _Search:
    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.lost: set[int] = set()

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
            if changed := view.through(eqn):
                return list(changed)
            found = linear_equation(eqn, operand)
            if found and not (found.requires_unique_elements and view.repeats):
                self.uses.append(Use(path, view, found, loops, _shape(eqn.outvars[0])))
            else:
                self._give_copies(eqn, views, path, loops)
        else:
            self._give_copies(eqn, views, path, loops)
        return [None] * len(eqn.outvars)

    def _give_copies(
        self, eqn: JaxprEqn, views: list[View | None], path: Path, loops: tuple[int, ...]
    ) -> None:
        if not any(
            v is None and not isinstance(a, Literal) for v, a in zip(views, eqn.invars, strict=True)
        ):
            self.lose(views)
        for k, (view, operand) in enumerate(zip(views, eqn.invars, strict=True)):
            if view:
                use = Use(path, view, BiasAdd(()), loops, _shape(operand), k)
                self.uses.append(use)

    def _scan(
        self, eqn: JaxprEqn, views: list[View | None], path: Path, loops: tuple[int, ...]
    ) -> None:
        s = jaxprs.scan(eqn)
        before = s.constants + s.carry
        self.lose(views[s.constants : before])
        rows = [view and view.rows(len(loops)) for view in views[before:]]
        inputs = [*views[: s.constants], *[None] * s.carry, *rows]
        self.lose(self.visit(s.body, inputs, path, (*loops, eqn.params["length"])))

    def lose(self, views: Sequence[View | None]) -> None:
        self.lost |= {view.param for view in views if view}


def _shape(atom: Any) -> jax.ShapeDtypeStruct:
    aval = jaxprs.aval(atom)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def tapped(
    closed: ClosedJaxpr,
    uses: Sequence[Use],
    taps: Sequence[Array],
    args: Sequence[Any],
    alone: Mapping[Path, Alone] | None = None,
) -> tuple[list[Any], list[Array]]:
    """Evaluates a traced function with a tap behind every use.

    Args:
      closed: the traced function.
      uses: of its parameters.
      taps: of each use, zeros [*loops, *out.shape]. The cotangent of a tap is that
        of the result behind which it stands. Before an operand it is [*loops, batch,
        *operand.shape], and its cotangent that of each example's copy.
      args: of the function.
      alone: the equations whose operands have taps.

    Returns:
      Its results; and of each use the data that met the parameter, [*loops, ...].
    """
    at: dict[Path, list[int]] = {}
    for number, use in enumerate(uses):
        at.setdefault(use.path, []).append(number)
    evaluation = _Evaluation(at, uses, alone or {})
    results, data = evaluation.run(closed, args, (), dict(enumerate(taps)))
    return results, [data[number] for number in range(len(uses))]


class _Evaluation(NamedTuple):
    at: dict[Path, list[int]]
    uses: Sequence[Use]
    alone: Mapping[Path, Alone]

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
            if here in self.alone:
                outputs = self._each_alone(here, inputs, taps)
                data |= dict.fromkeys(self.at[here], jnp.zeros(0))
            elif here in self.at:
                (number,), (out,) = self.at[here], jaxprs.run(jaxpr, eqn, inputs)
                outputs = [tap(out, taps[number])]
                operand = self.uses[number].product.data
                data[number] = jnp.zeros(0) if operand is None else inputs[operand]
            elif inside:
                enter = self._scan if eqn.primitive.name == "scan" else self._call
                with jaxprs.in_scopes(eqn):
                    outputs, found = enter(eqn, inputs, here, inside)
                data |= found
            else:
                outputs = jaxprs.run(jaxpr, eqn, inputs)
            values |= zip(eqn.outvars, outputs, strict=True)
        return read(jaxpr.outvars), data

    def _each_alone(self, path: Path, inputs: list[Any], taps: Mapping[int, Array]) -> list[Array]:
        # Copies are made before anything is vectorised: of a tap that JAX stages (in a loop), it
        # takes the first operand's axes for the result's, and that has none of examples.
        copies = {
            k: tap(jnp.broadcast_to(inputs[k], taps[n].shape), taps[n])
            for n, k in ((n, self.uses[n].operand) for n in self.at[path])
            if k is not None
        }
        return self.alone[path](inputs, copies)

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
