"""A task: data, network, loss and metrics."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax import Array

from train.config import Config, variants
from train.config.data import Content
from train.data import Arrays, Dataset
from train.data.batch import Batch
from train.errors import UserError


class BatchMetrics(NamedTuple):
    """Metrics and predictions of a network on a batch of test examples.

    Attributes:
      metrics: {name: [batch]}; evaluation averages them over all examples.
      confusion: ``(labels, predictions)`` [batch, ...], counted in a confusion matrix
        [true, predicted]. Labels >= the number of classes are ignored. None without classes.
      probability: [batch], probability of each prediction, if there is one per example.
      examples: {name: [batch, ...]}, what else is kept of each example; ``outputs`` [batch, K] are
        the probabilities or numbers that are predicted.
    """

    metrics: dict[str, Array]
    confusion: tuple[Array, Array] | None = None
    probability: Array | None = None
    examples: Mapping[str, Array] = {}


class Task(NamedTuple):
    """Data, network, loss and metrics of a config.

    Attributes:
      dataset: training and test examples.
      model: network. Only the task knows the arguments of its ``apply``.
      loss: training loss, ``(params, model_state, batch, key) -> (losses [batch], Aux)``.
      measure: evaluation, ``(params, model_state, batch) -> BatchMetrics``.
      scores: ``(examples, their rows of the dataset, confusion matrix) -> {metric: value}``,
        additional metrics of all examples; see `train.run.evaluation.Evaluation`.
      before_batches: Computes what batches of the dataset have from the model that a run begins
        with. Before, it is 0. Its argument is the file that keeps the result; None: no file.
    """

    dataset: Dataset
    model: Any
    loss: Callable[..., Any]
    measure: Callable[[Any, Any, Batch], BatchMetrics]
    scores: Callable[[Arrays, Arrays, Any], dict[str, float]] = lambda examples, rows, confusion: {}
    before_batches: Callable[[Path | None], None] = lambda file: None


LOSS_OPTIONS = ("label_smoothing", "focal", "expert_balance")
"""Fields of `train.config.Optim` that change a loss."""


class Kind(NamedTuple):
    """A task of a network, and what commands can do with it.

    Attributes:
      content: Content that the data must have.
      build: Builds the task of a config for a dataset. Raises ValueError if the network is invalid.
      network: Builds the network of a config without data. It may ask for the names of the outputs.
      predicts: What `fnet predict` writes: labels or masks of images, or labels of texts; None if
        it predicts no labels.
      generates: What `fnet sample` generates; None if nothing.
      outputs: ``(config, network) -> (params, model_state, images) -> outputs``, the probabilities
        [N, classes] or logits [N, h, w, classes] that predictions come from. Texts are a batch.
      data_options: Options of ``fnet eval`` that change the data, if the source has them.
      options: Other options of ``fnet eval``.
      loss_options: Fields of `train.config.Optim` that change the loss, of those in `LOSS_OPTIONS`.
    """

    content: Content
    build: Callable[[Config, Dataset], Task]
    network: Callable[[Config, Callable[[], tuple[str, ...]]], Any]
    predicts: Literal["labels", "masks", "labels of texts"] | None = None
    generates: Literal["text", "images"] | None = None
    outputs: Callable[[Config, Any], Callable[[Any, Any, Any], Array]] | None = None
    data_options: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    loss_options: tuple[str, ...] = ()

    @property
    def labels_images(self) -> bool:
        """Whether the network labels images, or their pixels."""
        return self.predicts in ("labels", "masks")

    def check(self, config: Config) -> None:
        """Check that the data source has what the network needs, and the loss what is asked for."""
        if config.data.content == self.content:
            for name in LOSS_OPTIONS:
                if (value := getattr(config.optim, name)) and name not in self.loss_options:
                    raise UserError(
                        f"optim.{name}: {value:g}, but the loss of {self.content} has none; leave "
                        "it out"
                    )
            return
        *others, last = (
            name for name, kind in variants("data").items() if kind.content == self.content
        )
        raise UserError(
            f"data.source: {config.data.source} has no {self.content}, which the network "
            f"{config.model.name} needs; give data.source "
            + " or ".join(filter(None, [", ".join(others), last]))
        )
