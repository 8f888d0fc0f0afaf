"""RandAugment and random erasing equal torchvision's, and draws cover all operations."""

import json
import zlib
from pathlib import Path

import chex
import numpy as np
from PIL import Image

from train.data import rand_augment

PIXELS = (np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8) // 2 + 100).astype(np.uint8)  # fmt: skip

# CRC-32 of `PIXELS` after each operation with magnitude 9 of 30, computed with torchvision 0.28.0
# and Pillow: ``torchvision.transforms.autoaugment._apply_op``, nearest neighbor. A minus is for the
# negative magnitude.
TORCHVISION = json.loads(Path(__file__).with_suffix(".json").read_text())


def test_operations_equal_those_of_torchvision():
    found = {}
    for kind, operation in enumerate(rand_augment.OPERATIONS):
        for negative in (False, True) if operation.is_signed else (False,):
            image = rand_augment.apply_operation(Image.fromarray(PIXELS), kind, negative, 9)
            found["-" * negative + operation.name] = zlib.crc32(np.asarray(image).tobytes())
    assert found == TORCHVISION


def test_operations_are_applied_one_after_the_other():
    names = [operation.name for operation in rand_augment.OPERATIONS]
    draws = np.array([[[names.index("Rotate"), 1], [names.index("Equalize"), 0]]])
    image = Image.fromarray(PIXELS)
    for kind, negative in draws[0].tolist():
        image = rand_augment.apply_operation(image, kind, bool(negative), 20)
    chex.assert_trees_all_equal(
        rand_augment.rand_augment(PIXELS[None].copy(), draws, 20)[0], np.asarray(image)
    )


def test_all_operations_and_signs_are_drawn():
    draws = rand_augment.draw_rand_augment(1000, 2, np.random.default_rng(0))
    chex.assert_shape(draws, (1000, 2, 2))
    counts = np.bincount(draws[..., 0].ravel() * 2 + draws[..., 1].ravel())
    assert len(counts) == 2 * len(rand_augment.OPERATIONS)
    assert counts.min() > 40  # 71 are expected


# Top, left, height and width that torchvision 0.28.0's ``RandomErasing.get_params`` returns for an
# image of 24 x 32, with its random numbers replaced by those below.
RECTANGLES = [
    (3, 7, 20, 7), (2, 16, 14, 13), (1, 15, 16, 9), (4, 6, 10, 24),
    (4, 10, 6, 19), (14, 14, 6, 8), (2, 16, 13, 13), (3, 3, 18, 14),
]  # fmt: skip


def test_erases_the_rectangles_of_torchvision():
    draws = np.random.default_rng(1).random((8, rand_augment.ERASING_DRAWS))
    images = np.full((8, 24, 32, 3), 9, np.uint8)
    expected = images.copy()
    for image, (top, left, height, width) in zip(expected, RECTANGLES, strict=True):
        image[top : top + height, left : left + width] = (1, 2, 3)
    chex.assert_trees_all_equal(
        rand_augment.random_erasing(images, draws, 1.0, np.array([1, 2, 3])), expected
    )


def test_erases_only_some_images():
    draws = np.random.default_rng(1).random((200, rand_augment.ERASING_DRAWS))
    images = rand_augment.random_erasing(np.ones((200, 4, 5, 3), np.uint8), draws, 0.5, np.zeros(3))
    erased = (images == 0).all(3)
    assert erased.any((1, 2)).tolist() == (draws[:, -1] < 0.5).tolist()
    # No rectangle is as high or as wide as the image.
    assert (erased.any(2).sum(1).max(), erased.any(1).sum(1).max()) == (3, 4)
