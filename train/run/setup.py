"""From a config to what runs: the task, the train step and the shapes of its arguments."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
import optax
from jax import Array

import fnet
from fnet import TrainState, autodiff, optim
from fnet.step import Step
from train import data
from train.config import Clipped, Config, ImageFolder, Microbatch, PerExample, TextFile
from train.data import Dataset, buckets, poisson
from train.data.unreadable import UnreadableFiles
from train.errors import UserError
from train.run.evaluation import Evaluate
from train.run.mesh import Layout, shardings
from train.run.privacy import Privacy, privacy_of
from train.run.run_folder import changed_fields
from train.tasks import Task
from train.tasks import build as build_task


class Setup(NamedTuple):
    """Everything of a run but its state.

    Attributes:
      config: what it follows from.
      task: data, network, loss and metrics.
      steps: the length of the run.
      steps_per_epoch: of one pass over the training examples, not rounded.
      schedule: step -> learning rate.
      init: ``key -> TrainState``.
      step: the train step; its remat policy is the planner's to choose.
      state_shapes: of the train state.
      batch_shapes: of a training batch.
      privacy: what noise and sampling promise; None without noise.
      layout: the devices that the shapes are placed on; None: no device is chosen yet.
    """

    config: Config
    task: Task
    steps: int
    steps_per_epoch: float
    schedule: optax.Schedule
    init: Callable[[Array], TrainState]
    step: Step
    state_shapes: TrainState
    batch_shapes: Any
    privacy: Privacy | None
    layout: Layout | None = None

    def on(self, layout: Layout) -> "Setup":
        """The same run, its state and batches placed on devices."""
        state_shapes = layout.state(self.state_shapes)
        return self._replace(
            step=self.step.replace(state_sharding=shardings(state_shapes)),
            state_shapes=state_shapes,
            batch_shapes=layout.batch(self.batch_shapes),
            layout=layout,
        )

    @property
    def devices(self) -> int:
        """How many train together."""
        return self.layout.mesh.size if self.layout else 1

    @property
    def crops(self) -> int:
        """How many parts of each test image the network is given."""
        return self.config.data.crops if isinstance(self.config.data, ImageFolder) else 1

    @property
    def microbatch_choices(self) -> tuple[int, ...] | None:
        """Numbers of microbatches a memory plan may choose from; None for any."""
        fixed = isinstance(self.config.grad, Microbatch | PerExample | Clipped)
        return (self.step.microbatches,) if fixed else None

    def training_batches(self) -> grain.DatasetIterator:
        """Endless batches; their position is saved with ``get_state``."""
        dataset, size = self.task.dataset, self.config.data.batch_size
        seed = self.config.train.seed
        if self.privacy:
            rows = jax.tree.leaves(self.batch_shapes)[0].shape[0]
            return poisson.poisson_batches(dataset, size, seed, rows)
        if longest := _longest(self.config):
            return buckets.bucketed_batches(dataset, size, seed, longest)
        return data.training_batches(dataset, size, seed)

    def with_batch_size(self, rows: int) -> "Setup":
        """The same run with batches of another size, to be compiled."""
        config = dataclasses.replace(
            self.config, data=dataclasses.replace(self.config.data, batch_size=rows)
        )
        return self._replace(config=config).with_batch_shapes(_batch_shapes(self.task, config))

    def put(self, batch: Any) -> Any:
        """A batch where the step takes it from."""
        return self.layout.put(batch) if self.layout else batch

    def with_batch_shapes(self, shapes: Any) -> "Setup":
        """The same run with batches of other shapes."""
        return self._replace(batch_shapes=self.layout.batch(shapes) if self.layout else shapes)

    def compile_schedule(self) -> Callable[[int], float]:
        """``step -> learning rate``: called eagerly it would compile a dozen small programs."""
        compiled = jax.jit(self.schedule).lower(jax.ShapeDtypeStruct((), np.int32)).compile()
        return lambda step: float(compiled(np.int32(step)))

    def compile_init(self) -> Callable[[Array], TrainState]:
        """``key -> TrainState``."""
        places = shardings(self.state_shapes) if self.layout else None
        return jax.jit(self.init, out_shardings=places).lower(jax.random.key(0)).compile()

    def compile_evaluation(self, unreadable: UnreadableFiles, batch_size: int) -> Evaluate:
        """``state -> Evaluation`` on the test examples, so many at a time."""
        return Evaluate(self.task, batch_size, self.state_shapes, unreadable.watch, self.layout)


def setup(config: Config) -> Setup:
    """Everything that follows from a config; compiles and computes nothing yet.

    Raises:
      UserError: if the config's parts do not fit each other or the data.
    """
    task = build_task(config)
    steps_per_epoch = _steps_per_epoch(config, task.dataset)
    steps = _length(config, steps_per_epoch)
    o = config.optim
    if o.warmup_steps > steps:
        raise UserError(
            f"optim.warmup_steps: the run has {steps} steps, fewer than {o.warmup_steps}"
        )
    try:
        schedule = optim.make_schedule(
            o.schedule,
            o.learning_rate,
            steps,
            warmup_steps=o.warmup_steps,
            decay_steps=[epochs * steps_per_epoch for epochs in o.decay_epochs],
            decay_rate=o.decay_rate,
        )
    except ValueError as error:  # of the decays: what else it refuses was checked before
        given = ", ".join(f"{epochs:g}" for epochs in o.decay_epochs) or "none"
        raise UserError(f"optim.decay_epochs: {given}, counted in steps: {error}") from error
    privacy = _privacy(config, data.num_examples(task.dataset.train), steps)
    plain = optim.make_optimizer(
        o.name,
        schedule,
        momentum=o.momentum,
        nesterov=o.nesterov,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
        classifier_scale=o.classifier_learning_rate
        and o.classifier_learning_rate / o.learning_rate,
    )

    mode, optimizer = _mode(config, privacy, plain)

    def init(key: Array) -> TrainState:
        return TrainState.create(task.model, optimizer, key, ema=o.ema_decay is not None)

    # What noise promises is reckoned for steps that are taken whatever their examples are.
    skip = config.nonfinite.skip and privacy is None
    step = fnet.make_step(task.loss, optimizer, mode, ema_decay=o.ema_decay, skip_nonfinite=skip)
    state_shapes = jax.eval_shape(init, jax.random.key(config.train.seed))
    if o.classifier_learning_rate and not any(
        jax.tree.leaves(optim.classifier_mask(state_shapes.params))
    ):
        raise UserError(
            f"optim.classifier_learning_rate: the network {config.model.name} has no layer that is "
            f"named one of {', '.join(sorted(optim.CLASSIFIERS))}"
        )
    batch_shapes = _batch_shapes(task, config)
    if isinstance(config.grad, PerExample | Clipped):
        try:  # not every network has a gradient per example
            jax.eval_shape(step, state_shapes, batch_shapes)
        except ValueError as error:
            raise UserError(f"grad: {error}") from error
    return Setup(
        config=config,
        task=task,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        schedule=schedule,
        init=init,
        step=step,
        state_shapes=state_shapes,
        batch_shapes=batch_shapes,
        privacy=privacy,
    )


def check_resumed(run: Setup, there: Config) -> None:
    """Refuses to go on with other noise than a run was begun with.

    Args:
      run: what is to go on.
      there: the config that it was begun with.

    Raises:
      UserError: if the noise was calibrated for a run of another length.
    """
    here = run.config
    if changed_fields(there, here):
        return  # not the same run: the folder says so
    steps = _length(there, run.steps_per_epoch)
    if isinstance(here.grad, Clipped) and here.grad.epsilon is not None and steps != run.steps:
        raise UserError(
            f"train.steps: the noise was calibrated to spend epsilon {here.grad.epsilon:g} over "
            f"{steps} steps, not {run.steps}; a run that is to become longer names "
            "grad.noise_multiplier instead"
        )


def _longest(config: Config) -> int | None:
    """Tokens of the longest rows where rows differ in length; else None."""
    text = config.data
    return text.context if isinstance(text, TextFile) and text.separator else None


def _steps_per_epoch(config: Config, dataset: Dataset) -> float:
    size, longest = config.data.batch_size, _longest(config)
    if longest and not config.is_private:
        return buckets.batches_per_epoch(dataset, size, longest)
    return data.num_examples(dataset.train) / size


def _length(config: Config, steps_per_epoch: float) -> int:
    # Rounded first: 15 epochs of 50,000 / 48 steps would be a little more than 15,625.
    steps = round(config.train.epochs * steps_per_epoch, 6)
    if config.train.steps is None and not steps < 2**31:
        raise UserError(f"train.epochs: {config.train.epochs:g} are 2^31 steps or more")
    return config.train.steps or max(math.ceil(steps), 1)


def _privacy(config: Config, examples: int, steps: int) -> Privacy | None:
    if not isinstance(config.grad, Clipped):
        return None
    size = config.data.batch_size
    return privacy_of(config.grad, batch_size=size, examples=examples, steps=steps)


def _mode(
    config: Config, privacy: Privacy | None, optimizer: optax.GradientTransformation
) -> tuple[Any, optax.GradientTransformation]:
    """The gradient mode of a config, and the optimizer with the state that the mode adds."""
    grad = config.grad
    mixed = isinstance(config.data, ImageFolder) and config.data.mixup > 0
    if isinstance(grad, PerExample | Clipped) and mixed:
        raise UserError(
            f"data.mixup: an image that is mixed is two examples, and grad.mode {grad.mode} takes "
            "each by itself; give data.mixup 0"
        )
    if isinstance(grad, PerExample):
        return autodiff.per_example(), optimizer
    if isinstance(grad, Microbatch):
        return autodiff.microbatches(grad.microbatches), optimizer
    if not isinstance(grad, Clipped):
        return autodiff.mean, optimizer
    noise = privacy.noise_multiplier if privacy else 0.0
    size, parts = config.data.batch_size, grad.microbatches
    if grad.quantile is None:
        mode = autodiff.clipped(
            grad.clip,
            noise_multiplier=noise,
            expected_batch_size=size,
            per_layer=grad.per_layer,
            automatic=grad.automatic,
            microbatches=parts,
        )
        return mode, optimizer
    if grad.per_layer or grad.automatic is not None:
        other = "per_layer" if grad.per_layer else "automatic"
        raise UserError(
            f"grad.quantile: adapts one bound for whole gradients, which grad.{other} has not; "
            "give one of them"
        )
    try:
        adaptive = autodiff.AdaptiveClipping(
            grad.clip,
            quantile=grad.quantile,
            noise_multiplier=noise,
            expected_batch_size=size,
            microbatches=parts,
        )
    except ValueError as error:
        raise UserError(f"grad.quantile: {error}") from error
    return adaptive, adaptive.wrap_optimizer(optimizer)


def _batch_shapes(task: Task, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    dataset, rows, grad = task.dataset, config.data.batch_size, config.grad
    if config.is_private:
        assert isinstance(grad, Clipped)
        # Whole vectors of 8, and as many on each device, in each part.
        multiple = math.lcm(8, config.mesh.data * config.mesh.fsdp) * grad.microbatches
        rows = poisson.padded_batch_size(data.num_examples(dataset.train), rows, multiple)
    batch = data.sample_batch(dataset, rows)
    if config.is_private or _longest(config):
        batch = data.pad_batch(batch, rows)
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch.items()}
