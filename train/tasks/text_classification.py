"""Classification of texts by a published language model."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

import fnet
from train.config import Config
from train.data import Arrays, Dataset
from train.data.batch import Batch
from train.networks.published.network import PretrainedNetwork, with_head
from train.tasks import language
from train.tasks.targets import OneClass
from train.tasks.task import BatchMetrics, Kind, Task


def build(config: Config, dataset: Dataset) -> Task:
    """Build the task of texts with a class each.

    A dense layer without bias turns the features of a text's last token into logits, as in
    transformers' models for sequence classification.
    """
    model = with_head(language.build_network(config), len(dataset.classes))
    logits = functools.partial(_logits, model)
    targets, optim = OneClass(dataset), config.optim

    def loss(params: Any, state: Any, batch: Batch, key: Array) -> tuple[Array, fnet.Aux]:
        found, state = logits(params, state, batch, key)
        losses = targets.losses(found, batch["label"], optim.label_smoothing, optim.focal)
        return losses, fnet.Aux(state, targets.accuracy(found, batch["label"]))

    def measure(params: Any, state: Any, batch: Batch) -> BatchMetrics:
        return targets.measure(logits(params, state, batch, None)[0], batch["label"])

    def scores(examples: Arrays, rows: Arrays, confusion: Any) -> dict[str, float]:
        return targets.scores(examples, rows["label"], confusion)

    return Task(dataset, model, loss, measure, scores)


def _outputs(config: Config, model: PretrainedNetwork) -> Callable[[Any, Any, Any], Array]:
    return lambda params, state, batch: OneClass.outputs(
        _logits(model, params, state, batch, None)[0]
    )


def _logits(
    model: PretrainedNetwork, params: Any, state: Any, batch: Batch, key: Array | None
) -> tuple[Array, Any]:
    tokens, lengths = batch["tokens"].astype(jnp.int32), batch["length"] + 1
    return model.apply(params, state, tokens, key=key, train=key is not None, lengths=lengths)


KIND = Kind(
    "text",
    build,
    lambda config, names: with_head(language.build_network(config), len(names())),
    predicts="labels of texts",
    outputs=_outputs,
    loss_options=("label_smoothing", "focal"),
)
