"""Preprocessing of any image file for a run's network, as in evaluation."""

import os
from typing import NamedTuple

import numpy as np
from PIL import Image

from train.config import (
    ArrayFile,
    Config,
    Digits,
    HuggingFace,
    SegmentationFolder,
    Synthetic,
)
from train.config.data import Images
from train.data.augment import evaluation_crops, fit, resize_shorter_side, to_uint8
from train.data.decode import MAX_PIXELS, View, decode
from train.errors import UserError


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


class Preprocessor:
    """``preprocessor(image) -> PreprocessedImage``, for the data source of a config.

    Image folders, shards and Hugging Face data sets resize the shorter side and take the center
    crop, or several crops. Segmentation folders fit the image into a square, at its upper left
    corner. Digits and synthetic images resize the whole image to float32 in [0, 1], gray for one
    channel; digits are white on black.

    Attributes:
      shape: height, width and channels of the network's input.
      crops: number of crops per image.
      max_pixels: largest number of pixels of an image.

    Raises:
      UserError: if the data source has no images, its channels are not 1 or 3, or it is an array
        file, which does not define how to convert other images.
    """

    def __init__(self, config: Config):
        data = config.data
        self.crops, self._border = 1, 0
        self.max_pixels: int = getattr(data, "max_pixels", MAX_PIXELS)
        if isinstance(data, Images):
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
                "data.source: arrays do not define how to convert image files to their size and "
                "value range; use a run on image_folder, for example"
            )
        else:
            channels = getattr(data, "channels", "no")
            raise UserError(
                f"data.source: {data.source} has images of {channels} channels; image files have "
                "1 or 3"
            )
        self._data = data

    def __call__(self, source: str | os.PathLike[str] | Image.Image) -> PreprocessedImage:
        """Read an image file, or an image of Pillow.

        Raises:
          UnreadableError: with the reason.
        """
        data, side = self._data, self.shape[0]
        sizes: list[tuple[int, int]] = []

        def view(width: int, height: int) -> View:
            sizes.append((width, height))
            if isinstance(data, Images | HuggingFace):
                return resize_shorter_side(data.shorter_side)(width, height)
            if isinstance(data, SegmentationFolder):
                return fit(width, height, side).view
            return View((0, 0, width, height), (side, side))

        image = decode(source, view, self.max_pixels)
        height, width, _ = image.shape
        if isinstance(data, Images | HuggingFace):
            image = evaluation_crops(image, side, self.crops, self._border)
        elif isinstance(data, SegmentationFolder):
            canvas = np.empty(self.shape, np.uint8)
            canvas[:] = to_uint8(data.mean)
            canvas[:height, :width] = image
            image = canvas
        else:
            if self.shape[2] == 1:
                image = np.asarray(Image.fromarray(image).convert("L"))[..., None]
            image = image.astype(np.float32) / 255
        return PreprocessedImage(image, sizes[0], (width, height))
