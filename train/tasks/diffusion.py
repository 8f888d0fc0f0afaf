"""Class-conditional diffusion: data, network and loss."""

from typing import Any

import jax
import numpy as np
from jax import Array

import fnet
from fnet import diffusion
from fnet.diffusion import schedules
from train.config import Config
from train.data import Arrays, Dataset, num_examples
from train.data.batch import Batch
from train.errors import UserError
from train.networks.transformer import Denoiser
from train.tasks import images
from train.tasks.task import BatchMetrics, Kind, Task


def build(config: Config, dataset: Dataset) -> Task:
    """Build the diffusion task of a config, for images in [0, 1] of one label and one crop."""
    section = config.model
    assert isinstance(section, Denoiser)  # whose task it is
    for name, what, only in (("mixup", "label", 0), ("cutmix", "label", 0), ("crops", "crop", 1)):
        if (value := getattr(config.data, name)) != only:
            raise UserError(
                f"data.{name}: {value:g}, but a denoiser needs one {what} per image; give "
                f"data.{name} {only}"
            )
    if not config.data.is_in_unit_interval:
        _check_unit_interval(dataset)
    model = images.build_network(config, dataset)
    index = np.arange(num_examples(dataset.test), dtype=np.int32)
    dataset = dataset._replace(test=dataset.test | {"index": index})
    classes, schedule = len(dataset.classes), schedules.get(section.schedule, section.steps)

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
            example: Batch = {"image": image[None]}
            return losses(params, state, example, label[None], key, None)[0][0]

        per_example = jax.vmap(measure_example)(batch["index"], batch["image"], batch["label"])
        return BatchMetrics({"loss": per_example})

    return Task(dataset, model, loss, measure)


def _check_unit_interval(dataset: Dataset) -> None:
    def augment(rows: Arrays) -> Arrays:
        return dataset.augmented(rows, np.random.default_rng(0))

    for split, make_batch in ((dataset.train, augment), (dataset.test, dataset.prepare)):
        for start in range(0, num_examples(split), 64):
            image = make_batch({name: a[start : start + 64] for name, a in split.items()})["image"]
            if image.dtype != np.uint8 and (image.min() < 0 or image.max() > 1):
                raise UserError(
                    f"data.images: values from {image.min():g} to {image.max():g}; a denoiser "
                    "needs uint8 images, or floating ones in [0, 1]"
                )


KIND = Kind("images", build, images.network_for, generates="images")
