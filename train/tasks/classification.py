"""One label an image: data, network, loss and metrics."""

from typing import Any

import jax
from jax import Array

import fnet
from fnet import losses
from train.config import Config, LanguageModel
from train.data import batch_of
from train.tasks import images
from train.tasks.task import Batch, Measured, Task


def build(config: Config) -> Task:
    """The classification task of a config.

    Raises:
      UserError: if the config names no images.
      ValueError: if the network cannot be built.
    """
    assert not isinstance(config.model, LanguageModel)  # that is another task
    dataset = images.load(config)
    shape = batch_of(dataset, 1)["image"].shape[1:]
    model = config.model.build(shape, len(dataset.classes))

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        image = images.normalized(config, batch["image"])
        logits, state = model.apply(params, state, image, key=key, train=True)
        label = batch["label"]
        with jax.named_scope("loss"):
            smoothing = config.optim.label_smoothing
            per_example = losses.cross_entropy(logits, label, smoothing=smoothing)
        return per_example, fnet.Aux(state, {"accuracy": losses.accuracy(logits, label)})

    def measure(params: Any, state: Any, batch: Batch) -> Measured:
        image = images.normalized(config, batch["image"])
        logits, _ = model.apply(params, state, image, train=False)
        label = batch["label"]
        metrics = {
            "loss": losses.cross_entropy(logits, label),
            "accuracy": losses.accuracy(logits, label),
        }
        return Measured(metrics, (label, logits.argmax(-1)))

    return Task(dataset, model, loss, measure)
