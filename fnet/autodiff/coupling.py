"""Whether the loss of an example depends on the batch that it is in.

A batch may be split into microbatches if it does not. The check is `fnet.jaxpr.batch_axis`, with
two differences. Random numbers may differ from row to row, because other rows of a dropout mask are
as good. And numbers must not change with the batch, as in ``penalty / len(x)``, nor what a custom
derivative rule makes of the cotangent of a parameter, which is a sum over the batch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from fnet.autodiff.mean import Loss, losses_and_aux
from fnet.jaxpr import (
    Propagation,
    Site,
    aval,
    dependencies,
    find_equations,
    inline,
    is_reference,
    located,
    place,
)
from fnet.jaxpr.batch_axis import KEY, BatchAxis, Mixed, Shared, State, Unknown, find_batch_axes
from fnet.jaxpr.custom_rules import has_linear_rules
from fnet.jaxpr.two_sizes import differing_equation


def find_coupling(
    loss: Loss, params: Any, model_state: Any, batch: dict[str, Array], key: Array
) -> str | None:
    """Find the operation in which a loss depends on the batch that its example is in.

    Args:
      loss: per-example losses; see `fnet.autodiff.Loss`.
      params: parameters, or their shapes, as are the next arguments.
      model_state: model state.
      batch: arrays [batch, ...] of at least two examples.
      key: random key.

    Returns:
      A clause that names the operation and its line; None if each loss is shown to depend on its
      own example alone. What is not known counts as coupled.
    """
    sizes = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        return None  # Such a batch is never split.
    ((size,),) = sizes

    def trace(size: int) -> ClosedJaxpr:
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype), batch)
        leaves, structure = jax.tree.flatten((params, model_state, rows, key))

        def losses(*leaves: Any) -> Array:
            params, model_state, batch, key = jax.tree.unflatten(structure, leaves)
            return losses_and_aux(loss(params, model_state, batch, key), model_state)[0]

        return inline(jax.make_jaxpr(losses)(*leaves))

    closed = trace(size)
    if closed.out_avals[0].shape != (size,):
        return None  # The mode rejects the loss.
    effects = [place(e) for e in find_equations(closed) if any(map(is_reference, e.outvars))]
    effects += (type(e).__name__ for e in closed.effects if "Debug" not in type(e).__name__)
    if effects:
        return f"it is not known whether side effects ({effects[0]}) mix the examples of the batch"
    counts = [len(jax.tree.leaves(tree)) for tree in (params, model_state, batch)]
    states: list[State] = [Shared()] * sum(counts[:2])
    states += [BatchAxis(0)] * counts[2]
    states += [KEY] * (len(closed.in_avals) - len(states))
    state = find_batch_axes(*_with_known_keys(closed, states), size)[0]
    if isinstance(state, Mixed | Unknown):
        operation = located(state.operation or "the loss", state.line)
        if isinstance(state, Unknown):
            return f"it is not known whether {operation} mixes the examples of the batch"
        if state.by_position:
            return f"the loss of an example depends on its position in the batch ({operation})"
        within = f", in {state.layer}" * bool(state.layer)
        return f"{operation} mixes the examples of the batch{within}"
    if isinstance(state, Shared) and not state.is_uniform(0, (size,)):
        return "the loss of an example depends on its position in the batch"
    kinds = [_PARAMETER] * counts[0] + [_CONSTANT] * counts[1] + [_EXAMPLES] * counts[2]
    kinds += [_CONSTANT] * (len(closed.in_avals) - len(kinds))
    sources = _Sources()
    sources.run(closed, kinds)
    for eqn in sources.rules.values():
        return (
            f"it is not known whether the derivative rule of {place(eqn)} is linear, which gets "
            "the sum of the examples' cotangents"
        )
    half = max(size // 2, 1)
    try:
        other = trace(half)
    except Exception as error:  # Whatever the loss raises.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"the loss does not work for {half} examples ({reason})"
    # Axes of length 1 are broadcast, by other equations.
    other, half = (other, half) if half > 1 else (trace(2 * size), 2 * size)
    differing = differing_equation(closed, other, (size, half))
    return f"{place(differing)} depends on the batch size" if differing else None


_CONSTANT, _PARAMETER, _EXAMPLES = range(3)
"""Sources of a value. Parameters together with examples count as examples."""


class _Sources(Propagation[int]):
    """Follow what values depend on, and find rules that may not be linear in the cotangent.

    Attributes:
      rules: Equations with such a rule that gives parameters a cotangent, by their path.
    """

    def __init__(self) -> None:
        self.rules: dict[tuple[int, ...], JaxprEqn] = {}

    def constant(self, value: Any) -> int:
        """A constant depends on nothing."""
        return _CONSTANT

    def equation(self, eqn: JaxprEqn, states: list[int], site: Site) -> Sequence[int]:
        """Any result depends on all operands."""
        self.rules.pop(site.path, None)
        if _PARAMETER in states and not has_linear_rules(eqn):
            self.rules[site.path] = eqn
        return [max(states, default=_CONSTANT)] * len(eqn.outvars)

    custom = loop = branches = shard_map = equation

    def join(self, states: Sequence[int]) -> int:
        """Parameters together with examples count as examples."""
        return max(states)


def _with_known_keys(closed: ClosedJaxpr, states: list[State]) -> tuple[ClosedJaxpr, list[State]]:
    """Make every random key that no example determines an argument, of state `KEY`."""
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    keys = [v for v in constants if _is_key(v)]
    of_examples: set[Any] = {
        v for v, state in zip(jaxpr.invars, states, strict=True) if isinstance(state, BatchAxis)
    }
    for eqn in jaxpr.eqns:
        if any(v in of_examples for v in eqn.invars if isinstance(v, Var)):
            of_examples.update(eqn.outvars)
        else:
            keys += filter(_is_key, eqn.outvars)
    _, eqns = dependencies(jaxpr, jaxpr.outvars, keys)
    others = {v: value for v, value in constants.items() if v not in keys}
    with_keys = jaxpr.replace(
        constvars=list(others),
        invars=[*jaxpr.invars, *keys],
        eqns=eqns,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    pairs = zip(jaxpr.invars, states, strict=True)
    own = [KEY if _is_key(v) and isinstance(state, Shared) else state for v, state in pairs]
    return ClosedJaxpr(with_keys, list(others.values())), [*own, *[KEY] * len(keys)]


def _is_key(variable: Any) -> bool:
    return bool(jnp.issubdtype(aval(variable).dtype, jax.dtypes.prng_key))
