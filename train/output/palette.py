"""Class colors of PASCAL VOC, used for every segmentation picture."""

import numpy as np


def voc_colors(n: int = 256) -> np.ndarray:
    """Return the colors of labels 0 to n - 1 as uint8 [n, 3].

    Label 0 is black and label 255 is the color of VOC's void pixels.

    References:
      VOClabelcolormap.m of the PASCAL VOC development kit (Everingham et al. 2015). The bits
      0, 3 and 6 of a label are the highest bits of red, 1, 4 and 7 of green, 2 and 5 of blue.
    """
    labels, channels = np.arange(n)[:, None], np.arange(3)
    colors = np.zeros((n, 3), int)
    for i in range(3):
        colors |= (labels >> (3 * i + channels) & 1) << (7 - i)
    return colors.astype(np.uint8)


def overlay_labels(image: np.ndarray, labels: np.ndarray, opacity: float = 0.6) -> np.ndarray:
    """Blend an image, uint8 [H, W, 3], with the colors of its labels [H, W]."""
    blended = (1 - opacity) * image + opacity * voc_colors()[labels]
    return blended.round().astype(np.uint8)
