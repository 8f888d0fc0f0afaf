"""Prediction in Python: the network of a run, applied to any images."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from PIL import Image

from fnet.cpu.convolutions import count_cpus, for_cpus
from train.data import pad_batch
from train.data.decode import UnreadableError
from train.data.preprocessing import PreprocessedImage
from train.errors import UserError
from train.run.open_run import OpenRun

_BATCH_SIZE = 16
"""Largest number of images, or crops, in a batch."""

_Content = bytes | bytearray | memoryview | IO[bytes]
ImageLike = str | os.PathLike[str] | _Content | Image.Image | np.ndarray | Array
"""Path of an image file, its content, the open file, an image of Pillow, or an array of pixels."""


class Predictor:
    """Predict the labels of images, or of their pixels, as the command ``fnet predict``.

    Images are prepared as the run's test images are. The first call compiles the network, once for
    any number of images.

    Args:
      run: Folder of a run.
      best: Use the best checkpoint instead of the newest.

    Attributes:
      classes: Names of the classes by label.
      step: Step of the checkpoint.

    Raises:
      UserError: If there is no run, it does not label images, or it has no checkpoint.

    Example:
      >>> from PIL import Image
      >>> from train.predictor import Predictor
      >>> predictor = Predictor("runs/shapes")
      >>> predictor.classes[:2]
      ('ground', 'disk')
      >>> photo = Image.open("photos/0.jpg")
      >>> (mask,) = predictor([photo])
      >>> mask.dtype, mask.shape == (photo.height, photo.width)
      (dtype('uint8'), True)
    """

    classes: tuple[str, ...]
    step: int

    def __init__(self, run: str | os.PathLike[str], *, best: bool = False):
        opened = OpenRun.of(os.fspath(run))
        config, kind = opened.config, opened.kind
        if not kind.labels_images or kind.outputs is None:
            instead = "; try fnet sample" if kind.generates else ""
            raise UserError(
                f"{opened.folder.path} is a run of {config.model.name}, which predicts no labels "
                f"of images{instead}"
            )
        self.classes, _, scaling = opened.outputs
        self.preprocessor = config.data.preprocessor
        model, (params, state, self.step) = opened.network(best=best)
        self._network = jax.jit(_in_chunks(kind.outputs(config, model), count_cpus(params)))
        self._apply = lambda images, count: self._network(params, state, images, count)
        self._restore = scaling.restore if scaling else lambda outputs: outputs
        self._is_segmentation = kind.predicts == "masks"
        largest = min(_BATCH_SIZE, config.data.batch_size)
        self.batch_size = max(largest // self.preprocessor.crops, 1)

    def __call__(self, images: Iterable[ImageLike]) -> list[np.ndarray]:
        """Predict images.

        Args:
          images: Each is the path of an image file, the content of one, an open one, an image of
            Pillow of any size and mode, or an array uint8 [H, W, 3], RGBA [H, W, 4] or gray
            [H, W], of any library that NumPy converts.

        Returns:
          For each image of a segmentation run a mask uint8 [height, width] of labels, of the size
          of the image after its EXIF rotation. Of other runs, probabilities float32 [classes], or
          the numbers of a table.

        Raises:
          UnreadableError: If an image cannot be used; with its path, or its place in the list.
          TypeError: If one image is given in place of a list, or an element is no image.
        """
        source = _source(images)
        if source is not None and getattr(source, "ndim", 0) not in (1, 4):
            raise TypeError(
                "Predictor: expected a list of images, got one; write predictor([image])"
            )
        predictions: list[np.ndarray] = []
        numbered = enumerate(images if source is None else source)
        while rows := list(itertools.islice(numbered, self.batch_size)):
            predictions += self.predict_batch([self._prepare(image, i) for i, image in rows])
        return predictions

    def _prepare(self, image: ImageLike, index: int) -> PreprocessedImage:
        is_path = isinstance(image, str | os.PathLike)
        where = str(image) if is_path else f"image {index}"
        source = _source(image)
        if source is None:
            raise TypeError(
                f"Predictor: {where}: expected a path, the content of a file, an image of Pillow "
                f"or an array, got {type(image).__name__}"
            )
        try:
            return self.preprocessor(source)
        except UnreadableError as error:
            raise UnreadableError(f"{where}: {error}") from None

    def predict_files(
        self, paths: Sequence[str]
    ) -> Iterator[tuple[str, np.ndarray | UnreadableError]]:
        """Yield each path of an image file with its prediction, or with why it has none."""

        def read(path: str) -> PreprocessedImage | UnreadableError:
            try:
                return self.preprocessor(path)
            except UnreadableError as error:
                return error

        for start in range(0, len(paths), self.batch_size):
            batch = [(path, read(path)) for path in paths[start : start + self.batch_size]]
            readable = [item for _, item in batch if isinstance(item, PreprocessedImage)]
            outputs = self.predict_batch(readable)
            for path, item in batch:
                yield path, next(outputs) if isinstance(item, PreprocessedImage) else item

    def predict_batch(self, batch: Sequence[PreprocessedImage]) -> Iterator[np.ndarray]:
        """Yield the prediction of each of up to ``batch_size`` images, as `__call__` returns it."""
        if not batch:
            return
        images = np.stack([prepared.image for prepared in batch])
        images = pad_batch({"image": images}, self.batch_size)["image"]
        outputs = np.asarray(self._apply(images, len(batch)))
        for prepared, output in zip(batch, outputs, strict=False):
            if self._is_segmentation:
                yield predict_mask(output, prepared)
            else:
                yield self._restore(output)


def _source(image: Any) -> Any:
    """Return what can be decoded, or an array of images; None if it is neither."""
    if isinstance(image, str | os.PathLike | bytes | Image.Image):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if hasattr(image, "__array__"):
        return np.asarray(image)
    content = image.read() if hasattr(image, "read") else None
    return content if isinstance(content, bytes) else None  # a text is no content of an image


def _in_chunks(
    outputs: Callable[[Any, Any, Array], Array], cpus: int
) -> Callable[[Any, Any, Array, Array], Array]:
    """Return ``(params, state, images, count) -> outputs`` of the first ``count`` images.

    On a CPU the images run one after the other, which takes as long as all at once. So padding
    costs nothing there. Other devices run the whole batch.
    """

    def apply(params: Any, state: Any, images: Array, count: Array) -> Array:
        if not cpus:
            return outputs(params, state, images)
        shape = jax.eval_shape(outputs, params, state, images)

        def add_image(i: Array, rows: Array) -> Array:
            row = outputs(params, state, jax.lax.dynamic_slice_in_dim(images, i, 1))
            return jax.lax.dynamic_update_slice_in_dim(rows, row, i, 0)

        return jax.lax.fori_loop(0, count, add_image, jnp.zeros(shape.shape, shape.dtype))

    return for_cpus(apply, cpus)


def predict_mask(logits: np.ndarray, prepared: PreprocessedImage) -> np.ndarray:
    """Return labels uint8 [H, W] from logits [h, w, K], resized to the image file's size."""
    height, width, classes = logits.shape
    side = prepared.image.shape[0]
    part = tuple(
        length * n / side for length, n in zip(prepared.part, (width, height), strict=True)
    )
    best = np.full(prepared.size[::-1], -np.inf, np.float32)
    labels = np.zeros(best.shape, np.uint8)
    for label in range(classes):
        plane = Image.fromarray(np.ascontiguousarray(logits[..., label], np.float32))
        z = np.asarray(plane.resize(prepared.size, Image.Resampling.BILINEAR, box=(0, 0, *part)))
        labels[z > best] = label
        np.maximum(best, z, out=best)
    return labels
