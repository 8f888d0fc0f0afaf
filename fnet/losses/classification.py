"""Cross-entropy and accuracy of logits that are there: one number per example."""

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int

from fnet.precision import as_int32, widened


def cross_entropy(
    logits: Float[Array, "... k"], labels: Int[Array, "..."], *, smoothing: float = 0.0
) -> Float[Array, "..."]:
    """``-log softmax(logits)[label]`` in nats, one per example.

    Args:
      logits: unnormalised log-probabilities of K classes [..., K], any floating dtype.
      labels: class indices, integers [...]. One outside [0, K) gives NaN.
      smoothing: probability mass spread evenly over all classes (Szegedy et al.
        2016), in [0, 1)::

            loss = -(1 - smoothing) log p[label] - smoothing mean(log p)

    Returns:
      Losses [...], float32 (float64 for float64).

    Raises:
      ValueError: if ``labels`` do not match ``logits`` without its last axis, or for a
        smoothing out of its range.
      TypeError: if ``labels`` are not integers.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"cross_entropy: smoothing must be in [0, 1), got {smoothing}")
    _check_labels("cross_entropy", logits, labels)
    logits = widened(logits)
    labels = as_int32(labels)
    losses: Array = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    losses = jnp.where(labels < 0, jnp.nan, losses)  # an index would count from the end
    if not smoothing:
        return losses
    evenly = jax.nn.logsumexp(logits, -1) - logits.mean(-1)
    return (1 - smoothing) * losses + smoothing * evenly


def accuracy(logits: Float[Array, "... k"], labels: Int[Array, "..."]) -> Float[Array, "..."]:
    """1.0 where the largest logit is the label's, else 0.0; one per example.

    Args:
      logits: [..., K], floating.
      labels: class indices [...], integers.

    Returns:
      float32 [...].

    Raises:
      ValueError: if ``labels`` do not match ``logits`` without its last axis.
      TypeError: if ``labels`` are not integers.
    """
    _check_labels("accuracy", logits, labels)
    return (logits.argmax(-1) == labels).astype(jnp.float32)


def _check_labels(where: str, logits: Array, labels: Array) -> None:
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"{where}: labels must have shape {logits.shape[:-1]}, got {labels.shape}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{where}: labels must be integers, indices of classes, got {labels.dtype}")
