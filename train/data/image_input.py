"""Any image file as a run's network takes it in evaluation."""

from typing import NamedTuple

import numpy as np
from PIL import Image

from train.config import (
    ArrayFile,
    Config,
    Digits,
    HuggingFace,
    ImageFolder,
    SegmentationFolder,
    Synthetic,
)
from train.data.augment import fitted, in_bytes, short_side, views
from train.data.decode import View, decode
from train.errors import UserError


class Prepared(NamedTuple):
    """An image as the network takes it.

    Attributes:
      image: as a row of the dataset's test batches: uint8 [H, W, 3] or [crops, H, W, 3], or
        float32 in [0, 1].
      size: width and height of the file's image, upright.
      part: width and height of what of ``image`` it takes, from the upper left corner.
    """

    image: np.ndarray
    size: tuple[int, int]
    part: tuple[int, int]


class Preparation:
    """``preparation(path) -> Prepared``, for the images that a config names.

    Image folders and data sets of huggingface: the shorter side resized and the middle cut, or
    ten crops. Segmentation folders: fitted into a square, at its upper left corner. Digits and
    synthetic images, which are in no files: the whole image at their size, grey where they are,
    in [0, 1] from black to white; digits are white on black.

    Attributes:
      shape: of an image that the network takes: height, width, channels.
      crops: of each image.

    Raises:
      UserError: if the config names no images, or such as no file holds, or arrays, which
        alone say how large they are and what is black and white in them.
    """

    def __init__(self, config: Config):
        data = config.data
        self.crops, self._border = 1, 0
        if isinstance(data, ImageFolder):
            self.shape = (data.image_size, data.image_size, 3)
            self.crops, self._border = data.crops, data.border
        elif isinstance(data, HuggingFace | SegmentationFolder):
            self.shape = (data.image_size, data.image_size, 3)
        elif isinstance(data, Digits):
            self.shape = (8, 8, 1)
        elif isinstance(data, Synthetic) and data.channels in (1, 3):
            self.shape = (data.image_size, data.image_size, data.channels)
        elif isinstance(data, ArrayFile):
            raise UserError(
                "data.source: arrays alone say how large their images are, and what is black and "
                "white in them; files are predicted by runs on image_folder and the like"
            )
        else:
            what = getattr(data, "channels", "no")
            raise UserError(
                f"data.source: {data.source} has images of {what} channels; "
                "files hold images of 1 or 3"
            )
        self._data = data

    def __call__(self, path: str) -> Prepared:
        """Reads an image.

        Raises:
          UnreadableError: with the reason.
        """
        data, size = self._data, self.shape[0]
        found: list[tuple[int, int]] = []

        def seen(width: int, height: int) -> View:
            found.append((width, height))
            if isinstance(data, ImageFolder | HuggingFace):
                return short_side(data.shorter_side)(width, height)
            if isinstance(data, SegmentationFolder):
                return fitted(width, height, size).view
            return View((0, 0, width, height), (size, size))

        image = decode(path, seen)
        height, width, _ = image.shape
        if isinstance(data, ImageFolder | HuggingFace):
            image = views(image, size, self.crops, self._border)
        elif isinstance(data, SegmentationFolder):
            canvas = np.empty(self.shape, np.uint8)
            canvas[:] = in_bytes(data.mean)
            canvas[:height, :width] = image
            image = canvas
        else:
            if self.shape[2] == 1:
                image = np.asarray(Image.fromarray(image).convert("L"))[..., None]
            image = image.astype(np.float32) / 255
        return Prepared(image, found[0], (width, height))
