"""Networks of images, and the normalization of images."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from fnet.optim import classifier_mask
from train.config import Config
from train.data import Dataset, sample_batch


def build_network(config: Config, dataset: Dataset) -> Any:
    """Build the network of a config for the images and classes of a dataset."""
    shape = sample_batch(dataset, 1)["image"].shape[1:]
    return config.model.for_images(shape, dataset.classes, config.train.precision)


def network_for(config: Config, names: Callable[[], Sequence[str]]) -> Any:
    """Build the network of a config for named classes, without data."""
    return config.model.for_images(image_shape(config), names(), config.train.precision)


def training_apply(config: Config, model: Any) -> Callable[..., tuple[Array, Any]]:
    """Return ``(params, state, image, key) -> (logits, state)``, for training.

    A frozen backbone computes as in evaluation, and no gradient enters it.
    """
    if not config.optim.freeze_backbone:
        return lambda params, state, image, key: model.apply(
            params, state, image, key=key, train=True
        )

    def apply(params: Any, state: Any, image: Array, key: Array) -> tuple[Array, Any]:
        params = jax.tree.map(
            lambda p, is_trained: p if is_trained else jax.lax.stop_gradient(p),
            params,
            classifier_mask(params),
        )
        return model.apply(params, state, image, train=False)[0], state

    return apply


def image_shape(config: Config) -> tuple[int, ...]:
    """Return the shape [H, W, C] of the network's input; files of photos need not be there."""
    if config.data.image_shape is not None:
        return config.data.image_shape
    return tuple(sample_batch(config.data.load(), 1)["image"].shape[1:])


def normalize(config: Config, image: Array) -> Array:
    """Convert images [..., H, W, C] to the network's input, in the config's precision.

    uint8 images are divided by 255. Data with a mean and std are then standardized per channel.
    """
    image = to_unit_interval(image)
    if config.data.mean:
        mean, std = (
            np.reshape(values, [1] * (image.ndim - 1) + [-1]).astype(np.float32)
            for values in (config.data.mean, config.data.std)
        )
        image = (image - mean) / std
    return image.astype(config.train.precision)


def to_unit_interval(image: Array) -> Array:
    """Divide uint8 images by 255, in float32; return floating images unchanged."""
    return image.astype(np.float32) / 255 if image.dtype == np.uint8 else image


def in_float32(config: Config) -> Config:
    """Return the config with float32 activations."""
    return config.replace(train=config.train.replace(precision="float32"))
