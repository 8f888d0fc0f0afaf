"""A parameter as an equation sees it: transposed, reshaped, cut, cast, scaled, shifted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn, Literal

from fnet import jaxprs


class View(NamedTuple):
    """Which elements of a parameter a value consists of, in which order.

    Attributes:
      param: the parameter's number.
      elements: an array that is never read. Its strides are those of the value in
        the parameter, as if the parameter had items of one byte.
      of: ``parameter -> value`` in the parameter's dtype.
      loops: the enclosing scans in whose rounds different elements are seen; as
        many leading axes of ``elements`` stand for them.
      scale: what the elements were multiplied by; what was added does not matter.
    """

    param: int
    elements: np.ndarray
    of: Callable[[Any], Any]
    loops: tuple[int, ...] = ()
    scale: float = 1.0

    @classmethod
    def whole(cls, param: int, shape: tuple[int, ...]) -> "View":
        """The parameter itself."""
        # Reserved, but never touched: it takes no memory.
        return cls(param, np.empty(shape, np.int8), lambda p: p)

    @property
    def repeats(self) -> bool:
        """Whether an element may be seen more than once (it was broadcast)."""
        sides = zip(self.elements.shape, self.elements.strides, strict=True)
        return any(size > 1 and step == 0 for size, step in sides)

    def rows(self, loop: int) -> "View":
        """One row a round of a scan."""
        return self._replace(loops=(*self.loops, loop))

    def through(self, eqn: JaxprEqn) -> list["View"] | None:
        """What the equation makes of it, or None if it is more than a view."""
        if (scale := _scale(eqn)) is not None:
            return [self._replace(scale=self.scale * scale)]
        changes = _CHANGES.get(eqn.primitive.name)
        if changes is None or not jnp.issubdtype(jaxprs.aval(eqn.outvars[0]).dtype, jnp.floating):
            return None
        found = [self._changed(change) for change in changes(eqn, len(self.loops))]
        return None if None in found else [view for view in found if view]

    def _changed(self, change: Callable[[Any], Any]) -> "View | None":
        elements, of = change(self.elements), self.of
        if elements.size != 0 and not np.may_share_memory(elements, self.elements):
            return None  # a copy: its elements are in no regular order
        return self._replace(elements=elements, of=lambda p: change(of(p)))

    def unscaled(self, cotangent: Array) -> Array:
        """The cotangent of the elements, from that of the value."""
        return cotangent if self.scale == 1 else cotangent * self.scale

    def gradient(self, cotangent: Array, param: Any) -> Array:
        """The parameter's share of a cotangent of the value.

        Args:
          cotangent: `unscaled`, shaped as the value, rounds of loops first; of one example, 1 long
            where the value is the parameter broadcast along examples.
          param: the parameter, or its shape.
        """

        def of(p: Any) -> Any:
            value = self.of(p)
            return value[tuple(map(slice, cotangent.shape))] if value.ndim else value

        shape = jax.ShapeDtypeStruct(param.shape, cotangent.dtype)
        gradient: Array
        (gradient,) = jax.linear_transpose(of, shape)(cotangent)
        return gradient


def _scale(eqn: JaxprEqn) -> float | None:
    """``c`` of ``c w + d``, where the equation is that with numbers that stand in it."""
    name = eqn.primitive.name
    if name == "neg":
        return -1.0
    if name not in ("add", "sub", "mul", "div"):
        return None
    numbers = [float(a.val) if isinstance(a, Literal) else None for a in eqn.invars]
    match name, *numbers:
        case ("add" | "sub", None, float()) | ("add", float(), None):
            return 1.0
        case "sub", float(), None:
            return -1.0
        case ("mul", float(c), None) | ("mul", None, float(c)):
            return c
        case "div", None, float(c) if c:
            return 1 / c
    return None


Change = Callable[[Any], Any]
"""What is done to a value: the same for NumPy's arrays and JAX's."""


def _same(eqn: JaxprEqn, loops: int) -> list[Change]:
    return [lambda a: a]


def _reshaped(eqn: JaxprEqn, loops: int) -> list[Change]:
    shape = jaxprs.aval(eqn.outvars[0]).shape
    return [lambda a: a.reshape((*a.shape[:loops], *shape))]


def _broadcast(eqn: JaxprEqn, loops: int) -> list[Change]:
    shape, kept = jaxprs.aval(eqn.outvars[0]).shape, eqn.params["broadcast_dimensions"]

    def change(a: Any) -> Any:
        ones = [1] * len(shape)
        for axis, size in zip(kept, a.shape[loops:], strict=True):
            ones[axis] = size
        a = a.reshape((*a.shape[:loops], *ones))
        broadcast: Any = np.broadcast_to if isinstance(a, np.ndarray) else jnp.broadcast_to
        return broadcast(a, (*a.shape[:loops], *shape))

    return [change]


def _transposed(eqn: JaxprEqn, loops: int) -> list[Change]:
    order = [*range(loops), *(loops + i for i in eqn.params["permutation"])]
    return [lambda a: a.transpose(order)]


def _sliced(eqn: JaxprEqn, loops: int) -> list[Change]:
    p = eqn.params
    strides = p["strides"] or (1,) * len(p["start_indices"])
    cut = tuple(map(slice, p["start_indices"], p["limit_indices"], strides))
    return [lambda a: a[(slice(None),) * loops + cut]]


def _split(eqn: JaxprEqn, loops: int) -> list[Change]:
    ends = np.cumsum(eqn.params["sizes"]).tolist()
    before = (slice(None),) * (loops + eqn.params["axis"])

    def part(start: int, end: int) -> Change:
        return lambda a: a[(*before, slice(start, end))]

    return [part(*bounds) for bounds in zip([0, *ends[:-1]], ends, strict=True)]


_CHANGES: dict[str, Callable[[JaxprEqn, int], list[Change]]] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _same,
    "copy": _same,
    "reduce_precision": _same,
    "reshape": _reshaped,
    "sharding_constraint": _same,
    "slice": _sliced,
    "split": _split,
    "squeeze": _reshaped,
    "transpose": _transposed,
}
