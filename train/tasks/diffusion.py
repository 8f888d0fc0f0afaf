"""Images out of noise, by label: data, network, loss and metrics."""

from typing import Any

import jax
import numpy as np
from jax import Array

import fnet
from fnet import diffusion, models
from fnet.diffusion import Schedule, schedules
from train.config import Config, Denoiser, ImageFolder
from train.data import Dataset, batch_of, size
from train.errors import UserError
from train.tasks import images
from train.tasks.task import Batch, Measured, Task


def schedule_of(model: Denoiser) -> Schedule:
    """The schedule of noise that a config names."""
    return schedules.get(model.schedule, model.steps)


def network_of(config: Config) -> tuple[Dataset, models.Denoiser]:
    """The images, and the network for them.

    Raises:
      UserError: if the config names no images.
      ValueError: if the network cannot be built.
    """
    assert isinstance(config.model, Denoiser)
    dataset = images.load(config)
    shape = batch_of(dataset, 1)["image"].shape[1:]
    return dataset, config.model.build(shape, len(dataset.classes))


def build(config: Config) -> Task:
    """The diffusion task of a config.

    Raises:
      UserError: if the config names no images, mixes them, cuts several of each, or
        smooths labels.
      ValueError: if the network cannot be built.
    """
    section = config.model
    assert isinstance(section, Denoiser)
    if config.optim.label_smoothing:
        raise UserError(
            f"optim.label_smoothing: {config.optim.label_smoothing:g}, but the network denoiser "
            "tells no classes; give 0"
        )
    if isinstance(config.data, ImageFolder):
        _check_whole(config.data)
    dataset, model = network_of(config)
    place = np.arange(size(dataset.test), dtype=np.int32)
    dataset = dataset._replace(test=dataset.test | {"place": place})
    classes, schedule = len(dataset.classes), schedule_of(section)

    def losses(
        params: Any, state: Any, batch: Batch, label: Array, noise: Array, dropout: Array | None
    ) -> tuple[Array, Any]:
        train = dropout is not None

        def denoise(x: Array, t: Array) -> tuple[Array, Any]:
            x = x.astype(config.train.precision)
            return model.apply(params, state, x, timestep=t, label=label, key=dropout, train=train)

        return diffusion.denoising_losses(
            denoise,
            2 * images.in_unit_interval(batch["image"]) - 1,
            noise,
            schedule,
            predicts=section.predicts,
            weighting=section.weighting,
            has_aux=True,
        )

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        noise, dropout, dropping = jax.random.split(key, 3)
        label = diffusion.drop_labels(dropping, batch["label"], classes, section.label_dropout)
        each, state = losses(params, state, batch, label, noise, dropout)
        return each, fnet.Aux(state, {})

    def measure(params: Any, state: Any, batch: Batch) -> Measured:
        # The same noise for the same example each time, whatever batch it is in, so that
        # evaluations compare.
        def of_one(place: Array, image: Array, label: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(0), place)
            one = {"image": image[None]}
            return losses(params, state, one, label[None], key, None)[0][0]

        each = jax.vmap(of_one)(batch["place"], batch["image"], batch["label"])
        return Measured({"loss": each})

    return Task(dataset, model, loss, measure)


def _check_whole(data: ImageFolder) -> None:
    """Refuses what is for classifiers alone: two images in one, or several views of one."""
    if data.mixup:
        raise UserError(
            f"data.mixup: {data.mixup:g}, but the network denoiser learns each image with its own "
            "label; give data.mixup 0"
        )
    if data.crops != 1:
        raise UserError(
            f"data.crops: {data.crops}, but the network denoiser takes one image of each; "
            "give data.crops 1"
        )
