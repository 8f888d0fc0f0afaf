"""Scores of training examples for test examples, and the scorers that give them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet.autodiff.examples import Examples, PerExampleLoss, examples
from fnet.autodiff.per_example.backward import per_example_gradients
from fnet.autodiff.per_example.gradients import map_in_chunks
from fnet.precision import upcast

Scorer = Callable[..., Array]
"""``scorer(*batch) -> scores [batch, queries]`` of training examples, float32."""

_CHUNK_BYTES = 2**28
"""Bytes of per-example gradients that are materialized at a time."""


class Ranking(NamedTuple):
    """The training examples that matter most for a query.

    Attributes:
      helpful: Their indices, the highest score first, int [k].
      harmful: Their indices, the lowest score first, int [k].
    """

    helpful: np.ndarray
    harmful: np.ndarray


class Scores(NamedTuple):
    """Scores of all training examples for all queries.

    Attributes:
      values: [train, queries]; how much an example lowers the loss of a query. Any array-like,
        such as a `numpy.memmap`.

    Example:
      >>> import numpy as np, fnet
      >>> scores = fnet.attribution.Scores(np.array([[0.5], [-2.0], [1.0]]))
      >>> scores.top(query=0, k=1)
      Ranking(helpful=array([2]), harmful=array([1]))
    """

    values: Any

    @classmethod
    def of(cls, scorer: Scorer, batches: Iterable[tuple[Any, ...]]) -> "Scores":
        """Score all training examples.

        Args:
          scorer: What `tracin`, `ekfac` or `trak` returns.
          batches: Arguments of the loss after params. The last batch may be smaller.
        """
        compiled = jax.jit(scorer)
        return cls(np.concatenate([np.asarray(compiled(*batch)) for batch in batches]))

    def top(self, query: int, k: int = 10) -> Ranking:
        """Return the ``k`` most helpful and most harmful examples of a query, without NaN."""
        values = np.asarray(self.values[:, query])
        order = np.argsort(values, kind="stable")[: np.sum(~np.isnan(values))]  # NaN is last.
        return Ranking(order[::-1][:k], order[:k])


def gradients(
    name: str, loss: PerExampleLoss, params: Any, batch: tuple[Any, ...], then: Callable[..., Any]
) -> Any:
    """Compute ``then(gradients, losses)`` of all examples, a few at a time.

    It gets gradients like params, [n, ...] each and float32, and losses [n], and returns a tree of
    arrays [n, ...].
    """
    e = examples(name, batch)
    return map_in_chunks(lambda chunk: _then(name, loss, params, chunk, then), e, _width(params, e))


def directions_of(
    name: str,
    loss: PerExampleLoss,
    params: Any,
    queries: tuple[Any, ...],
    then: Callable[..., Any],
    *,
    average: bool,
) -> Any:
    """Compute ``then(gradients, losses)`` of all queries, [queries, ...], or its mean, [1, ...]."""
    if not (count := examples(name, queries).size):
        raise ValueError(f"{name}: expected test examples in queries, got none")

    @jax.jit
    def compute(params: Any, queries: tuple[Any, ...]) -> Any:
        if not average:
            return gradients(name, loss, params, queries, then)
        sums = sum_of_gradients(name, loss, params, queries, then)
        return jax.tree.map(lambda a: a[None] / count, sums)

    return compute(params, queries)


def sum_of_gradients(
    name: str, loss: PerExampleLoss, params: Any, batch: tuple[Any, ...], then: Callable[..., Any]
) -> Any:
    """Sum what `gradients` would return over the examples."""
    e = examples(name, batch)
    width = _width(params, e)

    def total(leaves: list[Array]) -> Any:
        chunk = e._replace(size=len(leaves[0]), leaves=leaves)
        rows = _then(name, loss, params, chunk, then)
        return jax.tree.map(lambda a: a.sum(0), rows)

    def add(sums: Any, leaves: list[Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, total(leaves)), None

    first = total([a[: e.size % width or width] for a in e.leaves])
    rest = [a[e.size % width or width :] for a in e.leaves]
    return jax.lax.scan(add, first, [a.reshape(-1, width, *a.shape[1:]) for a in rest])[0]


def _then(
    name: str, loss: PerExampleLoss, params: Any, chunk: Examples, then: Callable[..., Any]
) -> Any:
    result = per_example_gradients(name, loss, params, chunk)
    return then(jax.tree.map(upcast, result.materialize()), result.losses)


def _width(params: Any, e: Examples) -> int:
    """Number of examples whose gradients are materialized at a time."""
    size = sum(int(p.size) for p in jax.tree.leaves(params))
    return max(min(_CHUNK_BYTES // max(4 * size, 1), e.size), 1)


def scorer_of(name: str, loss: PerExampleLoss, terms: Sequence[tuple[Any, Any]]) -> Scorer:
    """Return a scorer: inner products with directions, summed over (parameters, directions)."""

    def scorer(*batch: Any) -> Array:
        of_terms = [
            gradients(name, loss, params, batch, lambda grads, _, d=own: _products(grads, d))
            for params, own in terms
        ]
        return jnp.stack(of_terms).sum(0)

    return scorer


def _products(grads: Any, directions: Any) -> Array:
    """Inner products [n, queries] of gradients [n, ...] and directions [queries, ...]."""

    def product(g: Array, d: Array) -> Array:
        rows, columns = (a.reshape(len(a), -1) for a in (g, d))
        return jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST)

    return jax.tree.reduce(jnp.add, jax.tree.map(product, grads, directions))
