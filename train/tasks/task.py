"""What a run learns: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import Array

import fnet
from train.data import Dataset

Batch = dict[str, Array]


class Measured(NamedTuple):
    """What a network makes of a batch of held-out examples.

    Attributes:
      metrics: {name: [batch]}, to be averaged over all examples.
      confusion: ``(labels, predictions)`` [batch, ...], to be counted in a matrix [true,
        predicted]; labels beyond the classes count nowhere. None where nothing is classified.
      probability: [batch], of each prediction, where there is one an example.
    """

    metrics: dict[str, Array]
    confusion: tuple[Array, Array] | None = None
    probability: Array | None = None


class Task(NamedTuple):
    """What a config describes.

    Attributes:
      dataset: training and test examples.
      model: the network, of which the state is made; its ``apply`` is the task's own.
      loss: ``(params, model_state, batch, key) -> (losses [batch], Aux)`` in training.
      measure: ``(params, model_state, batch) -> Measured`` in evaluation.
      scores: ``confusion matrix -> {metric: value}``: what it tells beside the measured metrics.
    """

    dataset: Dataset
    model: Any
    loss: fnet.autodiff.Loss
    measure: Callable[[Any, Any, Batch], Measured]
    scores: Callable[[np.ndarray], dict[str, float]] = lambda confusion: {}
