"""Random images, to measure training without data."""

import numpy as np

from train.config import Synthetic
from train.data import Arrays, Dataset


def load(config: Synthetic) -> Dataset:
    """Draw images float32 [N, H, W, C] from N(0, 1) and labels int32 [N], with a fixed seed."""
    generator = np.random.default_rng(0)

    def draw(n: int) -> Arrays:
        shape = (n, config.image_size, config.image_size, config.channels)
        return {
            "image": generator.standard_normal(shape, np.float32),
            "label": generator.integers(0, config.classes, n, np.int32),
        }

    return Dataset(
        train=draw(config.examples),
        test=draw(max(config.examples // 4, 1)),
        classes=tuple(str(c) for c in range(config.classes)),
        augment=lambda batch, generator: batch,
    )
