"""Setup of a run: everything that follows from its config."""

import math
import operator
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import grain
import jax
import optax
from jax import Array

import fnet
from fnet import TrainState, optim
from fnet.cpu.options import RUNS_ONCE
from fnet.precision import cast_kernels
from fnet.privacy.canaries import GradientCanaries
from fnet.privacy.users import per_user
from fnet.step import Step, divisors
from train import data
from train.config import Config
from train.config.section import without_effect
from train.data import Dataset, buckets, poisson
from train.data.canaries import add_canaries, draw_included, exclude
from train.data.placeholder import Placeholder
from train.data.unreadable import UnreadableFiles
from train.errors import UserError, shorten
from train.networks.published.network import PretrainedNetwork, without_module
from train.output.formats import duration
from train.platform import keeps_freed_memory
from train.privacy import Privacy
from train.run.evaluation import Evaluator
from train.run.mesh import Layout, shardings
from train.run.metrics import best_metric
from train.run.run_folder import changed_fields
from train.tasks import Task
from train.tasks import build as build_task

_WARMUP_SHARE = 0.1
"""Share of warmup steps in a run that is shorter than its warmup."""
_MOST_INITIAL = 0.05
"""Share of the initial network in an average of parameters that is still a result of training."""
_FEW_STEPS = 20
"""A run of fewer steps is probably too short to learn anything."""


class Setup(NamedTuple):
    """Everything that follows from a config: data, loss, step and shapes. It compiles on request.

    Attributes:
      steps_per_epoch: Number of steps per epoch, not rounded.
      schedule: Function ``step -> learning rate``.
      init: Function ``(key, variables=None) -> TrainState``; see `compile_init`.
      step: Train step, whose remat policy is not chosen yet.
      privacy: Privacy guarantee; None without noise.
      layout: Layout of the shapes; None before `on`.
      notes: Where the run differs from its config, for the user.
    """

    config: Config
    task: Task
    steps: int
    steps_per_epoch: float
    schedule: optax.Schedule
    init: Callable[..., TrainState]
    step: Step
    state_shapes: TrainState
    batch_shapes: Any
    privacy: Privacy | None
    canaries: GradientCanaries | None = None
    layout: Layout | None = None
    notes: tuple[str, ...] = ()

    def on(self, layout: Layout) -> "Setup":
        """Return the same run with shardings of state and batches."""
        state_shapes = layout.state(self.state_shapes)
        return self._replace(
            step=self.step.replace(state_sharding=shardings(state_shapes)),
            state_shapes=state_shapes,
            batch_shapes=layout.batch(self.batch_shapes),
            layout=layout,
        )

    @property
    def devices(self) -> int:
        """Number of training devices; 1 before `on`."""
        return self.layout.mesh.size if self.layout else 1

    @property
    def microbatch_choices(self) -> tuple[int, ...] | None:
        """Numbers of microbatches that a memory plan may choose from; None for any.

        Every device can split its shard into them.
        """
        if self.config.grad.has_fixed_microbatches or self.step.microbatches > 1:
            return (self.step.microbatches,)
        rows = jax.tree.leaves(self.batch_shapes)[0].shape[0]
        return tuple(divisors(rows // self.devices)) if self.devices > 1 else None

    def training_batches(self, seed: int) -> grain.DatasetIterator:
        """Return an endless iterator of batches, whose position is in its ``get_state``."""
        dataset, size = self.task.dataset, self.config.data.batch_size
        if dataset.canaries:
            dataset = exclude(dataset, draw_included(dataset.canaries, seed))
        if self.privacy and self.config.examples_per_user:
            k = self.config.examples_per_user
            return poisson.user_batches(dataset, self.privacy.sampling, k, seed)
        if self.privacy:
            return poisson.poisson_batches(dataset, self.privacy.sampling, seed)
        if longest := self.config.data.longest_row:
            return buckets.bucketed_batches(dataset, size, seed, longest)
        local = self.layout.local_rows(size) if self.layout else None
        return data.training_batches(dataset, size, seed, local)

    def with_batch_size(self, rows: int, microbatches: int) -> "Setup":
        """Return the same run with another batch size, for compilation in microbatches."""
        data, grad = self.config.data, self.config.grad.with_microbatches(microbatches)
        config = self.config.replace(data=data.replace(batch_size=rows), grad=grad)
        return self._replace(config=config).with_batch_shapes(_batch_shapes(self.task, config))

    def put(self, batch: Any) -> Any:
        """Distribute a batch over the devices of all processes; one process needs no change."""
        return self.layout.put(batch) if self.layout else batch

    def with_batch_shapes(self, shapes: Any) -> "Setup":
        """Return the same run with other shapes of batches."""
        return self._replace(batch_shapes=self.layout.batch(shapes) if self.layout else shapes)

    def lower_init(self, variables: Any = None) -> jax.stages.Lowered:
        """Lower ``(key, variables) -> TrainState``; see `compile_init`."""
        out_shardings = shardings(self.state_shapes) if self.layout else None
        # The new state takes the buffers of what is read from a published model.
        donated = (1,) if self.config.model.is_published else ()
        init = jax.jit(self.init, out_shardings=out_shardings, donate_argnums=donated)
        return init.lower(jax.random.key(0), variables)

    def compile_init(
        self, variables: Any = None, threads: Executor | None = None
    ) -> Callable[[Array], TrainState]:
        """Compile ``key -> TrainState``.

        Args:
          variables: ``(params, model_state)`` in place of the initial values of a network of fnet's
            layers; arrays that are None keep theirs. A published model begins with the parameters
            of its files, whatever is given.
          threads: Threads to compile in. The first call waits.
        """
        model, read = self.task.model, lambda: variables
        if self.config.model.is_published:
            shapes = model.pretrained(self.state_shapes.params, self.state_shapes.model_state)
            variables, read = shapes, lambda: model.read(shapes)
        options = RUNS_ONCE if jax.default_backend() == "cpu" else None
        threads = threads or ThreadPoolExecutor(1)
        program = threads.submit(self.lower_init(variables).compile, options)
        return lambda key: program.result()(key, read())

    def evaluation(self, unreadable: UnreadableFiles, batch_size: int) -> Evaluator:
        """Trace the evaluation on the test examples, with as many on each device."""
        # More rows than there are examples would be computed in vain.
        batch_size = min(batch_size, data.num_examples(self.task.dataset.test) + self.devices - 1)
        batch_size = max(batch_size // self.devices, 1) * self.devices
        return Evaluator(self.task, batch_size, self.state_shapes, unreadable.watch, self.layout)

    def what_shortens(self, seconds: float) -> str:
        """Say how long an epoch is, of steps of so many seconds, and what makes the run shorter."""
        train, size = self.config.train, getattr(self.config.data, "image_size", None)
        length = f"steps than {train.steps:,}" if train.steps else f"epochs than {train.epochs:g}"
        images = f" or a smaller --data.image-size than {size}" if size else ""
        epoch = duration(seconds * self.steps_per_epoch)
        return f"; {epoch} an epoch. For a shorter run, give fewer --train.{length}{images}"


def setup(config: Config, *, without_data: bool = False, dataset: Dataset | None = None) -> Setup:
    """Load the data and build the step; no program of the run is compiled.

    Args:
      config: Config of the run.
      without_data: Replace data that are not there yet by zeros; see `train.data.placeholder`.
      dataset: Data to use in place of those that the config describes.
    """
    for section in config.sections.values():
        section.check(config)

    missing = config.data.placeholder() if without_data else None
    task = build_task(config, missing.dataset if missing else dataset)
    canaries = None
    if config.grad.num_canaries:
        params, _ = jax.eval_shape(task.model.init, jax.random.key(0))
        canaries = config.grad.draw_canaries(params, config.train.seed)
        dataset = add_canaries(task.dataset, config.grad.num_canaries)
        task = task._replace(dataset=dataset, loss=canaries.add_to(task.loss))
    if config.examples_per_user:
        task = task._replace(loss=per_user(task.loss))

    units = _num_units(task.dataset)
    steps_per_epoch = units / config.data.batch_size
    steps = _num_steps(config, steps_per_epoch)
    schedule = _schedule(config, steps, steps_per_epoch)
    privacy = config.grad.privacy(config, units, steps)
    optimizer = _optimizer(config, schedule)
    mode, optimizer = config.grad.build_for(config, optimizer, privacy, task.dataset, schedule)
    average = optim.schedule_free_params if config.optim.is_schedule_free else None
    init = _init(config, task, optimizer, ema=average is not None)
    step = fnet.make_step(
        task.loss,
        optimizer,
        mode,
        ema_decay=config.optim.ema_decay,
        average=average,
        # Privacy accounting assumes that steps are never skipped depending on data.
        skip_nonfinite=config.nonfinite.skip and privacy is None,
    )

    state_shapes = jax.eval_shape(init, jax.random.key(config.train.seed), None)  # as `lower_init`
    batch_shapes = _batch_shapes(task, config)
    if config.grad.is_per_example:
        try:
            jax.eval_shape(step, state_shapes, batch_shapes)
        except ValueError as error:  # a network that mixes examples
            raise UserError(f"grad: {error}") from error
    notes, network = _notes(config, task.dataset, steps, missing), task.model
    has_adapters = isinstance(network, PretrainedNetwork) and network.is_frozen and not network.new
    if has_adapters and (lacking := without_module(network, state_shapes.params)):
        notes.append(
            f"model.lora_targets: PEFT has no module for {shorten(lacking)}, so that fnet export "
            "writes merged weights only, and refuses --adapters"
        )
    shapes = state_shapes, batch_shapes
    run = Setup(config, task, steps, steps_per_epoch, schedule, init, step, *shapes, privacy)
    return run._replace(canaries=canaries, notes=tuple(notes))


def check_resumed_length(run: Setup, saved: Config, repeated: int = 0) -> None:
    """Check the length of a resumed private run; ``repeated`` of its steps are in no checkpoint."""
    config = run.config
    if changed_fields(saved, config):
        return  # another run, which `RunFolder.resume` reports
    before = _num_steps(saved, run.steps_per_epoch)
    config.grad.check_length(before, run.steps)
    # The difference of two sums with the same noise has none.
    if config.is_private and repeated > 0 and before != run.steps:
        raise UserError(
            f"train.steps: {repeated:,} steps after the last checkpoint would get the noise that "
            f"they had in a run of {before:,} steps; resume with as many, and change that later"
        )


def _notes(config: Config, dataset: Dataset, steps: int, missing: Placeholder | None) -> list[str]:
    notes = [f"data: {missing.note}"] if missing else []
    if keeps_freed_memory() and jax.default_backend() == "cpu":
        if config.memory.budget is not None:
            raise UserError(
                f"memory.budget: {config.memory.budget}, but GLIBC_TUNABLES keeps freed memory, so "
                "that the process holds more than is predicted; leave one of them out"
            )
        notes.append("memory: the process may hold more than predicted (GLIBC_TUNABLES)")
    notes += config.model.notes(config.data, dataset.classes)
    if config.is_private and config.checkpoint.best:
        notes.append(
            "checkpoint.best: no guarantee covers the test examples, by which the best checkpoint "
            "is chosen; if they are private, too, publish the last one, with --checkpoint.no-best"
        )
    if config.is_private and config.tracking.wandb and not config.is_release_only:
        notes.append(
            "tracking.wandb: sends losses and pictures of training examples, which the guarantee "
            "does not cover; give grad.release_only unless the server may see them"
        )
    if not config.is_release_only:  # These depend on training examples.
        notes += [f"data: {note}" for note in dataset.notes]
        if steps < _FEW_STEPS and config.train.steps is None and not missing:
            notes.append(
                f"train.epochs: {config.train.epochs:g} is only {steps} step{'s' * (steps > 1)} "
                f"of {config.data.batch_size} {dataset.rows}, because there are "
                f"{data.num_examples(dataset.train):,} of them; give more epochs, or a smaller "
                "data.batch_size"
            )
    if config.data.targets == "numbers":
        options = {
            "data.class_weights": config.data.class_weights,
            "optim.label_smoothing": config.optim.label_smoothing,
            "optim.focal": config.optim.focal,
        }
        if given := [name for name, value in options.items() if value]:
            notes.append(f"{', '.join(given)}: no effect, because numbers have no classes")
    for name, section in config.sections.items():
        notes += without_effect(section, f"{name}.{{}}".format)
    decay = config.optim.ema_decay
    if decay is not None and (initial := decay**steps) > _MOST_INITIAL:
        notes.append(
            f"optim.ema_decay: {decay:g}, so that the average that is evaluated is "
            f"{initial:.0%} the initial network after {steps:,} steps; give "
            f"{_MOST_INITIAL ** (1 / steps):.2g} or less, or more steps"
        )
    if config.optim.schedule in ("step", "multistep") and not missing:
        epochs = steps * config.data.batch_size / _num_units(dataset)
        if late := [f"{epoch:g}" for epoch in config.optim.decay_epochs if epoch >= epochs]:
            text = f"the run has {epochs:.4g} epochs, so that no decay comes at {', '.join(late)}"
            notes.append(f"optim.decay_epochs: {text}")
    if (metric := config.checkpoint.metric) != best_metric(config):
        notes.append(f"checkpoint.metric: loss instead of {metric}, which numbers do not have")
    warmup_steps = _warmup_steps(config, steps)
    if warmup_steps != config.optim.warmup_steps:
        notes.append(
            f"optim.warmup_steps: {warmup_steps} instead of {config.optim.warmup_steps}, because "
            f"the run has {steps} step{'s' if steps > 1 else ''}"
        )
    return notes


def _num_units(dataset: Dataset) -> int:
    """Count what privacy protects and batches consist of: training examples, or users."""
    return data.num_examples(dataset.train) if dataset.users is None else poisson.num_users(dataset)


def _warmup_steps(config: Config, steps: int) -> int:
    given = config.optim.warmup_steps
    return given if given <= steps else int(_WARMUP_SHARE * steps)


def _schedule(config: Config, steps: int, steps_per_epoch: float) -> optax.Schedule:
    section = config.optim
    try:
        return optim.make_schedule(
            section.schedule,
            section.learning_rate,
            steps,
            warmup_steps=_warmup_steps(config, steps),
            decay_steps=[epochs * steps_per_epoch for epochs in section.decay_epochs],
            decay_rate=section.decay_rate,
        )
    except ValueError as error:  # only decay_steps is not checked yet
        given = ", ".join(f"{epochs:g}" for epochs in section.decay_epochs) or "none"
        raise UserError(f"optim.decay_epochs: {given}, counted in steps: {error}") from error


def _optimizer(config: Config, schedule: optax.Schedule) -> optax.GradientTransformation:
    section = config.optim
    names = "momentum nesterov weight_decay clip_norm layer_decay galore_rank galore_every"
    options: dict[str, Any] = {name: getattr(section, name) for name in names.split()}
    if section.classifier_learning_rate:
        options["classifier_scale"] = section.classifier_learning_rate / section.learning_rate
    optimizer = optim.make_optimizer(section.name, schedule, **options)

    if section.freeze_backbone:
        # The gradients of the others are 0, but private noise is not.
        freeze = optax.transforms.freeze(
            lambda params: jax.tree.map(operator.not_, optim.classifier_mask(params))
        )
        optimizer = optax.chain(optax.masked(optimizer, optim.classifier_mask), freeze)

    def init(params: Any) -> Any:
        has_classifier = any(jax.tree.leaves(optim.classifier_mask(params)))
        options = {
            "classifier_learning_rate": "--optim.classifier-learning-rate None",
            "freeze_backbone": "--optim.no-freeze-backbone",
        }
        needs = [name for name in options if getattr(section, name)]
        if needs and not has_classifier:
            without = options[needs[0]]
            raise UserError(
                f"optim.{needs[0]}: the network {config.model.name} has no layer "
                f"named {' or '.join(sorted(optim.CLASSIFIERS))}; add {without}"
            )
        try:
            return optimizer.init(params)
        except ValueError as error:  # it needs parameters that the network does not have
            raise UserError(f"optim: {error}") from error

    return optimizer._replace(init=init)


def _init(
    config: Config, task: Task, optimizer: optax.GradientTransformation, *, ema: bool
) -> Callable[..., TrainState]:
    has_ema = ema or config.optim.ema_decay is not None

    def choose(initial: Array, given: Array | None) -> Array:
        return initial if given is None else given.astype(initial.dtype)

    def init(key: Array, variables: Any = None) -> TrainState:
        def variables_of(key: Array) -> tuple[Any, Any]:
            if variables is None:
                params, state = task.model.init(key)
            elif config.model.is_published:
                params, state = task.model.place(key, variables)
            else:
                params, state = jax.tree.map(choose, task.model.init(key), variables)
            if config.train.params_dtype != "float32":
                params = cast_kernels(params, config.train.params_dtype)
            return params, state

        model = fnet.Layer(variables_of, task.model.apply)
        return TrainState.create(model, optimizer, key, ema=has_ema)

    return init


def _num_steps(config: Config, steps_per_epoch: float) -> int:
    # Rounding errors must not add a step: 15 epochs of 50,000 / 48 steps are 15,625.
    steps = round(config.train.epochs * steps_per_epoch, 6)
    if config.train.steps is None and not steps < 2**31:
        raise UserError(f"train.epochs: {config.train.epochs:g} gives 2^31 steps or more")
    return config.train.steps or max(math.ceil(steps), 1)


def _batch_shapes(task: Task, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    dataset = task.dataset
    rows = config.grad.batch_rows(config, _num_units(dataset))
    if config.examples_per_user:
        batch = poisson.sample_user_batch(dataset, rows, config.examples_per_user)
    else:
        batch = data.sample_batch(dataset, rows)
        if config.is_private or config.data.longest_row:
            batch = data.pad_batch(batch, rows)
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch.items()}
