"""Equations that are linear in a parameter, and what each example adds to its gradient.

Shapes: data and cotangents come as [stacked, batch, times, *shape of one example in
one round]. Stacked counts rounds of a loop that each have a parameter of their own,
times those that share it. Gradients go as [stacked, *shape of the parameter].
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from fnet import jaxprs
from fnet.autodiff.per_example import ghost_norm
from fnet.autodiff.per_example.convolution import Convolution
from fnet.precision import wide, widened


class Product(Protocol):
    """An equation ``out = f(data, parameter)``, linear in the parameter."""

    @property
    def data(self) -> int | None:
        """Which operand is data that the gradient needs."""

    @property
    def once(self) -> bool:
        """Whether no element of the parameter may be seen twice."""

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """Of each example's gradient, [batch]."""

    def per_example(self, x: Array, ct: Array) -> Array:
        """Each example's gradient, [stacked, batch, *parameter]."""

    def total(self, x: Array, ct: Array, scales: Array) -> Array:
        """Their sum, scaled by [batch], [stacked, *parameter], float32 or wider.

        Examples that are scaled by 0 are left out, whatever their data and cotangents are.
        """


def product(eqn: JaxprEqn, parameter: int) -> Product | None:
    """What the equation is, if its operand of that number is a parameter that data meets."""
    made = _PRODUCTS.get(eqn.primitive.name)
    if made is None or not jnp.issubdtype(jaxprs.aval(eqn.outvars[0]).dtype, jnp.floating):
        return None
    return made(eqn, parameter)


class Shift(NamedTuple):
    """``add``: a bias. Its gradient is the cotangent.

    Attributes:
      summed: axes along which it is the same for all.
    """

    summed: tuple[int, ...]
    data: None = None
    once: bool = False

    @classmethod
    def of(cls, eqn: JaxprEqn, parameter: int) -> "Shift | None":
        """Reads the equation; None if the parameter is a number."""
        if not jaxprs.aval(eqn.invars[parameter]).ndim:
            return None
        return cls(_stretched(eqn, parameter))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        each = self.per_example(x, ct)
        return jnp.square(each).sum((0, *range(2, each.ndim)))

    def per_example(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        axes = (2, *(3 + i for i in self.summed))
        return widened(ct).sum(axes, keepdims=True).squeeze(2)

    def total(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `Product`."""
        shape = ct.shape[3:]

        def one(ct: Array) -> Array:
            rows, _ = ghost_norm.scaled(ct.reshape(*ct.shape[:2], -1), scales)
            rows = widened(rows).sum(0)
            return rows.reshape(shape).sum(self.summed, keepdims=True)

        return one(ct[0])[None] if len(ct) == 1 else jax.vmap(one)(ct)


class Scale(NamedTuple):
    """``mul``: a gain. Its gradient is the cotangent times the data.

    Attributes:
      data: which operand is data, 0 or 1.
      summed: axes along which it is the same for all.
    """

    data: int
    summed: tuple[int, ...]
    once: bool = False

    @classmethod
    def of(cls, eqn: JaxprEqn, parameter: int) -> "Scale | None":
        """Reads the equation; None if the parameter or what it scales is a number."""
        if not all(jaxprs.aval(operand).ndim for operand in eqn.invars):
            return None
        return cls(1 - parameter, _stretched(eqn, parameter))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        each = self.per_example(x, ct)
        return jnp.square(each).sum((0, *range(2, each.ndim)))

    def per_example(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        axes = (2, *(3 + i for i in self.summed))
        each = (x.astype(wide(x, ct)) * ct).sum(axes, keepdims=True)
        return each.squeeze(2)

    def total(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `Product`."""
        each = self.per_example(x, ct)
        rows = scales.reshape(1, -1, *[1] * (each.ndim - 2))
        return jnp.where(rows != 0, each * rows, 0).sum(1)


def _stretched(eqn: JaxprEqn, parameter: int) -> tuple[int, ...]:
    shapes = jaxprs.aval(eqn.invars[parameter]).shape, jaxprs.aval(eqn.outvars[0]).shape
    return tuple(i for i, (n, m) in enumerate(zip(*shapes, strict=True)) if n < m)


class Dot(NamedTuple):
    """``dot_general``: outer products of data and cotangents, a group for each batch index.

    Attributes:
      data: which operand is data, 0 or 1.
      batch: axes of data and parameter that are groups.
      contracted: axes of data and parameter that are summed over.
      parameter: its shape.
    """

    data: int
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    parameter: tuple[int, ...]
    once: bool = True

    @classmethod
    def of(cls, eqn: JaxprEqn, parameter: int) -> "Dot":
        """Reads the equation."""
        contracted, batch = eqn.params["dimension_numbers"]
        data = 1 - parameter
        shape = jaxprs.aval(eqn.invars[parameter]).shape
        return cls(
            data,
            (tuple(batch[data]), tuple(batch[parameter])),
            (tuple(contracted[data]), tuple(contracted[parameter])),
            shape,
        )

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Rows [groups, batch, time, contracted] and columns [groups, batch, time, free]."""
        groups, summed = self.batch[0], self.contracted[0]
        free = [i for i in range(x.ndim - 3) if i not in groups + summed]
        u = _arranged(x, groups, free, summed)
        first, columns = len(groups), len(self._free())
        times = range(first, first + len(free))
        if self.data == 1:  # the parameter's free axes come first in the result
            times = range(first + columns, first + columns + len(free))
        rest = [i for i in range(first, first + columns + len(free)) if i not in times]
        return u, _arranged(ct, range(first), times, rest)

    def matrix(self, elements: np.ndarray) -> np.ndarray:
        """[*loops, *parameter] as [groups, rows, cols] of `factors`."""
        loops = elements.ndim - len(self.parameter)
        order = (self.batch[1], self.contracted[1], self._free())
        axes = [loops + i for part in order for i in part]
        sizes = [math.prod(self.parameter[i] for i in part) for part in order[1:]]
        return elements.transpose(*range(loops), *axes).reshape(-1, *sizes)

    def _free(self) -> list[int]:
        taken = self.batch[1] + self.contracted[1]
        return [i for i in range(len(self.parameter)) if i not in taken]

    def _shaped(self, g: Array, stacked: int) -> Array:
        """[stacked * groups, ..., rows, cols] as the parameter is laid out."""
        order = [*self.batch[1], *self.contracted[1], *self._free()]
        lead = g.shape[1:-2]
        split = [self.parameter[i] for i in order]
        n = len(self.batch[1])
        g = g.reshape(stacked, *split[:n], *lead, *split[n:])
        # [stacked, groups..., lead..., rows..., cols...] -> [stacked, lead..., parameter...]
        place = {axis: 1 + k + (len(lead) if k >= n else 0) for k, axis in enumerate(order)}
        leads = range(1 + n, 1 + n + len(lead))
        return g.transpose(0, *leads, *(place[i] for i in range(len(order))))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        return ghost_norm.squared_norms(*self.factors(x, ct))

    def per_example(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        return self._shaped(ghost_norm.per_example(*self.factors(x, ct)), x.shape[0])

    def total(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `Product`."""
        return self._shaped(ghost_norm.total(*self.factors(x, ct), scales), x.shape[0])


class Lookup(NamedTuple):
    """``gather`` of whole rows: an embedding.

    Attributes:
      data: 1, the indices.
      gather: the equation's parameters.
      parameter: shape of the table.
    """

    data: int
    gather: dict[str, Any]
    parameter: tuple[int, ...]
    once: bool = True

    @classmethod
    def of(cls, eqn: JaxprEqn, parameter: int) -> "Lookup | None":
        """Reads the equation; None for any other gather."""
        p, table = eqn.params, jaxprs.aval(eqn.invars[0])
        d = p["dimension_numbers"]
        indices = jaxprs.aval(eqn.invars[1]).ndim
        whole_rows = (
            parameter == 0
            and d.collapsed_slice_dims == d.start_index_map == (0,)
            and tuple(p["slice_sizes"]) == (1, *table.shape[1:])
            and d.offset_dims == tuple(range(indices - 1, indices - 2 + table.ndim))
            and not d.operand_batching_dims
        )
        return cls(1, dict(p), table.shape) if whole_rows else None

    def factors(self, x: Array, ct: Array) -> tuple[Array, Array]:
        """Indices [stacked, batch, time] and rows [stacked, batch, time, width].

        Rows of indices outside of the table are 0 where they are not read from it.
        """
        stacked, batch = x.shape[:2]
        index = x.reshape(stacked, batch, -1)
        if index.dtype.itemsize < 4:  # the table's length would be taken modulo 256 or 65536
            index = index.astype(jnp.int32)
        rows = ct.reshape(*index.shape, math.prod(self.parameter[1:]))
        last = self.parameter[0] - 1
        inside = (index >= 0) & (index <= last)
        if self.gather["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
            rows = jnp.where(inside[..., None], rows, 0)
        return index.clip(0, last), rows

    def matrix(self, elements: np.ndarray) -> np.ndarray:
        """[*loops, *parameter] as [groups, rows, cols] of `factors`."""
        return elements.reshape(-1, self.parameter[0], math.prod(self.parameter[1:]))

    def squared_norms(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        return ghost_norm.squared_norms(*self.factors(x, ct))

    def per_example(self, x: Array, ct: Array) -> Array:
        """See `Product`."""
        index, rows = self.factors(x, ct)
        table = jnp.zeros((self.parameter[0], rows.shape[-1]), wide(rows))
        add: Callable[[Array, Array], Array] = jax.vmap(
            jax.vmap(lambda index, rows: table.at[index].add(rows))
        )
        return add(index, rows.astype(table.dtype)).reshape(*index.shape[:2], *self.parameter)

    def total(self, x: Array, ct: Array, scales: Array) -> Array:
        """See `Product`."""
        index, rows = self.factors(x, ct)
        table = jnp.zeros((self.parameter[0], rows.shape[-1]), wide(rows))

        def add(index: Array, rows: Array) -> Array:
            return table.at[index.ravel()].add(ghost_norm.scaled(rows, scales)[0])

        found = jax.vmap(add)(index, rows.astype(table.dtype))
        return found.reshape(-1, *self.parameter)


def _arranged(a: Array, groups: Any, times: Any, last: Any) -> Array:
    """[stacked, batch, times, ...] as [stacked * groups, batch, times * times', last]."""
    groups, times, last = (tuple(3 + i for i in axes) for axes in (groups, times, last))
    sizes = (
        a.shape[0] * math.prod(a.shape[i] for i in groups),
        a.shape[1],
        a.shape[2] * math.prod(a.shape[i] for i in times),
        math.prod(a.shape[i] for i in last),
    )
    return a.transpose(0, *groups, 1, 2, *times, *last).reshape(sizes)


_PRODUCTS = {
    "add": Shift.of,
    "conv_general_dilated": Convolution.of,
    "dot_general": Dot.of,
    "gather": Lookup.of,
    "mul": Scale.of,
}
