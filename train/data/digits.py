"""Scikit-learn's bundled handwritten digits: 1,797 images of 8 x 8 pixels, no download.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998. Scikit-learn ships its test part.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt
from typing_extensions import override

from train.config.data import Data
from train.config.section import Count, Seed
from train.data import Arrays, Dataset, num_examples
from train.data.augment import shift
from train.data.preprocessing import Preprocessor, whole_image
from train.errors import UserError


@dataclass(frozen=True)
class Digits(Data):
    """Scikit-learn's handwritten digits: 1,797 grayscale images of 8 x 8 pixels, no download."""

    source: Literal["digits"] = "digits"
    """Data source; --data.source NAME --help lists the fields of another one."""
    batch_size: Count = 64
    """Batch size."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Fraction of each class that is held out for testing."""
    split_seed: Seed = 0
    """Random seed of the train/test split."""
    max_shift: Annotated[int, Ge(0), Lt(8)] = 1
    """Random shift of training images, in pixels per direction."""

    def load(self, *, private: bool = False) -> Dataset:
        """Load images float32 [N, 8, 8, 1] in [0, 1] and labels int32 [N], split by class."""
        from sklearn.datasets import load_digits  # slow to import
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = (digits.images / 16.0).astype(np.float32)[..., None]
        labels = digits.target.astype(np.int32)
        try:
            train, test = train_test_split(
                np.arange(len(labels)), test_size=self.test_fraction, stratify=labels,
                random_state=self.split_seed,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(
                f"data.test_fraction: {self.test_fraction} does not work: {error}"
            ) from error

        def augment(batch: Arrays, generator: np.random.Generator) -> Arrays:
            offsets = generator.integers(0, 2 * self.max_shift + 1, (2, num_examples(batch))).T
            images = shift(batch["image"].copy(), offsets, self.max_shift, reflect=False)
            return batch | {"image": images}

        numbers = np.concatenate([train, test])
        return Dataset(
            train={"image": images[train], "label": labels[train]},
            test={"image": images[test], "label": labels[test]},
            classes=tuple(str(c) for c in digits.target_names),
            augment=augment,
            place=lambda row: {"index": int(numbers[row])},
        )

    @property
    @override
    def image_shape(self) -> tuple[int, ...]:
        return (8, 8, 1)

    @property
    def preprocessor(self) -> Preprocessor:
        """Resize the whole image, in gray; digits are white on black."""
        return whole_image(8, channels=1)
