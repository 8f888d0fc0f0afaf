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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from fnet.jaxpr.interpreter import (
    CUSTOM_DERIVATIVES,
    Scan,
    ShardMap,
    While,
    called_jaxpr,
    interpret,
    is_checkpoint,
    is_reference,
    scopes,
    with_bodies,
)

S = TypeVar("S")


class Site(NamedTuple):
    """Where an equation is.

    Attributes:
      path: Its index, preceded by the indices of the equations around it. A branch or the
        condition of a loop has an index of its own in between.
      scopes: Named scopes, outermost first.
      lengths: Lengths of the scans around it, outermost first.
      in_checkpoint: Whether it is inside of a `jax.checkpoint`.
    """

    path: tuple[int, ...] = ()
    scopes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    in_checkpoint: bool = False


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

    def join(self, states: Sequence[S]) -> S:
        """Return the state of a value that is one of several values, in loops and branches."""
        raise NotImplementedError

    def chosen(self, predicate: S, states: Sequence[S]) -> Sequence[S]:
        """Return the states of results that a predicate chose: of branches, or of iterations."""
        raise NotImplementedError

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
            here = site._replace(path=path, scopes=site.scopes + scopes(eqn))
            return self.visit(eqn, states, here)

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
        in_checkpoint = site.in_checkpoint or is_checkpoint(eqn)
        return self.run(inner, states, site._replace(in_checkpoint=in_checkpoint))

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


class BackwardPropagation(abc.ABC, Generic[S]):
    """Follow what is wanted of results back to what it is wanted of, and rewrite on the way.

    A *wish* is a state of a value that its readers agree on, or None. References (mutable arrays)
    have wishes both ways, because equations write to operands.
    """

    @abc.abstractmethod
    def equation(
        self, eqn: JaxprEqn, refs: Sequence[S | None], outs: Sequence[S | None]
    ) -> tuple[Sequence[JaxprEqn], Sequence[S | None]]:
        """Return the equations in place of one, and the wishes for its operands.

        Args:
          eqn: An equation without inner jaxprs.
          refs: Wishes for the operands that are references.
          outs: Wishes for the results.
        """

    @abc.abstractmethod
    def sliced(self, wish: S | None) -> S | None:
        """Return the wish for one row of a scanned array."""

    @abc.abstractmethod
    def stacked(self, wish: S | None) -> S | None:
        """Return the wish for a scanned array, given the one for its rows."""

    def run(
        self, jaxpr: Jaxpr, ins: Sequence[S | None], outs: Sequence[S | None]
    ) -> tuple[Jaxpr, list[S | None]]:
        """Rewrite a jaxpr, and return the wishes for its arguments.

        Args:
          jaxpr: A jaxpr.
          ins: Wishes for references among its arguments.
          outs: Wishes for its results.
        """
        wishes: dict[Any, S] = {}

        def want(atoms: Sequence[Any], wanted: Sequence[S | None]) -> None:
            for v, wish in zip(atoms, wanted, strict=True):
                if wish is not None and not isinstance(v, Literal):
                    wishes.setdefault(v, wish)

        want(jaxpr.invars, ins)
        want(jaxpr.outvars, outs)
        reversed_eqns: list[JaxprEqn] = []
        for eqn in reversed(jaxpr.eqns):
            results = [wishes.get(v) for v in eqn.outvars]
            refs = [wishes.get(v) if is_reference(v) else None for v in eqn.invars]
            eqns: Sequence[JaxprEqn] = [eqn]
            if any(wish is not None for wish in (*results, *refs)):
                eqns, operands = self._visit(eqn, refs, results)
                want(eqn.invars, operands)
            reversed_eqns += eqns[::-1]
        return jaxpr.replace(eqns=reversed_eqns[::-1]), [wishes.get(v) for v in jaxpr.invars]

    def _visit(
        self, eqn: JaxprEqn, refs: Sequence[S | None], outs: Sequence[S | None]
    ) -> tuple[Sequence[JaxprEqn], Sequence[S | None]]:
        name = eqn.primitive.name
        wanted: list[list[S | None]] = []

        def rewritten(ins: Sequence[S | None], outs: Sequence[S | None]) -> JaxprEqn:
            def change(jaxpr: Jaxpr, index: tuple[int, ...]) -> Jaxpr:
                if name == "while" and index == (1,):
                    return jaxpr
                new, wishes = self.run(jaxpr, ins, outs)
                wanted.append(wishes)
                return new

            return with_bodies(eqn, change)

        def first(wishes: Iterable[S | None]) -> S | None:
            return next((wish for wish in wishes if wish is not None), None)

        if name == "scan":
            scan = Scan.of(eqn)
            carry, xs = scan.num_consts, scan.num_consts + scan.num_carry
            ins = [*refs[:xs], *map(self.sliced, refs[xs:])]
            ys = map(self.sliced, outs[scan.num_carry :])
            new = rewritten(ins, [*outs[: scan.num_carry], *ys])
            carried = map(first, zip(outs, wanted[0][carry:xs], strict=False))
            return [new], [*wanted[0][:carry], *carried, *map(self.stacked, wanted[0][xs:])]
        if name == "while":
            loop = While.of(eqn)
            consts = loop.num_condition_consts
            new = rewritten(refs[consts:], outs)
            carry = loop.num_body_consts
            carried = map(first, zip(outs, wanted[0][carry:], strict=True))
            return [new], [*[None] * consts, *wanted[0][:carry], *carried]
        if name == "cond":
            new = rewritten(refs[1:], outs)
            return [new], [None, *map(first, zip(*wanted, strict=True))]
        if called_jaxpr(eqn, custom_derivatives=True) is not None:
            new = rewritten(refs, outs)
            return [new], wanted[0]
        return self.equation(eqn, refs, outs)


class Dependence(Propagation[bool]):
    """Whether each value may depend on the selected arguments."""

    def constant(self, value: Any) -> bool:
        """Constants depend on nothing."""
        return False

    def equation(self, eqn: JaxprEqn, states: list[bool], site: Site) -> Sequence[bool]:
        """Any result may depend on any operand, and a reference on what is written to it later."""
        depends = any(map(is_reference, eqn.outvars)) or any(states)
        return [depends] * len(eqn.outvars)

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
