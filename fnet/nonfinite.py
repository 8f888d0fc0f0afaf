"""Where numbers stopped being finite: the layer and the operation, found by computing again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Literal

from fnet import jaxprs


class Nonfinite(NamedTuple):
    """What made the first NaN or infinity that reached a result.

    Attributes:
      layer: the named scopes it was made under, ``"stage0/block1/conv"``; of an argument,
        its name, ``"params['stem']['kernel']"``.
      operation: the JAX primitive, ``"log"``; ``"argument"`` where it was given.
      backward: whether it was made on the way back; what is made on the way forward may be
        a derivative as well, which is then needed on the way back.
      source: the line that made it, ``"model.py:12 (block)"``; empty where JAX does not know.
      value: ``"nan"`` or ``"inf"``.
    """

    layer: str
    operation: str
    backward: bool
    source: str
    value: str

    def __str__(self) -> str:
        if self.operation == "argument":
            return f"{self.layer} has {self.value}"
        layer = self.layer or "outside of every layer"
        words = ("backward" if self.backward else "", self.operation, self.source)
        return f"{layer} ({', '.join(filter(None, words))}) gives {self.value}"


def find_nonfinite(f: Callable[..., Any], *args: Any) -> Nonfinite | None:
    """What makes the first NaN or infinity that reaches a result of ``f(*args)``.

    ``f`` is traced, and computed once more as one program that says of every array whether
    all of it is finite. From the results that are not, the way goes back through what they
    were made of to where everything that went in was still finite. An infinity that was
    written down on purpose (a mask's) is not where it ends, but what made a NaN of it is.

    Loops (`jax.lax.scan`, `while_loop`) count as one operation; `jax.checkpoint` is without
    effect, so that this takes the memory of a program that keeps everything.

    Args:
      f: a function of arrays, such as ``jax.value_and_grad(loss)``.
      *args: its arguments, trees of arrays.

    Returns:
      None if every result is finite.
    """
    closed = jax.make_jaxpr(f)(*args)
    names = [
        name + jax.tree_util.keystr(path)
        for name, arg in zip(jaxprs.argument_names(f, args), args, strict=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(arg)
    ]
    made: list[_Made] = []
    results: list[int] = []

    def flags(leaves: list[Any]) -> Array:
        trail = _Trail(made, [])
        given = [_Made(name, "argument", None, ()) for name in names]
        inputs = [trail.add(how, a) for how, a in zip(given, leaves, strict=True)]
        results.extend(trail.visit(closed, inputs, leaves)[0])
        return jnp.stack(trail.flags)

    found = np.asarray(jax.jit(flags)(jax.tree.leaves(args)))
    origins = {_origin(made, found, i) for i in results if found[i].any()}
    if not origins:
        return None
    first = min(origins)
    last = made[first]
    value = "nan" if found[first, 0] else "inf"
    source = "" if last.eqn is None else jaxprs.source(last.eqn)
    return Nonfinite(last.layer, last.operation, last.backward, source, value)


class _Made(NamedTuple):
    """How an array came about: by an equation, or as an argument or a constant."""

    layer: str
    operation: str
    eqn: Any
    inputs: tuple[int, ...]
    backward: bool = False


class _Trail(NamedTuple):
    """All arrays of a computation, in order: how they came about, and (any NaN, any infinity)."""

    made: list[_Made]
    flags: list[Array]

    def add(self, made: _Made, value: Any) -> int:
        self.made.append(made)
        known = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        none = jnp.zeros((), bool)
        self.flags.append(
            jnp.stack([jnp.isnan(value).any(), jnp.isinf(value).any()])
            if known
            else jnp.stack([none, none])
        )
        return len(self.made) - 1

    def visit(
        self,
        closed: ClosedJaxpr,
        numbers: list[int],
        values: list[Any],
        scopes: tuple[str, ...] = (),
        backward: bool = False,
    ) -> tuple[list[int], list[Any]]:
        """Runs a jaxpr; the numbers of its results, and the results."""
        jaxpr = closed.jaxpr
        constant = _Made("", "constant", None, ())
        known = dict(zip(jaxpr.invars, zip(numbers, values, strict=True), strict=True))
        known |= {
            var: (self.add(constant, a), a)
            for var, a in zip(jaxpr.constvars, closed.consts, strict=True)
        }

        def read(atom: Any) -> tuple[int, Any]:
            if isinstance(atom, Literal):
                return self.add(constant, atom.val), atom.val
            found: tuple[int, Any] = known[atom]
            return found

        for eqn in jaxpr.eqns:
            given = [read(atom) for atom in eqn.invars]
            here = (*scopes, *jaxprs.scopes(eqn))
            # Of what is called on the way back the call alone is marked, not what is inside.
            back = backward or "transpose(" in str(eqn.source_info.name_stack)
            numbers, values = [n for n, _ in given], [a for _, a in given]
            if (inner := jaxprs.computed(eqn)) is not None:
                numbers, values = self.visit(inner, numbers, values, here, back)
            else:
                values = jaxprs.run(jaxpr, eqn, values)
                made = _Made("/".join(here), eqn.primitive.name, eqn, tuple(numbers), back)
                numbers = [self.add(made, a) for a in values]
            known |= zip(eqn.outvars, zip(numbers, values, strict=True), strict=True)
        results = [read(atom) for atom in jaxpr.outvars]
        return [n for n, _ in results], [a for _, a in results]


def _origin(made: list[_Made], flags: np.ndarray, number: int) -> int:
    """The array behind this one that is not finite while all it was made of is."""
    number = _last(made, flags[:, 0], number) if flags[number, 0] else number
    infinite = (
        _infinite(made, flags[:, 1], i) for i in (number, *made[number].inputs) if flags[i, 1]
    )
    return next((i for i in infinite if i is not None), number)


def _last(made: list[_Made], flagged: np.ndarray, number: int) -> int:
    """The last array on the way back that is flagged."""
    while (behind := next((i for i in made[number].inputs if flagged[i]), None)) is not None:
        number = behind
    return number


def _infinite(made: list[_Made], flagged: np.ndarray, number: int) -> int | None:
    """The array behind this one that became infinite; None where all were written as constants."""
    seen: set[int] = set()
    waiting = [number]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        behind = [i for i in made[at].inputs if flagged[i]]
        if not behind and made[at].operation != "constant":
            return at
        waiting += reversed(behind)
    return None
