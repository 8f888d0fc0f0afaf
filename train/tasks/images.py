"""Image data sources and the normalization of images."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from train.config import (
    ArrayFile,
    Config,
    Denoiser,
    Digits,
    HuggingFace,
    ImageFolder,
    ImageShards,
    Synthetic,
)
from train.data import (
    Arrays,
    Dataset,
    arrays,
    digits,
    huggingface,
    image_folder,
    image_shards,
    num_examples,
    sample_batch,
    synthetic,
)
from train.data.preprocessing import Preprocessor
from train.errors import UserError

_SOURCES: dict[type, Callable[[Any], Dataset]] = {
    Digits: digits.load,
    ImageFolder: image_folder.load,
    ImageShards: image_shards.load,
    ArrayFile: arrays.load,
    HuggingFace: huggingface.load,
    Synthetic: synthetic.load,
}


def normalize(config: Config, image: Array) -> Array:
    """Convert images [..., H, W, C] to the network's input, in the config's precision.

    uint8 images are divided by 255. Data with a mean and std are then standardized per channel.
    """
    image = to_unit_interval(image)
    if hasattr(config.data, "mean"):
        mean, std = (
            np.reshape(getattr(config.data, name), [1] * (image.ndim - 1) + [-1]).astype(np.float32)
            for name in ("mean", "std")
        )
        image = (image - mean) / std
    return image.astype(config.train.precision)


def to_unit_interval(image: Array) -> Array:
    """Divide uint8 images by 255, in float32; return floating images unchanged."""
    return image.astype(np.float32) / 255 if image.dtype == np.uint8 else image


def load(config: Config) -> Dataset:
    """Load images [N, H, W, C] with one label each.

    Raises:
      UserError: if the data source has no images, or a denoiser gets images outside [0, 1].
    """
    if type(config.data) not in _SOURCES:
        raise UserError(
            f"data.source: {config.data.source} has no images, which the network "
            f"{config.model.name} needs; give data.source digits, image_folder, image_shards, "
            "arrays, huggingface or synthetic"
        )
    dataset = _SOURCES[type(config.data)](config.data)
    if isinstance(config.model, Denoiser) and isinstance(config.data, ArrayFile):
        _check_unit_interval(dataset)
    return dataset


def image_shape(config: Config) -> tuple[int, ...]:
    """Return the shape [H, W, C] of the network's input; image files need not be there.

    Raises:
      UserError: if the data source has no images.
    """
    if isinstance(config.data, ArrayFile | Synthetic):
        return tuple(sample_batch(load(config), 1)["image"].shape[1:])
    return Preprocessor(config).shape


def _check_unit_interval(dataset: Dataset) -> None:
    def augment(rows: Arrays) -> Arrays:
        return dataset.augment(rows, np.random.default_rng(0))

    for split, make_batch in ((dataset.train, augment), (dataset.test, dataset.prepare)):
        for start in range(0, num_examples(split), 64):
            image = make_batch({name: a[start : start + 64] for name, a in split.items()})["image"]
            if image.dtype != np.uint8 and (image.min() < 0 or image.max() > 1):
                raise UserError(
                    f"data.images: values from {image.min():g} to {image.max():g}; a denoiser "
                    "needs uint8 images, or floating ones in [0, 1]"
                )
