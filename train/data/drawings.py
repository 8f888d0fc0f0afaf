"""Masks that annotation files describe by outlines or runs, drawn when they are read.

This module runs in the processes of `train.data.workers`, so it must not import JAX.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.data.decode import MaskValues, UnreadableError, decode_mask, upright_size

_MOST_CROSSINGS = 2**22
"""Rows that an outline crosses, each one counted at each crossing: 400 MiB of work."""


class Shape(NamedTuple):
    """An object of an image.

    Attributes:
      value: Value of its class in the mask.
      polygons: Outlines [N, 2] of x and y in pixels, whose union it is.
      runs: In place of polygons, lengths of runs of pixels column by column, first outside.
    """

    value: int
    polygons: tuple[np.ndarray, ...] = ()
    runs: tuple[int, ...] = ()

    def pixels(self, height: int, width: int) -> np.ndarray:
        """Return which pixels it covers, bool [height, width]: those whose center is inside."""
        if self.runs:
            return fill_runs(self.runs, height, width)
        covered = np.zeros((height, width), bool)
        for polygon in self.polygons:
            covered |= fill_polygon(polygon, height, width)
        return covered


class Drawing(NamedTuple):
    """A mask of shapes on a background of value 0, the largest below.

    Attributes:
      source: File that describes it, for messages.
      height: Height of the image in pixels.
      width: Its width.
      shapes: Its objects.
    """

    source: str
    height: int
    width: int
    shapes: tuple[Shape, ...]

    def draw(self) -> np.ndarray:
        """Return the values, int32 [height, width]."""
        mask = np.zeros((self.height, self.width), np.int32)
        covered = [(shape.value, shape.pixels(self.height, self.width)) for shape in self.shapes]
        for value, pixels in sorted(covered, key=lambda item: -int(item[1].sum())):
            mask[pixels] = value
        return mask


Mask = str | Drawing
"""Path of a mask, or its description."""


def read_mask(mask: Mask, max_pixels: int) -> MaskValues:
    """Decode a mask file, or draw a mask."""
    if isinstance(mask, str):
        return decode_mask(mask, max_pixels)
    if mask.height * mask.width > max_pixels:
        raise UnreadableError(f"{mask.width} x {mask.height} pixels are more than data.max_pixels")
    return MaskValues(mask.draw(), "gray")


def mask_size(mask: Mask, max_pixels: int) -> tuple[int, int, int]:
    """Return width and height of an upright mask, and its EXIF orientation; outlines have 1."""
    if isinstance(mask, str):
        return upright_size(mask, max_pixels)
    return mask.width, mask.height, 1


def fill_polygon(polygon: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the pixels whose center is inside an outline [N, 2], by the even-odd rule.

    Raises:
      UnreadableError: if the outline crosses too many rows.
    """
    toggles = np.zeros((height, width + 1), np.int32)
    (x0, y0), (x1, y1) = polygon.T, np.roll(polygon, -1, 0).T
    first, last = (
        np.clip(np.ceil(f(y0, y1) - 0.5), 0, height).astype(int) for f in (np.minimum, np.maximum)
    )
    counts = last - first
    if counts.sum() > _MOST_CROSSINGS:
        raise UnreadableError(
            f"an outline of {len(polygon):,} points crosses {counts.sum():,} rows; at most "
            f"{_MOST_CROSSINGS:,} are drawn"
        )
    edge = np.repeat(np.arange(len(polygon)), counts)
    row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    slope = (x1 - x0)[edge] / (y1 - y0)[edge]
    x = x0[edge] + (row + 0.5 - y0[edge]) * slope
    np.add.at(toggles, (row, np.clip(np.ceil(x - 0.5), 0, width).astype(int)), 1)
    return toggles.cumsum(1)[:, :width] % 2 == 1


def fill_runs(runs: Sequence[int], height: int, width: int) -> np.ndarray:
    """Return the pixels of runs that are alternately outside and inside, column by column.

    Raises:
      UnreadableError: if they are not as many as the pixels of the image.
    """
    if sum(runs) != height * width or min(runs) < 0:
        raise UnreadableError(
            f"runs of {sum(runs):,} pixels, but the image has {width} x {height} pixels"
        )
    inside = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return inside.reshape(width, height).T


def decode_runs(text: str) -> tuple[int, ...]:
    """Return the lengths of runs that COCO writes as text.

    Each number is in groups of five bits, the lowest first, at code 48; the sixth bit says that
    more follow. From the third on, numbers are differences from the one two before.

    References:
      rleFrString in maskApi.c of cocodataset/cocoapi.

    Raises:
      ValueError: if the text is none of these.
    """
    runs: list[int] = []
    value = shift = 0
    for code in text.encode("ascii"):
        bits = code - 48
        if not 0 <= bits < 64:
            raise ValueError(f"{chr(code)!r} is in no run-length code")
        value |= (bits & 31) << shift
        shift += 5
        if shift > 60:
            raise ValueError("a number in a run-length code has more than 60 bits")
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    return tuple(runs)
