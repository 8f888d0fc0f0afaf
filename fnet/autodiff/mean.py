"""The default gradient mode: the gradient of the weighted mean of the losses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fnet.autodiff.examples import check_floating
from fnet.precision import sum_dtype


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
      TypeError: If ``result`` is anything else, or the model state has another structure.
    """
    if isinstance(result, Array):
        return result, Aux(model_state, {})
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Aux)):
        raise TypeError(
            "loss: expected losses [batch] or (losses [batch], fnet.Aux(model_state, metrics)), "
            f"got {jax.tree.structure(result)}"
        )
    given: Any = jax.tree.structure(model_state)
    if (new := jax.tree.structure(result[1].model_state)) != given:
        raise TypeError(
            f"loss: Aux(model_state, metrics) needs a model state like the given one, {given}, got "
            f"{new}; pass on model_state if it does not change"
        )
    return result


def weighted_mean(values: Array, weight: Array | None) -> Array:
    """Average per-example values, weighted.

    A value with weight 0, such as for a padded example, has no effect even if it is NaN.

    Args:
      values: one value per example, [batch], floating.
      weight: [batch], >= 0. None: all examples have the same weight.

    Returns:
      ``sum(weight * values) / sum(weight)``, []; 0 if all weights are 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet.autodiff import weighted_mean
      >>> values, weight = jnp.array([1.0, 3.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0])
      >>> float(weighted_mean(values, weight))
      2.0
    """
    if weight is None:
        return values.mean()
    return jnp.where(weight != 0, values * shares(weight), 0).sum()


def shares(weight: Array) -> Array:
    """Divide weights by their sum, in float32 or wider. They are 0 if all weights are 0."""
    weight = jnp.asarray(weight, sum_dtype(weight))
    # In units of the largest, because a sum of very large weights is infinite.
    largest = jnp.abs(weight).max(initial=0)
    weight = weight / jnp.where(largest > 0, largest, 1)
    total = weight.sum()
    return weight / jnp.where(total != 0, total, 1)


def mean(loss: Loss) -> Gradient:
    """Return a function that computes the gradient of the mean loss over the batch.

    This is the default mode of `fnet.make_step`. With w_i = ``batch["weight"]``, or 1,

        g = grad_params  sum_i w_i loss_i / sum_i w_i.

    Args:
      loss: per-example losses; see `Loss`. Give padded examples ``batch["weight"]`` 0. They have
        no effect even if their loss or its derivative is NaN; see `replace_padding`.

    Returns:
      ``gradient(params, model_state, batch, key) -> (grads, model_state, metrics)``:
      ``grads`` like ``params``, and the weighted means of the loss (``"loss"``) and of the
      per-example metrics.

    Raises:
      ValueError: when called, if ``loss`` does not return one loss per example, or
        ``batch["weight"]`` has another shape.
      TypeError: when called, if the losses are not floating, or ``loss`` returns neither
        losses nor ``(losses, Aux)``.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet.autodiff import mean
      >>> def loss(params, model_state, batch, key):
      ...     return (params["w"] * batch["x"]) ** 2
      >>> batch = {
      ...     "x": jnp.asarray([1.0, 2.0, 9.0]),
      ...     "weight": jnp.asarray([1.0, 1.0, 0.0]),
      ... }
      >>> grads, _, metrics = mean(loss)({"w": jnp.float32(1.0)}, {}, batch, None)
      >>> float(grads["w"]), float(metrics["loss"])
      (5.0, 2.5)
    """
    return ignore_padding(gradient_of(mean_loss(loss)))


def ignore_padding(gradient: Gradient) -> Gradient:
    """Return the gradient function without the effect of examples of weight 0, even of a NaN."""

    def without_padding(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        grads, *others = gradient(params, model_state, replace_padding(batch), key)
        if (weight := batch.get("weight")) is not None:
            # A batch of padding only has no example to replace it.
            any_counts = (jnp.asarray(weight) != 0).any()
            grads = jax.tree.map(lambda g: jnp.where(any_counts, g, jnp.zeros_like(g)), grads)
        return grads, *others

    return without_padding


def gradient_of(objective: Objective) -> Gradient:
    """Return the function that computes the gradient of an objective."""

    def gradient(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Any, Any, dict[str, Array]]:
        grads, (model_state, means) = jax.grad(objective, has_aux=True)(
            params, model_state, batch, key
        )
        return grads, model_state, means

    return gradient


def replace_padding(batch: dict[str, Array]) -> dict[str, Array]:
    """Replace each example of weight 0 by the first example that counts.

    The derivative of a loss may be NaN where the example is zeros, such as a norm's, and 0
    times NaN is NaN. So padding needs inputs at which the loss is differentiable, and an example
    of the batch is the only one at hand. Weights stay. Without an example that counts, or without
    weights of shape [batch], the batch stays.
    """
    weight = batch.get("weight")
    if weight is None or jnp.ndim(weight) != 1:
        return batch
    counts = jnp.asarray(weight) != 0
    is_padding = ~counts & counts.any()
    # On sharded rows, all of this is sums and minima of what each device has.
    row = jax.lax.broadcasted_iota(int, counts.shape, 0, out_sharding=jax.typeof(counts).sharding)
    is_first = row == jnp.where(counts, row, counts.size).min(initial=counts.size)

    def replace(a: Any) -> Any:
        a = jnp.asarray(a)
        is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        if is_key or a.shape[:1] != counts.shape or not counts.size:
            return a
        column = counts.shape + (1,) * (a.ndim - 1)
        first = jnp.where(is_first.reshape(column), a, jnp.zeros_like(a)).sum(0, dtype=a.dtype)
        return jnp.where(is_padding.reshape(column), first, a)

    replaced: dict[str, Array] = jax.tree.map(replace, dict(batch))
    return replaced | {"weight": weight}


def mean_loss(loss: Loss) -> Objective:
    """Return the function that `mean` differentiates. It raises what `mean` does."""

    def objective(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Array, tuple[Any, dict[str, Array]]]:
        losses, aux = losses_and_aux(loss(params, model_state, batch, key), model_state)
        if losses.ndim != 1:
            raise ValueError(
                f"mean: expected one loss per example, shape [batch], got {losses.shape}; "
                "return the losses, not their mean"
            )
        check_floating("mean", losses)
        weight = batch.get("weight")
        if weight is not None and weight.shape != losses.shape:
            raise ValueError(
                f"mean: expected one weight per loss, shape {losses.shape}, got {weight.shape}"
            )
        value = weighted_mean(losses, weight)
        means = {name: weighted_mean(v, weight) for name, v in aux.metrics.items()}
        return value, (aux.model_state, means | {"loss": value})

    return objective
