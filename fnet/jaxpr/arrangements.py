"""Equations that put the elements of an array into other places, as functions of arrays.

The same functions rearrange a `fnet.jaxpr.Layout`, which says which element is where.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from fnet.jaxpr.axes import is_elementwise, is_identity, places_once
from fnet.jaxpr.interpreter import aval
from fnet.jaxpr.layout import Layout
from fnet.jaxpr.primitives import Slice

Arrangement = Callable[[Any], Any]
"""A rearrangement of elements, for arrays and layouts with further axes first."""


def arrangements(eqn: JaxprEqn, leading: int = 0) -> list[Arrangement] | None:
    """Return the rearrangement behind each result; None if an equation does more, or less.

    Args:
      eqn: An equation of one array and constants.
      leading: Number of axes of the array that precede those in the equation.
    """
    if is_identity(eqn) or (is_elementwise(eqn) and places_once(eqn) and len(eqn.invars) == 1):
        return [lambda a: a]
    make = _ARRANGEMENTS.get(eqn.primitive.name)
    return None if make is None else make(eqn, leading)


def _reshape(eqn: JaxprEqn, leading: int) -> list[Arrangement] | None:
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        return None  # It also transposes.
    shape = aval(eqn.outvars[0]).shape
    return [lambda a: a.reshape((*a.shape[:leading], *shape))]


def _broadcast_in_dim(eqn: JaxprEqn, leading: int) -> list[Arrangement]:
    shape, dimensions = aval(eqn.outvars[0]).shape, eqn.params["broadcast_dimensions"]

    def broadcast(a: Any) -> Any:
        sizes = [1] * len(shape)
        for axis, size in zip(dimensions, a.shape[leading:], strict=True):
            sizes[axis] = size
        a = a.reshape((*a.shape[:leading], *sizes))
        broadcast_to: Any = Layout.broadcast_to if isinstance(a, Layout) else jnp.broadcast_to
        return broadcast_to(a, (*a.shape[:leading], *shape))

    return [broadcast]


def _transpose(eqn: JaxprEqn, leading: int) -> list[Arrangement]:
    order = [*range(leading), *(leading + i for i in eqn.params["permutation"])]
    return [lambda a: a.transpose(order)]


def _indexed(index: tuple[Any, ...]) -> Arrangement:
    def arrange(a: Any) -> Any:
        is_reversed = any(isinstance(k, slice) and k.step == -1 for k in index)
        if isinstance(a, Layout) or is_reversed or not a.ndim:
            return a[index]
        of_axes = [*index, *[slice(None)] * (a.ndim - len(index))]
        own = [
            range(n)[k] if isinstance(k, slice) else range(k, k + 1)
            for k, n in zip(of_axes, a.shape, strict=True)
        ]
        # Without strides, JAX cannot add the gradient of a slice to a mutable array.
        part = jax.lax.slice(a, *zip(*((r.start, r.stop, r.step) for r in own), strict=True))
        return part.reshape(
            [len(r) for r, k in zip(own, of_axes, strict=True) if isinstance(k, slice)]
        )

    return arrange


def _slice(eqn: JaxprEqn, leading: int) -> list[Arrangement]:
    part = Slice.of(eqn)
    strides = part.strides or (1,) * len(part.start_indices)
    slices = map(slice, part.start_indices, part.limit_indices, strides)
    return [_indexed((*(slice(None),) * leading, *slices))]


def _rev(eqn: JaxprEqn, leading: int) -> list[Arrangement]:
    reverse, whole = slice(None, None, -1), slice(None)
    reversed_axes, ndim = eqn.params["dimensions"], aval(eqn.invars[0]).ndim
    slices = (reverse if i in reversed_axes else whole for i in range(ndim))
    return [_indexed((*(whole,) * leading, *slices))]


def _unstack(eqn: JaxprEqn, leading: int) -> list[Arrangement]:
    before = (slice(None),) * (leading + eqn.params["axis"])
    return [_indexed((*before, i)) for i in range(len(eqn.outvars))]


def _split(eqn: JaxprEqn, leading: int) -> list[Arrangement]:
    ends = np.cumsum(eqn.params["sizes"]).tolist()
    before = (slice(None),) * (leading + eqn.params["axis"])
    return [_indexed((*before, slice(*ab))) for ab in zip([0, *ends[:-1]], ends, strict=True)]


_ARRANGEMENTS: dict[str, Callable[[JaxprEqn, int], list[Arrangement] | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "transpose": _transpose,
    "unstack": _unstack,
}
