"""One label an image: data, network, loss and metrics."""

from typing import Any

import jax
from jax import Array

import fnet
from fnet import losses
from train.config import Config, LanguageModel
from train.tasks import images
from train.tasks.task import Batch, Task


def build(config: Config) -> Task:
    """The classification task of a config.

    Raises:
      UserError: if the config names no images.
      ValueError: if the network cannot be built.
    """
    assert not isinstance(config.model, LanguageModel)  # that is another task
    dataset = images.load(config)
    model = config.model.build(dataset.train["image"].shape[1:], len(dataset.classes))

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        logits, state = model.apply(params, state, batch["image"], key=key, train=True)
        label = batch["label"]
        with jax.named_scope("loss"):
            smoothing = config.optim.label_smoothing
            per_example = losses.cross_entropy(logits, label, smoothing=smoothing)
        return per_example, fnet.Aux(state, {"accuracy": losses.accuracy(logits, label)})

    def measure(params: Any, state: Any, batch: Batch) -> dict[str, Array]:
        logits, _ = model.apply(params, state, batch["image"], train=False)
        label = batch["label"]
        return {
            "loss": losses.cross_entropy(logits, label),
            "accuracy": losses.accuracy(logits, label),
        }

    return Task(dataset, model, loss, measure)
