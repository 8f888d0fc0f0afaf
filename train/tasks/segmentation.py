"""A label for every pixel: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import fnet
from fnet.losses.segmentation import pixel_cross_entropy, pixel_predictions
from train.config import Config, DeepLab, SegmentationFolder
from train.data import Dataset, batch_of, segmentation_folder
from train.errors import UserError
from train.output.confusion import pixel_scores
from train.tasks import images
from train.tasks.task import Batch, Measured, Task


class Views(NamedTuple):
    """How each image is seen in evaluation; probabilities are averaged over all views.

    Attributes:
      scales: to which it is resized.
      flip: whether each is seen mirrored as well.
    """

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    @property
    def number(self) -> int:
        """Of each image."""
        return len(self.scales) * (2 if self.flip else 1)


def build(config: Config) -> Task:
    """The segmentation task of a config.

    Raises:
      UserError: if the config names no images with masks.
      ValueError: if the network cannot be built.
    """
    assert isinstance(config.model, DeepLab)
    dataset = _load(config)
    model = config.model.build(batch_of(dataset, 1)["image"].shape[1:], len(dataset.classes))

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        image = images.normalized(config, batch["image"])
        logits, state = model.apply(params, state, image, key=key, train=True)
        with jax.named_scope("loss"):
            smoothing = config.optim.label_smoothing
            found = pixel_cross_entropy(logits, batch["mask"], smoothing=smoothing)
        return found.losses, fnet.Aux(state, {"pixel_accuracy": found.accuracy})

    return Task(dataset, model, loss, measuring(config, model, Views()), pixel_scores)


def measuring(config: Config, model: Any, views: Views) -> Callable[[Any, Any, Batch], Measured]:
    """A task's ``measure``, by several views of each image."""
    logits_of = logits_by_view(config, model, views)

    def measure(params: Any, state: Any, batch: Batch) -> Measured:
        mask = batch["mask"]
        _, height, width = mask.shape
        logits = logits_of(params, state, batch["image"])
        found = pixel_predictions(logits, (height, width), mask)
        assert found.losses is not None  # there are labels
        return Measured({"loss": found.losses}, (mask, found.labels))

    return measure


def logits_by_view(
    config: Config, model: Any, views: Views
) -> Callable[[Any, Any, Array], list[Array]]:
    """``(params, state, image [N, H, W, 3]) -> logits [N, h, w, classes] of each view``.

    As mapillary/inplace_abn tests its networks: the image is resized bilinearly, the logits
    of a mirrored one are mirrored back.
    """

    def logits_of(params: Any, state: Any, image: Array) -> list[Array]:
        image = images.normalized(config, image)
        n, height, width, channels = image.shape
        found: list[Array] = []
        for scale in views.scales:
            shape = (n, round(height * scale), round(width * scale), channels)
            view = jax.image.resize(image, shape, "bilinear", antialias=False)
            found.append(model.apply(params, state, view, train=False)[0])
            if views.flip:
                mirrored, _ = model.apply(params, state, jnp.flip(view, 2), train=False)
                found.append(jnp.flip(mirrored, 2))
        return found

    return logits_of


def _load(config: Config) -> Dataset:
    if not isinstance(config.data, SegmentationFolder):
        raise UserError(
            f"data.source: {config.data.source} has no masks, which the network "
            f"{config.model.name} takes; give data.source segmentation_folder"
        )
    return segmentation_folder.load(config.data)
