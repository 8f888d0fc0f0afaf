"""Class-conditional diffusion: data, network and loss."""

from typing import Any

import jax
import numpy as np
from jax import Array

import fnet
from fnet import diffusion, models
from fnet.diffusion import Schedule, schedules
from train.config import Config, Denoiser
from train.config.data import Images
from train.data import Dataset, num_examples, sample_batch
from train.errors import UserError
from train.tasks import images
from train.tasks.task import Batch, BatchMetrics, Task


def build_schedule(model: Denoiser) -> Schedule:
    """Build the noise schedule of a config."""
    return schedules.get(model.schedule, model.steps)


def build_network(
    config: Config, dataset: Dataset | None = None
) -> tuple[Dataset, models.Denoiser]:
    """Load the images, by default those of the config, and build the network for them.

    Raises:
      UserError: if the data source has no images.
      ValueError: if the network is invalid.
    """
    assert isinstance(config.model, Denoiser)
    dataset = dataset or images.load(config)
    shape = sample_batch(dataset, 1)["image"].shape[1:]
    return dataset, config.model.build(shape, len(dataset.classes))


def build(config: Config, dataset: Dataset | None = None) -> Task:
    """Build the diffusion task of a config, by default with the data it describes.

    Raises:
      UserError: if the data source has no images, or for mixup, several crops or label smoothing.
      ValueError: if the network is invalid.
    """
    section = config.model
    assert isinstance(section, Denoiser)
    if config.optim.label_smoothing:
        raise UserError(
            f"optim.label_smoothing: {config.optim.label_smoothing:g}, but a denoiser does not "
            "predict labels; give 0"
        )
    if isinstance(config.data, Images):
        _check_single_images(config.data)
    dataset, model = build_network(config, dataset)
    index = np.arange(num_examples(dataset.test), dtype=np.int32)
    dataset = dataset._replace(test=dataset.test | {"index": index})
    classes, schedule = len(dataset.classes), build_schedule(section)

    def losses(
        params: Any, state: Any, batch: Batch, label: Array, noise: Array, dropout: Array | None
    ) -> tuple[Array, Any]:
        train = dropout is not None

        def denoise(x: Array, t: Array) -> tuple[Array, Any]:
            x = x.astype(config.train.precision)
            return model.apply(params, state, x, timestep=t, label=label, key=dropout, train=train)

        return diffusion.denoising_losses(
            denoise,
            2 * images.to_unit_interval(batch["image"]) - 1,
            noise,
            schedule,
            predicts=section.predicts,
            weighting=section.weighting,
            has_aux=True,
        )

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        noise, dropout, dropping = jax.random.split(key, 3)
        label = diffusion.drop_labels(dropping, batch["label"], classes, section.label_dropout)
        per_example, state = losses(params, state, batch, label, noise, dropout)
        return per_example, fnet.Aux(state, {})

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        # Each example always gets the same noise, so that evaluations are comparable.
        def measure_example(index: Array, image: Array, label: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(0), index)
            example = {"image": image[None]}
            return losses(params, state, example, label[None], key, None)[0][0]

        per_example = jax.vmap(measure_example)(batch["index"], batch["image"], batch["label"])
        return BatchMetrics({"loss": per_example})

    return Task(dataset, model, loss, measure)


def _check_single_images(data: Images) -> None:
    """Refuse options for classifiers: mixed images, and several crops per image."""
    if data.mixup:
        raise UserError(
            f"data.mixup: {data.mixup:g}, but a denoiser needs one label per image; give "
            "data.mixup 0"
        )
    if data.crops != 1:
        raise UserError(
            f"data.crops: {data.crops}, but a denoiser needs one crop per image; give data.crops 1"
        )
