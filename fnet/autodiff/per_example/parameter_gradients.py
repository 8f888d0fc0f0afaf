"""Per-example gradients in the cheapest form: as factors, materialized, or rematerialized.

`PerExampleGradients` is the result of one backward pass. It computes norms and weighted sums of
the gradients of all examples, of which there are three forms:

  - `FactoredGradients`: data and cotangents, whose products are the gradients. Parts of a parameter
    that have no elements in common are apart. A part stays factors unless its gradients take less
    memory. A parameter that the losses do not depend on has no parts.
  - `MaterializedGradients`: an array [batch, *parameter]. Gradients `InChunks` are such an array
    for a few examples at a time, once for norms and once for sums. `ChunkedGradients` differentiate
    the loss for it, and `fnet.autodiff.per_example.derived.DerivedGradients` pull gradients back.
  - `RematerializedGradients`: parameters inside of `jax.checkpoint`. Norms come from the first
    backward pass, and sums from a second one.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fnet.autodiff.examples import Examples, is_key
from fnet.autodiff.per_example import ghost_norm
from fnet.autodiff.per_example.batching import Rows, rows_from, rows_of, run_for_batch
from fnet.autodiff.per_example.ghost_norm import (
    Convolution,
    Dot,
    Embedding,
    Estimate,
    squared_norms_of,
)
from fnet.autodiff.per_example.taps import Use, Weighed, evaluate_with_taps
from fnet.cpu.tracing import is_for_cpu
from fnet.jaxpr import Layout, merged
from fnet.jaxpr.custom_rules import AnyEquation
from fnet.measured import FUSED_ROWS, MOST_FUSED_ROWS
from fnet.mesh import equally_varying
from fnet.precision import sum_dtype, upcast

T = TypeVar("T")
ByIndex = Mapping[int, Array]
Rough = Mapping[int, Array | None]
"""By index of the parameter: arrays, and which examples are rough, see `SquaredNorms`."""

_MATERIALIZED = 2
"""Gradients are materialized if they take at most this many times the memory of their factors.

They are one product, and free the factors. A ghost norm is a second product.
"""

_READS_AND_WRITES = 32
"""FLOPs per element that take as long as to write a matrix, to add it and to multiply it."""

_ROUGH = 0.004
"""Gradients are materialized if their squared norm may have an error above this fraction of it."""

_CANCELLATION = 128
"""Gradients are materialized if the norms of their terms add up to this many times their norm.

For smaller ratios, a weighted sum of float32 has an error of less than 5e-4 times its norm. The
largest error in measurements was 40 roundoffs times the sum of the norms, for thousands of equal
time steps."""


class SquaredNorms(NamedTuple):
    """Squared norms of per-example gradients, and what rounding may do to them.

    A gradient is a sum of terms, such as one outer product per time step. If large terms cancel,
    rounding errors of their sum may exceed the sum.

    Attributes:
      values: Squared norms, [batch].
      errors: Bounds of rounding errors of ``values``, [batch] or one for all.
      is_rough: Whether most terms of the gradient cancel, [batch]. It is then materialized for
        its norm, and should be for the sum. None if this cannot happen.
      sum_errors: Bounds of the rounding error of a weighted sum for a scale of 1, squared.
    """

    values: Array
    errors: Array | float
    is_rough: Array | None = None
    sum_errors: Array | float = 0.0

    @classmethod
    def total(cls, norms: Sequence["SquaredNorms"]) -> "SquaredNorms":
        """Return the squared norms of gradients with respect to several parameters."""
        rough = [n.is_rough for n in norms if n.is_rough is not None]
        return cls(
            sum_of([n.values for n in norms]),
            sum_of([n.errors for n in norms]),
            functools.reduce(jnp.logical_or, rough) if rough else None,
            sum_of([n.sum_errors for n in norms]),
        )

    @property
    def upper(self) -> Array:
        """Upper bound of the squared norm of what an example contributes to a sum, [batch].

        Errors that change the norm by less than 5e-4 do not count, so that ordinary gradients
        are scaled by their norm. Those of sums in less than float32 all do.
        """
        # An error of NaN is not small.
        is_small = self.errors <= ghost_norm.NEGLIGIBLE * self.values
        squares = self.values + jnp.where(is_small, 0, self.errors)
        return jnp.square(jnp.sqrt(squares) + jnp.sqrt(self.sum_errors))


def sum_of(terms: Sequence[Any]) -> Any:
    """Add up arrays and numbers; 0 without any."""
    return functools.reduce(operator.add, terms) if terms else 0.0


class KroneckerFactors(NamedTuple):
    """Factors of the gradients of one parameter: ``G_b = sum_t u_bt v_bt^T`` in each group.

    Attributes:
      u: [groups, batch, time, rows].
      v: [groups, batch, time, cols].
      as_matrices: Moves the elements of an array like the parameter: [groups, rows, cols].
    """

    u: Array
    v: Array
    as_matrices: Callable[[Array], Array]


class _OfExamples(Protocol):
    @property
    def size(self) -> int:
        """Number of examples."""

    @property
    def arrays(self) -> list[Array]:
        """The arrays behind the gradients."""


class ParameterGradients(_OfExamples, Protocol):
    """The gradients of all examples with respect to one parameter."""

    @property
    def strategy(self) -> str:
        """How norms and sums are computed; see `fnet.autodiff.gradient_strategies`."""

    def squared_norms(self) -> SquaredNorms:
        """Squared norm of each example's gradient, with bounds of rounding errors."""

    def materialize(self) -> Array:
        """Per-example gradients, [batch, *parameter]."""

    def weighted_sum(self, scales: Array, is_rough: Array | None = None) -> Array:
        """Sum of the gradients scaled by ``scales`` [batch], [*parameter].

        float32 or wider. An example with scale 0 contributes exactly 0, even if its gradient is
        not finite. See `SquaredNorms` for ``is_rough``.
        """

    def add_weighted_sum(self, total: Array, scales: Array, is_rough: Array | None) -> Array:
        """Return ``total`` plus the `weighted_sum`."""
        return total + self.weighted_sum(scales, is_rough).astype(total.dtype)

    def inner_products(self, direction: Array) -> Array:
        """Inner product of each example's gradient with a direction [*parameter], [batch]."""
        return MaterializedGradients(self.materialize()).inner_products(direction)

    def sum_and_products(
        self, scales: Array, direction: Array, other: "ParameterGradients | None", weights: Array
    ) -> tuple[Array, Array]:
        """The `weighted_sum`, and the `inner_products` with a direction.

        The direction is the sum of ``other`` gradients, weighted by ``weights``.
        """
        return self.weighted_sum(scales), self.inner_products(direction)

    def kronecker_factors(self) -> "KroneckerFactors | None":
        """Factors whose products are the gradients, or None."""
        return None

    def every_nth(self, n: int, start: Array) -> "ParameterGradients":
        """The gradients of every n-th example."""


class GroupGradients(Protocol):
    """The gradients of all examples with respect to some parameters, by their indices."""

    def strategies(self) -> dict[int, str]:
        """See `ParameterGradients.strategy`."""

    def squared_norms(self, whole: bool) -> dict[int, SquaredNorms]:
        """Squared norms; if ``whole``, only their sum over parameters is right."""

    def materialize(self) -> dict[int, Array]:
        """Per-example gradients, [batch, *parameter]."""

    def inner_products(self, directions: Mapping[int, Array]) -> Array:
        """Inner product of each example's gradient with directions [*parameter], [batch]."""
        products = (
            MaterializedGradients(g).inner_products(directions[i])
            for i, g in self.materialize().items()
        )
        return functools.reduce(jnp.add, products)

    def weighted_sums(self, scales: ByIndex, is_rough: Rough) -> Iterator[tuple[int, Array]]:
        """Yield the weighted sum of each parameter, see `ParameterGradients`.

        Args:
          scales: Weights [batch] by index of the parameter.
          is_rough: By index of the parameter; see `SquaredNorms`.
        """

    def plus_weighted_sums(self, totals: ByIndex, scales: ByIndex, is_rough: Rough) -> ByIndex:
        """Return ``totals`` by index of the parameter plus the weighted sums."""
        sums = self.weighted_sums(scales, is_rough)
        return {i: totals[i] + g.astype(totals[i].dtype) for i, g in sums}

    def add_weighted_sums(self, totals: Any, scales: ByIndex, is_rough: Rough) -> None:
        """Add the weighted sums to mutable arrays by index of the parameter."""
        for i, total in self.weighted_sums(scales, is_rough):
            jax.ref.addupdate(totals[i], ..., total.astype(totals[i].dtype))


class InChunks(_OfExamples, Protocol):
    """Gradients that are materialized for a few examples at a time.

    All that follows from them sees equal numbers, see `ghost_norm.made_alone`. So what is added to
    a sum is what was counted in a norm.
    """

    @property
    def chunks(self) -> int:
        """Number of chunks of the batch. A chunk is every n-th example."""

    @property
    def zeros(self) -> list[Array]:
        """Sums of no gradients: an array for each parameter."""

    def of_chunk(self, chunks: int, number: Array) -> list[Array]:
        """Per-example gradients of a chunk, [batch / chunks, *parameter] for each parameter."""

    @functools.cached_property
    def whole(self) -> list[Array]:
        """All gradients, of a batch that is one chunk."""
        return list(map(ghost_norm.computed_once, self.of_chunk(1, jnp.int32(0))))

    def squares_in_chunks(self, values: list[Array], needed: Array | None = None) -> list[Array]:
        """Squared norms [batch] for each parameter. They are ``values`` if not ``needed``."""

        def replace(number: Array, squares: list[Array], gradients: list[Array]) -> list[Array]:
            pairs = zip(squares, map(squared_norms_of, gradients), strict=True)
            return [_set_chunk(a, number, own) for a, own in pairs]

        carry = [a.reshape(-1, self.chunks) for a in values]
        return [a.ravel() for a in self._for_each(replace, carry, needed)]

    def add_in_chunks(
        self, totals: list[Array], scales: Sequence[Array], needed: Array | None = None
    ) -> list[Array]:
        """Add the gradients, scaled by ``scales`` [batch] for each parameter, if ``needed``."""
        return self.add_and_products_in_chunks(totals, scales, (), needed)[0]

    def add_and_products_in_chunks(
        self,
        totals: list[Array],
        scales: Sequence[Array],
        directions: Sequence[Array],
        needed: Array | None = None,
    ) -> tuple[list[Array], Array]:
        """Add scaled gradients; also return inner products with directions [*parameter], [batch].

        Without totals or directions, it returns what the other argument asks for.
        """

        def update(number: Array, carry: Any, gradients: list[Array]) -> Any:
            (sums, products), grads = carry, list(map(MaterializedGradients, gradients))
            own = [ghost_norm.every_nth(a, self.chunks, number) for a in scales]
            sums = [a + g.weighted_sum(b) for a, g, b in zip(sums, grads, own, strict=False)]
            pairs = zip(grads, directions, strict=False)
            values = jnp.asarray(sum_of([g.inner_products(d) for g, d in pairs]))
            return sums, _set_chunk(products, number, values) if directions else products

        dtype = sum_dtype(*directions) if directions else jnp.float32
        products = jnp.zeros((self.size // self.chunks, self.chunks), dtype)
        sums, products = self._for_each(update, (totals, products), needed)
        return sums, products.ravel()

    def _for_each(self, update: Callable[..., T], carry: T, needed: Array | None) -> T:
        """Return ``carry = update(number, carry, gradients)`` after all chunks, if ``needed``."""
        if self.chunks == 1 and needed is None:
            return update(jnp.int32(0), carry, self.whole)

        def step(number: Array, carry: T) -> T:
            gradients = ghost_norm.made_alone(number, lambda: self.of_chunk(self.chunks, number))
            return update(number, carry, gradients)

        repeats = self.chunks if needed is None else jnp.where(needed, self.chunks, 0)
        carry, _ = equally_varying((carry, self.arrays))
        result: T = jax.lax.fori_loop(0, repeats, step, carry)
        return result


def _set_chunk(rows: Array, number: Array, values: Array) -> Array:
    """Set a chunk's values [batch / chunks] in an array [batch / chunks, chunks]."""
    column = values[:, None].astype(rows.dtype)
    return jax.lax.dynamic_update_slice_in_dim(
        rows, column, number, 1, allow_negative_indices=False
    )


class GroupInChunks(GroupGradients, InChunks, Protocol):
    """The gradients of some parameters `InChunks`."""

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the parameters."""

    def squared_norms(self, whole: bool) -> dict[int, SquaredNorms]:
        squares = self.squares_in_chunks([jnp.zeros(self.size, a.dtype) for a in self.zeros])
        rows = zip(self.indices, squares, self.zeros, strict=True)
        return {i: _accurate(values, zero.size) for i, values, zero in rows}

    def materialize(self) -> dict[int, Array]:
        gradients = self.whole if self.chunks == 1 else self.of_chunk(1, jnp.int32(0))
        return dict(zip(self.indices, gradients, strict=True))

    def inner_products(self, directions: Mapping[int, Array]) -> Array:
        own = [directions[i] for i in self.indices]
        return self.add_and_products_in_chunks([], (), own)[1]

    def weighted_sums(self, scales: ByIndex, is_rough: Rough) -> Iterator[tuple[int, Array]]:
        sums = self.add_in_chunks(self.zeros, [scales[i] for i in self.indices])
        yield from zip(self.indices, sums, strict=True)


@dataclasses.dataclass(frozen=True, eq=False)
class SeparateGradients(GroupGradients):
    """Gradients of parameters whose norms and sums have nothing in common.

    Attributes:
      by_param: The gradients by index of the parameter.
    """

    by_param: Mapping[int, ParameterGradients]

    def strategies(self) -> dict[int, str]:
        return {i: g.strategy for i, g in self.by_param.items()}

    def squared_norms(self, whole: bool) -> dict[int, SquaredNorms]:
        return {i: g.squared_norms() for i, g in self.by_param.items()}

    def materialize(self) -> dict[int, Array]:
        return {i: g.materialize() for i, g in self.by_param.items()}

    def inner_products(self, directions: Mapping[int, Array]) -> Array:
        products = (g.inner_products(directions[i]) for i, g in self.by_param.items())
        total: Array = functools.reduce(jnp.add, products, jnp.zeros(()))
        return total

    def weighted_sums(self, scales: ByIndex, is_rough: Rough) -> Iterator[tuple[int, Array]]:
        """See `GroupGradients`. One sum after the other, in the order of a backward pass."""
        previous = jnp.zeros(())
        for i, gradients in sorted(self.by_param.items(), reverse=True):
            total = gradients.weighted_sum(_wait_for(previous, scales[i]), is_rough.get(i))
            previous = total if total.ndim > 1 and total.size else previous
            yield i, total

    def plus_weighted_sums(self, totals: ByIndex, scales: ByIndex, is_rough: Rough) -> ByIndex:
        return {
            i: g.add_weighted_sum(totals[i], scales[i], is_rough.get(i))
            for i, g in self.by_param.items()
        }


class UseInputs(NamedTuple):
    """A use of a parameter with its data and cotangents.

    Attributes:
      use: The equation that combines the parameter with data.
      x: Data, [*scan_lengths, batch, ...]; a list of arrays for `AnyEquation`.
      ct: Cotangents of the equation's result, [*scan_lengths, batch, ...]; or a list.
    """

    use: Use
    x: Any
    ct: Any

    @property
    def arrays(self) -> list[Array]:
        """Data and cotangents."""
        return jax.tree.leaves((self.x, self.ct))

    def map(self, f: Callable[[Array], Array]) -> "UseInputs":
        """Apply a function to data and cotangents."""
        return self._replace(x=jax.tree.map(f, self.x), ct=jax.tree.map(f, self.ct))

    def every_nth(self, n: int, start: Array) -> "UseInputs":
        """Data and cotangents of every n-th example."""
        axis = len(self.use.scan_lengths)
        return self.map(lambda a: ghost_norm.every_nth(a, n, start, axis))

    def arranged(self) -> tuple[Any, Any]:
        """Return ``x`` and ``ct`` as [stack, batch, time, ...], see `ghost_norm`."""
        lengths, stack = self.use.scan_lengths, self.use.view.scans
        time = [i for i in range(len(lengths)) if i not in stack]
        sizes = [math.prod(lengths[i] for i in scans) for scans in (stack, time)]

        def arrange(a: Array) -> Array:
            n = len(lengths)
            batch, shape = a.shape[n], a.shape[n + 1 :]
            a = a.transpose(*stack, n, *time, *range(n + 1, a.ndim))
            return a.reshape(sizes[0], batch, sizes[1], *shape)

        arranged = self.map(arrange)
        return arranged.x, arranged.ct

    def is_like(self, other: "UseInputs") -> bool:
        """Whether an equation of another trace uses the same elements in the same way."""
        same_elements = self.use.view.layout == other.use.view.layout
        return same_elements and bool(self.use.equation == other.use.equation)

    def from_param(self, param: Array) -> Array:
        """Return the view of an array like the parameter, [stack, *view]."""
        view: Array = self.use.view.from_param(param)
        return view.reshape(-1, *view.shape[len(self.use.view.scans) :])

    def to_param(self, gradient: Array, param: Any) -> Array:
        """Return the parameter's gradient, given the view's gradient [stack, *view]."""
        stack = tuple(self.use.scan_lengths[i] for i in self.use.view.scans)
        return self.use.view.to_param(gradient.reshape(*stack, *gradient.shape[1:]), param)


@dataclasses.dataclass(frozen=True, eq=False)
class FactoredGradients(ParameterGradients):
    """Gradients as data and cotangents of the parameter's uses.

    Attributes:
      param: The parameter.
      batch: Number of examples.
      inputs: Data and cotangents of each use. The gradient is the sum over uses.
    """

    param: Any
    batch: int
    inputs: Sequence[UseInputs]

    @property
    def size(self) -> int:
        return self.batch

    @property
    def strategy(self) -> str:
        strategies = {part.strategy for part in self._parts}
        return next((strategy for strategy in _STRATEGIES if strategy in strategies), "unused")

    def squared_norms(self) -> SquaredNorms:
        norms = [part.squared_norms() for part in self._parts]
        return SquaredNorms.total(norms or [SquaredNorms(jnp.zeros(self.size), 0.0)])

    def materialize(self) -> Array:
        parts = self._parts
        if not parts:
            return jnp.zeros((self.size, *self.param.shape), self.param.dtype)
        grads = [part.materialize() for part in parts]
        return jax.vmap(lambda grads: self._assemble(parts, grads))(grads)

    def kept(self) -> "MaterializedGradients":
        """The gradients as an array, in the `ghost_norm.kept_dtype`."""
        dtype, inputs = ghost_norm.kept_dtype(self.param), []
        for i in self.inputs:
            equation = dataclasses.replace(i.use.equation, dtype=dtype)
            rounded = i.map(lambda a: a.astype(dtype))
            inputs.append(rounded._replace(use=i.use._replace(equation=equation)))
        gradients = dataclasses.replace(self, inputs=inputs).materialize().astype(dtype)
        return MaterializedGradients(ghost_norm.computed_once(gradients))

    def inner_products(self, direction: Array) -> Array:
        products = (part.inner_products(direction) for part in self._parts)
        return functools.reduce(jnp.add, products, jnp.zeros(self.size))

    def _factors(self) -> tuple[Array, Array] | None:
        """Factors of the gradients, see `OuterProducts`, if a single use gives them, or None."""
        if len(self.inputs) != 1:
            return None
        (first,) = self.inputs
        equation, has_repeats = first.use.equation, first.use.view.layout.has_repeats
        if has_repeats or not isinstance(equation, Dot | Convolution):
            return None
        return equation.factors(*first.arranged())

    def kronecker_factors(self) -> KroneckerFactors | None:
        factors = self._factors()
        if factors is None or self.inputs[0].use.view.layout.size != self.param.size:
            return None
        first = self.inputs[0]

        def as_matrices(param: Array) -> Array:
            matrices: Array = first.use.equation.as_matrix(first.from_param(param))
            return matrices

        return KroneckerFactors(*factors, as_matrices)

    def sum_and_products(
        self, scales: Array, direction: Array, other: ParameterGradients | None, weights: Array
    ) -> tuple[Array, Array]:
        """See `ParameterGradients`. Takes the way that is estimated to be the fastest.

        For T positions of an example and S of all others, inner products with the direction take
        ``T rows cols`` FLOPs, and those with factors of the other gradients ``T S (rows + cols)``:
        ``sum_j weights_j <u_b, u_j> <v_b, v_j>``. Gradients of a few examples at a time have the
        FLOPs of the sum, and are read and written.
        """
        factors = self._factors()
        if factors is None or self._parts[0].is_small:
            return super().sum_and_products(scales, direction, other, weights)
        (u, v), others = factors, None
        positions, rows, cols = u.shape[2], u.shape[-1], v.shape[-1]
        if isinstance(other, FactoredGradients) and len(other.inputs) == 1:
            others = other._factors() if self.inputs[0].is_like(other.inputs[0]) else None
        fewest = rows * cols
        if others is not None:
            fewest = min(fewest, math.prod(others[0].shape[1:3]) * (rows + cols))
        if positions * fewest > _READS_AND_WRITES * rows * cols:
            total, products = self._parts[0].sum_and_products(scales, direction)
            return self._assemble(self._parts, [total]), products
        if others is None or fewest == rows * cols:
            return super().sum_and_products(scales, direction, other, weights)
        weights = weights[None, :, None, None]
        other_u = jnp.where(weights != 0, others[0], 0)
        other_v = jnp.where(weights != 0, others[1] * weights, 0).astype(v.dtype)
        products = jnp.einsum(
            "gbjts,gbjts->b",
            jnp.einsum("gbtr,gjsr->gbjts", u, other_u),
            jnp.einsum("gbtc,gjsc->gbjts", v, other_v),
            preferred_element_type=sum_dtype(u, v),
        )
        return self.weighted_sum(scales), products

    def weighted_sum(self, scales: Array, is_rough: Array | None = None) -> Array:
        parts = self._parts
        return self._assemble(parts, [part.weighted_sum(scales, is_rough) for part in parts])

    def add_weighted_sum(self, total: Array, scales: Array, is_rough: Array | None) -> Array:
        """See `ParameterGradients`. Rows of a table are added in place."""
        first = self.inputs[0] if len(self.inputs) == 1 else None
        if first is None or not reads_whole_rows(first.use, self.param):
            return super().add_weighted_sum(total, scales, is_rough)
        added: Array = first.use.equation.add_weighted_sum(total, *first.arranged(), scales)
        return added

    @property
    def arrays(self) -> list[Array]:
        return [a for i in self.inputs for a in i.arrays]

    def every_nth(self, n: int, start: Array) -> ParameterGradients:
        inputs = [i.every_nth(n, start) for i in self.inputs]
        return FactoredGradients(self.param, self.size // n, inputs)

    @functools.cached_property
    def _parts(self) -> list["_Part"]:
        """Split the uses into parts of the parameter that have no elements in common."""
        layouts = [i.use.view.layout for i in self.inputs]
        parts = []
        for numbers in _connected(layouts):
            inputs = [self.inputs[n] for n in numbers]
            (box, *others) = {Box.of(layouts[n]) for n in numbers}
            is_proper = box is not None and not others and box.shape != self.param.shape
            parts.append(_Part(self.param, self.size, inputs, box if is_proper else None))
        return parts

    def _assemble(self, parts: Sequence["_Part"], grads: Sequence[Array]) -> Array:
        whole = [g for part, g in zip(parts, grads, strict=True) if part.box is None]
        dtype = jnp.result_type(jnp.float32, *grads)
        total = jax.tree.reduce(jnp.add, whole) if whole else jnp.zeros(self.param.shape, dtype)
        for part, g in zip(parts, grads, strict=True):
            if part.box is not None:
                total = jax.lax.dynamic_update_slice(total, g.astype(dtype), part.box.start)
        return total


_STRATEGIES = ("autodiff", "materialized in chunks", "materialized", "ghost norm")
"""Strategies of parts of a parameter. The first that occurs is the strategy of the parameter."""


class Box(NamedTuple):
    """Elements of an array within a range of indices along each axis.

    Attributes:
      start: First index along each axis.
      shape: Number of indices along each axis.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> "Box | None":
        """Return the box that has each element of a view once; None if there is none."""
        # A box counts through all axes in their order, so its strides descend.
        factors = sorted(layout.factors, key=lambda factor: -factor[1])
        if not layout.size or any(stride <= 0 for _, stride in factors):
            return None
        last = layout.start + sum((n - 1) * stride for n, stride in factors)
        corners = (np.unravel_index(k, layout.whole) for k in (layout.start, last))
        ranges = [slice(int(i), int(j) + 1) for i, j in zip(*corners, strict=True)]
        box = Layout.of(layout.whole)[tuple(ranges)]
        if not box.size or merged(box.factors) != merged(factors):
            return None
        return cls(tuple(own.start for own in ranges), box.shape)

    def arrange(self, gradient: Array, layout: Layout) -> Array:
        """Arrange the gradient of a view like the box."""
        factors = layout.factors
        order = sorted(range(len(factors)), key=lambda k: -factors[k][1])
        return gradient.reshape([n for n, _ in factors]).transpose(order).reshape(self.shape)


def _connected(layouts: Sequence[Layout]) -> list[list[int]]:
    """Numbers of views in groups, so that views of different groups have no common element."""
    groups: list[list[int]] = []
    for number, layout in enumerate(layouts):
        overlapping = [g for g in groups if any(layout.may_overlap(layouts[n]) for n in g)]
        groups = [g for g in groups if g not in overlapping]
        groups.append(sorted(sum(overlapping, [number])))
    return sorted(groups)


def reads_whole_rows(use: Use, param: Any) -> bool:
    """Whether a use reads rows of the whole parameter."""
    equation = use.equation
    return (
        isinstance(equation, Embedding)
        and equation.is_in_order
        and not use.view.scans
        and use.view.layout == Layout.of(param.shape)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Part(InChunks):
    """Uses of one part of a parameter.

    Gradients of a part are [..., *part]: arrays like the box, or like the parameter.

    Attributes:
      param: The parameter.
      batch: Number of examples.
      inputs: Data and cotangents of the uses.
      box: Elements of each use, or None if uses differ in them or use all.
    """

    param: Any
    batch: int
    inputs: Sequence[UseInputs]
    box: Box | None

    @property
    def size(self) -> int:
        return self.batch

    @functools.cached_property
    def _arranged(self) -> list[tuple[Any, Any]]:
        """Data and cotangents of each use, see `UseInputs.arranged`."""
        return [i.arranged() for i in self.inputs]

    @property
    def strategy(self) -> str:
        if self.is_small:
            return "materialized"
        has_formula = not self._has_no_formula and (self._is_single() or self._factors())
        return "ghost norm" if has_formula else "materialized in chunks"

    @property
    def _shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.box.shape if self.box else self.param.shape
        return shape

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether the gradients take little memory in comparison to the factors.

        A single term is an outer product, whose factors have the norm already.
        """
        if not self._has_no_formula and self.never_cancels():
            return False
        factors: int = sum(a.size * a.dtype.itemsize for a in self.arrays)
        nbytes = self.size * math.prod(self._shape) * self._dtype().itemsize
        return nbytes <= _MATERIALIZED * factors

    @property
    def _has_no_formula(self) -> bool:
        """Whether gradients are materialized for norms and sums, whatever their size."""
        return any(isinstance(i.use.equation, AnyEquation) for i in self.inputs)

    @property
    def chunks(self) -> int:
        if self.is_small:
            return 1
        width = min((w for i in self.inputs if (w := i.use.equation.width)), default=None)
        nbytes = 4 * math.prod(self._shape)
        return ghost_norm.number_of_chunks(self.size, self.arrays, nbytes, width)

    @property
    def arrays(self) -> list[Array]:
        return [a for i in self.inputs for a in i.arrays]

    @property
    def zeros(self) -> list[Array]:
        return [jnp.zeros(self._shape, self._dtype())]

    def of_chunk(self, chunks: int, number: Array) -> list[Array]:
        # A loop gets an object of its own, which has no arrays of another trace.
        inputs = [i.every_nth(chunks, number) for i in self.inputs]
        return [dataclasses.replace(self, batch=self.batch // chunks, inputs=inputs).materialize()]

    def _sums_terms(self) -> bool:
        return self._is_single() and bool(self._equation.sums_terms)

    def _is_single(self) -> bool:
        return len(self.inputs) == 1 and not self.inputs[0].use.view.layout.has_repeats

    def never_cancels(self) -> bool:
        """Whether the gradient is a single term."""
        return self._is_single() and self._equation.terms(*self._arranged[0]) == 1

    @property
    def _equation(self) -> Any:
        return self.inputs[0].use.equation

    def _factors(self) -> list[tuple[Array, Array]] | None:
        """Factors of all uses that give gradients in the same arrangement, or None."""
        if len(self.inputs) == 1:
            return None
        matrices, factors = [], []
        for i, arranged in zip(self.inputs, self._arranged, strict=True):
            equation = i.use.equation
            if not isinstance(equation, Dot | Embedding):
                return None
            matrices.append(equation.as_matrix(i.use.view.layout))
            factors.append(equation.factors(*arranged))
        aligned = []
        for matrix, (u, v) in zip(matrices, factors, strict=True):
            if matrix == matrices[0]:
                aligned.append((u, v))
            elif matrix.transpose((0, 2, 1)) == matrices[0]:
                aligned.append((v, u))
            else:
                return None
        return aligned

    def squared_norms(self) -> SquaredNorms:
        if self.is_small or self._has_no_formula:
            (values,) = self.squares_in_chunks([jnp.zeros(self.size, self._dtype())])
            return _accurate(values, math.prod(self._shape))
        if self._sums_terms():
            values, _ = self._equation.squared_norms(*self._arranged[0])
            return _accurate(values, self.inputs[0].arrays[-1].size // self.size)
        rounding = self._rounding()
        rounding = rounding if isinstance(rounding, float) else rounding**2
        if self.never_cancels():
            values, _ = self._equation.squared_norms(*self._arranged[0])
            _, upper = self._equation.term_norms(*self._arranged[0])
            return SquaredNorms(values, jnp.square(upper) - values, None, rounding * values)
        squares_of_terms, upper = self._squares_of_terms()
        estimate = self._estimate()
        if estimate is None:
            (values,) = self.squares_in_chunks([squares_of_terms])
        else:
            values = estimate.values
        is_rough = squares_of_terms > _CANCELLATION**2 * values
        # Squares that were rounded to 0, in the norm or in lengths of factors.
        errors = math.prod(self._shape) * _tiny(values) + jnp.where(
            upper > 1.001 * squares_of_terms, upper, 0
        )
        if estimate is not None and estimate.errors is not None:
            is_rough |= estimate.errors > _ROUGH * values
            errors += jnp.where(is_rough, 0, estimate.errors)
        if estimate is not None:
            (exact,) = self.squares_in_chunks([values], is_rough.any())
            values = jnp.where(is_rough, exact, values)
        # Squares of terms may be infinite.
        sum_errors: Any = 0.0
        if not isinstance(rounding, float):
            sum_errors = jnp.where(is_rough | (rounding == 0), 0, rounding * squares_of_terms)
        return SquaredNorms(values, errors, is_rough, sum_errors)

    def _rounding(self) -> Array | float:
        errors = [i.use.equation.rounding(i.ct.dtype) for i in self.inputs]
        errors = [jnp.asarray(e) for e in errors if not isinstance(e, float) or e]
        return functools.reduce(jnp.maximum, errors) if errors else 0.0

    def _squares_of_terms(self) -> tuple[Array, Array]:
        """Squares of the sums of the norms of terms, and upper bounds; see `LinearEquation`."""
        terms = [
            i.use.equation.term_norms(*arranged)
            for i, arranged in zip(self.inputs, self._arranged, strict=True)
        ]
        sums, upper = (functools.reduce(jnp.add, norms) for norms in zip(*terms, strict=True))
        return jnp.square(sums), jnp.square(upper)

    def _estimate(self) -> Estimate | None:
        """Squared norms that do not materialize gradients, or None."""
        if self._is_single():
            estimate: Estimate = self._equation.squared_norms(*self._arranged[0])
            return estimate
        factors = self._factors()
        return _squared_norms_of_sum(factors) if factors else None

    def _dtype(self) -> jnp.dtype:
        return sum_dtype(*(jnp.result_type(*jax.tree.leaves(i.ct)) for i in self.inputs))

    def materialize(self) -> Array:
        """Per-example gradients, [batch, *part]."""

        def gradients_of(i: UseInputs) -> Array:
            views = i.use.equation.materialize(*i.arranged())
            return jax.vmap(lambda view: self._to_part(i, view), 1)(views)

        # The rows of a tied embedding are added in place: a second array could be large.
        first, *others = sorted(self.inputs, key=self._adds_rows)
        total = gradients_of(first)
        for i in others:
            if self._adds_rows(i):
                total = i.use.equation.add_rows(total, *i.arranged())
            else:
                total += gradients_of(i)
        return total

    def inner_products(self, direction: Array) -> Array:
        """Inner products with a direction like the whole parameter, [batch]."""
        if self.is_small or self._has_no_formula:
            return self.add_and_products_in_chunks([], (), [self._of_part(direction)])[1]
        pairs = zip(self.inputs, self._arranged, strict=True)
        products = [
            i.use.equation.inner_products(*arranged, i.from_param(direction))
            for i, arranged in pairs
        ]
        total: Array = sum_of(products)
        return total

    def _of_part(self, param: Array) -> Array:
        """The elements [*part] of an array like the parameter."""
        if self.box is None:
            return param
        return jax.lax.dynamic_slice(param, self.box.start, self.box.shape)

    def sum_and_products(self, scales: Array, direction: Array) -> tuple[Array, Array]:
        """Weighted sum [*part] and inner products of gradients of a few examples at a time.

        The direction is like the whole parameter.
        """
        own = [self._of_part(direction)]
        (total,), products = self.add_and_products_in_chunks(self.zeros, [scales], own)
        return total, products

    def _adds_rows(self, i: UseInputs) -> bool:
        return reads_whole_rows(i.use, self.param)

    def weighted_sum(self, scales: Array, is_rough: Array | None) -> Array:
        """Sum of the gradients scaled by ``scales`` [batch], [*part]."""
        if self.is_small:
            return MaterializedGradients(self.whole[0]).weighted_sum(scales)
        if self._has_no_formula:
            return self.add_in_chunks(self.zeros, [scales])[0]
        smooth_scales = scales if is_rough is None else jnp.where(is_rough, 0, scales)
        sums = [
            self._to_part(i, i.use.equation.weighted_sum(*arranged, smooth_scales))
            for i, arranged in zip(self.inputs, self._arranged, strict=True)
        ]
        total: Array = jax.tree.reduce(jnp.add, sums)
        if is_rough is None or self.never_cancels():
            return total
        # Large terms of such a gradient would leave their rounding errors in the sum.
        rough_scales = jnp.where(is_rough, scales, 0)
        return self.add_in_chunks([total], [rough_scales], (rough_scales != 0).any())[0]

    def _to_part(self, i: UseInputs, gradient: Array) -> Array:
        """Return the gradient of the part, given the gradient [stack, *view] of a use."""
        if self.box is None:
            return i.to_param(gradient, self.param)
        view = i.use.view
        stack = tuple(i.use.scan_lengths[k] for k in view.scans)
        return self.box.arrange(gradient.reshape(*stack, *gradient.shape[1:]), view.layout)


def _squared_norms_of_sum(factors: Sequence[tuple[Array, Array]]) -> Estimate:
    """Squared norms ``|sum_i G_i|^2`` of gradients that are sums over uses."""
    is_one_hot = [jnp.issubdtype(a.dtype, jnp.integer) for pair in factors for a in pair]
    if not any(is_one_hot):
        u, v = (jnp.concatenate(arrays, 2) for arrays in zip(*factors, strict=True))
        return ghost_norm.squared_norms(u, v)
    squares = [ghost_norm.squared_norms(u, v) for u, v in factors]
    mixed = [
        ghost_norm.inner_products(*factors[i], *factors[j])
        for i in range(len(factors))
        for j in range(i)
    ]
    estimates = squares + mixed + mixed
    total: Array = jax.tree.reduce(jnp.add, [e.values for e in estimates])
    errors: Array = jax.tree.reduce(jnp.add, [e.errors for e in estimates])
    return Estimate(ghost_norm.nonnegative(total), errors)


@dataclasses.dataclass(frozen=True, eq=False)
class MaterializedGradients(ParameterGradients):
    """Gradients as an array.

    Attributes:
      gradients: [batch, *parameter].
    """

    gradients: Array
    strategy: ClassVar[str] = "autodiff"

    def squared_norms(self) -> SquaredNorms:
        # The sum has no other gradients than these.
        return _accurate(squared_norms_of(self.gradients), math.prod(self.gradients.shape[1:]))

    def materialize(self) -> Array:
        return self.gradients

    def weighted_sum(self, scales: Array, is_rough: Array | None = None) -> Array:
        if len(scales) <= (1 if is_for_cpu() else MOST_FUSED_ROWS):
            # Fused with what adds the sum to others.
            parts = (slice(i, i + FUSED_ROWS) for i in range(0, len(scales), FUSED_ROWS))
            total: Array = sum_of([_weighted_rows(self.gradients[r], scales[r]) for r in parts])
            return total
        # A matrix product. XLA on CPU compiles scales[:, None] * gradients to a slow loop.
        rows = self.gradients.reshape(len(scales), -1).astype(sum_dtype(self.gradients))
        total = jnp.matmul(
            scales.astype(rows.dtype),
            jnp.where(scales[:, None] != 0, rows, 0),
            precision=jax.lax.Precision.HIGHEST,
        )
        return total.reshape(self.gradients.shape[1:])

    def inner_products(self, direction: Array) -> Array:
        rows = self.gradients.reshape(len(self.gradients), -1)
        return jnp.matmul(upcast(rows), upcast(direction.ravel()))

    @property
    def arrays(self) -> list[Array]:
        return [self.gradients]

    @property
    def size(self) -> int:
        return len(self.gradients)

    def every_nth(self, n: int, start: Array) -> ParameterGradients:
        return MaterializedGradients(ghost_norm.every_nth(self.gradients, n, start))


def _weighted_rows(gradients: Array, scales: Array) -> Array:
    g = upcast(gradients)
    scales = scales.astype(g.dtype).reshape(-1, *[1] * (g.ndim - 1))
    return jnp.where(scales != 0, scales * g, 0).sum(0)


def _accurate(values: Array, size: int) -> SquaredNorms:
    """Squared norms of gradients of this size, from the gradients that are summed."""
    return SquaredNorms(values, size * _tiny(values))


def _tiny(squares: Array) -> float:
    """Squares below this number round to 0."""
    return float(jnp.finfo(squares.dtype).tiny)


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedGradients(GroupInChunks):
    """Gradients with respect to large parameters, differentiated for a few examples at a time.

    Attributes:
      loss: The traced loss of a batch of one: ``(*params, *batch) -> (losses, ...)``.
      params: All parameters.
      examples: The batch.
      selected: Indices of the parameters to differentiate.
      width: Largest number of examples at a time.
    """

    loss: ClosedJaxpr
    params: Sequence[Any]
    examples: Examples
    selected: Sequence[int]
    width: int

    @property
    def indices(self) -> Sequence[int]:
        return self.selected

    @property
    def size(self) -> int:
        return self.examples.size

    @property
    def chunks(self) -> int:
        return ghost_norm.number_of_chunks(self.size, (), 0, self.width)

    @property
    def zeros(self) -> list[Array]:
        return [jnp.zeros(self.params[i].shape, sum_dtype(self.params[i])) for i in self.indices]

    @property
    def arrays(self) -> list[Array]:
        return self.examples.leaves

    def strategies(self) -> dict[int, str]:
        return dict.fromkeys(self.indices, "autodiff in chunks")

    def of_chunk(self, chunks: int, number: Array) -> list[Array]:
        def gradient(example: Sequence[Array]) -> list[Array]:
            def loss(selected: list[Any]) -> Array:
                params = list(self.params)
                for i, p in zip(self.indices, selected, strict=True):
                    params[i] = p
                losses: Array = jaxpr_as_fun(self.loss)(*params, *(a[None] for a in example))[0]
                return losses[0]

            grads: list[Array] = jax.grad(loss)([self.params[i] for i in self.indices])
            return grads

        # The same masks for norms and for sums.
        leaves = [jax.random.clone(a) if is_key(a) else a for a in self.examples.leaves]
        rows = [ghost_norm.every_nth(a, chunks, number) for a in leaves]
        grads: list[Array] = jax.vmap(gradient)(rows)
        return grads


@dataclasses.dataclass(frozen=True, eq=False)
class RematerializedGradients(GroupGradients):
    """Gradients of parameters inside of `jax.checkpoint`, of which only norms were computed.

    Attributes:
      loss: The traced loss of a batch of one: ``(*leaves, *batch) -> (losses, ...)``.
      leaves: Its first arguments: the parameters, and values derived from them.
      examples: The batch.
      uses: The use of each parameter. Its tap gives norms.
      squares: `upper_squared_norms` [batch, *scan_lengths] by index of the parameter.
    """

    loss: ClosedJaxpr
    leaves: Sequence[Any]
    examples: Examples
    uses: Sequence[Use]
    squares: dict[int, Array]

    def strategies(self) -> dict[int, str]:
        return dict.fromkeys(self.squares, "rematerialized")

    def squared_norms(self, whole: bool) -> dict[int, SquaredNorms]:
        totals = {i: a.reshape(len(a), -1).sum(1) for i, a in self.squares.items()}
        return {i: SquaredNorms(a, 0.0) for i, a in totals.items()}

    def materialize(self) -> dict[int, Array]:
        chunks = ChunkedGradients(
            self.loss, self.leaves, self.examples, list(self.squares), self.examples.size
        )
        return chunks.materialize()

    def weighted_sums(self, scales: ByIndex, is_rough: Rough) -> Iterator[tuple[int, Array]]:
        """See `GroupGradients`. A second backward pass, whose gradients are weighted."""
        total_loss, included = self._total_loss(scales)
        sums = jax.grad(total_loss)({i: upcast(self.leaves[i]) for i in self.squares})
        yield from ((i, jnp.where(included.any(), g, 0)) for i, g in sums.items())

    def add_weighted_sums(self, totals: Any, scales: ByIndex, is_rough: Rough) -> None:
        """See `GroupGradients`.

        The backward pass adds to the arrays layer by layer, so no other array of their size exists.
        """
        total_loss, included = self._total_loss(scales)
        wide = {i: self.leaves[i].astype(totals[i].dtype) for i in self.squares}

        def add(_: Array, nothing: None) -> None:
            value, backward = jax.vjp(total_loss, wide)
            accumulate: Any = backward  # A `jax.VJP`, which JAX types as a plain function.
            accumulate.with_refs({i: totals[i] for i in self.squares})(jnp.ones_like(value))

        # Without any weight, gradients may be infinite. XLA copies the arrays that a
        # `jax.lax.cond` updates, but no arrays that a loop updates.
        jax.lax.fori_loop(0, included.any().astype(jnp.int32), add, None)

    def _total_loss(
        self, scales_by_param: Mapping[int, Array]
    ) -> tuple[Callable[[dict[int, Any]], Array], Array]:
        """Return a function whose gradient is the weighted sum, and which examples have a weight.

        It is the sum of the losses, as a function of the parameters in float32 or wider. Weights
        enter where a parameter meets data: a weighted loss would pass other cotangents through
        the layers behind, which need not treat them in proportion. Norms of the first pass enter,
        too, see `Weighed`.
        """
        scales = scales_by_param[next(iter(self.squares))]
        included = scales != 0
        # An example that is left out, which may be infinite, is computed as another one.
        size = self.examples.size
        index = jnp.where(included, jnp.arange(size), jnp.argmax(included))

        def replace(a: Array) -> Array:
            a = jax.random.clone(a) if is_key(a) else a  # The same masks as in the first pass.
            return a[index]

        def of_one(
            wide: dict[int, Any], scale: Array, squares: list[Array], leaves: list[Any], *batch: Any
        ) -> Array:
            views = [(use.view, wide[use.view.param]) for use in self.uses]
            wide_views = (view.scale * view.from_param(a) for view, a in views)
            taps = list(map(Weighed, wide_views, squares))
            (losses, *_), _ = evaluate_with_taps(
                self.loss, [*leaves, *batch], self.uses, taps, scale
            )
            return cast(Array, losses)

        leaves = list(self.leaves)
        counted = [replace(self.squares[use.view.param]) for use in self.uses]

        def total_loss(wide: dict[int, Any]) -> Array:
            one, own = self.examples.of_size(1), [a[0] for a in counted]
            program = jax.make_jaxpr(of_one)(wide, scales[0], own, leaves, *one)
            rows = [Rows(replace(a), 0) for a in self.examples.leaves]
            squares = [rows_from(a) for a in counted]
            args = [*jax.tree.leaves(wide), Rows(scales, 0), *squares, *leaves, *rows]
            losses, *_ = run_for_batch(program, args, size, keep_rules=True)
            return rows_of(losses, (1,), size)[:, 0].sum()

        return total_loss, included


class PerExampleGradients(NamedTuple):
    """The gradients of all examples with respect to all parameters.

    Attributes:
      losses: Losses of the examples, [batch].
      aux: The auxiliary output of the loss: arrays [batch, ...], or of any shape where they do
        not depend on the batch.
      aux_is_batched: Whether each leaf of ``aux`` is [batch, ...].
      treedef: Structure of the parameters.
      groups: Gradients of all parameters, each in one group.
    """

    losses: Array
    aux: Any
    aux_is_batched: list[bool]
    treedef: Any
    groups: Sequence[GroupGradients]

    def squared_norms(self, *, whole: bool = False) -> dict[int, SquaredNorms]:
        """Squared norms by index of the parameter; if ``whole``, only their sum is right."""
        return _merged(group.squared_norms(whole) for group in self.groups)

    def materialize(self) -> Any:
        """Per-example gradients [batch, *parameter], like params."""
        return self._unflatten(_merged(group.materialize() for group in self.groups))

    def weighted_sum(self, scales: Any, is_rough: Rough | None = None, totals: Any = None) -> Any:
        """Weighted sums ``sum_b scales_b gradient_b``, like params; float32 or wider.

        Args:
          scales: Weights [batch] for each parameter, like params. An example with scale 0
            contributes exactly 0, even if its gradient is not finite.
          is_rough: Those of `squared_norms`, by index of the parameter. Clipped sums need them.
          totals: Mutable arrays like params to add the sums to, in place of returning them.
        """
        scales_by_param = dict(enumerate(jax.tree.leaves(scales)))
        rough = is_rough or {}
        if totals is None:
            sums = (group.weighted_sums(scales_by_param, rough) for group in self.groups)
            return self._unflatten(_merged(map(dict, sums)))
        refs = dict(enumerate(jax.tree.leaves(totals)))
        for group in self.groups:
            group.add_weighted_sums(refs, scales_by_param, rough)
        return None

    def inner_products(self, direction: Any) -> Array:
        """Inner product of each example's gradient with a direction like params, [batch]."""
        directions = dict(enumerate(jax.tree.leaves(direction)))
        products = (group.inner_products(directions) for group in self.groups)
        return functools.reduce(jnp.add, products, jnp.zeros(self.losses.shape))

    def sum_and_products(
        self, scales: Array, other: "PerExampleGradients", weights: Array
    ) -> tuple[Any, Array]:
        """Weighted sum, and inner products ``<g_b, sum_j weights_j g'_j>`` with other gradients.

        Args:
          scales: Weights [batch] of the examples in the sum.
          other: Gradients with respect to the same parameters.
          weights: Weights of its examples. Those of weight 0 have no effect.

        Returns:
          The sum, like params, and inner products [batch].
        """
        directions = dict(enumerate(jax.tree.leaves(other.sum_by(weights))))
        scales_by_param = dict.fromkeys(directions, scales)
        others, sums, products = other.separate(), {}, jnp.zeros(self.losses.shape)
        for group in self.groups:
            if isinstance(group, SeparateGradients):
                previous = jnp.zeros(())
                for i, g in sorted(group.by_param.items(), reverse=True):
                    own = _wait_for(previous, scales)
                    sums[i], product = g.sum_and_products(
                        own, directions[i], others.get(i), weights
                    )
                    previous = sums[i] if sums[i].ndim > 1 and sums[i].size else previous
                    products += product
            else:
                sums |= group.weighted_sums(scales_by_param, {})
                products += group.inner_products(directions)
        return self._unflatten(sums), products

    def sum_by(self, weights: Array) -> Any:
        """Weighted sum of the gradients, like params, with one weight per example [batch]."""
        leaves = [weights] * self.treedef.num_leaves
        return self.weighted_sum(jax.tree.unflatten(self.treedef, leaves))

    def separate(self) -> dict[int, ParameterGradients]:
        """Gradients of the parameters that have nothing in common with others, by index."""
        return _merged(g.by_param for g in self.groups if isinstance(g, SeparateGradients))

    def plus_weighted_sum(self, totals: Any, scales: Any, is_rough: Rough) -> Any:
        """Return ``totals``, like params, plus the `weighted_sum`."""
        by_param, scales = (dict(enumerate(jax.tree.leaves(a))) for a in (totals, scales))
        sums = (group.plus_weighted_sums(by_param, scales, is_rough) for group in self.groups)
        return self._unflatten(_merged(sums))

    def strategies(self) -> Any:
        """How each parameter's norms and sums are computed, like params."""
        return self._unflatten(_merged(group.strategies() for group in self.groups))

    def _unflatten(self, leaves: Mapping[int, Any]) -> Any:
        return jax.tree.unflatten(self.treedef, [leaves[i] for i in range(len(leaves))])


def _merged(by_param: Iterable[Mapping[int, T]]) -> dict[int, T]:
    return {i: value for values in by_param for i, value in values.items()}


def _wait_for(previous: Array, scales: Array) -> Array:
    """Return ``scales``, but available only once ``previous`` is computed.

    The layers' sums are then computed one after the other. Otherwise XLA on CPU first scales the
    cotangents of all layers, which doubles their memory.
    """
    # XLA on CPU drops `jax.lax.optimization_barrier` before it schedules.
    return scales + 0 * jnp.nan_to_num(previous[(0,) * previous.ndim])
