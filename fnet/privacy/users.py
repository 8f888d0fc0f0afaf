"""Losses per user, for privacy of users with several examples each."""

from typing import Any

import jax
from jax import Array

from fnet.autodiff.mean import Aux, Loss, losses_and_aux, replace_padding, weighted_mean
from fnet.privacy.batch_names import EXAMPLE_WEIGHT


def per_user(loss: Loss) -> Loss:
    """Turn losses per example into losses per user: the mean over the user's examples.

    In a batch of users, every array has one more axis: ``[users, k, ...]``. A user has up to k
    examples, and the rest is padding. `fnet.clipped_grad` of the new loss clips the gradient of
    each user::

        g_u = grad sum_j w_uj loss(x_uj) / sum_j w_uj

    Guarantees:
      - Adding or removing a user, with all of their examples, changes the sum of clipped gradients
        by at most ``clip``, whatever k is and however many examples the user has.
      - Padding has no effect, even if its loss or its derivative is NaN: a copy of an example of
        the same user takes its place.

    Sample users, not examples, and count users in the accounting: `PoissonSampling` with
    ``examples`` as the number of users, and delta below 1 / users.

    Args:
      loss: Losses per example. It is called with the batch's arrays as ``[users * k, ...]``,
        without weights.

    Returns:
      A loss for batches of users with ``example_weight`` [users, k]. A user without examples has
      loss 0. Metrics are averaged in the same way.

    Raises:
      ValueError: When called with a batch without ``example_weight``.

    Example:
      >>> import jax.numpy as jnp
      >>> from fnet.privacy.users import per_user
      >>> def loss(params, model_state, batch, key):
      ...     return batch["x"] * params["w"]
      >>> batch = {
      ...     "x": jnp.array([[1.0, 3.0], [5.0, 0.0]]),
      ...     "example_weight": jnp.array([[1.0, 3.0], [1.0, 0.0]]),
      ... }
      >>> losses, _ = per_user(loss)({"w": jnp.float32(1)}, {}, batch, None)
      >>> losses.tolist()
      [2.5, 5.0]

    References: McMahan et al. 2018, "Learning differentially private recurrent language models",
      arXiv:1710.06963.
    """

    def user_loss(
        params: Any, model_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Array, Aux]:
        if EXAMPLE_WEIGHT not in batch:
            raise ValueError(
                f"per_user: the batch needs {EXAMPLE_WEIGHT} [users, k], 0 for padding; it has "
                f"{', '.join(batch)}"
            )
        weight = batch[EXAMPLE_WEIGHT]
        arrays = {n: a for n, a in batch.items() if n not in (EXAMPLE_WEIGHT, "weight")}
        arrays = jax.vmap(replace_padding)(arrays | {"weight": weight})
        examples = {n: a.reshape(-1, *a.shape[2:]) for n, a in arrays.items() if n != "weight"}
        losses, aux = losses_and_aux(loss(params, model_state, examples, key), model_state)

        def mean(values: Array) -> Array:
            return jax.vmap(weighted_mean)(values.reshape(weight.shape), weight)

        metrics = {name: mean(values) for name, values in aux.metrics.items()}
        return mean(losses), Aux(aux.model_state, metrics)

    return user_loss
