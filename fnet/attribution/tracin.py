"""TracIn: inner products of gradients at checkpoints of a run."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from fnet.attribution.scores import Scorer, directions_of, scorer_of
from fnet.autodiff.examples import PerExampleLoss


def tracin(
    loss: PerExampleLoss,
    checkpoints: Sequence[Any],
    learning_rates: Sequence[float],
    queries: tuple[Any, ...],
    *,
    average: bool = False,
) -> Scorer:
    """Score training examples by inner products of gradients at checkpoints.

        score(z, q) = sum_c learning_rates[c] <grad loss(w_c, z), grad loss(w_c, q)>

    This is how much steps on z at the checkpoints w_c lower the loss of q, to first order (Pruthi
    et al. 2020). One checkpoint with a rate of 1 gives plain inner products.

    Args:
      loss: ``loss(params, *batch) -> losses [batch]``.
      checkpoints: Parameters at several steps.
      learning_rates: Learning rate at each of them.
      queries: Arguments of the loss after params, for the test examples, [queries, ...] each. Their
        gradients at all checkpoints are stored.
      average: Whether to score for the mean loss of the queries, as a single query.

    Returns:
      ``scorer(*batch) -> [batch, queries]``, float32; for `Scores.of`.

    Raises:
      ValueError: There is no checkpoint, or not one learning rate for each.

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, x):
      ...     return x @ params
      >>> x, query = jnp.eye(2), jnp.array([[1.0, -1.0]])
      >>> scorer = fnet.attribution.tracin(loss, [jnp.zeros(2)], [0.5], (query,))
      >>> print(scorer(x))
      [[ 0.5]
       [-0.5]]

    References: Pruthi et al. 2020, "Estimating training data influence by tracing gradient
      descent", arXiv:2002.08484.
    """
    if not checkpoints or len(checkpoints) != len(learning_rates):
        raise ValueError(
            "tracin: expected one learning rate for each checkpoint, got "
            f"{len(learning_rates)} for {len(checkpoints)} checkpoints"
        )

    def directions(params: Any, rate: float) -> Any:
        def scale(grads: Any, _: Array) -> Any:
            return jax.tree.map(lambda g: rate * g, grads)

        return directions_of("tracin", loss, params, queries, scale, average=average)

    terms = zip(checkpoints, learning_rates, strict=True)
    return scorer_of("tracin", loss, [(params, directions(params, rate)) for params, rate in terms])
