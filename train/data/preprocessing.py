"""Preprocessing of any image file for a run's network, as in evaluation."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from train.data.decode import MAX_PIXELS, File, View, ViewOf, decode


class PreprocessedImage(NamedTuple):
    """Input of a network.

    Attributes:
      image: as a row of the dataset's test batches: uint8 [H, W, 3] or [crops, H, W, 3], or
        float32 in [0, 1].
      size: width and height of the upright image in the file.
      part: width and height of the part of ``image`` that the file covers, from the upper left
        corner.
    """

    image: np.ndarray
    size: tuple[int, int]
    part: tuple[int, int]


class Preprocessor(NamedTuple):
    """``preprocessor(image) -> PreprocessedImage``, of a data source.

    Attributes:
      shape: height, width and channels of the network's input.
      view: part of the image that is read, and its size.
      finish: makes the network's input from this part, uint8 [H, W, 3].
      crops: number of crops per image.
      max_pixels: largest number of pixels of an image.
    """

    shape: tuple[int, ...]
    view: ViewOf
    finish: Callable[[np.ndarray], np.ndarray]
    crops: int = 1
    max_pixels: int = MAX_PIXELS

    def __call__(self, source: File | Image.Image | np.ndarray) -> PreprocessedImage:
        """Read an image file, an image of Pillow, or an array.

        Raises:
          UnreadableError: with the reason.
        """
        sizes: list[tuple[int, int]] = []

        def view(width: int, height: int) -> View:
            sizes.append((width, height))
            return self.view(width, height)

        image = decode(source, view, self.max_pixels)
        height, width, _ = image.shape
        return PreprocessedImage(self.finish(image), sizes[0], (width, height))


def whole_image(side: int, channels: int) -> Preprocessor:
    """Resize the whole image to a square, float32 in [0, 1]; gray for one channel."""

    def finish(image: np.ndarray) -> np.ndarray:
        if channels == 1:
            image = np.asarray(Image.fromarray(image).convert("L"))[..., None]
        return image.astype(np.float32) / 255

    def view(width: int, height: int) -> View:
        return View((0, 0, width, height), (side, side))

    return Preprocessor((side, side, channels), view, finish)
