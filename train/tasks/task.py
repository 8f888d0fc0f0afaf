"""A task: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import Array

import fnet
from train.data import Dataset

Batch = dict[str, Array]


class BatchMetrics(NamedTuple):
    """Metrics and predictions of a network on a batch of test examples.

    Attributes:
      metrics: {name: [batch]}; evaluation averages them over all examples.
      confusion: ``(labels, predictions)`` [batch, ...], counted in a confusion matrix
        [true, predicted]. Labels >= the number of classes are ignored. None without classes.
      probability: [batch], probability of each prediction, if there is one per example.
    """

    metrics: dict[str, Array]
    confusion: tuple[Array, Array] | None = None
    probability: Array | None = None


class Task(NamedTuple):
    """Data, network, loss and metrics of a config.

    Attributes:
      dataset: training and test examples.
      model: network. Only the task knows the arguments of its ``apply``.
      loss: training loss, ``(params, model_state, batch, key) -> (losses [batch], Aux)``.
      measure: evaluation, ``(params, model_state, batch) -> BatchMetrics``.
      scores: ``confusion matrix -> {metric: value}``, additional metrics of all examples.
    """

    dataset: Dataset
    model: Any
    loss: fnet.autodiff.Loss
    measure: Callable[[Any, Any, Batch], BatchMetrics]
    scores: Callable[[np.ndarray], dict[str, float]] = lambda confusion: {}
