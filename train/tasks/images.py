"""Sources of labelled images."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array

from train.config import Config, Digits, ImageFolder, Synthetic
from train.data import Dataset, digits, image_folder, synthetic
from train.errors import UserError

_SOURCES: dict[type, Callable[[Any], Dataset]] = {
    Digits: digits.load,
    ImageFolder: image_folder.load,
    Synthetic: synthetic.load,
}


def normalized(config: Config, image: Array) -> Array:
    """Images [..., H, W, C] as the network takes them.

    Bytes become (x / 255 - mean) / std, channel by channel, float32; what is floating
    already stays as it is.
    """
    if image.dtype != np.uint8:
        return image
    mean, std = (
        np.reshape(getattr(config.data, name), [1] * (image.ndim - 1) + [-1]).astype(np.float32)
        for name in ("mean", "std")
    )
    return (in_unit_interval(image) - mean) / std


def in_unit_interval(image: Array) -> Array:
    """Images in [0, 1], float32: bytes / 255; what is floating already stays as it is."""
    return image.astype(np.float32) / 255 if image.dtype == np.uint8 else image


def load(config: Config) -> Dataset:
    """Images [N, H, W, C] with a label each.

    Raises:
      UserError: if the config's data are no images.
    """
    if type(config.data) not in _SOURCES:
        raise UserError(
            f"data.source: {config.data.source} has no images, which the network "
            f"{config.model.name} takes; give data.source digits, image_folder or synthetic"
        )
    return _SOURCES[type(config.data)](config.data)
