"""Classifier-free guidance: one model with and without a label, and further towards the label.

Source: Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Int, PRNGKeyArray


def guided(
    denoise: Callable[[Array, Array, Array], Array],
    labels: Int[Array, " b"],
    null_label: int,
    scale: ArrayLike,
) -> Callable[[Array, Array], Array]:
    """A denoiser for samplers, from one that takes labels.

    Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022, equation 6 with
    ``scale = 1 + w``, which is the same for every target::

        prediction = with_label + (scale - 1) (with_label - without)

    Both come from one call of the model, on a batch of twice the size. With the number 1 there
    is nothing to guide: the model is called once on the batch itself.

    Args:
      denoise: ``denoise(x [N, ...], t [N], labels [N]) -> prediction [N, ...]``.
      labels: what each example of a sampler's batch should be [B], integers.
      null_label: the label that means none, as in `drop_labels`.
      scale: 1: as the label says; larger: more typical and less diverse; 0: without a label.
        A number, or one per example [B].

    Returns:
      ``denoise(x [B, ...], t [B]) -> prediction [B, ...]``.

    Raises:
      TypeError: if ``labels`` are not integers.
      ValueError: if ``labels`` are not a vector, their dtype lacks ``null_label``, ``scale``
        is neither a number nor one per label, or, when called, if ``x`` has another batch.
    """
    labels = _checked("guided", labels, null_label)
    if jnp.ndim(scale) and jnp.shape(scale) != labels.shape:
        raise ValueError(
            f"guided: scale must be a number or one per label, {labels.shape}, "
            f"got shape {jnp.shape(scale)}"
        )

    def guided_denoise(x: Array, t: Array) -> Array:
        if x.shape[:1] != labels.shape or t.shape != labels.shape:
            raise ValueError(
                f"guided: there are {labels.shape[0]} labels, but x has shape {x.shape} and "
                f"t {t.shape}; give one label per example"
            )
        if isinstance(scale, int | float) and scale == 1:
            return denoise(x, t, labels)
        both = jnp.concatenate([labels, jnp.full_like(labels, null_label)])
        out = denoise(jnp.concatenate([x, x]), jnp.concatenate([t, t]), both)
        with_label, without = jnp.split(out, 2)
        more = (jnp.asarray(scale) - 1).astype(out.dtype)  # rounded before, 1.003 would be 1
        if more.ndim:
            more = more.reshape(more.shape + (1,) * (out.ndim - 1))
        return with_label + more * (with_label - without)

    return guided_denoise


def drop_labels(
    key: PRNGKeyArray, labels: Int[Array, " b"], null_label: int, rate: float
) -> Int[Array, " b"]:
    """Labels for training, each replaced by ``null_label`` with probability ``rate``.

    Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022.

    Args:
      key: what is drawn from.
      labels: class indices [B], integers.
      null_label: the label that means none: often the number of classes.
      rate: in [0, 1]; the paper finds 0.1 and 0.2 equally good.

    Returns:
      Labels [B], in the dtype of ``labels``.

    Raises:
      TypeError: if ``labels`` are not integers.
      ValueError: if they are not a vector, their dtype lacks ``null_label``, or ``rate`` is
        not a probability.
    """
    labels = _checked("drop_labels", labels, null_label)
    if not 0 <= rate <= 1:
        raise ValueError(f"drop_labels: rate must be in [0, 1], got {rate}")
    without = jnp.full_like(labels, null_label)
    return jnp.where(jax.random.bernoulli(key, rate, labels.shape), without, labels)


def _checked(name: str, labels: Array, null_label: int) -> Array:
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name}: labels must be integers, got {labels.dtype}")
    if labels.ndim != 1:
        raise ValueError(f"{name}: labels must be a vector, got shape {labels.shape}")
    least, most = int(jnp.iinfo(labels.dtype).min), int(jnp.iinfo(labels.dtype).max)
    if not least <= null_label <= most:  # it would wrap around to a label that means something
        raise ValueError(
            f"{name}: null_label must be in [{least}, {most}] for labels of {labels.dtype}, "
            f"got {null_label}; give labels of a wider dtype"
        )
    return labels
