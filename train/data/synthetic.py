"""Random images: what a step takes can be measured without any data."""

import numpy as np

from train.config import Synthetic
from train.data import Arrays, Dataset


def load(config: Synthetic) -> Dataset:
    """Images float32 [N, H, W, C] from N(0, 1) and labels int32 [N], always the same."""
    generator = np.random.default_rng(0)

    def examples(n: int) -> Arrays:
        shape = (n, config.image_size, config.image_size, config.channels)
        return {
            "image": generator.standard_normal(shape, np.float32),
            "label": generator.integers(0, config.classes, n, np.int32),
        }

    return Dataset(
        train=examples(config.examples),
        test=examples(max(config.examples // 4, 1)),
        classes=tuple(str(c) for c in range(config.classes)),
        augment=lambda batch, generator: batch,
    )
