"""Data augmentation, in training and at test time: crops, flips, color jitter, cutout, mixup.

Functions that take ``draws`` are deterministic: all randomness is drawn before, so that the
images can be made in other processes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from train.data import Arrays
from train.data.decode import View, ViewOf

_CROP_ATTEMPTS = 10
RESIZED_CROP_DRAWS = 2 * _CROP_ATTEMPTS + 2
"""Random numbers that one `random_resized_crop` takes."""


def random_resized_crop(
    width: int,
    height: int,
    size: int,
    draws: np.ndarray,
    *,
    area: tuple[float, float] = (0.08, 1.0),
) -> View:
    """Crop a part of random area, aspect ratio and position, and resize it.

    The area is uniform and the aspect ratio log-uniform. The first of ten attempts that lies
    within the image counts. If there is none, the result is the largest center crop with an
    allowed ratio. This is torchvision's RandomResizedCrop (Szegedy et al. 2015, "Going deeper
    with convolutions").

    Args:
      width, height: size of the image.
      size: height and width of the result.
      draws: [RESIZED_CROP_DRAWS] numbers in [0, 1).
      area: smallest and largest area, as a fraction of the image.
    """
    ratio = 3 / 4, 4 / 3  # of width and height
    low, high = math.log(ratio[0]), math.log(ratio[1])
    d: list[float] = draws.tolist()
    for i in range(_CROP_ATTEMPTS):
        pixels = width * height * (area[0] + (area[1] - area[0]) * d[2 * i])
        shape = math.exp(low + (high - low) * d[2 * i + 1])
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
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


def resize_shorter_side(size: int) -> ViewOf:
    """Resize the image so that its shorter side has ``size`` pixels (torchvision's Resize)."""

    def view(width: int, height: int) -> View:
        short = min(width, height)
        sides = int(size * width / short), int(size * height / short)
        return View((0, 0, width, height), sides)

    return view


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Crop the center [size, size, C] of an image [H, W, C] that is at least as large."""
    top, left = (round((side - size) / 2) for side in image.shape[:2])
    return image[top : top + size, left : left + size]


def evaluation_crops(image: np.ndarray, size: int, crops: int, border: int = 0) -> np.ndarray:
    """Make the crops of a test image: [size, size, C], or [crops, size, size, C].

    Args:
      image: [H, W, C], with H and W at least ``size``.
      size: height and width of each crop.
      crops: 1 is the center, 2 adds its flip, and 10 are the corners and the center, then flips.
      border: pixels of reflected border that are added to the image first.
    """
    if border:
        image = np.pad(image, ((border, border), (border, border), (0, 0)), "reflect")
    center, ends = center_crop(image, size), (slice(None, size), slice(-size, None))
    if crops == 1:
        return center
    own = [*([image[y, x] for y in ends for x in ends] if crops == 10 else ()), center]
    return np.stack([*own, *(crop[:, ::-1] for crop in own)])


def shift(images: np.ndarray, offsets: np.ndarray, padding: int, *, reflect: bool) -> np.ndarray:
    """Pad each image [N, H, W, C] and crop it to its size, in place.

    Args:
      images: [N, H, W, C]; modified.
      offsets: int [N, 2], from 0 to 2 * padding: upper left corner (y, x) in the padded image.
      padding: pixels per side.
      reflect: pad by reflection instead of zeros.
    """
    if not padding:
        return images
    _, height, width, _ = images.shape
    widths = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    padded = np.pad(images, widths, "reflect" if reflect else "constant")
    for i, (y, x) in enumerate(offsets.tolist()):
        images[i] = padded[i, y : y + height, x : x + width]
    return images


def horizontal_flip(images: np.ndarray, flip: np.ndarray) -> np.ndarray:
    """Flip the images [N, H, W, ...] whose entry of ``flip`` [N] is True, in place."""
    columns = np.arange(images.shape[2])[::-1]
    for i in np.flatnonzero(flip):
        images[i] = images[i].take(columns, axis=1)  # copies whole pixels, unlike a slice
    return images


class Placement(NamedTuple):
    """Position of a part of an image on a square canvas.

    Attributes:
      view: part of the image, and its size on the canvas.
      at: x and y of its upper left corner on the canvas.
    """

    view: View
    at: tuple[int, int]


def fit(width: int, height: int, size: int) -> Placement:
    """Resize the whole image so that its longer side is ``size``, at the upper left corner."""
    long = max(width, height)
    sides = max(round(width * size / long), 1), max(round(height * size / long), 1)
    return Placement(View((0, 0, width, height), sides), (0, 0))


def random_scale_crop(
    width: int, height: int, size: int, draws: np.ndarray, scale: tuple[float, float]
) -> Placement:
    """Resize the image by a random scale, and crop it or place it at a random position.

    Args:
      width, height: size of the image.
      size: height and width of the canvas.
      draws: [3] numbers in [0, 1): scale, horizontal and vertical position.
      scale: smallest and largest scale, relative to `fit`.
    """
    u, *positions = draws.tolist()
    factor = (scale[0] + (scale[1] - scale[0]) * u) * size / max(width, height)
    sides, starts, ends, at = [], [], [], []
    for length, position in zip((width, height), positions, strict=True):
        scaled = max(round(length * factor), 1)
        shift = int(position * (abs(scaled - size) + 1))  # in the image, or on the canvas
        start, side = (shift, size) if scaled > size else (0, scaled)
        starts.append(start * length / scaled)
        ends.append((start + side) * length / scaled)
        sides.append(side)
        at.append(0 if scaled > size else shift)
    return Placement(
        View((starts[0], starts[1], ends[0], ends[1]), (sides[0], sides[1])), (at[0], at[1])
    )


_GRAY = np.array([0.299, 0.587, 0.114])
# Eigenvalues and eigenvectors of the covariance of ImageNet's pixels in [0, 1] (Krizhevsky et al.
# 2012), as in fb.resnet.torch and in scripts/imagenet/transforms.py of mapillary/inplace_abn.
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
_EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)
_SATURATION, _BRIGHTNESS, _CONTRAST = range(3)


def to_uint8(color: Sequence[float]) -> tuple[int, ...]:
    """Convert a color from [0, 1] to [0, 255]."""
    return tuple(round(255 * value) for value in color)


def draw_color_jitter(
    n: int, strength: float, lighting: float, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw the arguments of `color_matrix` for n images.

    Args:
      n: number of images.
      strength: largest relative change of saturation, brightness and contrast.
      lighting: standard deviation of the noise along the principal components of colors.
      generator: source of randomness.
    """
    order = np.argsort(generator.random((n, 3)), axis=1)
    blend = generator.uniform(1 - strength, 1 + strength, (n, 3))
    return {"order": order, "blend": blend, "light": generator.normal(0, lighting, (n, 3))}


def color_matrix(
    mean: np.ndarray, order: np.ndarray, blend: np.ndarray, light: np.ndarray
) -> np.ndarray:
    """Compute color jitter and lighting as one affine map of RGB, [3, 4].

    Saturation blends each pixel with its gray value, brightness with black, and contrast with the
    image's mean gray value: ``blend * x + (1 - blend) * other``. Lighting adds one color to all
    pixels. The map also transforms the mean that contrast needs, so that nothing is rounded or
    clipped between the operations.

    Args:
      mean: [3], mean color of the image, 0 to 255.
      order: [3], order of the operations: 0 saturation, 1 brightness, 2 contrast.
      blend: [3], blend factor of each operation.
      light: [3], noise along each principal component, in standard deviations of ImageNet's pixels.
    """
    matrix, offset = np.eye(3), np.zeros(3)
    for kind in order:
        alpha = blend[kind]
        if kind == _SATURATION:
            step = alpha * np.eye(3) + (1 - alpha) * _GRAY
            matrix, offset = step @ matrix, step @ offset
        else:
            other = _GRAY @ (matrix @ mean) if kind == _CONTRAST else 0.0
            matrix, offset = alpha * matrix, alpha * offset + (1 - alpha) * other
    offset = offset + 255 * (_EIGENVECTORS @ (light * _EIGENVALUES))
    return np.column_stack([matrix, offset])


def color_jitter(images: np.ndarray, draws: Arrays) -> np.ndarray:
    """Apply the `color_matrix` of each image uint8 [N, H, W, 3], in place."""
    pixels = images.shape[1] * images.shape[2]
    for i, image in enumerate(images):
        mean = image.sum(0, dtype=np.uint32).sum(0) / pixels
        matrix = color_matrix(mean, *(draws[k][i] for k in ("order", "blend", "light")))
        images[i] = Image.fromarray(image).convert("RGB", tuple(matrix.ravel().tolist()))
    return images


def cutout(images: np.ndarray, center: np.ndarray, side: int, fill: np.ndarray) -> np.ndarray:
    """Fill a square of each image [N, H, W, C], in place. The square can cross the border.

    DeVries and Taylor 2017, "Improved Regularization of Convolutional Neural Networks with
    Cutout".

    Args:
      images: uint8.
      center: float [N, 2] in [0, 1), relative position (y, x) of the square's center.
      side: side of the square, in pixels.
      fill: [C], color of the square.
    """
    _, height, width, _ = images.shape
    for i, (y, x) in enumerate((center * (height, width)).astype(int).tolist()):
        top, left = y - side // 2, x - side // 2
        images[i, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = fill
    return images


def draw_warp(
    n: int, rotation: float, perspective: float, generator: np.random.Generator
) -> np.ndarray:
    """Draw rotations and perspectives.

    Each corner moves into the image by up to ``perspective`` of half its sides, as in torchvision's
    RandomPerspective; then the image turns by up to ``rotation`` degrees.

    Returns:
      float64 [n, 9]: an angle in degrees, and x and y of the shift of each corner, relative to the
      sides: upper left, upper right, lower right, lower left.
    """
    angles = generator.uniform(-rotation, rotation, (n, 1))
    inward = np.array([1, 1, -1, 1, -1, -1, 1, -1]) * generator.random((n, 8)) * perspective / 2
    return np.concatenate([angles, inward], 1)


def warp(images: np.ndarray, draws: np.ndarray, fill: tuple[int, ...]) -> np.ndarray:
    """Turn and distort images uint8 [N, H, W, 3] by `draw_warp`, bilinearly, in place.

    ``fill`` is the color outside the image.
    """
    _, height, width, _ = images.shape
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64)
    center = np.array([width, height]) / 2
    for i, (angle, *inward) in enumerate(draws):
        turn = np.deg2rad(angle)
        matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        moved = corners + np.reshape(inward, (4, 2)) * (width, height)
        moved = (moved - center) @ matrix.T + center
        images[i] = Image.fromarray(images[i]).transform(
            (width, height),
            Image.Transform.PERSPECTIVE,
            tuple(perspective_from(moved, corners)),
            Image.Resampling.BILINEAR,
            fillcolor=tuple(fill),
        )
    return images


def perspective_from(points: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return a to h, float64 [8], that map four points [4, 2] to four others.

    ``x' = (a x + b y + c) / (g x + h y + 1)`` and ``y' = (d x + e y + f) / (g x + h y + 1)``.
    """
    rows = []
    for (x, y), (u, v) in zip(points, targets, strict=True):
        rows.append([x, y, 1, 0, 0, 0, -u * x, -u * y])
        rows.append([0, 0, 0, x, y, 1, -v * x, -v * y])
    return np.linalg.solve(np.array(rows), targets.ravel())


def draw_mixup(n: int, alpha: float, generator: np.random.Generator, cutmix: float = 0.0) -> Arrays:
    """Draw ``other`` int64 [n], the image that is mixed into each, and ``mix`` uint16 [n].

    ``mix / 256`` is from Beta(alpha, alpha). With ``cutmix``, half of the images, or all if alpha
    is 0, have a ``box`` float64 [n, 4] of the other one: y, x of its center, height and width,
    relative to the image. Its area is from Beta(cutmix, cutmix). Others have a box of zeros.
    """
    other = generator.permutation(n)
    mix = np.round(256 * generator.beta(alpha or 1, alpha or 1, n)).astype(np.uint16)
    if not cutmix:
        return {"other": other, "mix": mix}
    side = np.sqrt(1 - generator.beta(cutmix, cutmix, (n, 1)))
    box = np.concatenate([generator.random((n, 2)), side, side], 1)
    is_cut = generator.random(n) < (0.5 if alpha else 1.0)
    return {"other": other, "mix": np.where(is_cut, 256, mix), "box": box * is_cut[:, None]}


def mixup(batch: Arrays, draws: Arrays) -> Arrays:
    """Mix each image with another one of the batch (Zhang et al. 2018, "mixup").

    ``image = mix * image + (1 - mix) * other``, with ``mix`` in multiples of 1/256. With a box, the
    pixels of the box are the other image's, and ``mix`` is the share of the others (Yun et al.
    2019, "CutMix"). Unreadable images are not mixed.

    Args:
      batch: ``image`` uint8 [N, H, W, C], ``label`` [N], ``weight`` [N].
      draws: from `draw_mixup`.

    Returns:
      The batch with mixed images, ``label_2`` [N] of the other images, and ``mix`` float32 [N].
    """
    images, weight = batch["image"], batch["weight"]
    other, mix = draws["other"], draws["mix"].copy()
    unmixed = (weight == 0) | (weight[other] == 0)
    mix[unmixed] = 256
    share = (mix / 256).astype(np.float32)
    out = np.empty_like(images)
    for i in range(len(images)):  # one image at a time stays in the cache
        first = images[i] * mix[i]
        second = images[other[i]] * (256 - mix[i])
        out[i] = (first + second + np.uint16(128)) >> 8
        if "box" in draws and not unmixed[i]:
            rows, columns = _box(draws["box"][i], *images.shape[1:3])
            out[i, rows, columns] = images[other[i], rows, columns]
            share[i] *= 1 - np.float32(out[i, rows, columns, 0].size / out[i, ..., 0].size)
    return batch | {"image": out, "label_2": batch["label"][other], "mix": share}


def _box(box: np.ndarray, height: int, width: int) -> tuple[slice, slice]:
    """Return the rows and columns of a box, which ends where the image does."""
    y, x, tall, wide = box * (height, width, height, width)
    rows, columns = (
        slice(max(round(middle - side / 2), 0), max(round(middle + side / 2), 0))
        for middle, side in ((y, tall), (x, wide))
    )
    return rows, columns
