"""Each example's share of a parameter's gradient: its norm, and sums of scaled shares."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet.autodiff.per_example import ghost_norm
from fnet.autodiff.per_example.ghost_norm import Dot, Embedding
from fnet.autodiff.per_example.taps import Use
from fnet.precision import wide, widened

_KEPT = 4  # shares are kept if they take this part of what they are made of


class Shares(Protocol):
    """All examples' shares of one parameter's gradient."""

    @property
    def route(self) -> str:
        """How they are had, in a few words."""

    def squared_norms(self) -> Array:
        """[batch]."""

    def each(self) -> Array:
        """[batch, *parameter]."""

    def total(self, scales: Array) -> Array:
        """``sum_b scales_b share_b``, like the parameter, float32 or wider.

        What is scaled by 0 counts as 0, even if it is not finite.
        """


class Met(NamedTuple):
    """A use of the parameter, with what met it.

    Attributes:
      use: the equation.
      x: data, [*loops, batch, ...].
      ct: cotangents of the result, likewise.
    """

    use: Use
    x: Array
    ct: Array

    def sorted(self) -> tuple[Array, Array]:
        """Data and cotangents as products take them, [stacked, batch, times, ...]."""
        use, loops = self.use, len(self.use.loops)
        shared = [i for i in range(loops) if i not in use.stacked]
        stacked, times = (math.prod(use.loops[i] for i in part) for part in (use.stacked, shared))

        def sort(a: Array) -> Array:
            batch, rest = a.shape[loops], a.shape[loops + 1 :]
            a = a.transpose(*use.stacked, loops, *shared, *range(loops + 1, a.ndim))
            return a.reshape(stacked, batch, times, *rest)

        return sort(self.x), sort(self.ct)

    def of_parameter(self, g: Array, param: Any) -> Array:
        """A gradient [stacked, *what the use sees] as the parameter's."""
        stacked = tuple(self.use.loops[i] for i in self.use.stacked)
        return self.use.view.gradient(g.reshape(*stacked, *g.shape[1:]), param)


class Products(NamedTuple):
    """Shares that are products of data and cotangents: never made where that would be large."""

    param: Any
    met: Sequence[Met]

    @property
    def route(self) -> str:
        """See `Shares`."""
        if any(m.use.operand is not None for m in self.met):
            return "made"
        return "kept" if self._is_small() else "products" if self._aligned() else "made in parts"

    def _is_small(self) -> bool:
        sources = sum(m.x.size + m.ct.size for m in self.met)
        batch = self.met[0].ct.shape[len(self.met[0].use.loops)]
        small: bool = _KEPT * batch * self.param.size <= sources
        return small

    def each(self) -> Array:
        """See `Shares`."""
        made = [
            jax.vmap(lambda g, m=m: m.of_parameter(g, self.param), 1)(
                m.use.product.materialize(*m.sorted())
            )
            for m in self.met
        ]
        return jax.tree.reduce(jnp.add, made)

    def squared_norms(self) -> Array:
        """See `Shares`."""
        if self._is_small():
            return Made(self.each()).squared_norms()
        if len(self.met) == 1 and not self.met[0].use.view.repeats:
            (m,) = self.met
            return m.use.product.squared_norms(*m.sorted())
        if factors := self._aligned():
            return _sum_of_squares(factors)
        loops = [len(m.use.loops) for m in self.met]
        arrays = [
            jnp.moveaxis(a, n, 0) for m, n in zip(self.met, loops, strict=True) for a in (m.x, m.ct)
        ]

        def of(*arrays: Array) -> Array:
            pairs = zip(self.met, loops, arrays[::2], arrays[1::2], strict=True)
            met = [
                m._replace(x=jnp.moveaxis(x, 0, n), ct=jnp.moveaxis(ct, 0, n))
                for m, n, x, ct in pairs
            ]
            return Made(self._replace(met=met).each()).squared_norms()

        return ghost_norm.map_in_chunks(of, arrays, 4 * self.param.size)

    def _aligned(self) -> list[tuple[Array, Array]] | None:
        """Factors of every use in the rows and columns of the first, if they have any."""
        if len(self.met) == 1:
            return [] if self.met[0].use.view.repeats else [(self.met[0].x, self.met[0].ct)]
        matrices, factors = [], []
        for m in self.met:
            product: Any = m.use.product
            if not isinstance(product, Dot | Embedding):
                return None
            matrices.append(product.as_matrix(m.use.view.elements))
            factors.append(product.factors(*m.sorted()))
        aligned = []
        for matrix, (u, v) in zip(matrices, factors, strict=True):
            if _same(matrix, matrices[0]):
                aligned.append((u, v))
            elif _same(matrix.transpose(0, 2, 1), matrices[0]):
                aligned.append((v, u))
            else:
                return None
        return aligned

    def total(self, scales: Array) -> Array:
        """See `Shares`."""
        if self._is_small():
            return Made(self.each()).total(scales)
        made = [
            m.of_parameter(m.use.product.weighted_sum(*m.sorted(), scales), self.param)
            for m in self.met
        ]
        return jax.tree.reduce(jnp.add, made)


class Made(NamedTuple):
    """Shares as they are, [batch, *parameter]."""

    shares: Array
    route: str = "made"

    def squared_norms(self) -> Array:
        """See `Shares`."""
        shares = widened(self.shares)
        return jnp.square(shares).sum(tuple(range(1, shares.ndim)))

    def each(self) -> Array:
        """See `Shares`."""
        return self.shares

    def total(self, scales: Array) -> Array:
        """See `Shares`."""
        # A product: XLA's CPU compiler makes a slow loop of scales[:, None] * shares.
        rows = self.shares.reshape(len(scales), -1).astype(wide(self.shares))
        found = scales.astype(rows.dtype) @ jnp.where(scales[:, None] != 0, rows, 0)
        return found.reshape(self.shares.shape[1:])


class Unused(NamedTuple):
    """Of a parameter that the losses do not depend on."""

    param: Any
    batch: int
    route: str = "unused"

    def squared_norms(self) -> Array:
        """See `Shares`."""
        return jnp.zeros(self.batch, jnp.float32)

    def each(self) -> Array:
        """See `Shares`."""
        return jnp.zeros((self.batch, *self.param.shape), self.param.dtype)

    def total(self, scales: Array) -> Array:
        """See `Shares`."""
        return jnp.zeros(self.param.shape, jnp.float32)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two views of one array show the same elements in the same order."""

    def place(a: np.ndarray) -> tuple[Any, ...]:
        steps = [(n, s) for n, s in zip(a.shape, a.strides, strict=True) if n > 1]
        return a.__array_interface__["data"][0], a.shape, steps

    return place(a) == place(b)


def _sum_of_squares(factors: Sequence[tuple[Array, Array]]) -> Array:
    """``|sum_i G_i|^2`` [batch]."""
    dense = [not jnp.issubdtype(a.dtype, jnp.integer) for pair in factors for a in pair]
    if all(dense):
        u, v = (jnp.concatenate(parts, 2) for parts in zip(*factors, strict=True))
        return ghost_norm.squared_norms(u, v)
    squares = [ghost_norm.squared_norms(u, v) for u, v in factors]
    mixed = [
        2 * ghost_norm.inner_products(*factors[i], *factors[j])
        for i in range(len(factors))
        for j in range(i)
    ]
    return ghost_norm.nonnegative(jax.tree.reduce(jnp.add, squares + mixed))
