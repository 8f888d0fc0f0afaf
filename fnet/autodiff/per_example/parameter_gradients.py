"""Per-example gradients in the cheapest form: as factors, materialized, or recomputed.

`PerExampleGradients` is the result of one backward pass. It computes norms and weighted sums of
the gradients of all examples. Each parameter has one of these forms:

  - `FactoredGradients`: data and cotangents, whose products are the gradients. They stay
    factors unless the gradients take less memory.
  - `MaterializedGradients`: an array [batch, *parameter].
  - `ZeroGradients`: for parameters that the losses do not depend on.
  - `ChunkedGradients`: nothing but the loss. It is differentiated for a few examples at a time,
    once for norms and once for sums.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fnet.autodiff.examples import Examples
from fnet.autodiff.per_example import ghost_norm
from fnet.autodiff.per_example.ghost_norm import Dot, Embedding
from fnet.autodiff.per_example.taps import Use
from fnet.autodiff.update import squared_norm
from fnet.precision import sum_dtype, upcast

_FACTORS_RATIO = 4
"""Gradients are materialized if their factors are at least this many times larger."""


class ParameterGradients(Protocol):
    """The gradients of all examples with respect to one parameter."""

    @property
    def strategy(self) -> str:
        """How norms and sums are computed; see `fnet.autodiff.gradient_strategies`."""

    def squared_norms(self) -> Array:
        """Squared norm of each example's gradient, [batch]."""

    def materialize(self) -> Array:
        """Per-example gradients, [batch, *parameter]."""

    def weighted_sum(self, scales: Array) -> Array:
        """Sum of the gradients scaled by ``scales`` [batch], [*parameter].

        float32 or wider. An example with scale 0 contributes exactly 0, even if its gradient is
        not finite.
        """


class GroupGradients(Protocol):
    """The gradients of all examples with respect to several parameters, by their numbers."""

    @property
    def numbers(self) -> Sequence[int]:
        """Numbers of the parameters."""

    @property
    def strategy(self) -> str:
        """See `ParameterGradients`."""

    def squared_norms(self, whole: bool) -> dict[int, Array]:
        """Squared norms, [batch]; if ``whole``, only their sum over parameters is right."""

    def materialize(self) -> dict[int, Array]:
        """See `ParameterGradients`."""

    def weighted_sum(self, scales_by_param: Mapping[int, Array]) -> dict[int, Array]:
        """See `ParameterGradients`."""


class UseInputs(NamedTuple):
    """A use of a parameter with its data and cotangents.

    Attributes:
      use: The equation that combines the parameter with data.
      x: Data, [*scan_lengths, batch, ...].
      ct: Cotangents of the equation's result, [*scan_lengths, batch, ...].
    """

    use: Use
    x: Array
    ct: Array

    def arranged(self) -> tuple[Array, Array]:
        """Return ``x`` and ``ct`` as [stack, batch, time, ...], see `ghost_norm`."""
        lengths, stack = self.use.scan_lengths, self.use.view.scans
        time = [i for i in range(len(lengths)) if i not in stack]
        sizes = [math.prod(lengths[i] for i in scans) for scans in (stack, time)]

        def arrange(a: Array) -> Array:
            n = len(lengths)
            batch, shape = a.shape[n], a.shape[n + 1 :]
            a = a.transpose(*stack, n, *time, *range(n + 1, a.ndim))
            return a.reshape(sizes[0], batch, sizes[1], *shape)

        return arrange(self.x), arrange(self.ct)

    def to_param(self, gradient: Array, param: Any) -> Array:
        """Return the parameter's gradient, given the view's gradient [stack, *view]."""
        stack = tuple(self.use.scan_lengths[i] for i in self.use.view.scans)
        return self.use.view.to_param(gradient.reshape(*stack, *gradient.shape[1:]), param)


class FactoredGradients(NamedTuple):
    """Gradients as data and cotangents of the parameter's uses.

    Attributes:
      param: The parameter.
      inputs: Data and cotangents of each use. The gradient is the sum over uses.
    """

    param: Any
    inputs: Sequence[UseInputs]

    @property
    def strategy(self) -> str:
        """See `ParameterGradients`."""
        if self._is_small():
            return "materialized"
        return "ghost norm" if self._is_single() or self._factors() else "materialized in chunks"

    def _is_small(self) -> bool:
        first = self.inputs[0]
        batch = first.ct.shape[len(first.use.scan_lengths)]
        small: bool = _FACTORS_RATIO * batch * self.param.size <= sum(
            i.x.size + i.ct.size for i in self.inputs
        )
        return small

    def _is_single(self) -> bool:
        """Whether the equation of a single use gives the norms."""
        return len(self.inputs) == 1 and not self.inputs[0].use.view.has_repeats

    def _factors(self) -> list[tuple[Array, Array]] | None:
        """Factors of all uses that give gradients in the same arrangement, or None."""
        if len(self.inputs) == 1:
            return None
        matrices, factors = [], []
        for i in self.inputs:
            equation = i.use.equation
            if not isinstance(equation, Dot | Embedding):
                return None
            matrices.append(equation.as_matrix(i.use.view.elements))
            factors.append(equation.factors(*i.arranged()))
        aligned = []
        for matrix, (u, v) in zip(matrices, factors, strict=True):
            if _is_same_view(matrix, matrices[0]):
                aligned.append((u, v))
            elif _is_same_view(matrix.transpose(0, 2, 1), matrices[0]):
                aligned.append((v, u))
            else:
                return None
        return aligned

    def squared_norms(self) -> Array:
        """See `ParameterGradients`."""
        if self._is_small():
            return MaterializedGradients(self.materialize()).squared_norms()
        if self._is_single():
            (single,) = self.inputs
            return single.use.equation.squared_norms(*single.arranged())
        if factors := self._factors():
            return _squared_norms_of_sum(factors)
        scans = [len(i.use.scan_lengths) for i in self.inputs]
        batch_first = [
            jnp.moveaxis(a, n, 0)
            for i, n in zip(self.inputs, scans, strict=True)
            for a in (i.x, i.ct)
        ]

        def squared_norms_of_chunk(*arrays: Array) -> Array:
            pairs = zip(self.inputs, scans, arrays[::2], arrays[1::2], strict=True)
            inputs = [
                i._replace(x=jnp.moveaxis(x, 0, n), ct=jnp.moveaxis(ct, 0, n))
                for i, n, x, ct in pairs
            ]
            gradients = self._replace(inputs=inputs).materialize()
            return MaterializedGradients(gradients).squared_norms()

        return ghost_norm.map_in_chunks(squared_norms_of_chunk, batch_first, 4 * self.param.size)

    def materialize(self) -> Array:
        """See `ParameterGradients`."""

        def gradients_of(i: UseInputs) -> Array:
            views = i.use.equation.materialize(*i.arranged())
            return jax.vmap(lambda view: i.to_param(view, self.param), 1)(views)

        return jax.tree.reduce(jnp.add, [gradients_of(i) for i in self.inputs])

    def weighted_sum(self, scales: Array) -> Array:
        """See `ParameterGradients`."""
        if self._is_small():
            return MaterializedGradients(self.materialize()).weighted_sum(scales)
        sums = [
            i.to_param(i.use.equation.weighted_sum(*i.arranged(), scales), self.param)
            for i in self.inputs
        ]
        return jax.tree.reduce(jnp.add, sums)


def _is_same_view(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two views of one array have the same elements in the same order."""

    def layout(a: np.ndarray) -> tuple[Any, ...]:
        strides = [(n, s) for n, s in zip(a.shape, a.strides, strict=True) if n > 1]
        return a.__array_interface__["data"][0], a.shape, strides

    return layout(a) == layout(b)


def _squared_norms_of_sum(factors: Sequence[tuple[Array, Array]]) -> Array:
    """Squared norms ``|sum_i G_i|^2`` [batch] of gradients that are sums over uses."""
    is_one_hot = [jnp.issubdtype(a.dtype, jnp.integer) for pair in factors for a in pair]
    if not any(is_one_hot):
        u, v = (jnp.concatenate(arrays, 2) for arrays in zip(*factors, strict=True))
        return ghost_norm.squared_norms(u, v)
    squares = [ghost_norm.squared_norms(u, v) for u, v in factors]
    mixed = [
        2 * ghost_norm.inner_products(*factors[i], *factors[j])
        for i in range(len(factors))
        for j in range(i)
    ]
    return ghost_norm.nonnegative(jax.tree.reduce(jnp.add, squares + mixed))


class MaterializedGradients(NamedTuple):
    """Gradients as an array.

    Attributes:
      gradients: [batch, *parameter].
    """

    gradients: Array
    strategy: str = "autodiff"

    def squared_norms(self) -> Array:
        """See `ParameterGradients`."""
        gradients = upcast(self.gradients)
        return jnp.square(gradients).sum(tuple(range(1, gradients.ndim)))

    def materialize(self) -> Array:
        """See `ParameterGradients`."""
        return self.gradients

    def weighted_sum(self, scales: Array) -> Array:
        """See `ParameterGradients`."""
        # A matrix product. XLA on CPU compiles scales[:, None] * gradients to a slow loop.
        rows = self.gradients.reshape(len(scales), -1).astype(sum_dtype(self.gradients))
        total = scales.astype(rows.dtype) @ jnp.where(scales[:, None] != 0, rows, 0)
        return total.reshape(self.gradients.shape[1:])


class ZeroGradients(NamedTuple):
    """Gradients with respect to a parameter that the losses do not depend on.

    Attributes:
      param: The parameter.
      batch_size: Number of examples.
    """

    param: Any
    batch_size: int
    strategy: str = "unused"

    def squared_norms(self) -> Array:
        """See `ParameterGradients`."""
        return jnp.zeros(self.batch_size, jnp.float32)

    def materialize(self) -> Array:
        """See `ParameterGradients`."""
        return jnp.zeros((self.batch_size, *self.param.shape), self.param.dtype)

    def weighted_sum(self, scales: Array) -> Array:
        """See `ParameterGradients`."""
        return jnp.zeros(self.param.shape, jnp.float32)


class ChunkedGradients(NamedTuple):
    """Gradients with respect to large parameters, recomputed for a few examples at a time.

    Attributes:
      loss: The traced loss of a batch of one: ``(*params, *batch) -> (losses, ...)``.
      params: All parameters.
      examples: The batch.
      numbers: Numbers of the parameters to differentiate.
      width: Number of examples at a time.
    """

    loss: ClosedJaxpr
    params: Sequence[Any]
    examples: Examples
    numbers: Sequence[int]
    width: int

    def squared_norms(self) -> dict[int, Array]:
        """Squared norms [batch] by number of the parameter."""

        def squares(example: Sequence[Array]) -> list[Array]:
            return [squared_norm(g) for g in self._gradient(example)]

        return dict(zip(self.numbers, self.examples.map(squares, self.width), strict=True))

    def materialize(self) -> dict[int, Array]:
        """Per-example gradients [batch, *parameter] by number of the parameter."""
        gradients = self.examples.map(self._gradient, self.width)
        return dict(zip(self.numbers, gradients, strict=True))

    def weighted_sum(self, scales_by_param: Mapping[int, Array]) -> dict[int, Array]:
        """Weighted sums [*parameter] by number of the parameter; scales are [batch] each."""
        size, width = self.examples.size, self.width
        chunks = -(-size // width)
        padding = chunks * width - size

        def split(a: Array) -> Array:
            a = jnp.concatenate([a, jnp.broadcast_to(a[:1], (padding, *a.shape[1:]))])
            return a.reshape(chunks, width, *a.shape[1:])

        def add_chunk(sums: list[Array], chunk: Any) -> tuple[list[Array], None]:
            rows, scales = chunk
            gradients = map(MaterializedGradients, jax.vmap(self._gradient)(rows))
            triples = zip(sums, gradients, scales, strict=True)
            return [total + g.weighted_sum(scale) for total, g, scale in triples], None

        zeros = [jnp.zeros(self.params[i].shape, sum_dtype(self.params[i])) for i in self.numbers]
        rows = [split(a) for a in self.examples.leaves]
        # Padding examples have scale 0.
        scales = [split(scales_by_param[i]).at[-1, width - padding :].set(0) for i in self.numbers]
        sums, _ = jax.lax.scan(add_chunk, zeros, (rows, scales))
        return dict(zip(self.numbers, sums, strict=True))

    def _gradient(self, example: Sequence[Array]) -> list[Array]:
        def loss(selected: list[Any]) -> Array:
            params = list(self.params)
            for i, p in zip(self.numbers, selected, strict=True):
                params[i] = p
            losses: Array = jaxpr_as_fun(self.loss)(*params, *(a[None] for a in example))[0]
            return losses[0]

        grads: list[Array] = jax.grad(loss)([self.params[i] for i in self.numbers])
        return grads


class PerExampleGradients(NamedTuple):
    """The gradients of all examples with respect to all parameters.

    Attributes:
      losses: Losses of the examples, [batch].
      aux: The auxiliary output of the loss: arrays [batch, ...], or of any shape where they do
        not depend on the batch.
      aux_is_batched: Whether each leaf of ``aux`` is [batch, ...].
      treedef: Structure of the parameters.
      by_param: Gradients by number of the parameter.
      groups: Gradients with respect to parameters that are combined before they meet data.
      chunked: Gradients with respect to the other parameters, if there are any.
    """

    losses: Array
    aux: Any
    aux_is_batched: list[bool]
    treedef: Any
    by_param: dict[int, ParameterGradients]
    groups: Sequence[GroupGradients]
    chunked: ChunkedGradients | None

    def squared_norms(self, *, whole: bool = False) -> Any:
        """Squared norms [batch] of the gradients with respect to each parameter, like params.

        Args:
          whole: Whether only their sum is needed.
        """
        squares = {i: g.squared_norms() for i, g in self.by_param.items()}
        for group in self.groups:
            squares |= group.squared_norms(whole)
        return self._unflatten(squares | (self.chunked.squared_norms() if self.chunked else {}))

    def materialize(self) -> Any:
        """Per-example gradients [batch, *parameter], like params."""
        gradients = {i: g.materialize() for i, g in self.by_param.items()}
        for group in self.groups:
            gradients |= group.materialize()
        return self._unflatten(gradients | (self.chunked.materialize() if self.chunked else {}))

    def weighted_sum(self, scales: Any) -> Any:
        """Weighted sums ``sum_b scales_b gradient_b``, like params; float32 or wider.

        Args:
          scales: Weights [batch] for each parameter, like params. An example with scale 0
            contributes exactly 0, even if its gradient is not finite.
        """
        scales_by_param = dict(enumerate(jax.tree.leaves(scales)))
        sums: dict[int, Array] = {}
        previous = jnp.zeros(())
        for i, gradients in sorted(self.by_param.items(), reverse=True):
            sums[i] = gradients.weighted_sum(_wait_for(previous, scales_by_param[i]))
            previous = sums[i] if sums[i].ndim > 1 and sums[i].size else previous
        for group in self.groups:
            sums |= group.weighted_sum(scales_by_param)
        chunked = self.chunked.weighted_sum(scales_by_param) if self.chunked else {}
        return self._unflatten(sums | chunked)

    def strategies(self) -> Any:
        """How each parameter's norms and sums are computed, like params."""
        strategies = {i: g.strategy for i, g in self.by_param.items()}
        for group in self.groups:
            strategies |= dict.fromkeys(group.numbers, group.strategy)
        chunked = self.chunked.numbers if self.chunked else ()
        return self._unflatten(strategies | dict.fromkeys(chunked, "autodiff in chunks"))

    def _unflatten(self, leaves: Mapping[int, Any]) -> Any:
        return jax.tree.unflatten(self.treedef, [leaves[i] for i in range(len(leaves))])


def _wait_for(previous: Array, scales: Array) -> Array:
    """Return ``scales``, but available only once ``previous`` is computed.

    The layers' sums are then computed one after the other. Otherwise XLA on CPU first scales the
    cotangents of all layers, which doubles their memory.
    """
    # XLA on CPU drops `jax.lax.optimization_barrier` before it schedules.
    return scales + 0 * jnp.nan_to_num(previous[(0,) * previous.ndim])
