"""Sources of labelled images."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from train.config import ArrayFile, Config, Denoiser, Digits, HuggingFace, ImageFolder, Synthetic
from train.data import (
    Arrays,
    Dataset,
    arrays,
    digits,
    huggingface,
    image_folder,
    size,
    synthetic,
)
from train.errors import UserError

_SOURCES: dict[type, Callable[[Any], Dataset]] = {
    Digits: digits.load,
    ImageFolder: image_folder.load,
    ArrayFile: arrays.load,
    HuggingFace: huggingface.load,
    Synthetic: synthetic.load,
}


def normalized(config: Config, image: Array) -> Array:
    """Images [..., H, W, C] as the network takes them.

    Bytes are divided by 255. Then (x - mean) / std, channel by channel, of data that have them.
    They are of the config's precision, and so is then what layers make of them.
    """
    image = in_unit_interval(image)
    if hasattr(config.data, "mean"):
        mean, std = (
            np.reshape(getattr(config.data, name), [1] * (image.ndim - 1) + [-1]).astype(np.float32)
            for name in ("mean", "std")
        )
        image = (image - mean) / std
    return image.astype(config.train.precision)


def in_unit_interval(image: Array) -> Array:
    """Images in [0, 1], float32: bytes / 255; what is floating already stays as it is."""
    return image.astype(np.float32) / 255 if image.dtype == np.uint8 else image


def load(config: Config) -> Dataset:
    """Images [N, H, W, C] with a label each.

    Raises:
      UserError: if the config's data are no images, or floating ones that the network, which
        draws images in [0, 1], could not have drawn.
    """
    if type(config.data) not in _SOURCES:
        raise UserError(
            f"data.source: {config.data.source} has no images, which the network "
            f"{config.model.name} takes; give data.source digits, image_folder, arrays, "
            "huggingface or synthetic"
        )
    dataset = _SOURCES[type(config.data)](config.data)
    if isinstance(config.model, Denoiser) and isinstance(config.data, ArrayFile):
        _check_unit_interval(dataset)
    return dataset


def _check_unit_interval(dataset: Dataset) -> None:
    def to_train(rows: Arrays) -> Arrays:
        return dataset.augment(rows, np.random.default_rng(0))

    for part, made in ((dataset.train, to_train), (dataset.test, dataset.prepare)):
        for start in range(0, size(part), 64):
            image = made({name: a[start : start + 64] for name, a in part.items()})["image"]
            if image.dtype != np.uint8 and (image.min() < 0 or image.max() > 1):
                raise UserError(
                    f"data.images: values from {image.min():g} to {image.max():g}; a network "
                    "that draws images takes uint8, or floating ones in [0, 1]"
                )
