"""Labels, and the values and colors of masks that stand for them.

This module runs in the processes of `train.data.workers`, so it must not import JAX.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import numpy as np

from train.data.class_table import VOID, Color
from train.data.decode import MaskValues, UnreadableError
from train.errors import shorten

IGNORE = 255
"""Label of pixels that count neither in the loss nor in metrics."""
PNG = "save masks as PNG"
Reading = Literal["index", "color"]
READINGS: tuple[Reading, Reading] = ("index", "color")
Pairs = tuple[tuple[int, int], ...]
_INVALID = -1


@dataclass(frozen=True)
class LabelMap:
    """Classes, and the labels 0, 1, ... that the values of masks stand for.

    Attributes:
      names: Class names by label.
      values: Pairs of a number in masks and its label; ignored ones have `IGNORE`.
      codes: The same for colors, as 0xRRGGBB; () if colors are the grays of ``values``.
      reading: Whether masks are read by numbers (gray values or palette indices) or by colors;
        None before `choose_reading` looked.
      colors: Color of each label in pictures; () chooses distinct ones.
      void: Color of ignored pixels in pictures.
      palette: Pairs of an index and its color in the palettes of masks that are read by index.
        Files with another color are refused. () compares none.
    """

    names: tuple[str, ...]
    values: Pairs
    codes: Pairs = ()
    reading: Reading | None = None
    colors: tuple[Color, ...] = ()
    void: Color = VOID
    palette: Pairs = ()

    def labels(self, mask: MaskValues) -> np.ndarray:
        """Return the labels of a mask, uint8 [height, width].

        Raises:
          UnreadableError: if a value has no label, or a palette differs from those of other masks.
        """
        if self.reading != "color":
            labels = self._labels_by_number(mask)
        elif mask.palette is not None:  # the few colors are looked up, not all pixels
            labels = _look_up(self._color_codes, mask.palette)[mask.values]
        else:
            labels = _look_up(self._color_codes, _colors_of(mask))
        if labels.min(initial=0) == _INVALID:
            at = np.unravel_index(labels.argmin(), labels.shape)
            hint = f"; lossy compression changes values: {PNG}" if mask.is_lossy else ""
            what = f"value {mask.values[at]}, expected {self.describe_values()}"
            if self.reading == "color":
                what = f"the color {color_text(int(_colors_of(mask)[at]))} is of no class"
            raise UnreadableError(what + hint)
        return labels.astype(np.uint8)

    def _labels_by_number(self, mask: MaskValues) -> np.ndarray:
        if mask.holds_colors:
            raise UnreadableError("it has colors, and no class table names them")
        known, label_of = dict(self.palette), dict(self.values)
        for index, color in held_colors(mask) if known else ():
            if label_of.get(index, IGNORE) != IGNORE and known.get(index) != color:
                other = color_text(known[index]) if index in known else "several colors"
                raise UnreadableError(
                    f"its palette index {index} is {color_text(color)}, but {other} in other "
                    "masks; if indices count, give --data.mask-reading index"
                )
        below, table = _table(self.values)
        return table[np.clip(mask.values - below, 0, len(table) - 1)]

    @property
    def _color_codes(self) -> Pairs:
        grays = ((value * 0x010101, label) for value, label in self.values if 0 <= value < 256)
        return self.codes or tuple(grays)

    def shown(self) -> dict[int, int]:
        """Return the color of each label in the palettes of masks."""
        label_of = dict(self.values)
        return {label_of[i]: c for i, c in self.palette if label_of.get(i, IGNORE) != IGNORE}

    def mask_values(self) -> np.ndarray:
        """Return the number in masks of each label, int [classes]; the inverse of `labels`."""
        value_of = {label: value for value, label in reversed(self.values)}
        return np.array([value_of[label] for label in range(len(self.names))])

    def describe_values(self) -> str:
        """Return ``"0 to 10, or 11 to ignore a pixel"``."""
        expected, ignored = (
            ranges([value for value, label in self.values if (label == IGNORE) == is_ignored])
            for is_ignored in (False, True)
        )
        return f"{expected}, or {ignored} to ignore a pixel" if ignored else expected

    def describe_options(self) -> str:
        """Return the options that say what the numbers of masks mean."""
        values = self.mask_values().tolist()
        ignored = [str(value) for value, label in self.values if label == IGNORE]
        is_plain = values == [*range(len(values))]
        counted = (
            f"classes {len(values)}" if is_plain else f"mask-values {' '.join(map(str, values))}"
        )
        return f"--data.{counted}" + (f" --data.ignore {' '.join(ignored)}" if ignored else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the map for JSON."""
        plain = asdict(self)
        return {"classes": plain.pop("names")} | plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Return the map that `as_dict` wrote.

        Raises:
          KeyError, TypeError, ValueError: for anything else.
        """
        values, codes, palette = (
            tuple((int(value), int(label)) for value, label in plain[name])
            for name in ("values", "codes", "palette")
        )
        reading = plain["reading"]
        if reading not in READINGS:
            raise ValueError(f"masks are read by {reading}")
        *colors, void = ((int(r), int(g), int(b)) for r, g, b in (*plain["colors"], plain["void"]))
        return cls(tuple(plain["classes"]), values, codes, reading, tuple(colors), void, palette)


def plain_label_map(names: tuple[str, ...]) -> LabelMap:
    """Return the map of masks whose values are the labels, and 255 to ignore a pixel."""
    values = [(label, label) for label in range(len(names))]
    return LabelMap(names, (*values, (IGNORE, IGNORE)), reading="index")


def held_colors(mask: MaskValues) -> list[tuple[int, int]]:
    """Return each index that a palette image holds, and its color; [] for other masks."""
    if mask.kind != "palette" or mask.palette is None:
        return []
    held = np.flatnonzero(np.bincount(mask.values.ravel()))
    return [(i, int(mask.palette[i])) for i in held.tolist() if mask.palette[i] >= 0]


@functools.lru_cache(maxsize=8)
def _table(pairs: Pairs) -> tuple[int, np.ndarray]:
    """Return a value, and the labels from there on; the first and the last one are of no class."""
    values, labels = map(np.array, zip(*pairs, strict=True))
    below = min(values) - 1
    table = np.full(max(values) - below + 2, _INVALID, np.int16)
    table[values - below] = labels
    return below, table


@functools.lru_cache(maxsize=8)
def _sorted(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Return colors in rising order and their labels; the last color is above all others."""
    known, labels = zip(*sorted(pairs), (2**31 - 1, _INVALID), strict=True)
    return np.array(known, np.int32), np.array(labels, np.int16)


def _look_up(pairs: Pairs, colors: np.ndarray) -> np.ndarray:
    known, label_of = _sorted(pairs)
    at = np.searchsorted(known, colors)
    return np.where(known[at] == colors, label_of[at], _INVALID)


def _colors_of(mask: MaskValues) -> np.ndarray:
    """Return the colors of a mask, as 0xRRGGBB; -1 for gray values that no color has."""
    if mask.holds_colors:
        return mask.values
    if mask.palette is not None:
        return mask.palette[mask.values]
    is_gray = (mask.values >= 0) & (mask.values < 256)
    return np.where(is_gray, mask.values * 0x010101, -1)


def color_text(color: int) -> str:
    """Return ``"255 128 0"`` of 0xFF8000."""
    return f"{color >> 16} {color >> 8 & 255} {color & 255}"


def ranges(values: Iterable[int]) -> str:
    """Return ``"0 to 10, 13"``."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return shorten(texts)
