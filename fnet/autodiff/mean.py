"""The plain gradient mode: the weighted mean of the losses, differentiated at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.examples import check_floating
from fnet.precision import wide


class Aux(NamedTuple):
    """Second return value of a loss that has model state or metrics.

    A loss without either returns its losses alone.

    Attributes:
      model_state: Updated model state (running statistics), with the structure of the old one.
      metrics: Name -> one value per example, [batch].

    Example:
      >>> import jax.numpy as jnp, fnet
      >>> def loss(params, model_state, batch, key):
      ...     error = batch["x"] * params["w"] - batch["y"]
      ...     return error**2, fnet.Aux(model_state, {"absolute_error": abs(error)})
      >>> batch = {"x": jnp.ones(4), "y": jnp.zeros(4)}
      >>> losses, aux = loss({"w": jnp.float32(2)}, {}, batch, None)
      >>> losses.shape, sorted(aux.metrics)
      ((4,), ['absolute_error'])
    """

    model_state: Any
    metrics: dict[str, Array]


Loss = Callable[[Any, Any, dict[str, Array], Array], Array | tuple[Array, Aux]]
"""``loss(params, model_state, batch, key) -> losses [batch]``, or ``(losses, Aux)``."""

Gradient = Callable[[Any, Any, dict[str, Array], Array], tuple[Any, Any, dict[str, Array]]]
"""``gradient(params, model_state, batch, key) -> (grads, model_state, mean metrics)``."""

Objective = Callable[
    [Any, Any, dict[str, Array], Array], tuple[Array, tuple[Any, dict[str, Array]]]
]
"""``objective(params, model_state, batch, key) -> (mean loss [], (model_state, metrics))``."""


def losses_and_aux(result: Any, model_state: Any) -> tuple[Array, Aux]:
    """Split the result of a `Loss` call into losses and `Aux`.

    Args:
      result: ``losses`` or ``(losses, Aux)``.
      model_state: The model state given to the loss; plain losses leave it unchanged.

    Returns:
      ``(losses, aux)``.

    Raises:
      TypeError: If ``result`` is anything else.
    """
    if isinstance(result, Array):
        return result, Aux(model_state, {})
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Aux)):
        raise TypeError(
            "loss: expected losses [batch] or (losses [batch], fnet.Aux(model_state, metrics)), "
            f"got {jax.tree.structure(result)}."
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
        losses, aux = losses_and_aux(loss(params, model_state, batch, key), model_state)
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
