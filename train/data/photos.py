"""Fields that sources of image files have in common: size, augmentation and evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import override

from train.config.data import Data
from train.config.section import Count, CountOrZero, Fraction, Needs, NonNegative, Positive, Seed
from train.data import Arrays
from train.data.augment import evaluation_crops, resize_shorter_side
from train.data.placeholder import Placeholder, missing_paths, zeros
from train.data.preprocessing import Preprocessor

_CLASSES = 1000
"""Number of classes of images that are not there."""


@dataclass(frozen=True)
class DecodedImages(Data):
    """Image files, which are decoded, augmented and normalized."""

    source: str = ""
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str | tuple[str, ...] = "."
    """Folder of the images."""
    batch_size: Count = 64
    """Batch size."""
    image_size: Count = 224
    """Height and width of the network's input."""
    flip: bool = True
    """Flip each training image horizontally with probability 1/2."""
    color_jitter: Fraction = 0.0
    """Strength of saturation, brightness and contrast jitter in training; 0.4 is common."""
    lighting: NonNegative = 0.0
    """Standard deviation of PCA color noise (AlexNet lighting) in training; 0.1 is common."""
    mean: tuple[Fraction, Fraction, Fraction] = (0.485, 0.456, 0.406)
    """Mean of each color channel, 0 to 1, subtracted from images."""
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Standard deviation of each color channel, which images are divided by."""
    max_bad_fraction: Fraction = 0.01
    """Largest fraction of unreadable files to tolerate; they are reported and skipped."""
    max_pixels: Count = 2**30 // 12
    """Largest image to decode, in pixels; larger files are reported and skipped."""
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    """Approximate fraction of each class to hold out if there is no test split."""
    split_seed: Seed = 0
    """Random seed of that split."""

    @property
    @override
    def image_shape(self) -> tuple[int, ...]:
        return (self.image_size, self.image_size, 3)


@dataclass(frozen=True)
class Photos(DecodedImages):
    """Image files with labels, which are resized and cropped to one size."""

    evaluation_options: ClassVar[dict[str, str]] = {"image_size": "image_size", "resize": "resize"}
    needs: ClassVar[Needs] = {
        "padding": ("crop", ("padded", "reflected").__contains__),
        "min_area": ("crop", "resized".__eq__),
        "magnitude": ("rand_augment", bool),
    }
    border = 0
    """Pixels of reflected border that are added to each test image before ten-crop."""

    crop: Literal["resized", "padded", "reflected", "center"] = "resized"
    """Training crop: random resized, random with zero or reflection padding, or center."""
    min_area: Annotated[float, Gt(0), Le(1)] = 0.08
    """Smallest area of a random resized crop, as a fraction of the image."""
    padding: CountOrZero = 4
    """Padding of padded and reflected crops, in pixels per side."""
    cutout: CountOrZero = 0
    """Side of the square that cutout removes from training images, in pixels; 0 is none."""
    rand_augment: CountOrZero = 0
    """RandAugment: number of random operations per training image; 2 is common, 0 is none."""
    magnitude: Annotated[int, Ge(0), Le(30)] = 9
    """Strength of RandAugment's operations, 0 to 30."""
    random_erasing: Annotated[float, Ge(0), Le(1)] = 0.0
    """Probability that a random rectangle of a training image is erased; 0.25 is common."""
    rotation: Annotated[float, Ge(0), Le(180)] = 0.0
    """Largest random rotation of training images, in degrees."""
    perspective: Fraction = 0.0
    """Largest random shift of each corner of training images, as a fraction of half the image."""
    resize: Count | None = None
    """Shorter side of test images before the center crop; None is 8/7 of image_size."""

    @override
    def for_evaluation(self, options: Mapping[str, Any]) -> Self:
        """Return the section with options; at another size, images show as much as before."""
        new = super().for_evaluation(options)
        if self.resize is None or "resize" in options or new.image_size == self.image_size:
            return new
        return new.replace(resize=round(self.resize * new.image_size / self.image_size))

    @property
    def shorter_side(self) -> int:
        """Shorter side of test images before the center crop."""
        return self.resize or round(self.image_size * 8 / 7)

    @property
    def preprocessor(self) -> Preprocessor:
        """Resize the shorter side, and take the center crop or several crops."""

        def crop(image: np.ndarray) -> np.ndarray:
            return evaluation_crops(image, self.image_size, self.crops, self.border)

        view = resize_shorter_side(self.shorter_side)
        return Preprocessor(self.image_shape, view, crop, self.crops, self.max_pixels)


@dataclass(frozen=True)
class LabeledFiles(Photos):
    """Images with labels, from folders or shards."""

    evaluation_options = {"crops": "crops", "border": "border"} | Photos.evaluation_options
    needs: ClassVar[Needs] = Photos.needs | {"test_fraction": ("folds", (None,).__contains__)}

    mixup: NonNegative = 0.0
    """Mixup strength alpha: mixing weights come from Beta(alpha, alpha); 0 is no mixup."""
    cutmix: NonNegative = 0.0
    """CutMix strength alpha: areas of pasted boxes come from Beta(alpha, alpha); 0 is no CutMix."""
    crops: Literal[1, 2, 10] = 1
    """Test-time crops per image: 1 center crop, 2 with its horizontal flip, 10 for ten-crop."""
    border: CountOrZero = 0
    """Pixels of reflected border that are added to each test image before ten-crop."""
    workers: CountOrZero = 0
    """Number of processes that decode images; 0 decodes in a thread of this process."""
    folds: Annotated[int, Ge(2), Le(100)] | None = None
    """Number of folds of a cross-validation, whose fold is held out; see fnet train --folds."""
    fold: Count = 1
    """Fold that is held out, from 1."""
    class_weights: Literal["balanced"] | None = None
    """Weights of classes in the loss; balanced makes rare classes count as much as others."""
    cache: bool = False
    """Keep decoded images in memory and read each file once; not with resized crops."""

    @override
    def placeholder(self) -> Placeholder | None:
        paths = (self.path,) if isinstance(self.path, str) else self.path
        if (missing := missing_paths(paths)) is None:
            return None
        image = np.zeros((1, *self.image_shape), np.uint8)
        test: Arrays = {"image": image, "label": np.zeros(1, np.int32)}
        batch = test
        if self.mixup or self.cutmix:
            batch = batch | {"label_2": np.zeros(1, np.int32), "mix": np.ones(1, np.float32)}
        if self.crops > 1:
            crops = np.broadcast_to(image[:, None], (1, self.crops, *self.image_shape))
            test = test | {"image": crops}
        return zeros(self.batch_size, batch, test, classes=_CLASSES, missing=missing)
