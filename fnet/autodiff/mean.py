"""The plain gradient mode: the weighted mean of the losses, differentiated at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Aux(NamedTuple):
    """What a loss returns beside the losses.

    Attributes:
      model_state: the renewed model state.
      metrics: name -> one value per example, [batch].
    """

    model_state: Any
    metrics: dict[str, Array]


Loss = Callable[[Any, Any, dict[str, Array], Array], tuple[Array, Aux]]
"""``loss(params, model_state, batch, key) -> (losses [batch], Aux)``."""

Gradient = Callable[[Any, Any, dict[str, Array], Array], tuple[Any, Any, dict[str, Array]]]
"""``gradient(params, model_state, batch, key) -> (grads, model_state, mean metrics)``."""


def weighted_mean(values: Array, weight: Array | None) -> Array:
    """Mean of ``values`` [batch] over examples, weighted by ``weight`` [batch] where given.

    A padded example has weight 0. All weights 0 gives 0.
    """
    if weight is None:
        return values.mean()
    return jnp.where(weight != 0, values * weight, 0).sum() / jnp.maximum(weight.sum(), 1e-12)


def mean(loss: Loss) -> Gradient:
    """The gradient of the mean loss over the batch.

    Args:
      loss: per-example losses; see `Loss`. A batch may carry ``weight`` [batch],
        0 for padding; without it all examples count the same.

    Returns:
      ``gradient(params, model_state, batch, key) -> (grads, model_state, metrics)``
      with ``grads`` like ``params`` and ``metrics`` the means of the loss
      (``"loss"``) and of every per-example metric.

    Raises:
      ValueError: if ``loss`` does not give one loss per example.
    """

    def gradient(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        weight = batch.get("weight")

        def objective(params: Any) -> tuple[Array, tuple[Any, dict[str, Array]]]:
            losses, aux = loss(params, model_state, batch, key)
            if losses.ndim != 1:
                raise ValueError(
                    f"mean: expected one loss per example, shape [batch], got {losses.shape}; "
                    "return the losses themselves, not their mean"
                )
            metrics = {"loss": losses} | aux.metrics
            means = {name: weighted_mean(v, weight) for name, v in metrics.items()}
            return means["loss"], (aux.model_state, means)

        grads, (new_model_state, means) = jax.grad(objective, has_aux=True)(params)
        return grads, new_model_state, means

    return gradient
