"""What is done to the colours of training images, what is cut out of them, what is mixed."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from train.data import Arrays

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
