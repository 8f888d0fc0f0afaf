"""Measure how far the clipped sum moves when one example changes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import checks
from fnet.autodiff.examples import PerExampleLoss, examples
from fnet.autodiff.per_example.clipped import clipped_grad, gradient_strategies


class Sensitivity(NamedTuple):
    """Largest distances that the clipped sum moved, in clips; see `check_sensitivity`.

    Attributes:
      worst: The largest of all distances.
      by_change: The largest distance by what changed: "removed" or "replaced".
      by_strategy: The largest distance among the parameters of each strategy, see
        `fnet.autodiff.gradient_strategies`.
    """

    worst: float
    by_change: dict[str, float]
    by_strategy: dict[str, float]


def check_sensitivity(
    loss: PerExampleLoss,
    params: Any,
    *batch: Any,
    clip: float = 1.0,
    trials: int = 16,
    seed: int = 0,
    has_aux: bool = False,
) -> Sensitivity:
    """Try to move the clipped sum of `fnet.clipped_grad` further than its bound allows.

    Each trial draws rows of your batch and scales them: losses by 1e-20 to 1e20, and floating
    data by 1e-3 to 1e3. One example, or each, gets another scale. Then one example is removed, or
    replaced by another one. A distance above 1.001 means that the bound does not hold for your
    loss. A check that passes is no proof.

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``, as in `fnet.clipped_grad`.
      params: Parameters.
      *batch: Arrays with at least two examples. Errors of rounding need many to show.
      clip: Largest norm of an example's gradient.
      trials: Number of batches to try.
      seed: Seed of all random choices.
      has_aux: Whether ``loss`` returns ``(losses, aux)``.

    Returns:
      The largest distances, in clips. A replaced example may move the sum by two clips: its
      distance is divided by 2.

    Raises:
      ValueError: ``clip`` is not above 0 and finite, ``trials`` is below 1, there are less than
        two examples, or `fnet.clipped_grad` rejects the loss.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x, y):
      ...     return (x @ params - y) ** 2
      >>> x, y = jnp.arange(12.0).reshape(4, 3), jnp.arange(4.0)
      >>> moved = fnet.privacy.check_sensitivity(loss, jnp.ones(3), x, y)
      >>> moved.worst <= 1.001, list(moved.by_strategy)
      (True, ['ghost norm'])
    """
    checks.numbers("check_sensitivity", "> 0 and finite", clip=clip)
    checks.sizes("check_sensitivity", trials=trials)
    size = examples("check_sensitivity", batch).size
    if size < 2:
        raise ValueError(f"check_sensitivity: expected at least 2 examples, got {size}")

    def scaled(params: Any, factors: Array, batch: Any) -> Array:
        out = loss(params, *batch)
        losses = out[0] if has_aux else out
        result: Array = losses * factors.astype(losses.dtype)
        return result

    @jax.jit
    def clipped_sum(drawn: _Drawn, mask: Array) -> Any:
        given = drawn.factors, jax.tree.map(drawn.of, batch)
        return clipped_grad(scaled, clip)(params, *given, mask=mask)[0]

    strategies = gradient_strategies(scaled, params, jnp.ones(size), batch)
    rng, everyone = np.random.default_rng(seed), np.ones(size, bool)
    squares: dict[str, list[Any]] = {"removed": [], "replaced": []}
    for trial in range(trials):
        b = int(rng.integers(size))
        drawn = _draw(rng, size, b, trial)
        total = clipped_sum(drawn, everyone)
        without = clipped_sum(drawn, np.arange(size) != b)
        squares["removed"].append(_squared_distances(total, without, clip))
        another = _draw(rng, size, b, trial + 1)
        another = another._replace(factors=-another.factors)  # The furthest away.
        replaced = jax.tree.map(
            lambda a, c, b=b: np.where(np.arange(size) == b, c, a), drawn, another
        )
        squares["replaced"].append(
            _squared_distances(total, clipped_sum(replaced, everyone), 2 * clip)
        )
    table = np.array([squares[change] for change in squares])  # [change, trial, parameter]
    names = np.array(jax.tree.leaves(strategies))
    by_change = dict(zip(squares, np.sqrt(table.sum(2).max(1)).tolist(), strict=True))
    by_strategy = {
        str(s): float(np.sqrt(table[:, :, names == s].sum(2).max())) for s in np.unique(names)
    }
    return Sensitivity(max(by_change.values()), by_change, by_strategy)


class _Drawn(NamedTuple):
    """A batch: numbers of its rows, and factors of their losses and floating data, [batch]."""

    rows: Any
    factors: Any
    scales: Any

    def of(self, a: Any) -> Any:
        a = jnp.asarray(a)
        if not a.ndim:
            return a
        rows = a[self.rows]
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return rows
        return rows * self.scales.reshape(-1, *[1] * (a.ndim - 1)).astype(a.dtype)


def _draw(rng: np.random.Generator, size: int, b: int, trial: int) -> _Drawn:
    """Draw a batch. Trial 0 has no scales, and the others have all kinds in turn."""
    is_one = np.arange(size) == b

    def powers(largest: int, kind: int) -> Any:
        every = rng.uniform(-largest, largest, size)
        chosen = [np.zeros(size), np.full(size, every[0]), np.where(is_one, every, 0), every][kind]
        return (10.0**chosen).astype(np.float32)

    return _Drawn(rng.integers(size, size=size), powers(20, trial % 4), powers(3, trial // 4 % 4))


def _squared_distances(a: Any, b: Any, unit: float) -> list[float]:
    """Squared distances of each parameter's sums, in units. A sum that is not finite is far."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    moved = [np.subtract(x, y, dtype=np.complex128) / unit for x, y in pairs]
    return [float(np.nan_to_num(np.square(np.abs(m)).sum(), nan=np.inf)) for m in moved]
