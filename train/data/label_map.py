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

INVALID = -1
"""Label of values of no class."""
PNG = "save masks as PNG"
Reading = Literal["indices", "colors"]
KINDS = {"palettes": ("palette",), "rgbs": ("rgb",), "grays": ("gray", "bits")}
"""Kinds of masks that are read alike, by the field of `LabelMap` that says how."""


@dataclass(frozen=True)
class LabelMap:
    """Classes, and the labels 0, 1, ... that the values of masks stand for.

    Attributes:
      names: Class names by label.
      values: Pairs of a gray value or palette index and its label; ignored ones have `IGNORE`.
      codes: The same for colors, as 0xRRGGBB; () without.
      palettes: Whether palette images are read by their values or by their colors.
      colors: Color of each label in pictures; () chooses distinct ones.
      void: Color of ignored pixels in pictures.
      grays: The same as ``palettes`` for gray images, and black and white ones.
      rgbs: The same for RGB images of grays.
      decided: Fields ``palettes``, ``grays`` and ``rgbs`` that masks of the run decided.
      indices: Pairs of an index and its label in palettes that are read by color, which gray masks
        have, too; () if these have ``values``.
      gray_palettes: Whether palettes are of grays, which are the values.
      shown: Pairs of a label and its color as 0xRRGGBB in palettes that are read by their values.
    """

    names: tuple[str, ...]
    values: tuple[tuple[int, int], ...]
    codes: tuple[tuple[int, int], ...] = ()
    palettes: Reading = "indices"
    colors: tuple[Color, ...] = ()
    void: Color = VOID
    grays: Reading = "indices"
    rgbs: Reading = "indices"
    shown: tuple[tuple[int, int], ...] = ()
    gray_palettes: bool = False
    indices: tuple[tuple[int, int], ...] = ()
    decided: tuple[str, ...] = ()

    def labels(self, mask: MaskValues) -> np.ndarray:
        """Return the labels of a mask, uint8 [height, width].

        Raises:
          UnreadableError: if a value has no label.
        """
        if self.gray_palettes and mask.kind == "palette":
            gray = mask.as_gray()
            if gray is None:
                raise UnreadableError(
                    "its palette has colors, but other masks have palettes of grays"
                )
            mask = gray
        is_color = self.reads_color(mask)
        values = colors_of(mask) if is_color else self.numbers(mask)
        if is_color and not self.codes:
            raise UnreadableError(
                "it has colors; give data.class_table a file with the color of each class"
            )
        if is_color:
            known, label_of = _sorted(self.codes)
            at = np.searchsorted(known, values)
            labels = np.where(known[at] == values, label_of[at], INVALID)
        else:
            for index, label, color in self.palette_colors(mask) if self.shown else ():
                if (owner := self.owner_of(label, color)) != label:
                    raise UnreadableError(
                        f"its palette index {index} is {color_text(color)}, the color of "
                        f"{self.names[owner]} in other masks"
                    )
            below, table = _table(self.values_of(mask))
            labels = table[np.clip(values - below, 0, len(table) - 1)]
        if labels.min(initial=0) == INVALID:
            value = int(values[labels == INVALID][0])
            hint = f"; lossy compression changes values: {PNG}" if mask.is_lossy else ""
            raise UnreadableError(f"{self._describe_unknown(value, is_color)}{hint}")
        return labels.astype(np.uint8)

    def values_of(self, mask: MaskValues) -> tuple[tuple[int, int], ...]:
        """Return pairs of a value and its label for a mask that is read by its values."""
        return self.indices if self.indices and mask.kind in KINDS["grays"] else self.values

    def palette_colors(self, mask: MaskValues) -> list[tuple[int, int, int]]:
        """Return each held index, its label and its color, of a palette that is read by values."""
        if mask.kind != "palette" or self.reads_color(mask):
            return []
        assert mask.palette is not None
        label_of = dict(self.values)
        held = np.flatnonzero(np.bincount(mask.values.ravel())).tolist()
        return [(i, label_of.get(i, IGNORE), int(mask.palette[i])) for i in held]

    def owner_of(self, label: int, color: int) -> int:
        """Return the label that has this color in the palettes of the run; ``label`` if none."""
        if dict(self.shown).get(label, color) == color:
            return label
        return next((other for other, shown in self.shown if shown == color), label)

    def reads_color(self, mask: MaskValues) -> bool:
        """Whether a mask is read by its colors."""
        by = next(getattr(self, name) for name, kinds in KINDS.items() if mask.kind in kinds)
        return mask.holds_colors or (by == "colors" and mask.values.max(initial=0) < 256)

    def numbers(self, mask: MaskValues) -> np.ndarray:
        """Return the values of a mask; white is 1, or 255 if that is a class and 1 is unknown."""
        known = dict(self.values_of(mask))
        is_255 = mask.kind == "bits" and 1 not in known and known.get(255, IGNORE) != IGNORE
        return mask.values * 255 if is_255 else mask.values

    def mask_values(self) -> np.ndarray:
        """Return the value in masks of each label, int [classes]; the inverse of `labels`."""
        pairs, grays = self.indices or self.values, grays_of(self.codes)
        are_colors = (self.palettes, self.rgbs, self.grays) == ("colors",) * 3
        if are_colors and not self.indices and {*range(len(self.names))} <= {*grays.values()}:
            pairs = tuple(grays.items())
        value_of = {label: value for value, label in reversed(pairs)}
        return np.array([value_of[label] for label in range(len(self.names))])

    def describe_values(self) -> str:
        """Return ``"0 to 10, or 11 to ignore a pixel"``."""
        expected = ranges([value for value, label in self.values if label != IGNORE])
        ignored = ranges([value for value, label in self.values if label == IGNORE])
        return f"{expected}, or {ignored} to ignore a pixel" if ignored else expected

    def _describe_unknown(self, value: int, is_color: bool) -> str:
        if not is_color:
            return f"value {value}, expected {self.describe_values()}"
        return f"the color {color_text(value)} is of no class"

    def without_readings(self) -> Self:
        """Return the classes of values and colors, without how the files at hand are read."""
        return type(self)(self.names, self.values, self.codes)

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
        values, codes = (
            tuple((int(value), int(label)) for value, label in plain[name])
            for name in ("values", "codes")
        )
        # Older runs read RGB images of grays like palettes.
        palettes, grays = plain["palettes"], plain.get("grays", "indices")
        rgbs, shown = plain.get("rgbs", palettes), plain.get("shown", ())
        if not {palettes, grays, rgbs} <= {"indices", "colors"}:
            raise ValueError(f"palettes are {palettes}, grays {grays}, RGB images {rgbs}")
        *colors, void = ((int(r), int(g), int(b)) for r, g, b in (*plain["colors"], plain["void"]))
        names = tuple(plain["classes"])
        by_label = tuple((int(label), int(color)) for label, color in shown)
        indices = tuple((int(index), int(label)) for index, label in plain.get("indices", ()))
        decided = tuple(name for name in plain.get("decided", ()) if name in KINDS)
        readings = rgbs, by_label, bool(plain.get("gray_palettes")), indices, decided
        return cls(names, values, codes, palettes, tuple(colors), void, grays, *readings)


def grays_of(codes: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the label of each gray among colors."""
    return {c & 255: label for c, label in codes if c == (c & 255) * 0x010101}


def plain_label_map(names: tuple[str, ...]) -> LabelMap:
    """Return the map of masks whose values are the labels, and 255 to ignore a pixel."""
    values = [(label, label) for label in range(len(names))]
    return LabelMap(names, (*values, (IGNORE, IGNORE)))


@functools.lru_cache(maxsize=8)
def _table(pairs: tuple[tuple[int, int], ...]) -> tuple[int, np.ndarray]:
    """Return a value, and the labels from there on; the first and the last one are of no class."""
    values, labels = map(np.array, zip(*pairs, strict=True))
    below = min(values) - 1
    table = np.full(max(values) - below + 2, INVALID, np.int16)
    table[values - below] = labels
    return below, table


@functools.lru_cache(maxsize=8)
def _sorted(pairs: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return values in rising order and their labels; the last value is above all others."""
    known, labels = zip(*sorted(pairs), (2**31 - 1, INVALID), strict=True)
    return np.array(known, np.int32), np.array(labels, np.int16)


def colors_of(mask: MaskValues) -> np.ndarray:
    """Return the colors of a mask whose values are at most 255, or colors, as 0xRRGGBB."""
    if mask.holds_colors:
        return mask.values
    return mask.values * 0x010101 if mask.palette is None else mask.palette[mask.values]


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
