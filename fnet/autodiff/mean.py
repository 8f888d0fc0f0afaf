"""The plain gradient mode: the weighted mean of the losses, differentiated at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.examples import check_floating
from fnet.precision import wide


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

Objective = Callable[
    [Any, Any, dict[str, Array], Array], tuple[Array, tuple[Any, dict[str, Array]]]
]
"""``objective(params, model_state, batch, key) -> (mean loss [], (model_state, metrics))``."""


def losses_and_aux(result: Any) -> tuple[Array, Aux]:
    """What a `Loss` returned, once it is known to be that.

    Args:
      result: of a call of a loss.

    Returns:
      ``(losses, aux)``.

    Raises:
      TypeError: for anything else.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Aux)):
        raise TypeError(
            "loss: expected (losses [batch], fnet.Aux(model_state, metrics)), got "
            f"{jax.tree.structure(result)}; without metrics fnet.Aux(model_state, {{}})"
        )
    return result


def weighted_mean(values: Array, weight: Array | None) -> Array:
    """Mean of ``values`` [batch] over examples, weighted by ``weight`` [batch] where given.

    A padded example has weight 0. All weights 0 gives 0.

    Args:
      values: [batch], floating.
      weight: [batch], >= 0; None: all examples count the same.

    Returns:
      ``sum(weight values) / sum(weight)``, [].
    """
    if weight is None:
        return values.mean()
    whole = weight.sum(dtype=wide(weight))
    return jnp.where(weight != 0, values * weight, 0).sum() / jnp.maximum(whole, 1e-12)


def mean(loss: Loss) -> Gradient:
    """The gradient of the mean loss over the batch.

    Args:
      loss: per-example losses; see `Loss`. A batch may carry ``weight`` [batch],
        0 for padding; without it all examples count the same.

    Returns:
      ``gradient(params, model_state, batch, key) -> (grads, model_state, metrics)``
      with ``grads`` like ``params`` and ``metrics`` the means of the loss
      (``"loss"``) and of every other per-example metric.

    Raises:
      ValueError: if ``loss`` does not give one loss per example, or ``weight`` is of another shape.
      TypeError: for losses that are not floating, or a ``loss`` that returns something else.
    """
    objective = mean_loss(loss)

    def gradient(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        grads, (model_state, means) = jax.grad(objective, has_aux=True)(
            params, model_state, batch, key
        )
        return grads, model_state, means

    return gradient


def mean_loss(loss: Loss) -> Objective:
    """What is differentiated: the mean loss of a batch, with all the loss returns beside it.

    Args:
      loss: as `mean` takes it.

    Returns:
      ``objective(params, model_state, batch, key) -> (mean loss [], (model_state, metrics))``.

    Raises:
      ValueError: if ``loss`` does not give one loss per example, or ``weight`` is of another shape.
      TypeError: for losses that are not floating, or a ``loss`` that returns something else.
    """

    def objective(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Array, tuple[Any, dict[str, Array]]]:
        losses, aux = losses_and_aux(loss(params, model_state, batch, key))
        if losses.ndim != 1:
            raise ValueError(
                f"mean: expected one loss per example, shape [batch], got {losses.shape}; "
                "return the losses themselves, not their mean"
            )
        check_floating("mean", losses)
        weight = batch.get("weight")
        if weight is not None and weight.shape != losses.shape:
            raise ValueError(
                f"mean: expected a weight for each of the losses {losses.shape}, got {weight.shape}"
            )
        value = weighted_mean(losses, weight)
        means = {name: weighted_mean(v, weight) for name, v in aux.metrics.items()}
        return value, (aux.model_state, means | {"loss": value})

    return objective
