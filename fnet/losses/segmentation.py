"""Segmentation loss and predictions that never materialize the upsampled logits."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from fnet import checks
from fnet.chunks import Start, fori_chunks
from fnet.mesh import equally_varying
from fnet.precision import upcast

_CHUNK_LOGITS = 2**20
"""Default number of upsampled logits per chunk. On CPU, with 21 and 150 classes, 2^18 to 2^22 are
equally fast."""


class PixelLosses(NamedTuple):
    """Loss and accuracy per image; both [N], float32 (float64 for float64).

    Attributes:
      losses: mean cross-entropy of the labeled pixels, in nats; 0 if there are none.
      accuracy: share of the labeled pixels that are classified correctly; 0 if there are none.
    """

    losses: Array
    accuracy: Array


def pixel_cross_entropy(
    logits: Float[Array, "n h w k"],
    labels: Int[Array, "n H W"],
    *,
    smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    rows: int | None = None,
) -> PixelLosses:
    """Mean cross-entropy over the pixels of each image, from logits of a lower resolution.

    The logits are upsampled bilinearly to the size of the labels, as by ``jax.image.resize`` with
    ``antialias=False``. For each pixel, with the upsampled logits z, label y and smoothing a::

        loss = logsumexp(z) - (1 - a) z[y] - a mean(z)

    The upsampled logits may be the largest array of a segmentation network: 22 MB per image for 21
    classes at 512 x 512, and more than twice that with gradients. This function upsamples a few
    rows at a time. If a gradient is needed, the forward pass computes it too, at the resolution of
    the input logits. That gradient is the only residual, and nothing is rematerialized.

    Value and gradient of 8 images with 21 classes, from a 64 x 64 grid at 512 x 512 in float32,
    have 15.8 MB of temporaries on a CPU. ``jax.image.resize`` and optax have 445 MB, or 377 MB with
    ``jax.checkpoint``, and take two to five times as long. Compiled for an H100 with 32 classes, it
    is 13.1 MB in place of 554 MB.

    Args:
      logits: [N, h, w, k], any floating dtype. Sums are in float32 (float64 for float64).
      labels: [N, H, W], any integer dtype. Labels outside [0, k), such as 255, are ignored.
      smoothing: label smoothing in [0, 1): probability mass spread evenly over all classes
        (Szegedy et al. 2016).
      class_weights: [k] positive numbers. Each pixel has the weight of its label, and the loss of
        an image is the weighted mean. None weighs all classes alike.
      rows: rows of pixels per chunk, >= 1. None: as many as have about 2^20 logits.

    Returns:
      Losses and accuracies per image [N]. Only the losses have a gradient.

    Raises:
      TypeError: if logits are not floating or labels not integers. From JAX in forward mode
        (``jax.jvp``), which is supported for the gradient but not for the loss itself.
      ValueError: for shapes that do not match, or a number out of range.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> logits = jnp.zeros((2, 8, 8, 4))
      >>> # the first row is ignored
      >>> labels = jnp.zeros((2, 64, 64), jnp.uint8).at[:, 0].set(255)
      >>> losses, accuracy = fnet.losses.pixel_cross_entropy(logits, labels)
      >>> print(losses.round(3))  # log(4)
      [1.386 1.386]
    """
    where = "pixel_cross_entropy"
    _check(where, logits, labels.shape, labels, rows)
    checks.numbers(where, "in [0, 1)", smoothing=smoothing)
    rows = _rows_per_chunk(logits.shape[-1], labels.shape, rows)
    weights = None if class_weights is None else tuple(map(float, class_weights))
    if weights is not None and len(weights) != logits.shape[-1]:
        raise ValueError(
            f"{where}: class_weights must have one number per class, {logits.shape[-1]}, got "
            f"{len(weights)}"
        )
    if weights is not None and not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"{where}: class_weights must be positive and finite, got {weights}")
    spec = _Spec(smoothing, rows, logits.dtype, weights)
    return PixelLosses(*_compiled_losses(spec, *equally_varying((logits, labels))))


class PixelPredictions(NamedTuple):
    """Predicted classes of pixels.

    Attributes:
      labels: [N, H, W], the most likely class of each pixel; uint8 for at most 255 classes, else
        int32.
      losses: [N], mean cross-entropy of the labeled pixels, in nats; 0 if there are none. None if
        no labels were given.
    """

    labels: Array
    losses: Array | None


def pixel_predictions(
    views: Sequence[Float[Array, "n _ _ k"]],
    size: tuple[int, int],
    labels: Int[Array, "n H W"] | None = None,
    *,
    rows: int | None = None,
) -> PixelPredictions:
    """Predict the class of each pixel, averaging probabilities over views.

    Pass one array of logits, or several for test-time augmentation, such as logits of the same
    images at several scales. Each is upsampled a few rows at a time, as in `pixel_cross_entropy`.

    Args:
      views: logits [N, h, w, k], floating, one array per view. h and w may differ between views.
      size: height and width of the prediction.
      labels: correct labels for the loss, as for `pixel_cross_entropy`, or None.
      rows: rows of pixels per chunk, as for `pixel_cross_entropy`.

    Returns:
      The class of each pixel, and the loss of each image if ``labels`` are given.

    Raises:
      TypeError, ValueError: as `pixel_cross_entropy`, and if there are no views.

    Example:
      >>> import fnet, jax.numpy as jnp
      >>> logits = jnp.zeros((1, 4, 4, 3)).at[..., 2].set(1.0)
      >>> prediction = fnet.losses.pixel_predictions([logits], (16, 16))
      >>> prediction.labels.shape, int(prediction.labels[0, 0, 0])
      ((1, 16, 16), 2)
    """
    where = "pixel_predictions"
    if not views:
        raise ValueError(f"{where}: views must have at least one array of logits, got none")
    n, classes = views[0].shape[0], views[0].shape[-1]
    for view in views:
        _check(where, view, (n, *size), labels, rows)
        if view.shape[-1] != classes:
            raise ValueError(
                f"{where}: all views must have the same number of classes, got {classes} and "
                f"{view.shape[-1]}"
            )
    views, labels = equally_varying((tuple(views), labels))
    predictions: PixelPredictions = _predictions(
        tuple(size), _rows_per_chunk(classes, (n, *size), rows), views, labels
    )
    return predictions


class _Spec(NamedTuple):
    smoothing: float
    rows: int
    dtype: DTypeLike
    class_weights: tuple[float, ...] | None


class _Upsampling(NamedTuple):
    """Logits [h, N, k, w] and the bilinear weights that upsample them, as two matrix products.

    Each product is a plain matrix product, and the reduction over classes is not over the last
    axis, where it would not vectorize. Weights [H, h] and [W, w] are None for sides that stay.
    """

    logits: Array
    row_weights: Array | None
    column_weights: Array | None

    @classmethod
    def create(cls, logits: Array, size: Sequence[int]) -> "_Upsampling":
        logits = upcast(logits)
        row_weights, column_weights = (
            None if n_in == n_out else bilinear_weights(n_in, n_out, logits.dtype)
            for n_in, n_out in zip(logits.shape[1:3], size, strict=True)
        )
        return cls(logits.transpose(1, 0, 3, 2), row_weights, column_weights)

    def rows(self, start: Start, count: int) -> Array:
        """Upsampled logits of some rows, [count, N, k, W]."""
        if self.row_weights is None:
            z = jax.lax.dynamic_slice_in_dim(self.logits, start, count)
        else:
            weights = jax.lax.dynamic_slice_in_dim(self.row_weights, start, count)
            z = _dot(weights, self.logits, 1, 0)
        return z if self.column_weights is None else _dot(z, self.column_weights, 3, 1)

    def add_transposed(self, total: Array, cotangent: Array, start: Start, count: int) -> Array:
        """Add the transpose of `rows`, applied to ``cotangent``, to ``total`` [h, N, k, w]."""
        if self.column_weights is not None:
            cotangent = _dot(cotangent, self.column_weights, 3, 0)
        if self.row_weights is None:
            return jax.lax.dynamic_update_slice_in_dim(total, cotangent, start, 0)
        weights = jax.lax.dynamic_slice_in_dim(self.row_weights, start, count)
        return total + _dot(weights, cotangent, 0, 0)


def _losses_and_grads(
    spec: _Spec, logits: Array, labels: Array, *, with_grads: bool
) -> tuple[PixelLosses, Any]:
    """Losses, accuracies and optionally the gradients of the losses by logits [N, h, w, k]."""
    upsampling = _Upsampling.create(logits, labels.shape[1:])
    classes, a = logits.shape[-1], spec.smoothing

    def body(start: Start, count: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        losses, correct, grads = carry
        row_labels, labeled = _slice_labels(labels, start, count, classes)
        z = upsampling.rows(start, count)
        pixel_losses, probabilities, one_hot = _cross_entropy(z, row_labels, a)
        weight = _pixel_weights(spec, row_labels, labeled, z.dtype)
        losses += (weight * jnp.where(labeled, pixel_losses, 0)).sum((0, 2))
        is_correct = labeled & (z.argmax(2) == row_labels)
        correct += jnp.where(is_correct, jnp.ones_like(pixel_losses), 0).sum((0, 2))
        if grads is not None:
            dz = weight[:, :, None] * (probabilities - (1 - a) * one_hot - a / classes)
            dz = jnp.where(labeled[:, :, None], dz, 0)
            grads = upsampling.add_transposed(grads, dz, start, count)
        return losses, correct, grads

    zeros = jnp.zeros_like(upsampling.logits)
    zero = zeros[0, :, 0, 0]
    carry = (zero, zero, zeros if with_grads else None)
    losses, correct, grads = fori_chunks(body, carry, labels.shape[1], spec.rows)
    counts = _count_labeled(labels, classes)
    total = counts if spec.class_weights is None else _total_weight(spec, labels, counts)
    if grads is not None:
        grads = grads.transpose(1, 0, 3, 2) / total[:, None, None, None]
    return PixelLosses(losses / total, correct / counts), grads


def _pixel_weights(spec: _Spec, labels: Array, labeled: Array, dtype: DTypeLike) -> Array:
    if spec.class_weights is None:
        return labeled.astype(dtype)
    weights = jnp.asarray(spec.class_weights, dtype)
    return jnp.where(labeled, weights[labels], 0)


def _total_weight(spec: _Spec, labels: Array, counts: Array) -> Array:
    """Return the sum of the weights of the labeled pixels per image; 1 if there are none."""
    assert spec.class_weights is not None
    labeled = _is_labeled(labels, len(spec.class_weights))
    weight = _pixel_weights(spec, labels.astype(jnp.int32), labeled, counts.dtype)
    return jnp.where(labeled.any((1, 2)), weight.sum((1, 2)), 1)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _predictions(
    size: tuple[int, int], rows: int, views: tuple[Array, ...], labels: Array | None
) -> PixelPredictions:
    n, classes = views[0].shape[0], views[0].shape[-1]
    upsamplings = [_Upsampling.create(view, size) for view in views]

    def body(start: Start, count: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        predicted, losses = carry
        z_by_view = [upsampling.rows(start, count) for upsampling in upsamplings]
        scores = z_by_view[0]
        if len(views) > 1:
            scores = functools.reduce(jnp.add, [jax.nn.softmax(z, 2) for z in z_by_view])
        row_classes = scores.argmax(2).astype(predicted.dtype).swapaxes(0, 1)
        predicted = jax.lax.dynamic_update_slice_in_dim(predicted, row_classes, start, 1)
        if labels is not None:
            row_labels, labeled = _slice_labels(labels, start, count, classes)
            losses_by_view = jnp.stack([_cross_entropy(z, row_labels)[0] for z in z_by_view])
            loss_of_mean = math.log(len(views)) - jax.nn.logsumexp(-losses_by_view, 0)
            losses += jnp.where(labeled, loss_of_mean, 0).sum((0, 2))
        return predicted, losses

    # Derived from the logits, so that it varies over the same mesh axes.
    zero = jnp.zeros_like(upsamplings[0].logits[0, :, 0, 0])
    label = zero.astype(jnp.uint8 if classes <= 255 else jnp.int32)
    zeros = jnp.broadcast_to(label[:, None, None], (n, *size))
    predicted, losses = fori_chunks(body, (zeros, zero), size[0], rows)
    if labels is None:
        return PixelPredictions(predicted, None)
    return PixelPredictions(predicted, losses / _count_labeled(labels, classes))


def _cross_entropy(z: Array, labels: Array, a: float = 0.0) -> tuple[Array, Array, Array]:
    """Losses, softmax and one-hot labels, from logits [r, N, k, W] and labels [r, N, W]."""
    top = z.max(2, keepdims=True)
    exps = jnp.exp(z - top)
    total = exps.sum(2, keepdims=True)
    one_hot = labels[:, :, None] == jnp.arange(z.shape[2])[None, None, :, None]
    losses = (jnp.log(total) + top)[:, :, 0] - (1 - a) * jnp.where(one_hot, z, 0).sum(2)
    return losses - a * z.mean(2) if a else losses, exps / total, one_hot


def _slice_labels(labels: Array, start: Start, count: int, classes: int) -> tuple[Array, Array]:
    """Labels of some rows, int32 [count, N, W], and whether they are valid."""
    label = jax.lax.dynamic_slice_in_dim(labels, start, count, 1).swapaxes(0, 1)
    return label.astype(jnp.int32), _is_labeled(label, classes)


def _is_labeled(labels: Array, classes: int) -> Array:
    """Whether labels are valid. Tested in their own dtype, because 2^32 is 0 as int32."""
    # A number beyond the dtype would wrap around: all uint8 labels are below 256.
    last = min(classes - 1, int(jnp.iinfo(labels.dtype).max))
    return (labels >= 0) & (labels <= last)


def _count_labeled(labels: Array, classes: int) -> Array:
    return jnp.maximum(_is_labeled(labels, classes).sum((1, 2)), 1).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(spec: _Spec, logits: Array, labels: Array) -> PixelLosses:
    return _losses_and_grads(spec, logits, labels, with_grads=False)[0]


def _losses_fwd(spec: _Spec, logits: Array, labels: Array) -> tuple[PixelLosses, Array]:
    losses, grads = _losses_and_grads(spec, logits, labels, with_grads=True)
    # Divided by the number of pixels, gradients may underflow in float16 before the loss scale
    # of the cotangent multiplies them. bfloat16 has the range of float32.
    return losses, grads.astype(jnp.promote_types(logits.dtype, jnp.bfloat16))


def _losses_bwd(spec: _Spec, grads: Array, cotangents: PixelLosses) -> tuple[Array, None]:
    scale = jnp.expand_dims(cotangents.losses, (1, 2, 3))
    return (grads * scale).astype(spec.dtype), None


_losses.defvjp(_losses_fwd, _losses_bwd)

# Outside of jax.jit, a loop would be recompiled at each call.
_compiled_losses = jax.jit(_losses, static_argnums=0, inline=True)


def bilinear_weights(n_in: int, n_out: int, dtype: Any) -> Array:
    """Interpolation weights [n_out, n_in], with samples at pixel centers and edge padding."""
    position = (jnp.arange(n_out, dtype=dtype) + 0.5) * (n_in / n_out) - 0.5
    position = jnp.clip(position, 0, n_in - 1)[:, None]
    return jax.nn.relu(1 - jnp.abs(position - jnp.arange(n_in, dtype=dtype)[None]))


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Contract one axis of each; the result has the other axes of a, then the other axes of b."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=jax.lax.Precision.HIGHEST)


def _rows_per_chunk(classes: int, shape: Sequence[int], rows: int | None) -> int:
    n, height, width = shape[:3]
    return min(rows or max(_CHUNK_LOGITS // max(n * width * classes, 1), 1), height)


def _check(
    where: str, logits: Array, shape: Sequence[int], labels: Array | None, rows: int | None
) -> None:
    checks.floating(where, logits=logits)
    checks.integers(where, labels=labels)
    checks.sizes(where, rows=rows)
    if logits.ndim != 4 or 0 in logits.shape:
        raise ValueError(f"{where}: logits must be [N, h, w, k] and not empty, got {logits.shape}")
    pixels = tuple(shape) if labels is None else labels.shape
    if len(pixels) != 3 or pixels != (logits.shape[0], *shape[1:]) or 0 in pixels:
        raise ValueError(
            f"{where}: pixels must be {(logits.shape[0], *shape[1:])} for logits "
            f"{logits.shape}, got {pixels}"
        )
