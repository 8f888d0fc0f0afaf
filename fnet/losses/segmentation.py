"""Cross-entropy of every pixel, interpolation included: logits of all pixels never exist whole."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from fnet.losses.chunks import Start, over_chunks
from fnet.mesh import equally_varying
from fnet.precision import widened

_NUMBERS = 2**20
"""Logits of all rows that are interpolated at once, about: of 2^18 to 2^22 none was faster on CPU,
for 21 and 150 classes, by more than measurements differ."""


class PixelLosses(NamedTuple):
    """Of each image; both [N], float32 (float64 for float64).

    Attributes:
      losses: mean cross-entropy of the counted pixels, in nats; 0 where there is none.
      accuracy: share of the counted pixels whose largest logit is the label's; likewise.
    """

    losses: Array
    accuracy: Array


def pixel_cross_entropy(
    logits: Float[Array, "n h w k"],
    labels: Int[Array, "n H W"],
    *,
    smoothing: float = 0.0,
    rows: int | None = None,
) -> PixelLosses:
    """Mean cross-entropy over each image's pixels; logits at their size never exist whole.

    For each pixel, with z the logits interpolated linearly to the labels' size (as
    ``jax.image.resize``, bilinear and without antialiasing), k classes, y the label,
    a the smoothing::

        loss = logsumexp(z) - (1 - a) z[y] - a mean(z)

    Interpolated logits may be the largest arrays of a segmentation network: for 21 classes
    at 512 x 512, 22 MB an image, which a gradient has twice and more. Here a few rows are
    interpolated, and their losses taken, at a time; where a gradient is asked for, the forward
    pass makes that of the rows at once, already in the size of the features. Nothing else is
    kept, and nothing is computed twice. Value and gradient by logits of a 64 x 64 grid at
    512 x 512, float32, against ``jax.image.resize`` and optax, plain and in ``jax.checkpoint``:

    ======  =======  ====================  ==============  ===========  =======================
    images  classes  temporaries, CPU      checkpointed    time, CPU    H100 (compiled for)
    ======  =======  ====================  ==============  ===========  =======================
    8       21       15.8 of 445 MB: 0.04  of 377 MB       0.2 - 0.5    9.2 MB (*)
    8       32                                                          13.1 of 554 MB: 0.02
    2       150      16.3 of 650 MB: 0.03  of 633 MB       0.35 - 0.65  12.6 MB (*)
    ======  =======  ====================  ==============  ===========  =======================

    (*) What it is compared with does not compile ahead of time for that GPU: products that
    have the classes, 21 or 150, in their last axis. Here they are not in it.

    Args:
      logits: [N, h, w, k], any floating dtype; sums are in float32 (float64 for float64).
      labels: [N, H, W], any integers; those outside [0, k), such as 255, are not counted.
      smoothing: probability mass spread evenly over all classes (Szegedy et al. 2016), in
        [0, 1).
      rows: of pixels at a time, >= 1; None: as many as have about 2^20 logits.

    Returns:
      Losses and accuracies; only the losses have a gradient.

    Raises:
      TypeError: if logits are not floating, or labels not integers; from JAX in forward
        mode, which a gradient of this allows and this itself does not.
      ValueError: for shapes that do not fit, or a number out of its range.
    """
    where = "pixel_cross_entropy"
    _check(where, logits, labels.shape, labels, rows)
    if not 0 <= smoothing < 1:
        raise ValueError(f"{where}: smoothing must be in [0, 1), got {smoothing}")
    spec = _Spec(smoothing, _rows(logits.shape[-1], labels.shape, rows), logits.dtype)
    return PixelLosses(*_compiled_losses(spec, *equally_varying((logits, labels))))


class PixelPredictions(NamedTuple):
    """What is seen in images.

    Attributes:
      labels: [N, H, W], the likeliest class of each pixel; uint8 where there are at most 255
        classes, else int32.
      losses: [N], mean cross-entropy of the counted pixels, in nats; 0 where there is none.
        None where nobody said what is right.
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
    """The likeliest class of every pixel, by the mean of what several views give.

    Each view's logits are interpolated as in `pixel_cross_entropy`, a few rows at a time;
    probabilities are averaged over views.

    Args:
      views: logits [N, h, w, k] each, floating, of any h and w: of the same images at several
        sizes, say.
      size: H and W of what is predicted.
      labels: what is right, as for `pixel_cross_entropy`; or None.
      rows: likewise.

    Returns:
      Each pixel's class, and each image's loss where ``labels`` are given.

    Raises:
      TypeError, ValueError: as `pixel_cross_entropy`; for no view.
    """
    where = "pixel_predictions"
    if not views:
        raise ValueError(f"{where}: views must be at least one array of logits, got none")
    n, classes = views[0].shape[0], views[0].shape[-1]
    for view in views:
        _check(where, view, (n, *size), labels, rows)
        if view.shape[-1] != classes:
            raise ValueError(
                f"{where}: views must have as many classes each, got {classes} and {view.shape[-1]}"
            )
    views, labels = equally_varying((tuple(views), labels))
    found: PixelPredictions = _compiled_predictions(
        tuple(size), _rows(classes, (n, *size), rows), views, labels
    )
    return found


class _Spec(NamedTuple):
    """What is static."""

    smoothing: float
    rows: int
    dtype: DTypeLike


class _Interpolation(NamedTuple):
    """Logits [h, N, k, w] and, for each pixel of a column or row, the shares of theirs.

    In this layout every product is one of matrices as they lie, and classes, whose largest and
    sum are wanted, are not in the last axis, along which a processor computes many at once.

    Attributes:
      logits: float32 or wider.
      down: [H, h]; None where H is h.
      across: [W, w]; likewise.
    """

    logits: Array
    down: Array | None
    across: Array | None

    @classmethod
    def of(cls, logits: Array, size: Sequence[int]) -> "_Interpolation":
        """Of logits [N, h, w, k], to be interpolated to H and W."""
        logits = widened(logits)
        pairs = zip(logits.shape[1:3], size, strict=True)
        down, across = (None if a == b else _shares(a, b, logits.dtype) for a, b in pairs)
        return cls(logits.transpose(1, 0, 3, 2), down, across)

    def rows(self, start: Start, count: int) -> Array:
        """The pixels' logits, [count, N, k, W]."""
        if self.down is None:
            z = jax.lax.dynamic_slice_in_dim(self.logits, start, count)
        else:
            z = _dot(jax.lax.dynamic_slice_in_dim(self.down, start, count), self.logits, 1, 0)
        return z if self.across is None else _dot(z, self.across, 3, 1)

    def add_transposed(self, total: Array, cotangent: Array, start: Start, count: int) -> Array:
        """``total`` [h, N, k, w] and what the cotangent of these rows is of the logits."""
        if self.across is not None:
            cotangent = _dot(cotangent, self.across, 3, 0)
        if self.down is None:
            return jax.lax.dynamic_update_slice_in_dim(total, cotangent, start, 0)
        down = jax.lax.dynamic_slice_in_dim(self.down, start, count)
        return total + _dot(down, cotangent, 0, 0)


def _sums(spec: _Spec, logits: Array, labels: Array, *, gradient: bool) -> tuple[PixelLosses, Any]:
    """Losses, accuracies and, if asked for, the losses' gradients by the logits [N, h, w, k]."""
    interpolation = _Interpolation.of(logits, labels.shape[1:])
    classes, a = logits.shape[-1], spec.smoothing

    def body(start: Start, count: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        losses, right, gradients = carry
        label, counted = _rows_of(labels, start, count, classes)
        z = interpolation.rows(start, count)
        each, probabilities, hot = _cross_entropy(z, label, a)
        losses += jnp.where(counted, each, 0).sum((0, 2))
        found = counted & (z.argmax(2) == label)
        right += jnp.where(found, jnp.ones_like(each), 0).sum((0, 2))
        if gradients is not None:
            dz = jnp.where(counted[:, :, None], probabilities - (1 - a) * hot - a / classes, 0)
            gradients = interpolation.add_transposed(gradients, dz, start, count)
        return losses, right, gradients

    zeros = jnp.zeros_like(interpolation.logits)
    zero = zeros[0, :, 0, 0]
    carry = (zero, zero, zeros if gradient else None)
    losses, right, gradients = over_chunks(body, carry, labels.shape[1], spec.rows)
    counts = _counts(labels, classes)
    if gradients is not None:
        gradients = gradients.transpose(1, 0, 3, 2) / counts[:, None, None, None]
    return PixelLosses(losses / counts, right / counts), gradients


def _predictions(
    size: tuple[int, int], step: int, views: tuple[Array, ...], labels: Array | None
) -> PixelPredictions:
    n, classes = views[0].shape[0], views[0].shape[-1]
    interpolations = [_Interpolation.of(view, size) for view in views]

    def body(start: Start, count: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        found, losses = carry
        all_z = [i.rows(start, count) for i in interpolations]
        likely = all_z[0]
        if len(views) > 1:
            likely = functools.reduce(jnp.add, [jax.nn.softmax(z, 2) for z in all_z])
        part = likely.argmax(2).astype(found.dtype).swapaxes(0, 1)
        found = jax.lax.dynamic_update_slice_in_dim(found, part, start, 1)
        if labels is not None:
            label, counted = _rows_of(labels, start, count, classes)
            each = jnp.stack([_cross_entropy(z, label)[0] for z in all_z])
            of_mean = math.log(len(views)) - jax.nn.logsumexp(-each, 0)
            losses += jnp.where(counted, of_mean, 0).sum((0, 2))
        return found, losses

    zero = jnp.zeros_like(interpolations[0].logits[0, :, 0, 0])  # varies as the logits do
    whole = jnp.broadcast_to(zero.astype(_label_dtype(classes))[:, None, None], (n, *size))
    found, losses = over_chunks(body, (whole, zero), size[0], step)
    if labels is None:
        return PixelPredictions(found, None)
    return PixelPredictions(found, losses / _counts(labels, classes))


_compiled_predictions = jax.jit(_predictions, static_argnums=(0, 1), inline=True)


def _cross_entropy(z: Array, label: Array, a: float = 0.0) -> tuple[Array, Array, Array]:
    """Of logits [r, N, k, W] and labels [r, N, W]: losses, softmax, where the label is."""
    top = z.max(2, keepdims=True)
    exps = jnp.exp(z - top)
    total = exps.sum(2, keepdims=True)
    hot = label[:, :, None] == jnp.arange(z.shape[2])[None, None, :, None]
    losses = (jnp.log(total) + top)[:, :, 0] - (1 - a) * jnp.where(hot, z, 0).sum(2)
    return losses - a * z.mean(2) if a else losses, exps / total, hot


def _rows_of(labels: Array, start: Start, count: int, classes: int) -> tuple[Array, Array]:
    """Labels of some rows, int32 [count, N, W], and whether they are counted."""
    label = jax.lax.dynamic_slice_in_dim(labels, start, count, 1).swapaxes(0, 1)
    return label.astype(jnp.int32), _is_counted(label, classes)


def _is_counted(labels: Array, classes: int) -> Array:
    """Whether labels are of a class, in their own dtype: cast to int32, 2^32 would be 0."""
    # A number that the dtype does not have would wrap around: of bytes, all are below 256.
    last = min(classes - 1, int(jnp.iinfo(labels.dtype).max))
    return (labels >= 0) & (labels <= last)


def _counts(labels: Array, classes: int) -> Array:
    """How many pixels of each image are counted, at least 1."""
    return jnp.maximum(_is_counted(labels, classes).sum((1, 2)), 1).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(spec: _Spec, logits: Array, labels: Array) -> PixelLosses:
    return _sums(spec, logits, labels, gradient=False)[0]


def _losses_fwd(spec: _Spec, logits: Array, labels: Array) -> tuple[PixelLosses, Array]:
    losses, gradients = _sums(spec, logits, labels, gradient=True)
    # float16 would lose, divided by their number, what the cotangent's scale is to save.
    return losses, gradients.astype(jnp.promote_types(logits.dtype, jnp.bfloat16))


def _losses_bwd(spec: _Spec, gradients: Array, cotangents: PixelLosses) -> tuple[Array, None]:
    by = jnp.expand_dims(cotangents.losses, (1, 2, 3))
    return (gradients * by).astype(spec.dtype), None


_losses.defvjp(_losses_fwd, _losses_bwd)

# Called outside of jax.jit, a loop would be compiled anew each time.
_compiled_losses = jax.jit(_losses, static_argnums=0, inline=True)


def _shares(few: int, many: int, dtype: Any) -> Array:
    """[many, few]: of neighbours; samples are squares, and beyond the border it is as at it."""
    at = (jnp.arange(many, dtype=dtype) + 0.5) * (few / many) - 0.5
    at = jnp.clip(at, 0, few - 1)[:, None]
    return jax.nn.relu(1 - jnp.abs(at - jnp.arange(few, dtype=dtype)[None]))


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Products summed over one axis of each; the others of a, then those of b."""
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=jax.lax.Precision.HIGHEST)


def _rows(classes: int, shape: Sequence[int], rows: int | None) -> int:
    n, height, width = shape[:3]
    return min(rows or max(_NUMBERS // max(n * width * classes, 1), 1), height)


def _label_dtype(classes: int) -> Any:
    return jnp.uint8 if classes <= 255 else jnp.int32


def _check(
    where: str, logits: Array, shape: Sequence[int], labels: Array | None, rows: int | None
) -> None:
    """Refuses logits, the shape of pixels [N, H, W], and labels that do not fit each other."""
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"{where}: logits must be floating, got {logits.dtype}")
    if logits.ndim != 4 or 0 in logits.shape:
        raise ValueError(f"{where}: logits must be [N, h, w, k], not empty, got {logits.shape}")
    if labels is not None and not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{where}: labels must be integers, got {labels.dtype}")
    pixels = tuple(shape) if labels is None else labels.shape
    if len(pixels) != 3 or pixels != (logits.shape[0], *shape[1:]) or 0 in pixels:
        raise ValueError(
            f"{where}: pixels must be {(logits.shape[0], *shape[1:])} for logits "
            f"{logits.shape}, got {pixels}"
        )
    if rows is not None and rows < 1:
        raise ValueError(f"{where}: rows must be >= 1, or None for as many as fit, got {rows}")
