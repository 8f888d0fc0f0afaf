"""Colours of labels, the same in every picture: those of PASCAL VOC."""

import numpy as np


def voc_colours(n: int = 256) -> np.ndarray:
    """A colour for each label, uint8 [n, 3]: 0 is black, 255 what VOC paints void.

    Bits 0, 3 and 6 of a label are the highest of red, bits 1, 4 and 7 of green, 2 and 5 of
    blue, as VOClabelcolormap.m of the PASCAL VOC development kit has it (Everingham et al.).

    Args:
      n: of labels, at most 256.
    """
    labels, channels = np.arange(n)[:, None], np.arange(3)
    colours = np.zeros((n, 3), int)
    for i in range(3):
        colours |= (labels >> (3 * i + channels) & 1) << (7 - i)
    return colours.astype(np.uint8)


def painted(image: np.ndarray, labels: np.ndarray, opacity: float = 0.6) -> np.ndarray:
    """The image uint8 [H, W, 3] with the colours of its labels [H, W] laid over it."""
    mixed = (1 - opacity) * image + opacity * voc_colours()[labels]
    return mixed.round().astype(np.uint8)
