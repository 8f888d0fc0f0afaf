"""Which axis of each value in a traced function counts examples, and where examples mix."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fnet import jaxprs
from fnet.autodiff.per_example.axis_rules import MIXED, UNKNOWN, Along, Mixed, State, joined, rule


class Followed(NamedTuple):
    """Where a batch went.

    Attributes:
      outputs: of each result.
      at: of the inputs and the results of every equation that the batch reaches, by
        the equation's number, after those of the calls and loops it is in.
    """

    outputs: list[State]
    at: dict[tuple[int, ...], tuple[list[State], list[State]]]


def follow(closed: ClosedJaxpr, batched: Sequence[bool], rows: int) -> Followed:
    """Follows the examples of a batch through a function.

    They are seen through elementwise operations, products, convolutions,
    reductions, reshapes, transposes, lookups, calls, branches and loops; also where a
    `jax.custom_jvp` or `jax.custom_vjp` goes back.

    Args:
      closed: ``jax.make_jaxpr(f)(*args)``, for at least two examples.
      batched: of each argument, whether its leading axis is that of examples.
      rows: how many examples there are.
    """
    trail = _Trail({}, rows)
    states: list[State] = [Along(0) if b else None for b in batched]
    return Followed(trail.visit(closed, states, "", ()), trail.at)


def depends(closed: ClosedJaxpr, on: Sequence[bool]) -> list[bool]:
    """Of each result of a traced function, whether it may depend on the arguments marked."""
    return [state is not None for state in reached(closed, on).outputs]


def reached(closed: ClosedJaxpr, on: Sequence[bool]) -> Followed:
    """All that may depend on the arguments marked, in whatever way."""
    trail = _Trail({}, 1)
    states: list[State] = [UNKNOWN if marked else None for marked in on]
    return Followed(trail.visit(closed, states, "", ()), trail.at)


class _Trail(NamedTuple):
    at: dict[tuple[int, ...], tuple[list[State], list[State]]]
    rows: int
    is_differentiated: bool = True

    def visit(
        self, closed: ClosedJaxpr, inputs: Sequence[State], scope: str, path: tuple[int, ...]
    ) -> list[State]:
        known: dict[Any, State] = dict(zip(closed.jaxpr.invars, inputs, strict=True))

        def states(atoms: Sequence[Any]) -> list[State]:
            return [None if isinstance(a, Literal) else known.get(a) for a in atoms]

        for i, eqn in enumerate(closed.jaxpr.eqns):
            given, place = states(eqn.invars), (*path, i)
            if eqn.primitive.name in ("new_ref", "empty_ref"):
                # What is written to it later is not followed.
                known |= dict.fromkeys(eqn.outvars, UNKNOWN)
            elif any(s is not None for s in given):
                here = "/".join(filter(None, (scope, *jaxprs.scopes(eqn))))
                # Of what has a rule of its own, nothing inside is differentiated.
                ruled = eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))
                inside = self._replace(is_differentiated=False) if ruled else self
                out = inside._equation(eqn, given, here, place)
                if ruled and self.is_differentiated:
                    out = self._gone_back(closed.jaxpr, eqn, given, out, here)
                self.at[place] = given, out
                known |= zip(eqn.outvars, out, strict=True)
        return states(closed.jaxpr.outvars)

    def _equation(
        self, eqn: JaxprEqn, given: list[State], here: str, path: tuple[int, ...]
    ) -> list[State]:
        name = eqn.primitive.name
        inner = jaxprs.computed(eqn)
        if inner is not None:
            return self.visit(inner, given, here, path)
        if name == "scan":
            return self._scan(eqn, given, here, path)
        if name == "optimization_barrier":
            return given
        count = len(eqn.outvars)
        if mixed := next((s for s in given if isinstance(s, Mixed)), None):
            return [mixed] * count
        if UNKNOWN in given:
            return [UNKNOWN] * count
        if name == "cond":
            return self._branches(eqn, given[1:], here)
        found = rule(name, self.rows)(eqn, given)
        return [Mixed(here, name) if found == MIXED else found] * count

    def _gone_back(
        self, jaxpr: Jaxpr, eqn: JaxprEqn, given: list[State], out: list[State], here: str
    ) -> list[State]:
        """What is known of the results, if the derivatives of an equation have a rule of their own.

        Of values that have a row an example, so must have what goes back to them.
        """
        shapes, results = (
            [jax.ShapeDtypeStruct(jaxprs.aval(v).shape, jaxprs.aval(v).dtype) for v in variables]
            for variables in (eqn.invars, eqn.outvars)
        )
        own = [i for i, s in enumerate(given) if isinstance(s, Along) and _is_floating(shapes[i])]
        ends = [i for i, result in enumerate(results) if _is_floating(result)]
        if not own or not ends:
            return out

        def back(inputs: list[Any], cotangents: list[Any]) -> Any:
            def function(*rows: Any) -> list[Any]:
                values = dict(enumerate(inputs)) | dict(zip(own, rows, strict=True))
                made = jaxprs.run(jaxpr, eqn, list(values.values()))
                return [made[i] for i in ends]

            return jax.vjp(function, *(inputs[i] for i in own))[1](cotangents)

        closed = jax.make_jaxpr(back)(shapes, [results[i] for i in ends])
        trail = self._replace(at={}, is_differentiated=False)
        found = trail.visit(closed, [*given, *(out[i] for i in ends)], here, ())
        if mixed := next((state for state in found if isinstance(state, Mixed)), None):
            return [mixed._replace(operation=f"{mixed.operation}, on the way back")] * len(out)
        if any(state not in (None, given[i]) for i, state in zip(own, found, strict=True)):
            return [UNKNOWN] * len(out)
        return out

    def _branches(self, eqn: JaxprEqn, given: list[State], here: str) -> list[State]:
        trail = self._replace(at={})
        results = [trail.visit(branch, given, here, ()) for branch in eqn.params["branches"]]
        return [joined(states) for states in zip(*results, strict=True)]

    def _scan(
        self, eqn: JaxprEqn, given: list[State], here: str, path: tuple[int, ...]
    ) -> list[State]:
        s = jaxprs.scan(eqn)
        before = s.constants + s.carry

        def in_round(state: State) -> State:
            if isinstance(state, Along):
                return Along(state.axis - 1) if state.axis else UNKNOWN
            return state

        def stacked(state: State) -> State:
            return Along(state.axis + 1) if isinstance(state, Along) else state

        rows = [in_round(state) for state in given[before:]]
        carry = given[s.constants : before]
        while True:  # it ends: of a carry less and less is certain
            out = self.visit(s.body, [*given[: s.constants], *carry, *rows], here, path)
            met = [joined(pair) for pair in zip(carry, out[: s.carry], strict=True)]
            if met == carry:
                return [*carry, *map(stacked, out[s.carry :])]
            carry = met


def _is_floating(a: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)
