"""Random images, to measure training without data."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from typing_extensions import override

from train.config.data import Data
from train.config.section import Count
from train.data import Arrays, Dataset
from train.data.preprocessing import Preprocessor, whole_image
from train.errors import UserError


@dataclass(frozen=True)
class Synthetic(Data):
    """Random images with random labels, for measurements."""

    source: Literal["synthetic"] = "synthetic"
    """Data source; --data.source NAME --help lists the fields of another one."""
    batch_size: Count = 32
    """Batch size."""
    image_size: Count = 224
    """Image height and width."""
    channels: Count = 3
    """Channels of each image."""
    classes: Count = 1000
    """Number of classes."""
    examples: Count = 256
    """Number of training images; there are a quarter as many test images."""

    def load(self, *, private: bool = False) -> Dataset:
        """Draw images float32 [N, H, W, C] from N(0, 1) and labels int32 [N], with a fixed seed."""
        generator = np.random.default_rng(0)

        def draw(n: int) -> Arrays:
            shape = (n, self.image_size, self.image_size, self.channels)
            return {
                "image": generator.standard_normal(shape, np.float32),
                "label": generator.integers(0, self.classes, n, np.int32),
            }

        return Dataset(
            train=draw(self.examples),
            test=draw(max(self.examples // 4, 1)),
            classes=tuple(str(c) for c in range(self.classes)),
        )

    @property
    @override
    def image_shape(self) -> tuple[int, ...]:
        return (self.image_size, self.image_size, self.channels)

    @property
    def preprocessor(self) -> Preprocessor:
        """Resize the whole image."""
        if self.channels not in (1, 3):
            raise UserError(
                f"data.source: {self.source} has images of {self.channels} channels; image files "
                "have 1 or 3"
            )
        return whole_image(self.image_size, self.channels)
