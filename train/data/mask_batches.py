"""From the paths of images and their masks to a batch: the same geometry for both."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

from train.data import Arrays
from train.data.augment import coloured, draw_colours
from train.data.crops import Placement, fitted, mirrored, scaled_crop
from train.data.decode import UnreadableError, View, decode, decode_labels

IGNORE = 255
"""The label of pixels that are not counted."""

Place = Callable[[int, int], Placement]
"""``(width, height) -> Placement`` of the image, and of its mask."""


def decode_pair(
    root: bytes, image: bytes, mask: bytes, classes: int, place: Place
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """A part of an image, resized (bilinear), and the same part of its mask (nearest label).

    Args:
      root: the folder that both paths start from.
      image, mask: paths.
      classes: labels are 0 to classes - 1, or `IGNORE`.
      place: which part, and where it goes.

    Returns:
      The image's part, uint8 [h, w, 3], the mask's, uint8 [h, w], and the x and y of both.

    Raises:
      UnreadableError: with the path of the file that cannot be used, and why.
    """
    path = os.path.join(root, mask)
    try:
        labels = decode_labels(path, classes - 1, IGNORE)
        path = os.path.join(root, image)
        placements = []

        def view(width: int, height: int) -> View:
            if (width, height) != labels.size:
                raise UnreadableError(
                    f"it is {width} x {height}, its mask {labels.width} x {labels.height}"
                )
            placements.append(place(width, height))
            return placements[0].view

        pixels = decode(path, view)
    except UnreadableError as error:
        raise UnreadableError(f"{os.fsdecode(path)}: {error}") from None
    (box, size), at = placements[0]
    part = labels.resize(size, Image.Resampling.NEAREST, box=box)
    return pixels, np.asarray(part), at


@dataclass(frozen=True)
class TrainingMasks:
    """How files become training images with masks; as `image_batches.TrainingImages`.

    Attributes:
      root: the folder that paths start from.
      size: height and width of the result.
      classes: how many labels there are.
      scale: smallest and largest; 1 is that of evaluation.
      flip: mirror each image with probability 1/2.
      color_jitter: strength of the colour color_jitter.
      lighting: standard deviation of the lighting.
      fill: mean colour, where there is no image.
    """

    root: bytes
    size: int
    classes: int
    scale: tuple[float, float]
    flip: bool
    color_jitter: float
    lighting: float
    fill: tuple[int, ...]

    def draw(self, n: int, generator: np.random.Generator) -> Arrays:
        """What is random about n images: arrays of n rows."""
        drawn: Arrays = {"place": generator.random((n, 3))}
        if self.flip:
            drawn["flip"] = generator.random(n) < 0.5
        if self.color_jitter or self.lighting:
            drawn |= draw_colours(n, self.color_jitter, self.lighting, generator)
        return drawn

    def __call__(self, rows: Arrays) -> Arrays:
        """``path``, ``mask_path`` [N] and what was drawn -> `EvaluationMasks`' batch."""

        def place(i: int, width: int, height: int) -> Placement:
            return scaled_crop(width, height, self.size, rows["place"][i], self.scale)

        batch = _batch(self.root, rows, self.size, self.classes, self.fill, place)
        if "flip" in rows:
            batch |= {name: mirrored(batch[name], rows["flip"]) for name in ("image", "mask")}
        return batch


@dataclass(frozen=True)
class EvaluationMasks:
    """How files become whole images, fitted into one size, with their masks.

    Attributes:
      root: the folder that paths start from.
      size: height and width of the result.
      classes: how many labels there are.
      fill: mean colour, where there is no image.
    """

    root: bytes
    size: int
    classes: int
    fill: tuple[int, ...]

    def __call__(self, rows: Arrays) -> Arrays:
        """``path`` and ``mask_path`` [N] -> a batch.

        ``image`` uint8 [N, size, size, 3], ``mask`` uint8 [N, size, size], `IGNORE` where
        there is no image, ``weight`` float32 [N].
        """

        def place(i: int, width: int, height: int) -> Placement:
            return fitted(width, height, self.size)

        return _batch(self.root, rows, self.size, self.classes, self.fill, place)


def _batch(
    root: bytes,
    rows: Arrays,
    size: int,
    classes: int,
    fill: tuple[int, ...],
    place: Callable[[int, int, int], Placement],
) -> Arrays:
    n = len(rows["path"])
    image = np.empty((n, size, size, 3), np.uint8)
    image[:] = fill
    mask = np.full((n, size, size), IGNORE, np.uint8)
    weight = np.ones(n, np.float32)
    colours: Arrays = {name: rows[name] for name in ("order", "blend", "light") if name in rows}
    for i, (path, mask_path) in enumerate(zip(rows["path"], rows["mask_path"], strict=True)):
        try:
            placed = functools.partial(place, i)
            pixels, labels, (x, y) = decode_pair(root, path, mask_path, classes, placed)
        except UnreadableError:
            weight[i] = 0.0
            continue
        if colours:  # of the image, not of what surrounds it
            row = {name: a[i : i + 1] for name, a in colours.items()}
            pixels = coloured(pixels[None].copy(), row)[0]
        height, width = labels.shape
        image[i, y : y + height, x : x + width] = pixels
        mask[i, y : y + height, x : x + width] = labels
    return {"image": image, "mask": mask, "weight": weight}
