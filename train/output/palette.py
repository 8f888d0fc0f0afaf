"""Colors of classes in pictures of segmentations."""

import functools

import numpy as np

from train.data.class_table import VOID, Color
from train.data.label_map import IGNORE, LabelMap

_BACKGROUND: tuple[Color, ...] = ((0, 0, 0), (255, 255, 255), VOID)
"""Colors that no class may resemble."""


def palette(label_map: LabelMap | None = None) -> np.ndarray:
    """Return the color of each label as uint8 [256, 3].

    Colors come from the class table or from palettes. Other labels get distinct ones; a background
    is black.
    """
    table = distinct_colors(256).copy()
    table[IGNORE] = VOID
    if label_map:
        if label_map.names[:1] == ("background",):
            table[0] = 0
        table[: len(label_map.colors)] = np.array(label_map.colors, np.uint8).reshape(-1, 3)
        if not label_map.colors and (shown := label_map.shown()):
            own = {i: [c >> 16, c >> 8 & 255, c & 255] for i, c in shown.items()}
            others = iter([color for color in table.tolist() if color not in own.values()])
            table[:IGNORE] = [own[i] if i in own else next(others) for i in range(IGNORE)]
        table[IGNORE] = label_map.void
    return table


@functools.cache
def distinct_colors(n: int) -> np.ndarray:
    """Return n colors as uint8 [n, 3], the first ones as different as possible.

    Each color is the one of a grid that is farthest in CIELAB (CIE 1976) from black, white, the
    color of void pixels, and all colors before.
    """
    levels = np.linspace(0, 255, 9).round()
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    lab = _cielab(grid)
    background = _cielab(np.array(_BACKGROUND, float))
    distance = np.linalg.norm(lab[:, None] - background, axis=2).min(1)
    chosen: list[int] = []
    for _ in range(n):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(lab - lab[chosen[-1]], axis=1))
    return grid[chosen].astype(np.uint8)


def _cielab(rgb: np.ndarray) -> np.ndarray:
    """Convert sRGB [N, 3] from 0 to 255 to CIELAB with white point D65, L plus 16."""
    u = rgb / 255
    linear = np.where(u <= 0.04045, u / 12.92, ((u + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = linear @ to_xyz.T / to_xyz.sum(1)
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = f.T
    return np.stack([116 * y, 500 * (x - y), 200 * (y - z)], 1)


def overlay_labels(
    image: np.ndarray, labels: np.ndarray, colors: np.ndarray, opacity: float = 0.6
) -> np.ndarray:
    """Blend an image, uint8 [H, W, 3], with the colors [256, 3] of its labels [H, W]."""
    blended = (1 - opacity) * image + opacity * colors[labels]
    return blended.round().astype(np.uint8)
