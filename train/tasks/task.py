"""What a run learns: data, network, loss and metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

import fnet
from train.data import Dataset

Batch = dict[str, Array]


class Task(NamedTuple):
    """What a config describes.

    Attributes:
      dataset: training and test examples.
      model: the network, of which the state is made; its ``apply`` is the task's own.
      loss: ``(params, model_state, batch, key) -> (losses [batch], Aux)`` in training.
      measure: ``(params, model_state, batch) -> {metric: [batch]}`` in evaluation.
    """

    dataset: Dataset
    model: Any
    loss: fnet.autodiff.Loss
    measure: Callable[[Any, Any, Batch], dict[str, Array]]
