"""Semantic segmentation: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import fnet
from fnet.losses.segmentation import pixel_cross_entropy, pixel_predictions
from train.config import Config
from train.data import Dataset
from train.data.batch import Batch
from train.tasks import images
from train.tasks.scores import pixel_scores
from train.tasks.task import BatchMetrics, Kind, Task


class Views(NamedTuple):
    """Test-time augmentation: views of each image whose probabilities are averaged.

    Attributes:
      scales: factors by which each image is resized.
      flip: whether each view is also flipped horizontally.
    """

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False

    @property
    def num_views(self) -> int:
        """Number of views per image."""
        return len(self.scales) * (2 if self.flip else 1)


def build(config: Config, dataset: Dataset) -> Task:
    """Build the segmentation task of a config."""
    model = images.build_network(config, dataset)

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        image = images.normalize(config, batch["image"])
        logits, state = model.apply(params, state, image, key=key, train=True)
        with jax.named_scope("loss"):
            result = pixel_cross_entropy(
                logits,
                batch["mask"],
                smoothing=config.optim.label_smoothing,
                class_weights=dataset.class_weights,
            )
        return result.losses, fnet.Aux(state, {"pixel_accuracy": result.accuracy})

    measure = make_measure(config, model, Views())
    return Task(dataset, model, loss, measure, lambda examples, rows, counts: pixel_scores(counts))


def make_measure(
    config: Config, model: Any, views: Views
) -> Callable[[Any, Any, Batch], BatchMetrics]:
    """Make the ``measure`` function of a task with test-time augmentation."""
    apply = logits_by_view(config, model, views)

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        mask = batch["mask"]
        _, height, width = mask.shape
        logits = apply(params, state, batch["image"])
        predictions = pixel_predictions(logits, (height, width), mask)
        assert predictions.losses is not None  # because there are labels
        counts = mask < logits[0].shape[-1]
        right = ((mask == predictions.labels) & counts).sum((1, 2))
        share = right / jnp.maximum(counts.sum((1, 2)), 1)
        return BatchMetrics(
            {"loss": predictions.losses},
            (mask, predictions.labels),
            examples={"pixel_accuracy": share.astype(jnp.float32)},
        )

    return measure


def logits_by_view(
    config: Config, model: Any, views: Views
) -> Callable[[Any, Any, Array], list[Array]]:
    """Return ``(params, state, image [N, H, W, 3]) -> [logits [N, h, w, classes] per view]``.

    As mapillary/inplace_abn tests its networks: images are resized bilinearly, and the logits of
    a flipped image are flipped back.
    """

    def apply(params: Any, state: Any, image: Array) -> list[Array]:
        image = images.normalize(config, image)
        n, height, width, channels = image.shape
        logits: list[Array] = []
        for scale in views.scales:
            shape = (n, round(height * scale), round(width * scale), channels)
            view = jax.image.resize(image, shape, "bilinear", antialias=False)
            logits.append(model.apply(params, state, view, train=False)[0])
            if views.flip:
                flipped, _ = model.apply(params, state, jnp.flip(view, 2), train=False)
                logits.append(jnp.flip(flipped, 2))
        return logits

    return apply


def _outputs(config: Config, model: Any) -> Callable[[Any, Any, Array], Array]:
    view_logits = logits_by_view(config, model, Views())
    return lambda params, state, image: view_logits(params, state, image)[0]


KIND = Kind(
    "masks",
    build,
    images.network_for,
    predicts="masks",
    outputs=_outputs,
    data_options=("image_size", "mask_reading"),
    options=("scales", "flip"),
    loss_options=("label_smoothing",),
)
