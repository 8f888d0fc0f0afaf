"""Cross-entropy and accuracy from logits, per example."""

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Int

from fnet import checks
from fnet.precision import as_int32, upcast


def cross_entropy(
    logits: Float[Array, "... k"], labels: Int[Array, "..."], *, smoothing: float = 0.0
) -> Float[Array, "..."]:
    """Cross-entropy ``-log softmax(logits)[label]`` in nats, per example.

    Args:
      logits: unnormalized log-probabilities of K classes [..., K], any floating dtype.
      labels: class indices [...], integers. A label outside [0, K) gives NaN.
      smoothing: label smoothing in [0, 1): probability mass spread evenly over all classes
        (Szegedy et al. 2016)::

            loss = -(1 - smoothing) log p[label] - smoothing mean(log p)

    Returns:
      Losses [...], float32 (float64 for float64).

    Raises:
      ValueError: if the shape of ``labels`` is not ``logits.shape[:-1]``, or ``smoothing`` is
        out of range.
      TypeError: if ``labels`` are not integers.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
      >>> print(fnet.losses.cross_entropy(logits, jnp.array([0, 2])).round(3))
      [0.693 0.223]
    """
    checks.numbers("cross_entropy", "in [0, 1)", smoothing=smoothing)
    _check_labels("cross_entropy", logits, labels)
    logits = upcast(logits)
    labels = as_int32(labels)
    losses: Array = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    losses = jnp.where(labels < 0, jnp.nan, losses)  # A negative index counts from the end.
    if not smoothing:
        return losses
    uniform = jax.nn.logsumexp(logits, -1) - logits.mean(-1)
    return (1 - smoothing) * losses + smoothing * uniform


def accuracy(logits: Float[Array, "... k"], labels: Int[Array, "..."]) -> Float[Array, "..."]:
    """Top-1 accuracy per example: 1.0 if the label has the largest logit, else 0.0.

    Args:
      logits: [..., K], floating.
      labels: class indices [...], integers.

    Returns:
      float32 [...].

    Raises:
      ValueError: if the shape of ``labels`` is not ``logits.shape[:-1]``.
      TypeError: if ``labels`` are not integers.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> logits = jnp.array([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
      >>> fnet.losses.accuracy(logits, jnp.array([0, 1])).tolist()
      [1.0, 0.0]
    """
    _check_labels("accuracy", logits, labels)
    return (logits.argmax(-1) == labels).astype(jnp.float32)


def _check_labels(where: str, logits: Array, labels: Array) -> None:
    checks.shapes(where, f"logits {logits.shape}", labels=(labels, logits.shape[:-1]))
    checks.integers(where, labels=labels)  # if they are whole numbers, cast them
