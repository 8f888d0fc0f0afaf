"""From a config to what runs: the task, the train step and the shapes of its arguments."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import Array

import fnet
from fnet import TrainState, optim
from train import data
from train.config import Config
from train.errors import UserError
from train.evaluate import Evaluate
from train.tasks import classification
from train.tasks.classification import Task


class Setup(NamedTuple):
    """Everything of a run but its state.

    Attributes:
      config: what it follows from.
      task: data, network, loss and metrics.
      steps: the length of the run.
      steps_per_epoch: of one pass over the training examples, not rounded.
      schedule: step -> learning rate.
      init: ``key -> TrainState``.
      step: the jitted train step, with the whole batch at once.
      state_shapes: of the train state.
      batch_shapes: of a training batch.
    """

    config: Config
    task: Task
    steps: int
    steps_per_epoch: float
    schedule: optax.Schedule
    init: Callable[[Array], TrainState]
    step: jax.stages.Wrapped
    state_shapes: TrainState
    batch_shapes: Any

    def with_batch_size(self, rows: int) -> "Setup":
        """The same run with batches of another size, to be compiled."""
        config = dataclasses.replace(
            self.config, data=dataclasses.replace(self.config.data, batch_size=rows)
        )
        return self._replace(config=config, batch_shapes=_batch_shapes(self.task, rows))

    def compile_schedule(self) -> Callable[[int], float]:
        """``step -> learning rate``: called eagerly it would compile a dozen small programs."""
        compiled = jax.jit(self.schedule).lower(jax.ShapeDtypeStruct((), np.int32)).compile()
        return lambda step: float(compiled(np.int32(step)))

    def compile_init(self) -> Callable[[Array], TrainState]:
        """``key -> TrainState``."""
        return jax.jit(self.init).lower(jax.random.key(0)).compile()

    def compile_evaluation(self, batch_size: int | None = None) -> Evaluate:
        """``state -> {metric: mean}`` on the test examples, by default in training's batches."""
        task, batch_size = self.task, batch_size or self.config.data.batch_size
        return Evaluate(task.measure, task.dataset.test, batch_size, self.state_shapes)


def setup(config: Config) -> Setup:
    """Everything that follows from a config; compiles and computes nothing yet.

    Raises:
      UserError: if the config's parts do not fit each other or the data.
    """
    task = classification.build(config)
    steps_per_epoch = data.size(task.dataset.train) / config.data.batch_size
    steps = config.train.steps or math.ceil(config.train.epochs * steps_per_epoch)
    o = config.optim
    try:
        schedule = optim.make_schedule(
            o.schedule, o.learning_rate, steps, warmup_steps=o.warmup_steps
        )
    except ValueError as error:
        raise UserError(f"optim: {error}") from error
    optimizer = optim.make_optimizer(
        o.name,
        schedule,
        momentum=o.momentum,
        nesterov=o.nesterov,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
    )

    def init(key: Array) -> TrainState:
        return TrainState.create(task.model, optimizer, key, ema=o.ema_decay is not None)

    key = jax.random.key(config.train.seed)
    return Setup(
        config=config,
        task=task,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        schedule=schedule,
        init=init,
        step=fnet.make_step(task.loss, optimizer, ema_decay=o.ema_decay),
        state_shapes=jax.eval_shape(init, key),
        batch_shapes=_batch_shapes(task, config.data.batch_size),
    )


def _batch_shapes(task: Task, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype)
        for name, a in task.dataset.train.items()
    }
