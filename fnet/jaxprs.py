"""A traced function: its equations, run or looked into; its arguments' names.

The same on JAX 0.10, 0.11 and 0.12.
"""

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

CHECKPOINT = ("checkpoint", "remat2")
"""What `jax.checkpoint` is called in a jaxpr."""

_CALLS = ("jit", "pjit", "closed_call")
_TRANSFORMED = re.compile(r"(?<!\w)(?:jvp|transpose|vmap|linearize|pmap)\(([^()]*)\)")


def argument_names(f: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """The positional arguments' names in the signature of ``f``."""
    try:
        bound = inspect.signature(f).bind_partial(*args)
    except (TypeError, ValueError):  # builtins have no signature
        return [f"args[{i}]" for i in range(len(args))]
    names: list[str] = []
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(value))]
        else:
            names.append(name)
    return names


def run(jaxpr: Jaxpr, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The results of one equation of a jaxpr for these values of its inputs, literals included."""
    given = {v: a for v, a in zip(eqn.invars, values, strict=True) if not isinstance(v, Literal)}
    # A jaxpr of its own carries the equation's named scopes along.
    one = jaxpr.replace(
        eqns=[eqn],
        constvars=[],
        invars=list(given),
        outvars=eqn.outvars,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    results: list[Any] = jaxpr_as_fun(ClosedJaxpr(one, []))(*given.values())
    return results


def aval(atom: Any) -> Any:
    """Shape and dtype of an array that an equation reads or gives."""
    return atom.aval


def nbytes(atom: Any) -> int:
    """Bytes of such an array; 0 of keys and tokens."""
    made = atom.aval
    if not hasattr(made, "shape") or jnp.issubdtype(made.dtype, jax.dtypes.extended):
        return 0
    size: int = math.prod(made.shape) * made.dtype.itemsize
    return size


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation only calls: of `jax.jit` and `jax.checkpoint`."""
    name = eqn.primitive.name
    if name in CHECKPOINT:
        return _closed(eqn.params["jaxpr"])
    if name in _CALLS:
        return _closed(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"])
    return None


def computed(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The same, and of a function with a derivative of its own what it computes."""
    if eqn.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call")):
        return _closed(eqn.params["call_jaxpr"])
    return called(eqn)


def every(value: Any, name: str) -> Iterator[JaxprEqn]:
    """The equations in a jaxpr, and in those within it, whose primitive's name begins so."""
    if isinstance(value, Jaxpr):
        for eqn in value.eqns:
            if eqn.primitive.name.startswith(name):
                yield eqn
            yield from every(tuple(eqn.params.values()), name)
    elif isinstance(value, ClosedJaxpr):
        yield from every(value.jaxpr, name)
    elif type(value) is tuple:
        for part in value:
            yield from every(part, name)


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Named scopes of an equation, without the marks of transformations: ``vmap(jvp(conv))``."""
    name, marks = str(eqn.source_info.name_stack), 1
    while marks:
        name, marks = _TRANSFORMED.subn(r"\1", name)
    return tuple(part for part in name.split("/") if part)


@contextlib.contextmanager
def in_scopes(eqn: JaxprEqn) -> Iterator[None]:
    """Traces under the named scopes of an equation that is not run, but replaced."""
    with contextlib.ExitStack() as entered:
        for name in scopes(eqn):
            entered.enter_context(jax.named_scope(name))
        yield


def source(eqn: JaxprEqn) -> str:
    """``file:line (function)``, of the innermost frame outside of JAX."""
    line = source_info_util.summarize(eqn.source_info)
    return "" if line == "unknown" else re.sub(r":(\d+):\d+ \(", r":\1 (", line)


class Scan(NamedTuple):
    """A `jax.lax.scan`, taken apart.

    Attributes:
      body: ``(constants, carry, rows) -> (carry, rows of results)``, flat.
      constants: how many arguments are the same in all rounds.
      carry: how many go from round to round.
      run: ``(body, carry, rows) -> (carry, stacked)``: such a loop with another body.
    """

    body: ClosedJaxpr
    constants: int
    carry: int
    run: Callable[[Callable[..., Any], Any, Any], tuple[Any, Any]]


def scan(eqn: JaxprEqn) -> Scan:
    """Takes the equation of a scan apart."""
    params = eqn.params
    body, length = _closed(params["jaxpr"]), params["length"]

    # Rows have one axis more outside than inside. (The counts' names differ between versions.)
    def rows(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(o.aval.ndim > i.aval.ndim for o, i in zip(outer, inner, strict=True))

    carry = len(eqn.outvars) - rows(eqn.outvars, body.jaxpr.outvars)
    constants = len(eqn.invars) - carry - rows(eqn.invars, body.jaxpr.invars)

    def run(f: Callable[..., Any], carry: Any, rows: Any) -> tuple[Any, Any]:
        return jax.lax.scan(f, carry, rows, length, params["reverse"], params["unroll"])

    return Scan(body, constants, carry, run)


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, [])
