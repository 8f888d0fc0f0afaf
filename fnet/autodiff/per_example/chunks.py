"""Shares of large parameters that are used in no known way: made for a few examples at a time."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fnet.autodiff.examples import Examples
from fnet.autodiff.per_example.parameter_gradients import Made
from fnet.autodiff.update import squared_norm
from fnet.precision import wide


class Chunks(NamedTuple):
    """Shares that are made for a few examples at a time, once for norms and again for sums.

    Attributes:
      closed: the traced loss of an example.
      leaves: all parameters.
      examples: the batch.
      which: the numbers of the parameters.
      width: how many examples at a time.
    """

    closed: ClosedJaxpr
    leaves: Sequence[Any]
    examples: Examples
    which: Sequence[int]
    width: int

    def squared_norms(self) -> dict[int, Array]:
        """[batch] of each parameter."""
        if not self.which:
            return {}

        def of(example: Sequence[Array]) -> list[Array]:
            return [squared_norm(g) for g in self._gradient(example)]

        return dict(zip(self.which, self.examples.map(of, self.width), strict=True))

    def each(self) -> dict[int, Array]:
        """[batch, *parameter] of each."""
        if not self.which:
            return {}
        return dict(zip(self.which, self.examples.map(self._gradient, self.width), strict=True))

    def totals(self, scales: Mapping[int, Array]) -> dict[int, Array]:
        """``sum_b scales_b gradient_b`` of each parameter."""
        e, width = self.examples, self.width
        parts = -(-e.size // width)
        padding = parts * width - e.size

        def divided(a: Array) -> Array:
            rows = jnp.concatenate([a, jnp.broadcast_to(a[:1], (padding, *a.shape[1:]))])
            return rows.reshape(parts, width, *a.shape[1:])

        def add(sums: list[Array], part: Any) -> tuple[list[Array], None]:
            rows, scales = part
            shares = map(Made, jax.vmap(self._gradient)(rows))
            added = [
                s + share.total(scale) for s, share, scale in zip(sums, shares, scales, strict=True)
            ]
            return added, None

        sums = [jnp.zeros(self.leaves[i].shape, wide(self.leaves[i])) for i in self.which]
        if self.which and parts:
            rows = [divided(a) for a in e.leaves]
            padded = [divided(scales[i]).at[-1, width - padding :].set(0) for i in self.which]
            sums, _ = jax.lax.scan(add, sums, (rows, padded))
        return dict(zip(self.which, sums, strict=True))

    def _gradient(self, example: Sequence[Array]) -> list[Array]:
        def of(own: list[Any]) -> Array:
            params = list(self.leaves)
            for i, p in zip(self.which, own, strict=True):
                params[i] = p
            loss: Array = jaxpr_as_fun(self.closed)(*params, *example)[0]
            return loss

        grads: list[Array] = jax.grad(of)([self.leaves[i] for i in self.which])
        return grads
