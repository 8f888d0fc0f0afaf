"""Whether two traces of a function, of batches of two sizes, differ in more than their lengths."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fnet.jaxpr.interpreter import aval, dependencies, inner_jaxprs, is_floating


def differing_equation(one: ClosedJaxpr, other: ClosedJaxpr, sizes: tuple[int, int]) -> Any:
    """Return the first equation that differs in more than one axis' length, or None."""
    statements = [_statements(closed.jaxpr, closed.consts) for closed in (one, other)]
    for (eqn, text), (twin, its_text) in zip_longest(*statements, fillvalue=(None, "")):
        if text != its_text:
            return eqn or twin
        pairs = zip([*eqn.invars, *eqn.outvars], [*twin.invars, *twin.outvars], strict=True)
        shapes = [zip(aval(v).shape, aval(w).shape, strict=True) for v, w in pairs]
        changed = [[(m, n) for m, n in lengths if m != n] for lengths in shapes]
        of_batch = all(m * sizes[1] == n * sizes[0] for lengths in changed for m, n in lengths)
        inputs, outputs = changed[: len(eqn.invars)], changed[len(eqn.invars) :]
        # Sums over the batch, and what more iterations of a loop carry, change with its size. A
        # barrier returns all operands. Of a call, the equations inside are compared.
        is_sum = any(inputs) and outputs != inputs
        if any(inner_jaxprs(eqn)):
            is_sum = eqn.params.get("length") != twin.params.get("length")
        if max(map(len, changed)) > 1 or not of_batch or (is_sum and not all(outputs)):
            return eqn
    return None


_LENGTHS = {"length", "limit_indices", "new_sizes", "shape", "sizes", "slice_sizes"}
"""Parameters that follow from the shapes of an equation."""


def _statements(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> Iterator[tuple[Any, str]]:
    """Equations, those inside included, each with a text that the length of an axis keeps."""
    eqns = dependencies(jaxpr, jaxpr.outvars)[1]
    names = {v: f"v{i}" for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    for v, c in zip(jaxpr.constvars, consts, strict=False):  # a part, because they may be large
        names[v] = f"{jnp.asarray(c)[(slice(1),) * jnp.ndim(c)]}"

    def text(v: Any) -> str:
        return f"{v.val if isinstance(v, Literal) else names[v]} [{aval(v).ndim}]"

    for eqn in eqns:
        inputs = list(map(text, eqn.invars))
        if eqn.primitive.name == "add" and not is_floating(eqn.outvars[0]):
            users = {e.primitive.name for e in eqns if eqn.outvars[0] in e.invars}
            # The length of an axis is added to an index from the end.
            inputs = inputs[: 1 if users == {"select_n"} else 2]
        params = sorted(eqn.params.items())
        plain = [(k, p) for k, p in params if isinstance(p, bool | int | float | str | tuple)]
        plain = [(k, p) for k, p in plain if k not in _LENGTHS and not any(inner_jaxprs((p,)))]
        yield eqn, f"{eqn.primitive} {inputs} {plain}"
        names |= {v: f"v{len(names) + i}" for i, v in enumerate(eqn.outvars)}
        for inner in inner_jaxprs(eqn):
            yield from _statements(inner)
    if eqns:
        yield eqns[-1], f"{list(map(text, jaxpr.outvars))}"
