"""Follow a state of every value through a traced program.

A *state* is whatever you want to know of a value: whether it depends on some input, which of its
axes counts examples, how it is sharded. `Propagation` carries states through equations, calls,
scans, while loops, branches and custom derivatives. Loops are repeated until the states of their
carry stay (a fixed point). A subclass says what one plain equation does with states, mostly by
`fnet.jaxpr.factors`, and how to join the states of values of which one is chosen.

This is abstract interpretation: Cousot and Cousot 1977, "Abstract interpretation: a unified
lattice model for static analysis of programs".
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.jaxpr.interpreter import (
    CUSTOM_DERIVATIVES,
    Scan,
    ShardMap,
    While,
    called_jaxpr,
    interpret,
    scopes,
)

S = TypeVar("S")


class Site(NamedTuple):
    """Where an equation is.

    Attributes:
      path: Its index, preceded by the indices of the equations around it. A branch or the
        condition of a loop has an index of its own in between.
      scopes: Named scopes, outermost first.
      lengths: Lengths of the scans around it, outermost first.
    """

    path: tuple[int, ...] = ()
    scopes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()


class Propagation(abc.ABC, Generic[S]):
    """Follow states through a program: subclass it for states of your own.

    States need ``==``. A join must lose knowledge in finitely many steps, or a loop never ends.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.jaxpr import Propagation
      >>> class Depends(Propagation[bool]):
      ...     def constant(self, value):
      ...         return False
      ...
      ...     def equation(self, eqn, states, site):
      ...         return [any(states)] * len(eqn.outvars)
      ...
      ...     def join(self, states):
      ...         return any(states)
      ...
      ...     def chosen(self, predicate, states):
      ...         return [predicate or state for state in states]
      >>> closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x), x * y))(1.0, 2.0)
      >>> Depends().run(closed, [False, True])
      [False, True]
    """

    @abc.abstractmethod
    def constant(self, value: Any) -> S:
        """Return the state of a constant."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Return the states of the results of an equation that nothing else here handles."""

    @abc.abstractmethod
    def join(self, states: Sequence[S]) -> S:
        """Return the state of a value that is one of several values."""

    @abc.abstractmethod
    def chosen(self, predicate: S, states: Sequence[S]) -> Sequence[S]:
        """Return the states of results that a predicate chose: of branches, or of iterations."""

    def sliced(self, state: S) -> S:
        """Return the state of one row of an array that a scan goes over."""
        return state

    def stacked(self, state: S) -> S:
        """Return the state of an array of which a scan makes a row per iteration."""
        return state

    def run(self, closed: ClosedJaxpr, inputs: Sequence[S], site: Site = Site()) -> list[S]:  # noqa: B008
        """Return the states of the results of a program.

        Args:
          closed: The program.
          inputs: State of each argument.
          site: Where the program is called.
        """
        index = iter(range(len(closed.jaxpr.eqns)))

        def handle(eqn: JaxprEqn, states: list[S]) -> Sequence[S]:
            path = (*site.path, next(index))
            return self.visit(eqn, states, Site(path, site.scopes + scopes(eqn), site.lengths))

        return interpret(closed, inputs, handle, self.constant)

    def visit(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Return the states of the results of any equation."""
        name = eqn.primitive.name
        if (inner := called_jaxpr(eqn)) is not None:
            return self.call(eqn, inner, states, site)
        handle: Callable[[JaxprEqn, list[S], Site], Sequence[S]]
        if name.startswith(CUSTOM_DERIVATIVES):
            handle = self.custom
        else:
            control = {
                "scan": self.scan,
                "while": self.loop,
                "cond": self.branches,
                "shard_map": self.shard_map,
            }
            handle = control.get(name, self.equation)
        return handle(eqn, states, site)

    def call(self, eqn: JaxprEqn, inner: ClosedJaxpr, states: list[S], site: Site) -> Sequence[S]:
        """Follow a `jax.jit` or a `jax.checkpoint`."""
        return self.run(inner, states, site)

    def custom(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Follow a `jax.custom_jvp` or `jax.custom_vjp` as the function that it is."""
        inner: Any = called_jaxpr(eqn, custom_derivatives=True)
        return self.run(inner, states, site)

    def scan(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Follow a `jax.lax.scan`."""
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(states)
        slices = [self.sliced(state) for state in xs]
        inside = site._replace(lengths=(*site.lengths, eqn.params["length"]))
        carry, ys = self.fixed_point(scan.body, consts, carry, slices, inside)
        return [*carry, *map(self.stacked, ys)]

    def loop(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Follow a `jax.lax.while_loop`."""
        loop = While.of(eqn)
        condition_consts, body_consts, carry = loop.split(states)
        inside = [site._replace(path=(*site.path, i)) for i in range(2)]
        carry, _ = self.fixed_point(loop.body, body_consts, carry, [], inside[0])
        (predicate,) = self.run(loop.condition, [*condition_consts, *carry], inside[1])
        return self.chosen(predicate, carry)

    def branches(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Follow a `jax.lax.cond` or `jax.lax.switch`."""
        predicate, *operands = states
        results = [
            self.run(branch, operands, site._replace(path=(*site.path, i)))
            for i, branch in enumerate(eqn.params["branches"])
        ]
        return self.chosen(predicate, [self.join(each) for each in zip(*results, strict=True)])

    def shard_map(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Follow what one device computes in a `jax.shard_map`."""
        mapped = ShardMap.of(eqn)
        inputs = [self.of_device(*pair) for pair in zip(states, mapped.inputs, strict=True)]
        results = self.run(mapped.body, inputs, site)
        return [self.of_device(*pair) for pair in zip(results, mapped.outputs, strict=True)]

    def of_device(self, state: S, splits: Sequence[int]) -> S:
        """Return the state of a device's part of an array, and the other way round.

        Args:
          state: State of the whole array, or of the part.
          splits: By how many devices each of its axes is split.
        """
        return state

    def fixed_point(
        self,
        body: ClosedJaxpr,
        consts: Sequence[S],
        carry: list[S],
        slices: Sequence[S],
        site: Site,
    ) -> tuple[list[S], list[S]]:
        """Repeat the body of a loop until the states of its carry stay.

        Returns:
          The states of the carry in every iteration, and those of the other results.
        """
        while True:
            results = self.run(body, [*consts, *carry, *slices], site)
            after = results[: len(carry)]
            joined = [self.join(pair) for pair in zip(carry, after, strict=True)]
            if joined == carry:
                return carry, results[len(carry) :]
            carry = joined


class Dependence(Propagation[bool]):
    """Whether each value may depend on the selected arguments."""

    def constant(self, value: Any) -> bool:
        """Constants depend on nothing."""
        return False

    def equation(self, eqn: JaxprEqn, states: list[bool], site: Site) -> Sequence[bool]:
        """Any result may depend on any operand, and a reference on what is written to it later."""
        is_reference = any(hasattr(v.aval, "inner_aval") for v in eqn.outvars)
        return [is_reference or any(states)] * len(eqn.outvars)

    def join(self, states: Sequence[bool]) -> bool:
        """One of several values depends on what any of them depends on."""
        return any(states)

    def chosen(self, predicate: bool, states: Sequence[bool]) -> Sequence[bool]:
        """What is chosen depends on the choice."""
        return [predicate or state for state in states]


def depends_on(closed: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return whether each result of a program may depend on the selected arguments.

    Args:
      closed: The program.
      inputs: Whether each argument is selected.
    """
    return Dependence().run(closed, inputs)
