"""Follow a state of every value through a traced program.

A *state* is whatever you want to know of a value: whether it depends on some input, which of its
axes counts examples, how it is sharded. `Propagation` carries states through equations, calls,
scans, while loops, branches and custom derivatives. Loops are repeated until the states of their
carry stop changing (a fixed point). A subclass says what one plain equation does with states,
mostly by `fnet.jaxpr.factors`, and how to join the states of alternatives.

`BackwardPropagation` carries states the other way, from results to what they are computed from.

This is abstract interpretation: Cousot and Cousot 1977, "Abstract interpretation: a unified
lattice model for static analysis of programs".
"""

import abc
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fnet.jaxpr.axes import stops_gradients
from fnet.jaxpr.interpreter import (
    Scan,
    ShardMap,
    While,
    called_jaxpr,
    custom_function,
    interpret,
    is_checkpoint,
    is_floating,
    is_reference,
    scopes,
    with_bodies,
)

S = TypeVar("S")


class Site(NamedTuple):
    """The place of an equation.

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


class Visitor(abc.ABC, Generic[S]):
    """Visit every equation of a program, and those of the programs inside of it.

    The base of `Propagation`, whose states stand for values, and of `fnet.jaxpr.Executor`, which
    computes values of its own. Both say what a loop, a branch or a call does with them.
    """

    @abc.abstractmethod
    def constant(self, value: Any) -> S:
        """Return the state of a constant."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Return the states of the results of an equation that nothing else here handles."""

    @abc.abstractmethod
    def call(self, eqn: JaxprEqn, inner: ClosedJaxpr, states: list[S], site: Site) -> Sequence[S]:
        """Visit a `jax.jit` or a `jax.checkpoint`."""

    @abc.abstractmethod
    def custom(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Visit what has derivative rules of its own."""

    @abc.abstractmethod
    def scan(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Visit a `jax.lax.scan`."""

    @abc.abstractmethod
    def loop(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Visit a `jax.lax.while_loop`."""

    @abc.abstractmethod
    def branches(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Visit a `jax.lax.cond` or `jax.lax.switch`."""

    @abc.abstractmethod
    def shard_map(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Visit a `jax.shard_map`."""

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
        if (inner := called_jaxpr(eqn)) is not None:
            return self.call(eqn, inner, states, site)
        control = {
            "scan": self.scan,
            "while": self.loop,
            "cond": self.branches,
            "shard_map": self.shard_map,
        }
        plain = self.equation if custom_function(eqn) is None else self.custom
        return control.get(eqn.primitive.name, plain)(eqn, states, site)


class Propagation(Visitor[S]):
    """Follow states through a program: subclass it for states of your own.

    States need ``==``. Repeated joins must stop changing, or a loop never ends. Inside of a loop,
    `equation` is called several times for one site, first with states that promise too much. So a
    subclass that records something by site must overwrite it: the last call is right.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.jaxpr import Propagation
      >>> class Sources(Propagation[frozenset]):
      ...     '''Which arguments a value depends on.'''
      ...
      ...     def constant(self, value):
      ...         return frozenset()
      ...
      ...     def equation(self, eqn, states, site):
      ...         return [self.join(states)] * len(eqn.outvars)
      ...
      ...     def join(self, states):
      ...         return frozenset().union(*states)
      ...
      ...     def chosen(self, predicate, states):
      ...         return [predicate | state for state in states]
      >>> closed = jax.make_jaxpr(lambda x, y: (jnp.sin(x), x * y))(1.0, 2.0)
      >>> [sorted(s) for s in Sources().run(closed, [frozenset("x"), frozenset("y")])]
      [['x'], ['x', 'y']]
    """

    def join(self, states: Sequence[S]) -> S:
        """Return the state of a value that is one of several values, in loops and branches."""
        raise NotImplementedError(f"{type(self).__name__}.join is needed for loops and branches")

    def chosen(self, predicate: S, states: Sequence[S]) -> Sequence[S]:
        """Return the states of results that a predicate chose: of branches, or of iterations."""
        raise NotImplementedError(f"{type(self).__name__}.chosen is needed for loops and branches")

    def sliced(self, state: S) -> S:
        """Return the state of one row of an array that a scan goes over."""
        return state

    def stacked(self, state: S) -> S:
        """Return the state of an array of which a scan makes a row per iteration."""
        return state

    def to_device(self, state: S, splits: Sequence[int]) -> S:
        """Return the state of a device's part of an array, in a `jax.shard_map`.

        Args:
          state: State of the whole array.
          splits: By how many devices each of its axes is split.
        """
        return state

    def from_device(self, state: S, splits: Sequence[int]) -> S:
        """Return the state of an array of which each device makes a part: see `to_device`."""
        return state

    def call(self, eqn: JaxprEqn, inner: ClosedJaxpr, states: list[S], site: Site) -> Sequence[S]:
        """Follow a `jax.jit` or a `jax.checkpoint`."""
        in_checkpoint = site.in_checkpoint or is_checkpoint(eqn)
        return self.run(inner, states, site._replace(in_checkpoint=in_checkpoint))

    def custom(self, eqn: JaxprEqn, states: list[S], site: Site) -> Sequence[S]:
        """Follow what has derivative rules of its own as the function that it is."""
        inner: Any = custom_function(eqn)
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
        inputs = [self.to_device(*pair) for pair in zip(states, mapped.inputs, strict=True)]
        results = self.run(mapped.body, inputs, site)
        return [self.from_device(*pair) for pair in zip(results, mapped.outputs, strict=True)]

    def fixed_point(
        self,
        body: ClosedJaxpr,
        consts: Sequence[S],
        carry: list[S],
        slices: Sequence[S],
        site: Site,
    ) -> tuple[list[S], list[S]]:
        """Repeat the body of a loop until the states of its carry stop changing.

        Returns:
          The states of the carry in every iteration, and the states of the other results.
        """
        while True:
            results = self.run(body, [*consts, *carry, *slices], site)
            after = results[: len(carry)]
            joined = [self.join(pair) for pair in zip(carry, after, strict=True)]
            if joined == carry:
                return carry, results[len(carry) :]
            carry = joined


class BackwardPropagation(abc.ABC, Generic[S]):
    """Propagate wishes from results to operands, and rewrite equations on the way.

    A *wish* is the state that the last reader of a value wants, or None. References (mutable
    arrays) have wishes both ways, because equations write to operands. The body of a loop is
    rewritten once, for the wishes for its results; there is no fixed point.
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
        """Rewrite any equation; see `equation`."""
        control = {"scan": self._scan, "while": self._loop, "cond": self._branches}
        if handle := control.get(eqn.primitive.name):
            new, wishes = handle(eqn, refs, outs)
            return [new], wishes
        if (inner := called_jaxpr(eqn, custom_derivatives=True)) is not None:
            body, wishes = self.run(inner.jaxpr, refs, outs)
            return [with_bodies(eqn, lambda jaxpr, index: body)], wishes
        return self.equation(eqn, refs, outs)

    def _scan(
        self, eqn: JaxprEqn, refs: Sequence[S | None], outs: Sequence[S | None]
    ) -> tuple[JaxprEqn, list[S | None]]:
        scan = Scan.of(eqn)
        consts, carry, xs = scan.split(refs)
        carried, ys = outs[: scan.num_carry], outs[scan.num_carry :]
        body, wishes = self.run(
            scan.body.jaxpr,
            [*consts, *carry, *map(self.sliced, xs)],
            [*carried, *map(self.sliced, ys)],
        )
        consts, carry, slices = scan.split(wishes)
        new = with_bodies(eqn, lambda jaxpr, index: body)
        return new, [
            *consts,
            *map(_first, zip(carried, carry, strict=True)),
            *map(self.stacked, slices),
        ]

    def _loop(
        self, eqn: JaxprEqn, refs: Sequence[S | None], outs: Sequence[S | None]
    ) -> tuple[JaxprEqn, list[S | None]]:
        loop = While.of(eqn)
        of_condition, consts, carry = loop.split(refs)
        body, wishes = self.run(loop.body.jaxpr, [*consts, *carry], outs)
        _, consts, carry = loop.split([*[None] * len(of_condition), *wishes])
        new = with_bodies(eqn, lambda jaxpr, index: body if index == (0,) else jaxpr)
        return new, [
            *[None] * len(of_condition),
            *consts,
            *map(_first, zip(outs, carry, strict=True)),
        ]

    def _branches(
        self, eqn: JaxprEqn, refs: Sequence[S | None], outs: Sequence[S | None]
    ) -> tuple[JaxprEqn, list[S | None]]:
        branches = [self.run(b.jaxpr, refs[1:], outs) for b in eqn.params["branches"]]
        bodies, wishes = zip(*branches, strict=True)
        new = with_bodies(eqn, lambda jaxpr, index: bodies[index[0]])
        return new, [None, *map(_first, zip(*wishes, strict=True))]


def _first(wishes: Iterable[S | None]) -> S | None:
    return next((wish for wish in wishes if wish is not None), None)


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
        """A chosen value depends on the choice."""
        return [predicate or state for state in states]


def depends_on(closed: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return whether each result of a program may depend on the selected arguments.

    Args:
      closed: The program.
      inputs: Whether each argument is selected.
    """
    return Dependence().run(closed, inputs)


class _Active(Dependence):
    """Differentiated variables, as JAX sees them: derivative rules hide what is inside."""

    def __init__(self) -> None:
        self.variables: set[Var] = set()

    def visit(self, eqn: JaxprEqn, states: list[bool], site: Site) -> Sequence[bool]:
        results = [
            state and is_floating(v)
            for v, state in zip(eqn.outvars, super().visit(eqn, states, site), strict=True)
        ]
        pairs = zip((*eqn.invars, *eqn.outvars), (*states, *results), strict=True)
        self.variables |= {v for v, state in pairs if state and isinstance(v, Var)}
        return results

    def equation(self, eqn: JaxprEqn, states: list[bool], site: Site) -> Sequence[bool]:
        if stops_gradients(eqn):
            return [False] * len(eqn.outvars)
        return super().equation(eqn, states, site)

    def custom(self, eqn: JaxprEqn, states: list[bool], site: Site) -> Sequence[bool]:
        return [any(states)] * len(eqn.outvars)


def active_variables(jaxpr: Jaxpr, differentiated: Sequence[bool]) -> set[Var]:
    """Return the variables that are differentiated, also in inner jaxprs.

    Args:
      jaxpr: The program.
      differentiated: Whether it is differentiated with respect to each argument.
    """
    pairs = zip(jaxpr.invars, differentiated, strict=True)
    given = [d and is_floating(v) for v, d in pairs]
    active = _Active()
    active.run(ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars)), given)
    return active.variables.union(itertools.compress(jaxpr.invars, given))
