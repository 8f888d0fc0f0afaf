"""Apply a rewriting of equations to a function: trace it, rewrite it, evaluate it."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from fnet.backward_pass import bind_static, constant
from fnet.cpu.tracing import traced_for, tracing_device
from fnet.jaxpr import inline, is_floating

F = TypeVar("F", bound=Callable[..., Any])


def variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """Yield the inputs of an equation that are variables."""
    return (a for a in atoms if not isinstance(a, Literal))


class Repeated(NamedTuple):
    """A function whose later traces get the variables of the first, so what is known of it holds.

    Attributes:
      f: The function.
      jaxprs: First traces by key and number of the call.
      key: What tells it from other functions with ``jaxprs``.
      calls: Numbers of its calls.
    """

    f: Callable[..., Any]
    jaxprs: dict[Any, Jaxpr]
    key: tuple[int, ...]
    calls: Iterator[int]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return self.f(*args, **kwargs)

    def renamed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """The trace of a call, with the variables of the first trace if it is the same."""
        first = self.jaxprs.setdefault((*self.key, next(self.calls)), closed.jaxpr)
        is_same = _types(first) == _types(closed.jaxpr)
        return ClosedJaxpr(first, closed.consts) if is_same else closed


def _types(jaxpr: Jaxpr) -> list[Any]:
    given = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    return [*given, *((e.primitive, [v.aval for v in e.outvars]) for e in jaxpr.eqns)]


def trace_inlined(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ClosedJaxpr, list[Any], Any]:
    """Trace a function, and return its inlined jaxpr, its arguments and its result's structure."""
    with_static, arrays = bind_static(f, kwargs)
    leaves, structure = jax.tree.flatten((args, arrays))

    def flat(*leaves: Any) -> Any:
        args, arrays = jax.tree.unflatten(structure, leaves)
        return with_static(*args, **arrays)

    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    closed = inline(traced)
    closed = f.renamed(closed) if isinstance(f, Repeated) else closed
    return closed, leaves, jax.tree.structure(shapes)


def evaluate_as(
    f: F,
    run: Callable[[ClosedJaxpr, list[Any], list[bool]], Sequence[Any]],
    *,
    first_alone: bool = True,
) -> F:
    """Evaluate a function as ``run`` does.

    ``run`` gets its equations, the arrays of its arguments, and which of these are a part of the
    first one. It returns the arrays of the results. With ``first_alone``, other arrays, also those
    that the function closes over, cannot be differentiated.
    """

    def fixed(a: Any) -> Any:
        can_be_differentiated = first_alone and isinstance(a, jax.Array) and is_floating(a)
        return constant(a) if can_be_differentiated else a

    # JAX keeps a traced function and uses it again, so the device is the current one.
    for_device = traced_for(tracing_device())

    @functools.wraps(f)
    @for_device
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        closed, leaves, structure = trace_inlined(f, args, kwargs)
        count = len(jax.tree.leaves(args[:1]))
        leaves[count:] = map(fixed, leaves[count:])
        closed = ClosedJaxpr(closed.jaxpr, [*map(fixed, closed.consts)])
        differentiated = [i < count for i in range(len(leaves))]
        return jax.tree.unflatten(structure, run(closed, leaves, differentiated))

    return evaluated  # type: ignore[return-value]
