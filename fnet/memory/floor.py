"""The floor of a loss: bytes that every plan of it holds at once."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from fnet.jaxpr import Scan, active_variables, aval, inline, is_floating, nbytes, place
from fnet.jaxpr.primitives import Cond, DotGeneral, product
from fnet.memory.apply import variables
from fnet.memory.regions import Division, Region, wide


class Floor(NamedTuple):
    """A lower bound on the temporaries of a differentiated loss.

    Attributes:
      bytes: The bound.
      place: What holds them: operation, line of the loss, shapes.
    """

    bytes: int = 0
    place: str = ""


def find_floor(closed: ClosedJaxpr, differentiated: Sequence[bool], division: Division) -> Floor:
    """Bound what a loss and its gradient hold under every plan.

    A plan may save nothing, run the regions of the loss in chunks of one row, and its loops in
    chunks of one iteration. Even then, a matrix product or a convolution of the rest has its
    operands and its result in memory at once, a loop the arrays that it scans and the gradients
    that it adds up, and so has the loop over the chunks of a region. The bound is the largest of
    these places, in the plan in which it is smallest. Arguments do not count, nor what can be fused
    away.

    Args:
      closed: The inlined loss.
      differentiated: Whether it is differentiated with respect to each argument.
      division: Its regions.
    """
    jaxpr = closed.jaxpr
    sizes = _sizes(jaxpr)
    active = active_variables(jaxpr, differentiated)
    whole = _largest(_at_equation(eqn, sizes, active) for eqn in jaxpr.eqns)
    if not division.regions:
        return whole
    parts = (
        _at_region(part, sizes)
        if isinstance(part, Region)
        else _largest(_at_equation(eqn, sizes, active) for eqn in part.eqns)
        for part in division.parts
    )
    return min(whole, _largest(parts), key=lambda floor: floor.bytes)


def _largest(floors: Iterable[Floor]) -> Floor:
    return max(floors, key=lambda floor: floor.bytes, default=Floor())


def _sizes(jaxpr: Jaxpr) -> dict[Var, int]:
    """Bytes of each array that is made, wherever it is read.

    What can be fused into its readers is as large as the largest array that it is computed from.
    """
    sizes: dict[Var, int] = {}
    for eqn in jaxpr.eqns:
        read = max((sizes.get(v, 0) for v in variables(eqn.invars)), default=0)
        own = _is_product(eqn) or Scan.read(eqn) is not None
        sizes |= {v: nbytes(v) if own else min(nbytes(v), read) for v in eqn.outvars}
    return sizes


def _is_product(eqn: JaxprEqn) -> bool:
    """Whether XLA has the operands and the result in memory; it fuses products with vectors."""
    dot = DotGeneral.read(eqn)
    if dot is None:
        return product(eqn) is not None
    return all(dot.size(k, axes) != 1 for k in range(2) for axes in dot.axes(k)[1:])


def _at_equation(eqn: JaxprEqn, sizes: dict[Var, int], active: set[Var]) -> Floor:
    if (scan := Scan.read(eqn)) is not None:
        return _at_scan(eqn, scan, sizes, active)
    if (cond := Cond.read(eqn)) is not None:
        given = [not isinstance(v, Literal) and v in active for v in eqn.invars[1:]]
        return _largest(_inside(branch, given) for branch in cond.branches)
    if not _is_product(eqn):
        return Floor()
    held = {v: sizes.get(v, 0) for v in variables(eqn.invars)} | {v: nbytes(v) for v in eqn.outvars}
    arrays = ", ".join(_shape(v) for v in eqn.invars)
    return Floor(sum(held.values()), f"{place(eqn)}: {arrays} -> {_shape(eqn.outvars[0])}")


def _inside(closed: ClosedJaxpr, differentiated: Sequence[bool]) -> Floor:
    """Bytes at the largest equation of an inner function."""
    body = inline(closed).jaxpr
    sizes, active = _sizes(body), active_variables(body, differentiated)
    return _largest(_at_equation(e, sizes, active) for e in body.eqns)


def _at_scan(eqn: JaxprEqn, scan: Scan, sizes: dict[Var, int], active: set[Var]) -> Floor:
    """Bytes that a loop holds in each iteration, and its largest equation."""
    consts, _, xs = scan.split(eqn.invars)
    ys = eqn.outvars[scan.num_carry :]
    given = [not isinstance(v, Literal) and v in active for v in eqn.invars]
    for i in range(scan.num_carry):
        given[scan.num_consts + i] |= eqn.outvars[i] in active
    inner = _inside(scan.body, given)
    if scan.length < 2:
        return inner
    forward = [*variables(xs), *ys]
    backward = [v for v in variables([*consts, *xs]) if v in active and is_floating(v)]
    made = sum(sizes.get(v, 0) for v in {*variables(xs)}) + sum(map(nbytes, ys))
    added = sum(map(nbytes, {*backward})) if any(v in active for v in eqn.outvars) else 0
    held = max(made, added)
    if held < inner.bytes:
        return Floor(held + inner.bytes, inner.place)
    arrays = _few(forward if made >= added else backward)
    return Floor(held + inner.bytes, f"{place(eqn)}, {scan.length} iterations: {arrays}")


def _at_region(region: Region, sizes: dict[Var, int]) -> Floor:
    """Bytes that the loop over the chunks of a region holds."""
    arguments, results = region.jaxpr.invars, region.jaxpr.outvars
    row_count, result_count = map(len, region.axes)
    read = sum(sizes.get(v, 0) for v in arguments)
    made = sum(_bytes(v, is_row=i < result_count) for i, v in enumerate(results))
    pairs = enumerate(zip(arguments, region.active, strict=True))
    gradients = sum(_bytes(v, is_row=i < row_count) for i, (v, is_active) in pairs if is_active)
    # In a loop of its own, gradients may be written over cotangents.
    is_at_once = region.objective is not None
    held = read + made + gradients if is_at_once else max(read + made, gradients)
    if gradients > read + made:
        differentiated = [*itertools.compress(arguments, region.active)]
        return Floor(held, f"gradients of {_few(differentiated)}")
    eqns = sorted(region.jaxpr.eqns, key=lambda e: sum(map(nbytes, e.outvars)))
    largest = "".join(f" with {place(e)}" for e in eqns[-1:])
    arrays = [v for v in arguments if sizes.get(v)] + list(results)
    return Floor(held, f"chunks of {region.size} rows{largest}: {_few(arrays)}")


def _bytes(v: Any, *, is_row: bool) -> int:
    """Bytes of the buffer in which chunks of an array are written, or its parts added."""
    return int(nbytes(v) if is_row else aval(v).size * wide(aval(v)).itemsize)


def _few(arrays: Sequence[Any]) -> str:
    largest = sorted(arrays, key=nbytes, reverse=True)
    return ", ".join(map(_shape, largest[:3])) + ", ..." * (len(largest) > 3)


def _shape(v: Any) -> str:
    return str(aval(v).str_short(short_dtypes=True))
