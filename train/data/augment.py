"""What is done to the colours of training images, what is cut out of them, what is mixed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from train.data import Arrays
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


_GREY = np.array([0.299, 0.587, 0.114])
# Of the pixels' covariance over ImageNet, in [0, 1]: Krizhevsky et al. 2012, as given in
# fb.resnet.torch and in mapillary/inplace_abn, scripts/imagenet/transforms.py.
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
_EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)
_SATURATION, _BRIGHTNESS, _CONTRAST = range(3)


def in_bytes(colour: Sequence[float]) -> tuple[int, ...]:
    """A colour of shares in [0, 1], in [0, 255]."""
    return tuple(round(255 * share) for share in colour)


def draw_colours(
    n: int, jitter: float, lighting: float, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """What is random about the colours of n images, for `colour_matrix`.

    Args:
      n: images.
      jitter: by how much saturation, brightness and contrast may each be less or more.
      lighting: standard deviation along the principal components of colours.
    """
    order = np.argsort(generator.random((n, 3)), axis=1)
    blend = generator.uniform(1 - jitter, 1 + jitter, (n, 3))
    return {"order": order, "blend": blend, "light": generator.normal(0, lighting, (n, 3))}


def colour_matrix(
    mean: np.ndarray, order: np.ndarray, blend: np.ndarray, light: np.ndarray
) -> np.ndarray:
    """Colour jitter and lighting as one affine map of RGB, [3, 4].

    Saturation blends each pixel with its grey value, brightness with black, contrast with
    the image's mean grey value, in the given order, each as ``blend * x + (1 - blend) *
    other``; lighting adds one colour to all pixels. All are affine, and what contrast needs
    of the image, its mean, is mapped along: nothing is rounded or clipped in between.

    Args:
      mean: [3], the image's mean colour, 0 to 255.
      order: [3], a permutation: 0 saturation, 1 brightness, 2 contrast.
      blend: [3], of each, by these numbers.
      light: [3], along each principal component, in standard deviations of the pixels.
    """
    matrix, offset = np.eye(3), np.zeros(3)
    for kind in order:
        alpha = blend[kind]
        if kind == _SATURATION:
            step = alpha * np.eye(3) + (1 - alpha) * _GREY
            matrix, offset = step @ matrix, step @ offset
        else:
            if kind == _CONTRAST:
                grey = _GREY @ (matrix @ mean + offset)
            matrix, offset = alpha * matrix, alpha * offset
            if kind == _CONTRAST:
                offset = offset + (1 - alpha) * grey
    offset = offset + 255 * (_EIGENVECTORS @ (light * _EIGENVALUES))
    return np.column_stack([matrix, offset])


def coloured(images: np.ndarray, colours: Arrays) -> np.ndarray:
    """Images uint8 [N, H, W, 3], changed in place, each by its `colour_matrix`."""
    pixels = images.shape[1] * images.shape[2]
    for i, image in enumerate(images):
        mean = image.sum(0, dtype=np.uint32).sum(0) / pixels
        matrix = colour_matrix(mean, *(colours[k][i] for k in ("order", "blend", "light")))
        images[i] = Image.fromarray(image).convert("RGB", tuple(matrix.ravel().tolist()))
    return images


def cutout(images: np.ndarray, centre: np.ndarray, side: int, fill: np.ndarray) -> np.ndarray:
    """Images [N, H, W, C], changed in place, without a square that may reach over the border.

    DeVries and Taylor 2017, "Improved Regularization of Convolutional Neural Networks with
    Cutout".

    Args:
      images: uint8.
      centre: float [N, 2] in [0, 1): its vertical and horizontal place.
      side: of the square, in pixels.
      fill: [C], what stands there instead.
    """
    _, height, width, _ = images.shape
    for i, (y, x) in enumerate((centre * (height, width)).astype(int).tolist()):
        top, left = y - side // 2, x - side // 2
        images[i, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = fill
    return images


def mixed(batch: Arrays, alpha: float, generator: np.random.Generator) -> Arrays:
    """Each image with a share of another one of the batch, and the label of that.

    ``image = mix * image + (1 - mix) * other``, the share from Beta(alpha, alpha), in steps
    of 1/256: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization". An image that
    could not be read is mixed with none.

    Args:
      batch: ``image`` uint8 [N, H, W, C], ``label`` [N], ``weight`` [N].
      alpha: more is nearer to halves.
      generator: of shares and pairs.

    Returns:
      The batch, its images mixed, with ``label_2`` [N] and ``mix`` float32 [N], the share
      of the first.
    """
    images, weight = batch["image"], batch["weight"]
    n = len(images)
    other = generator.permutation(n)
    share = np.round(256 * generator.beta(alpha, alpha, n)).astype(np.uint16)
    share[(weight == 0) | (weight[other] == 0)] = 256
    out = np.empty_like(images)
    for i in range(n):  # one at a time stays within the cache
        own = images[i] * share[i]
        rest = images[other[i]] * (256 - share[i])
        out[i] = (own + rest + np.uint16(128)) >> 8
    mix = (share / 256).astype(np.float32)
    return batch | {"image": out, "label_2": batch["label"][other], "mix": mix}
