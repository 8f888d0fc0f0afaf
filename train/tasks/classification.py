"""One label an image: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

import fnet
from fnet import losses
from fnet.layer import Layer
from train.config import Config, Digits, Synthetic
from train.data import Dataset, digits, synthetic
from train.errors import UserError

Batch = dict[str, Array]

_SOURCES: dict[type, Callable[[Any], Dataset]] = {Digits: digits.load, Synthetic: synthetic.load}


class Task(NamedTuple):
    """What a config describes.

    Attributes:
      dataset: training and test examples.
      model: the network.
      loss: ``(params, model_state, batch, key) -> (losses [batch], Aux)`` in training.
      measure: ``(params, model_state, batch) -> {metric: [batch]}`` in evaluation.
    """

    dataset: Dataset
    model: Layer
    loss: fnet.autodiff.Loss
    measure: Callable[[Any, Any, Batch], dict[str, Array]]


def build(config: Config) -> Task:
    """The classification task of a config.

    Raises:
      UserError: if the network cannot be built, or not for these images.
    """
    dataset = _SOURCES[type(config.data)](config.data)
    image_shape = dataset.train["image"].shape[1:]
    try:
        model = config.model.build(image_shape, len(dataset.classes))
        params, state = jax.eval_shape(model.init, jax.random.key(0))
        image = jax.ShapeDtypeStruct((2, *image_shape), "float32")
        jax.eval_shape(lambda p, s, x: model.apply(p, s, x, train=False), params, state, image)
    except (TypeError, ValueError) as error:
        raise UserError(f"model: {error}") from error

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
