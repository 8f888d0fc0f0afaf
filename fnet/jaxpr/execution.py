"""Execute a traced program on values of another kind than its arrays.

`fnet.jaxpr.interpret` evaluates one equation after the other. Values of another kind, such
as the rows of a batch or a weight in parts, must also be brought through loops, branches and
`jax.checkpoint`, where JAX traces a function of arrays. `Executor` does this once, for all kinds.
What follows values and computes nothing is a `fnet.jaxpr.Propagation`.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from fnet.jaxpr.interpreter import Scan, While, custom_function, in_scopes, is_checkpoint, switch
from fnet.jaxpr.propagation import Site, Visitor

V = TypeVar("V")
Form = Any
"""What is known of a value while tracing, with ``==``. None is the form of a plain array."""


class Executor(Visitor[V]):
    """Execute programs on values of type ``V``: subclass it for values of your own.

    A value enters a function that JAX traces as a pytree of arrays (`lower`), and is made of them
    inside (`lift`). What a loop carries, and what branches return, needs one form for all
    iterations and branches. That is a plain array, unless `forms` says more.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fnet.jaxpr import Executor, evaluate
      >>> class Negated:
      ...     def __init__(self, array):
      ...         self.array = array
      >>> class Negating(Executor):
      ...     '''Negate when the value is used, not before.'''
      ...
      ...     def form(self, value):
      ...         return "negated" if isinstance(value, Negated) else None
      ...
      ...     def lower(self, value, form, atom):
      ...         if form is None:
      ...             return -value.array if isinstance(value, Negated) else value
      ...         return value.array
      ...
      ...     def lift(self, arrays, form):
      ...         return arrays if form is None else Negated(arrays)
      ...
      ...     def equation(self, eqn, values, site):
      ...         if eqn.primitive.name == "neg":
      ...             return [Negated(values[0])]
      ...         plain = [self.lower(v, None, a) for v, a in zip(values, eqn.invars)]
      ...         return evaluate(eqn, plain)
      >>> closed = jax.make_jaxpr(jax.checkpoint(lambda x: jnp.sin(-x)))(1.0)
      >>> [y] = Negating().run(closed, [1.0])
      >>> bool(y == jnp.sin(-1.0))
      True
    """

    def form(self, value: V) -> Form:
        """Return the form of a value."""
        return None

    def forms(self, eqn: JaxprEqn, values: list[V], site: Site) -> Sequence[Form]:
        """Return a form for each value that a loop carries, or for each result of branches.

        An analysis tells it, mostly. Of a scan the forms of the other results are not read.
        """
        return [None] * len(eqn.outvars)

    def lower(self, value: V, form: Form, atom: Any) -> Any:
        """Return a value in a form, as a pytree of arrays.

        Args:
          value: The value.
          form: Its own form, or one that `forms` asks for.
          atom: Its variable in the program.
        """
        return value

    def lift(self, arrays: Any, form: Form) -> V:
        """Return the value that was lowered to these arrays."""
        value: V = arrays
        return value

    def unstack(self, value: V, atom: Any) -> tuple[Any, Form]:
        """Return the arrays that a scan goes over, and the form of the value of one iteration."""
        return self.lower(value, None, atom), None

    def stack(self, arrays: Any, form: Form, atom: Any) -> V:
        """Return the value of the arrays that a scan stacked; `unstack` backwards.

        Args:
          arrays: Of all iterations.
          form: Form of one iteration's value.
          atom: Its variable in the body of the scan.
        """
        return self.lift(arrays, form)

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which JAX traces an inner function. No array may leave it."""
        return contextlib.nullcontext()

    def constant(self, value: Any) -> V:
        """Return the value of a constant."""
        return self.lift(value, None)

    def call(self, eqn: JaxprEqn, inner: ClosedJaxpr, states: list[V], site: Site) -> Sequence[V]:
        """Execute a `jax.jit`, whose equations take its place, or a `jax.checkpoint`."""
        with in_scopes(eqn):
            if is_checkpoint(eqn):
                return self._checkpoint(eqn, inner, states, site)
            return self.run(inner, states, site)

    def custom(self, eqn: JaxprEqn, states: list[V], site: Site) -> Sequence[V]:
        """Execute a function without its own derivative rules."""
        inner: Any = custom_function(eqn)
        with in_scopes(eqn):
            return self.run(inner, states, site)

    def shard_map(self, eqn: JaxprEqn, states: list[V], site: Site) -> Sequence[V]:
        """Execute a `jax.shard_map` as one equation."""
        return self.equation(eqn, states, site)

    def _checkpoint(
        self, eqn: JaxprEqn, inner: ClosedJaxpr, values: list[V], site: Site
    ) -> Sequence[V]:
        """Rematerialize what the equation rematerializes.

        Its primitive is bound with all parameters. `jax.checkpoint` could not say that the program
        was differentiated before, and would not rematerialize anything of it.
        """
        forms: list[Form] = []

        def function() -> list[Any]:
            with self.inside():
                results = self.run(inner, values, site._replace(in_checkpoint=True))
                forms[:] = map(self.form, results)
                return self.lowered(results, forms, eqn.outvars)

        closed, shapes = jax.make_jaxpr(function, return_shape=True)()
        jaxpr = closed.jaxpr.replace(
            constvars=[],
            invars=closed.jaxpr.constvars,
            debug_info=closed.jaxpr.debug_info.with_unknown_names(),
        )
        prevent_cse = eqn.params["prevent_cse"]
        if isinstance(prevent_cse, tuple):
            pairs = zip(values, prevent_cse, strict=True)
            own = [(leaf, flag) for value, flag in pairs for leaf in jax.tree.leaves(value)]
            prevent_cse = tuple(
                next((flag for leaf, flag in own if leaf is const), True) for const in closed.consts
            )
        params = eqn.params | {"jaxpr": jaxpr, "prevent_cse": prevent_cse}
        outputs = eqn.primitive.bind(*closed.consts, **params)
        return self.lifted(jax.tree.unflatten(jax.tree.structure(shapes), outputs), forms)

    def scan(self, eqn: JaxprEqn, states: list[V], site: Site) -> Sequence[V]:
        """Execute a `jax.lax.scan`."""
        scan = Scan.of(eqn)
        variables = scan.body.jaxpr.outvars
        consts, carry, xs = scan.split(states)
        carried = list(self.forms(eqn, states, site))[: scan.num_carry]
        inside = site._replace(lengths=(*site.lengths, scan.length))
        of_ys: list[Form] = []

        def body(arrays: list[Any], rows: list[Any], _: None) -> tuple[list[Any], None]:
            with self.inside():
                given = [*self.lifted(arrays, carried), *self.lifted(rows, slices)]
                results = self.run(scan.body, [*consts, *given], inside)
                of_ys[:] = map(self.form, results[scan.num_carry :])
                return self.lowered(results, [*carried, *of_ys], variables), None

        with in_scopes(eqn):
            pairs = zip(xs, scan.split(eqn.invars)[2], strict=True)
            unstacked = [self.unstack(*pair) for pair in pairs]
            slices = [form for _, form in unstacked]
            first = self.lowered(carry, carried, eqn.outvars[: scan.num_carry])
            out, _ = scan.evaluate(body, first, [arrays for arrays, _ in unstacked])
            ys = zip(out[scan.num_carry :], of_ys, variables[scan.num_carry :], strict=True)
            return [*self.lifted(out[: scan.num_carry], carried), *(self.stack(*y) for y in ys)]

    def loop(self, eqn: JaxprEqn, states: list[V], site: Site) -> Sequence[V]:
        """Execute a `jax.lax.while_loop`."""
        loop, forms = While.of(eqn), self.forms(eqn, states, site)
        condition_consts, consts, carry = loop.split(states)
        sites = [site._replace(path=(*site.path, i)) for i in range(2)]

        def condition(arrays: Sequence[Any]) -> Any:
            with self.inside():
                given = [*condition_consts, *self.lifted(arrays, forms)]
                (result,) = self.run(loop.condition, given, sites[1])
                return self.lower(result, None, loop.condition.jaxpr.outvars[0])

        def body(arrays: Sequence[Any]) -> Sequence[Any]:
            with self.inside():
                results = self.run(loop.body, [*consts, *self.lifted(arrays, forms)], sites[0])
                return self.lowered(results, forms, eqn.outvars)

        with in_scopes(eqn):
            first = self.lowered(carry, forms, eqn.outvars)
            return self.lifted(loop.evaluate(condition, body, first), forms)

    def branches(self, eqn: JaxprEqn, states: list[V], site: Site) -> Sequence[V]:
        """Execute a `jax.lax.cond` or `jax.lax.switch`."""
        forms = self.forms(eqn, states, site)

        def run(number: int, branch: ClosedJaxpr) -> list[Any]:
            with self.inside():
                results = self.run(branch, states[1:], site._replace(path=(*site.path, number)))
                return self.lowered(results, forms, eqn.outvars)

        functions = [functools.partial(run, *b) for b in enumerate(eqn.params["branches"])]
        with in_scopes(eqn):
            index = self.lower(states[0], None, eqn.invars[0])
            return self.lifted(switch(eqn, index, functions), forms)

    def lowered(
        self, values: Sequence[V], forms: Sequence[Form], atoms: Sequence[Any]
    ) -> list[Any]:
        """Lower several values."""
        return [self.lower(*each) for each in zip(values, forms, atoms, strict=True)]

    def lifted(self, arrays: Sequence[Any], forms: Sequence[Form]) -> list[V]:
        """Lift several values."""
        return [self.lift(*pair) for pair in zip(arrays, forms, strict=True)]
