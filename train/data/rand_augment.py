"""RandAugment: random operations on colors and geometry, as in torchvision.

All randomness is drawn before, so that the images can be made in other processes.

References:
  Cubuk et al. 2020, "RandAugment: Practical Automated Data Augmentation with a Reduced Search
  Space". Operations, magnitudes and signs equal torchvision's ``RandAugment``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

MAX_MAGNITUDE = 30
"""Largest magnitude; 0 changes least."""


class Operation(NamedTuple):
    """An operation of RandAugment.

    Attributes:
      name: Its name in torchvision.
      apply: ``(image, strength) -> image``.
      strength: ``(magnitude from 0 to 1, width, height) -> strength``.
      is_signed: Whether the strength is negative in half of the cases.
    """

    name: str
    apply: Callable[[Image.Image, float], Image.Image]
    strength: Callable[[float, int, int], float] = lambda m, w, h: 0.0
    is_signed: bool = False


def _move(image: Image.Image, *matrix: float) -> Image.Image:
    """Map each pixel (x, y) of the result to (a x + b y + c, d x + e y + f); black outside."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.NEAREST
    )


def _enhance(name: str, kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return Operation(name, lambda x, s: kind(x).enhance(1 + s), lambda m, w, h: 0.9 * m, True)


def _solarize(image: Image.Image, strength: float) -> Image.Image:
    return ImageOps.solarize(image, strength)  # type: ignore[arg-type]


OPERATIONS = (
    Operation("Identity", lambda x, s: x),
    Operation("ShearX", lambda x, s: _move(x, 1, s, 0, 0, 1, 0), lambda m, w, h: 0.3 * m, True),
    Operation("ShearY", lambda x, s: _move(x, 1, 0, 0, s, 1, 0), lambda m, w, h: 0.3 * m, True),
    Operation(
        "TranslateX",
        lambda x, s: _move(x, 1, 0, -int(s), 0, 1, 0),
        lambda m, w, h: 150 / 331 * w * m,
        True,
    ),
    Operation(
        "TranslateY",
        lambda x, s: _move(x, 1, 0, 0, 0, 1, -int(s)),
        lambda m, w, h: 150 / 331 * h * m,
        True,
    ),
    Operation("Rotate", lambda x, s: x.rotate(s), lambda m, w, h: 30 * m, True),
    _enhance("Brightness", ImageEnhance.Brightness),
    _enhance("Color", ImageEnhance.Color),
    _enhance("Contrast", ImageEnhance.Contrast),
    _enhance("Sharpness", ImageEnhance.Sharpness),
    Operation(
        "Posterize", lambda x, s: ImageOps.posterize(x, int(s)), lambda m, w, h: 8 - round(4 * m)
    ),
    Operation("Solarize", _solarize, lambda m, w, h: 255 * (1 - m)),
    Operation("AutoContrast", lambda x, s: ImageOps.autocontrast(x)),
    Operation("Equalize", lambda x, s: ImageOps.equalize(x)),
)
"""Operations in torchvision's order."""


def draw_rand_augment(n: int, operations: int, generator: np.random.Generator) -> np.ndarray:
    """Draw operations and signs for n images: int [n, operations, 2]."""
    kinds = generator.integers(0, len(OPERATIONS), (n, operations))
    return np.stack([kinds, generator.integers(0, 2, (n, operations))], -1)


def apply_operation(image: Image.Image, kind: int, negative: bool, magnitude: int) -> Image.Image:
    """Apply one of `OPERATIONS` with a magnitude from 0 to `MAX_MAGNITUDE`."""
    operation = OPERATIONS[kind]
    strength = operation.strength(magnitude / MAX_MAGNITUDE, *image.size)
    return operation.apply(image, -strength if negative and operation.is_signed else strength)


def rand_augment(images: np.ndarray, draws: np.ndarray, magnitude: int) -> np.ndarray:
    """Apply the operations of each image uint8 [N, H, W, 3], in place."""
    for i, operations in enumerate(draws.tolist()):
        image = Image.fromarray(images[i])
        for kind, negative in operations:
            image = apply_operation(image, kind, bool(negative), magnitude)
        images[i] = np.asarray(image)
    return images


_ATTEMPTS = 10
ERASING_DRAWS = 2 * _ATTEMPTS + 3
"""Random numbers that one `random_erasing` takes."""


def random_erasing(
    images: np.ndarray, draws: np.ndarray, probability: float, fill: np.ndarray
) -> np.ndarray:
    """Fill a random rectangle of some images [N, H, W, C], in place.

    Its area is 2 to 33 % of the image and its aspect ratio 0.3 to 3.3, as in torchvision's
    ``RandomErasing`` (Zhong et al. 2020, "Random Erasing Data Augmentation"). The first of ten
    attempts that is smaller than the image counts.

    Args:
      images: uint8.
      draws: [N, ERASING_DRAWS] numbers in [0, 1).
      probability: probability that an image has a rectangle.
      fill: [C], color of the rectangle.
    """
    _, height, width, _ = images.shape
    low, high = math.log(0.3), math.log(3.3)
    for i, d in enumerate(draws.tolist()):
        if d[-1] >= probability:
            continue
        for k in range(_ATTEMPTS):
            area = height * width * (0.02 + (0.33 - 0.02) * d[2 * k])
            aspect = math.exp(low + (high - low) * d[2 * k + 1])
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if h < height and w < width:
                top, left = int(d[-3] * (height - h + 1)), int(d[-2] * (width - w + 1))
                images[i, top : top + h, left : left + w] = fill
                break
    return images
