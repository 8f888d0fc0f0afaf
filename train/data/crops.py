"""Which part of an image is seen: another one each time in training, the same in evaluation."""

import math
from typing import NamedTuple

import numpy as np

from train.data.decode import View, ViewOf

_ATTEMPTS = 10
RESIZED_CROP_DRAWS = 2 * _ATTEMPTS + 2
"""Numbers in [0, 1) that one random resized crop takes."""


def resized_crop(
    width: int,
    height: int,
    size: int,
    draws: np.ndarray,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> View:
    """A part of random area and shape, at a random place, at one size.

    Of ten tries the first that lies within the image is taken, its area uniform, its
    ratio log-uniform; else the largest part in the middle of an allowed ratio. As
    torchvision's RandomResizedCrop; Szegedy et al. 2015, "Going deeper with convolutions".

    Args:
      width, height: of the image.
      size: of the result, which is square.
      draws: [RESIZED_CROP_DRAWS] numbers in [0, 1).
      area: smallest and largest share of the image.
      ratio: smallest and largest width / height.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    d: list[float] = draws.tolist()
    for i in range(_ATTEMPTS):
        target = width * height * (area[0] + (area[1] - area[0]) * d[2 * i])
        shape = math.exp(low + (high - low) * d[2 * i + 1])
        w, h = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(d[-2] * (width - w + 1)), int(d[-1] * (height - h + 1))
            return View((left, top, left + w, top + h), (size, size))
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    left, top = (width - w) // 2, (height - h) // 2
    return View((left, top, left + w, top + h), (size, size))


def short_side(size: int) -> ViewOf:
    """The whole image, its shorter side of that many pixels, as torchvision's Resize."""

    def view(width: int, height: int) -> View:
        short = min(width, height)
        sides = int(size * width / short), int(size * height / short)
        return View((0, 0, width, height), sides)

    return view


def centre(image: np.ndarray, size: int) -> np.ndarray:
    """The middle [size, size, C] of an image [H, W, C] that is not smaller."""
    top, left = (round((side - size) / 2) for side in image.shape[:2])
    return image[top : top + size, left : left + size]


def ten_crops(image: np.ndarray, size: int) -> np.ndarray:
    """The four corners and the middle, and the mirror image of each: [10, size, size, C]."""
    first, last = slice(None, size), slice(-size, None)
    five = [image[y, x] for y in (first, last) for x in (first, last)]
    five.append(centre(image, size))
    return np.stack([*five, *(crop[:, ::-1] for crop in five)])


def two_crops(image: np.ndarray, size: int) -> np.ndarray:
    """The middle and its mirror image: [2, size, size, C]."""
    middle = centre(image, size)
    return np.stack([middle, middle[:, ::-1]])


_CUTS = {1: centre, 2: two_crops, 10: ten_crops}


def views(image: np.ndarray, size: int, crops: int, border: int) -> np.ndarray:
    """What is seen of an image in evaluation: [size, size, C], or [crops, size, size, C].

    Args:
      image: [H, W, C], not smaller.
      size: of each crop.
      crops: how many: 1, 2 or 10.
      border: pixels of its mirror image that are set around it before.
    """
    if border:
        around = (border, border)
        image = np.pad(image, (around, around, (0, 0)), "reflect")
    return _CUTS[crops](image, size)


def moved(images: np.ndarray, by: np.ndarray, padding: int, *, reflect: bool) -> np.ndarray:
    """Each image [N, H, W, C] seen through a window of its size, moved by up to ``padding``.

    Args:
      images: which may be changed.
      by: int [N, 2], 0 to 2 * padding: the window's upper left corner in the padded image.
      padding: pixels on each side.
      reflect: what comes in is the image's mirror image; else it is 0.
    """
    if not padding:
        return images
    _, height, width, _ = images.shape
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    padded = np.pad(images, around, "reflect" if reflect else "constant")
    for i, (y, x) in enumerate(by.tolist()):
        images[i] = padded[i, y : y + height, x : x + width]
    return images


def mirrored(images: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The images [N, H, W, ...], those mirrored left to right for which ``which`` [N] is True."""
    for i in np.flatnonzero(which):
        images[i] = images[i, :, ::-1].copy()
    return images


class Placement(NamedTuple):
    """Where a part of an image lies on a square canvas.

    Attributes:
      view: the part, and its size there.
      at: x, y of its upper left corner.
    """

    view: View
    at: tuple[int, int]


def fitted(width: int, height: int, size: int) -> Placement:
    """The whole image, its longer side ``size``, in the canvas's upper left corner."""
    long = max(width, height)
    sides = max(round(width * size / long), 1), max(round(height * size / long), 1)
    return Placement(View((0, 0, width, height), sides), (0, 0))


def scaled_crop(
    width: int, height: int, size: int, draws: np.ndarray, scale: tuple[float, float]
) -> Placement:
    """A part of the image at a random scale, at a random place; or all of it where it fits.

    Args:
      width, height: of the image.
      size: of the canvas, which is square.
      draws: [3] numbers in [0, 1): scale, horizontal and vertical place.
      scale: smallest and largest; 1 is that of `fitted`.
    """
    u, *places = draws.tolist()
    factor = (scale[0] + (scale[1] - scale[0]) * u) * size / max(width, height)
    sides, starts, ends, at = [], [], [], []
    for length, place in zip((width, height), places, strict=True):
        scaled = max(round(length * factor), 1)
        if scaled > size:
            start = int(place * (scaled - size + 1))
            starts.append(start * length / scaled)
            ends.append((start + size) * length / scaled)
            sides.append(size)
            at.append(0)
        else:
            starts.append(0.0)
            ends.append(float(length))
            sides.append(scaled)
            at.append(int(place * (size - scaled + 1)))
    return Placement(
        View((starts[0], starts[1], ends[0], ends[1]), (sides[0], sides[1])), (at[0], at[1])
    )
