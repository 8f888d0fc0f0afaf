"""Move computations of parameters alone out of loops and `jax.checkpoint`.

`derived` handles values that are computed from parameters before they meet data, if it sees them
outside of loops. A recurrent cell that concatenates its kernels in each step, or a loop that reads
``w[i]``, computes them inside. `hoist` computes them once before the loop, or once per iteration,
and scans over the results.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from fnet.autodiff.per_example.derived import find_derived
from fnet.autodiff.per_example.taps import DATA, State, View
from fnet.backward_pass import FINISH_TOGETHER, finish_together
from fnet.jaxpr import (
    Scan,
    aval,
    call_like,
    called_jaxpr,
    dependencies,
    evaluate,
    evaluate_from,
    in_scopes,
    inline,
    interpret,
    is_checkpoint,
    is_separable,
)
from fnet.jaxpr.primitives import Add, DynamicSlice


class _Value(NamedTuple):
    """A value while a function is traced again.

    Attributes:
      array: The value.
      is_known: Whether it depends on parameters and constants alone.
      has_gradient: Whether it depends on parameters. Constants stay where they are used: a loss
        may dequantize frozen weights one layer at a time.
    """

    array: Any
    is_known: bool
    has_gradient: bool


def hoist(closed: ClosedJaxpr, count: int) -> ClosedJaxpr:
    """Inline calls, and compute what depends on the ``count`` parameters alone outside of loops."""

    def function(*args: Any) -> list[Any]:
        values = [_Value(a, i < count, i < count) for i, a in enumerate(args)]
        return [v.array for v in _run(closed, values)]

    hoisted: ClosedJaxpr = jax.make_jaxpr(function)(*closed.in_avals)
    return hoisted


def _run(closed: ClosedJaxpr, values: Sequence[_Value]) -> list[_Value]:
    return interpret(closed, values, _equation, lambda constant: _Value(constant, True, False))


def _equation(eqn: JaxprEqn, values: list[_Value]) -> Sequence[_Value]:
    inner = called_jaxpr(eqn)
    if inner is not None and not is_checkpoint(eqn):
        with in_scopes(eqn):
            return _run(inner, values)
    if eqn.primitive is FINISH_TOGETHER:
        # Behind the barrier, what is computed from parameters would depend on data.
        finished = iter(finish_together(*(v.array for v in values if not v.is_known)))
        return [v if v.is_known else _Value(next(finished), False, True) for v in values]
    arrays = [v.array for v in values]
    if all(v.is_known for v in values):
        has_gradient = any(v.has_gradient for v in values)
        return [_Value(a, True, has_gradient) for a in evaluate(eqn, arrays)]
    outputs = None
    if inner is not None:
        outputs = _checkpoint(eqn, inline(inner), values)
    elif (scan := Scan.read(eqn)) is not None:
        outputs = _scan(eqn, scan, values)
    outputs = evaluate(eqn, arrays) if outputs is None else outputs
    return [_Value(a, False, True) for a in outputs]


def _states(values: Sequence[_Value], atoms: Sequence[Any]) -> list[State]:
    def state(k: int, value: _Value, v: Any) -> State:
        if not value.is_known:
            return DATA
        is_floating = jnp.issubdtype(aval(v).dtype, jnp.floating)
        return View.whole(k, aval(v).shape) if value.has_gradient and is_floating else None

    return [state(k, value, v) for k, (value, v) in enumerate(zip(values, atoms, strict=True))]


def _checkpoint(eqn: JaxprEqn, body: ClosedJaxpr, values: list[_Value]) -> list[Any] | None:
    jaxpr = body.jaxpr
    variables = find_derived(body, _states(values, jaxpr.invars))
    if not variables:
        return None
    constants = dict(zip(jaxpr.constvars, body.consts, strict=True))
    arrays = [v.array for v in values]
    known = constants | dict(zip(jaxpr.invars, arrays, strict=True))

    def function(arrays: list[Any], derived: list[Any]) -> list[Any]:
        env = constants | dict(zip([*jaxpr.invars, *variables], [*arrays, *derived], strict=True))
        return evaluate_from(jaxpr, jaxpr.outvars, env)

    with in_scopes(eqn):
        return call_like(eqn, function)(arrays, evaluate_from(jaxpr, variables, known))


def _scan(eqn: JaxprEqn, scan: Scan, values: list[_Value]) -> list[Any] | None:
    length, body = scan.length, inline(scan.body)
    jaxpr = body.jaxpr
    consts, carry, xs = scan.split(values)
    const_vars, carry_vars, x_vars = scan.split(jaxpr.invars)
    constants = dict(zip(jaxpr.constvars, body.consts, strict=True))
    constants |= {v: c.array for v, c in zip(const_vars, consts, strict=True)}
    known = {v for v, c in zip(const_vars, consts, strict=True) if c.is_known} | {*jaxpr.constvars}

    # Slices of a parameter by the number of the iteration are slices of a scan.
    scanned = {v: x.array for v, x in zip(x_vars, xs, strict=True)}
    own_slices = _counted_slices(jaxpr, carry_vars, carry, known, constants, length)
    states: list[Any] = _states(
        [*consts, *(_Value(None, False, True) for _ in carry), *xs], jaxpr.invars
    )
    if scan.reverse:
        own_slices = {}
    variables = [v for v in find_derived(body, states) if not _reads(jaxpr, v, own_slices)]
    if not variables and not own_slices:
        return None
    known_xs = {v for v, x in zip(x_vars, xs, strict=True) if x.is_known}
    invariant: list[Var] = []
    per_iteration: list[Var] = []
    for v in variables:
        is_invariant = not known_xs & set(dependencies(jaxpr, [v])[0])
        (invariant if is_invariant else per_iteration).append(v)
    with in_scopes(eqn):
        constants |= zip(invariant, evaluate_from(jaxpr, invariant, constants), strict=True)
        if per_iteration:
            sliced = [v for v in x_vars if v in known_xs]

            def derive(slices: list[Any]) -> list[Any]:
                env = constants | dict(zip(sliced, slices, strict=True))
                return evaluate_from(jaxpr, per_iteration, env)

            # Products of a stack of matrices stay products, see `products`.
            _, eqns = dependencies(jaxpr, per_iteration)
            derive_all = (
                jax.vmap(derive)
                if all(map(is_separable, eqns))
                else functools.partial(jax.lax.map, derive)
            )
            derived = derive_all([scanned[v] for v in sliced])
            scanned |= zip(per_iteration, derived, strict=True)
        names = [*scanned]

        def iterate(carry: list[Any], slices: list[Any], counted: list[Any]) -> tuple[Any, None]:
            env = constants | dict(zip(carry_vars, carry, strict=True))
            env |= dict(zip(names, slices, strict=True))
            env |= {v: a[None] for v, a in zip(own_slices, counted, strict=True)}
            return evaluate_from(jaxpr, jaxpr.outvars, env), None

        arrays = [c.array for c in carry]
        outputs, _ = scan.evaluate(iterate, arrays, [*scanned.values()], [*own_slices.values()])
    return outputs


def _reads(jaxpr: Any, v: Var, slices: dict[Var, Any]) -> bool:
    """Whether a derived value is, or follows from, a slice by the number of the iteration."""
    _, eqns = dependencies(jaxpr, [v])
    return any(out in slices for e in eqns for out in e.outvars)


def _counted_slices(
    jaxpr: Any,
    carry_vars: Sequence[Var],
    carry: Sequence[_Value],
    known: set[Var],
    constants: dict[Var, Any],
    length: int,
) -> dict[Var, Array]:
    """Find ``w[i]`` in a loop, where ``i`` counts iterations.

    Returns:
      By the result of each such slice, the array [length, ...] of which iteration i reads row i.
    """
    counters: dict[Var, np.ndarray] = {}
    produced = {v: e for e in jaxpr.eqns for v in e.outvars}
    for v, init, out in zip(carry_vars, carry, jaxpr.outvars[: len(carry)], strict=True):
        step = _increment(produced.get(out), v)
        if step is not None and not isinstance(init.array, jax.core.Tracer):
            counters[v] = np.asarray(init.array) + step * np.arange(length, dtype=aval(v).dtype)
    slices: dict[Var, Array] = {}
    for eqn in jaxpr.eqns if counters else ():
        row = DynamicSlice.read(eqn)
        if row is None or eqn.invars[0] not in known:
            continue
        operand, *starts = eqn.invars
        shape = aval(operand).shape
        inputs, _ = dependencies(jaxpr, starts)
        if row.slice_sizes != (1, *shape[1:]) or not set(inputs) <= set(counters):
            continue
        with jax.ensure_compile_time_eval():
            first, *others = jax.vmap(lambda values, s=starts: evaluate_from(jaxpr, s, values))(
                {v: jnp.asarray(counters[v]) for v in inputs}
            )
            first, others = np.asarray(first), [np.asarray(a) for a in others]
        start = int(first[0]) if length else 0
        consecutive = (first == start + np.arange(length)).all() and not any(map(np.any, others))
        if consecutive and start >= 0 and start + length <= shape[0]:
            slices[eqn.outvars[0]] = constants[operand][start : start + length]
    return slices


def _increment(eqn: JaxprEqn | None, v: Var) -> int | None:
    """The number ``c`` if the equation is ``v + c``."""
    is_counter = not aval(v).shape and jnp.issubdtype(aval(v).dtype, jnp.integer)
    if eqn is None or Add.read(eqn) is None or not is_counter:
        return None
    numbers = [a.val for a in eqn.invars if isinstance(a, Literal)]
    reads = any(a is v for a in eqn.invars)
    return int(numbers[0]) if len(numbers) == 1 and reads else None
