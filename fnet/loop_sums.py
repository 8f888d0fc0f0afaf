"""Sums and stacks of loops that are made when the loop begins, for accelerators.

A gradient sums over the iterations of a loop, from zeros on, and a loop writes its results into
stacks. Zeros wait for nothing: XLA merges equal ones, copies them for each loop, and makes all
copies when the program begins. Twelve blocks of attention in chunks hold 2.5 of 11.2 GB of zeros
at the peak of a train step. Here they are made of a number that waits for the loop's operands.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fnet.jaxpr import Scan, aval, call_in_place, find_equations, nbytes, rewrite, transformed

_LEAST_BYTES = 2**20  # Smaller ones may wait in memory: each costs a launch.


def late_sums(f: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that is jitted create sums and stacks of its loops where the loops begin.

    Values do not change. Differentiate the function before, not after: the sums of a gradient are
    loops of its own.
    """

    def change(closed: ClosedJaxpr, _: Any) -> ClosedJaxpr:
        numbers = {
            e.outvars[0]: e.invars[0].val
            for e in find_equations(closed, "broadcast_in_dim")
            if isinstance(e.invars[0], Literal)
        }
        return rewrite(closed, lambda eqn: _late(eqn, numbers))

    return transformed(f, change)


def _late(eqn: JaxprEqn, numbers: dict[Var, Any]) -> JaxprEqn:
    """The equation of a loop that makes stacks, and what is filled with one of the numbers."""
    scan = Scan.read(eqn)
    if scan is None or eqn.effects or scan.unroll != 1:
        return eqn
    first, last = scan.num_consts, scan.num_consts + scan.num_carry
    filled = {
        i: numbers[v]
        for i, v in enumerate(eqn.invars[first:last], first)
        if not isinstance(v, Literal) and v in numbers and nbytes(v) >= _LEAST_BYTES
    }
    stacks = eqn.outvars[scan.num_carry :]
    is_large = any(nbytes(v) >= _LEAST_BYTES for v in stacks)
    avals = [aval(v) for v in (*eqn.invars, *eqn.outvars)]
    is_plain = all(not jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
    if not (filled or is_large) or not is_plain:
        return eqn

    def loop(*inputs: Array) -> list[Array]:
        waits = [a for i, a in enumerate(inputs) if i not in filled]

        def late(number: Any, v: Any) -> Array:
            of = jnp.asarray(number, aval(v).dtype)
            return jax.lax.broadcast(jax.lax.optimization_barrier([of, *waits])[0], aval(v).shape)

        consts, carry, xs = scan.split(
            [late(filled[i], eqn.invars[i]) if i in filled else a for i, a in enumerate(inputs)]
        )

        def step(state: Any, slices: Sequence[Array]) -> tuple[Any, None]:
            carry, ys, i = state
            results = jaxpr_as_fun(scan.body)(*consts, *carry, *slices)
            at = scan.length - 1 - i if scan.reverse else i
            new = zip(ys, results[scan.num_carry :], strict=True)
            ys = [jax.lax.dynamic_update_index_in_dim(a, y, at, 0) for a, y in new]
            return (results[: scan.num_carry], ys, i + 1), None

        state = carry, [late(0, v) for v in stacks], 0
        (carry, ys, _), _ = jax.lax.scan(step, state, xs, scan.length, scan.reverse)
        return [*carry, *ys]

    return call_in_place(eqn, loop)
