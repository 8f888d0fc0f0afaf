"""Apply a rewriting of equations to a function: trace it, rewrite it, evaluate it."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var

from fnet.backward_pass import bind_static, constant
from fnet.cpu.tracing import traced_for, tracing_platform
from fnet.jaxpr import inline, is_floating

F = TypeVar("F", bound=Callable[..., Any])


def variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """Yield the inputs of an equation that are variables."""
    return (a for a in atoms if not isinstance(a, Literal))


class Once(NamedTuple):
    """A function that `evaluate_as` traces once for arguments of the same types."""

    f: Callable[..., Any]
    traces: dict[Any, tuple[ClosedJaxpr, Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.f(*args, **kwargs)


def trace_inlined(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ClosedJaxpr, list[Any], Any]:
    """Trace a function, and return its inlined jaxpr, its arguments and its result's structure."""
    traces = f.traces if isinstance(f, Once) else {}
    with_static, arrays = bind_static(f, kwargs)
    leaves, structure = jax.tree.flatten((args, arrays))
    static = [(name, a) for name, a in kwargs.items() if name not in arrays]
    key = structure, *map(jax.typeof, leaves), *static
    if key in traces:
        closed, result = traces[key]
        return closed, leaves, result

    def flat(*leaves: Any) -> Any:
        args, arrays = jax.tree.unflatten(structure, leaves)
        return with_static(*args, **arrays)

    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    closed, result = inline(traced), jax.tree.structure(shapes)
    if not any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        traces[key] = closed, result
    return closed, leaves, result


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
    for_device = traced_for(tracing_platform())

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
