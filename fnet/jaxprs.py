"""Old names of `fnet.jaxpr`, until all callers use the new ones."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fnet import jaxpr
from fnet.jaxpr import CHECKPOINT as CHECKPOINT
from fnet.jaxpr import argument_names as argument_names
from fnet.jaxpr import aval as aval
from fnet.jaxpr import in_scopes as in_scopes
from fnet.jaxpr import nbytes as nbytes
from fnet.jaxpr import scopes as scopes

called = jaxpr.called_jaxpr
computed = functools.partial(jaxpr.called_jaxpr, custom_derivatives=True)
every = jaxpr.find_equations
source = jaxpr.source_line


def run(_: Jaxpr, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """`fnet.jaxpr.evaluate`."""
    return jaxpr.evaluate(eqn, values)


class Scan(NamedTuple):
    """`fnet.jaxpr.Scan`."""

    body: ClosedJaxpr
    constants: int
    carry: int
    run: Callable[[Callable[..., Any], Any, Any], tuple[Any, Any]]


def scan(eqn: JaxprEqn) -> Scan:
    """`fnet.jaxpr.Scan.of`."""
    return Scan(*jaxpr.Scan.of(eqn))
