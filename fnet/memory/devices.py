"""What each device computes inside of a `jax.shard_map`: a loss of its own that is planned."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from fnet.jaxpr import ShardMap, active_variables, evaluate, interpret
from fnet.jaxpr.primitives import made_bytes
from fnet.memory.apply import evaluate_as

F = TypeVar("F", bound=Callable[..., Any])


def is_on_devices(closed: ClosedJaxpr) -> bool:
    """Whether most bytes of a loss are made inside of a `jax.shard_map`."""
    made = {e: made_bytes(e) for e in closed.eqns}
    return 2 * sum(b for e, b in made.items() if ShardMap.read(e)) > sum(made.values())


def on_devices(f: F, transform: Callable[[Any], Any]) -> F:
    """Transform what each device computes inside of the `jax.shard_map` of a function.

    Args:
      f: A function that is differentiated with respect to its first argument.
      transform: Takes and returns a function of a list of differentiated and one of other arrays.

    Returns:
      A function with the same arguments and values.
    """

    def run(closed: ClosedJaxpr, leaves: list[Any], differentiated: list[bool]) -> list[Any]:
        active = active_variables(closed.jaxpr, differentiated)

        def handle(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
            mapped = ShardMap.read(eqn)
            if mapped is None:
                return evaluate(eqn, inputs)
            is_active = [isinstance(v, Var) and v in active for v in eqn.invars]

            def of_lists(chosen: list[Any], others: list[Any]) -> list[Any]:
                first, rest = iter(chosen), iter(others)
                return interpret(
                    mapped.body, [next(first if a else rest) for a in is_active], evaluate
                )

            def of_device(*args: Any) -> tuple[Any, ...]:
                lists: tuple[list[Any], list[Any]] = ([], [])
                for a, is_own in zip(args, is_active, strict=True):
                    lists[not is_own].append(a)
                return tuple(transform(of_lists)(*lists))

            return list(jax.shard_map(of_device, **mapped.options)(*inputs))

        return interpret(closed, leaves, handle)

    return evaluate_as(f, run, first_alone=False)
