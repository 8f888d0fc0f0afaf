"""Prediction in Python: the network of a run, applied to any images."""

import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from PIL import Image

from train.config import Config
from train.data import pad_batch
from train.data.preprocessing import PreprocessedImage
from train.errors import UserError
from train.run.class_names import read_classes
from train.run.frozen import load_network
from train.run.model_files import check_model
from train.run.run_folder import RunFolder
from train.tasks import kind_of

_BATCH_SIZE = 16
"""Largest number of images, or crops, in a batch."""


class Predictor:
    """Predict the labels of images, or of their pixels, as the command ``fnet predict``.

    Images are prepared as the run's test images are. The first call compiles the network. It is
    compiled again for another number of images, up to the number in a batch.

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
        folder = RunFolder.of(os.fspath(run))
        config = config_of_images(folder)
        self.classes = tuple(read_classes(folder, config))
        self.preprocessor = config.data.preprocessor
        shape, precision = self.preprocessor.shape, config.train.precision
        model = config.model.for_images(shape, self.classes, precision)
        params, state, self.step = load_network(folder, model, best=best)
        kind = kind_of(config)
        assert kind.outputs is not None  # because it predicts labels
        network = jax.jit(kind.outputs(config, model))
        self._apply = lambda image: network(params, state, image)
        self._is_segmentation = kind.predicts == "masks"
        crops = self.preprocessor.crops
        self._batch_size = max(min(_BATCH_SIZE, config.data.batch_size) // crops, 1)

    def __call__(self, images: Sequence[str | os.PathLike[str] | Image.Image]) -> list[np.ndarray]:
        """Predict images.

        Args:
          images: Images of Pillow, of any size and mode, or paths of image files.

        Returns:
          For each image of a segmentation run a mask uint8 [height, width] of labels, of the size
          of the image after its EXIF rotation. Of other runs, probabilities float32 [classes].

        Raises:
          UnreadableError: If an image cannot be used.
        """
        size = self.batch_size(len(images))
        predictions: list[np.ndarray] = []
        for start in range(0, len(images), size):
            batch = [self.preprocessor(image) for image in images[start : start + size]]
            predictions += self.predict_batch(batch, size)
        return predictions

    def batch_size(self, num_images: int) -> int:
        """Return the number of images in a batch when so many are predicted."""
        return max(min(self._batch_size, num_images), 1)

    def predict_batch(
        self, batch: Sequence[PreprocessedImage], batch_size: int
    ) -> Iterator[np.ndarray]:
        """Yield the prediction of each image, as `__call__` returns it.

        The batch is padded to ``batch_size``, so that the network is compiled once.
        """
        if not batch:
            return
        images = np.stack([prepared.image for prepared in batch])
        outputs = np.asarray(self._apply(pad_batch({"image": images}, batch_size)["image"]))
        for prepared, output in zip(batch, outputs, strict=False):
            yield predict_mask(output, prepared) if self._is_segmentation else output


def config_of_images(folder: RunFolder) -> Config:
    """Return the config of a run that predicts labels of images.

    Raises:
      UserError: if there is no run here, it predicts no labels, or its published model was moved.
    """
    config = check_model(folder, folder.read_config())
    if kind_of(config).predicts is None:
        raise UserError(
            f"{folder.path} is a run of {config.model.name}, which predicts no labels; "
            "try fnet sample"
        )
    return config


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
