"""Classifier-free guidance: extrapolate from the unconditional to the conditional prediction."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int, PRNGKeyArray

from fnet import checks


def guided(
    denoise: Callable[[Array, Array, Array], Array],
    labels: Int[Array, " b"],
    null_label: int,
    scale: ArrayLike,
) -> Callable[[Array, Array], Array]:
    """Turn a conditional denoiser into one for samplers, with classifier-free guidance.

    Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022, equation 6 with
    ``scale = 1 + w``. The equation is the same for every prediction target::

        prediction = conditional + (scale - 1) * (conditional - unconditional)

    Both predictions come from one call of the model on a batch of twice the size. If ``scale`` is
    the Python number 1, the model is called once on the batch itself.

    Args:
      denoise: ``denoise(x [N, ...], t [N], labels [N]) -> prediction [N, ...]``.
      labels: label of each example in the sampler's batch [B], integers.
      null_label: label of the unconditional prediction, as for `drop_labels`.
      scale: guidance scale. 1: conditional; above 1: more typical and less diverse samples;
        0: unconditional. One number, or one per example [B].

    Returns:
      ``denoise(x [B, ...], t [B]) -> prediction [B, ...]``.

    Raises:
      TypeError: if ``labels`` are not integers.
      ValueError: if ``labels`` are not a vector, if their dtype cannot hold ``null_label``, or if
        ``scale`` is neither a number nor one per label. When called, if ``x`` has another batch
        size.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> denoise = lambda x, t, labels: x + labels[:, None]
      >>> labels = jnp.array([1, 2])
      >>> guided = fnet.diffusion.guided(denoise, labels, null_label=0, scale=3.0)
      >>> guided(jnp.zeros((2, 1)), jnp.zeros(2, int)).tolist()
      [[3.0], [6.0]]
    """
    labels = _check_labels("guided", labels, null_label)
    if jnp.ndim(scale) and jnp.shape(scale) != labels.shape:
        raise ValueError(
            f"guided: scale must be a number or one per label, {labels.shape}, "
            f"got shape {jnp.shape(scale)}"
        )

    def guided_denoise(x: Array, t: Array) -> Array:
        if x.shape[:1] != labels.shape or t.shape != labels.shape:
            raise ValueError(
                f"guided: got {labels.shape[0]} labels, but x has shape {x.shape} and t has shape "
                f"{t.shape}; pass one label per example"
            )
        if isinstance(scale, int | float) and scale == 1:
            return denoise(x, t, labels)
        both = jnp.concatenate([labels, jnp.full_like(labels, null_label)])
        out = denoise(jnp.concatenate([x, x]), jnp.concatenate([t, t]), both)
        conditional, unconditional = jnp.split(out, 2)
        # Subtract before the cast, because 1.003 is 1 in bfloat16.
        extra = (jnp.asarray(scale) - 1).astype(out.dtype)
        if extra.ndim:
            extra = extra.reshape(extra.shape + (1,) * (out.ndim - 1))
        return conditional + extra * (conditional - unconditional)

    return guided_denoise


def drop_labels(
    key: PRNGKeyArray, labels: Int[Array, " b"], null_label: int, rate: float
) -> Int[Array, " b"]:
    """Replace labels by ``null_label`` with probability ``rate``, to train for guidance.

    Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022.

    Args:
      key: random key.
      labels: class indices [B], integers.
      null_label: label of the unconditional prediction, often the number of classes.
      rate: probability in [0, 1]. The paper finds 0.1 and 0.2 equally good.

    Returns:
      Labels [B], in the dtype of ``labels``.

    Raises:
      TypeError: if ``labels`` are not integers.
      ValueError: if they are not a vector, their dtype cannot hold ``null_label``, or ``rate`` is
        not a probability.

    Example:
      >>> import fnet, jax, jax.numpy as jnp
      >>> key, labels = jax.random.key(0), jnp.arange(5)
      >>> labels = fnet.diffusion.drop_labels(key, labels, 10, rate=0.5)
      >>> labels.shape, bool(((labels == 10) | (labels == jnp.arange(5))).all())
      ((5,), True)
    """
    labels = _check_labels("drop_labels", labels, null_label)
    checks.numbers("drop_labels", "in [0, 1]", rate=rate)
    null_labels = jnp.full_like(labels, null_label)
    return jnp.where(jax.random.bernoulli(key, rate, labels.shape), null_labels, labels)


def _check_labels(where: str, labels: Array, null_label: int) -> Array:
    labels = jnp.asarray(labels)
    checks.integers(where, labels=labels)
    if labels.ndim != 1:
        raise ValueError(f"{where}: labels must be a vector, got shape {labels.shape}")
    least, most = int(jnp.iinfo(labels.dtype).min), int(jnp.iinfo(labels.dtype).max)
    if not least <= null_label <= most:  # It would wrap around to a valid label.
        raise ValueError(
            f"{where}: null_label must be in [{least}, {most}] for labels of {labels.dtype}, "
            f"got {null_label}; pass labels of a wider dtype"
        )
    return labels
