"""Setup of a run: everything that follows from its config."""

import dataclasses
import functools
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
from fnet.precision import cast_kernels
from fnet.privacy.canaries import GradientCanaries
from fnet.privacy.users import per_user
from fnet.step import Step
from train import data
from train.config import (
    ChatFile,
    Clipped,
    Config,
    Microbatch,
    PerExample,
    TextFile,
)
from train.config.data import Images
from train.data import Dataset, buckets, placeholder, poisson, users
from train.data.canaries import add_canaries, draw_included, exclude
from train.data.model_images import size_note
from train.data.unreadable import UnreadableFiles
from train.errors import UserError
from train.run.evaluation import Evaluator
from train.run.mesh import Layout, shardings
from train.run.privacy import Privacy, privacy_from_config, sampling_from_config
from train.run.run_folder import changed_fields
from train.tasks import Task
from train.tasks import build as build_task
from train.tasks.pretrained import PretrainedNetwork

_WARMUP_FRACTION = 10
_FEW_STEPS = 20
"""A run of fewer steps is probably too short to learn anything."""
"""A run that is shorter than its warmup warms up for one step in so many."""


class Setup(NamedTuple):
    """Everything that follows from a config, before anything is compiled.

    Attributes:
      config: Config of the run.
      task: Data, network, loss and metrics.
      steps: Number of steps of the run.
      steps_per_epoch: Number of steps per epoch, not rounded.
      schedule: Function ``step -> learning rate``.
      init: Function ``key -> TrainState``; for a published model ``(key, parameters)``.
      step: Train step, whose remat policy is not chosen yet.
      state_shapes: Shapes of the train state.
      batch_shapes: Shapes of a training batch.
      privacy: Privacy guarantee; None without noise.
      canaries: Canaries of an audit, or None.
      layout: Layout of the shapes; None for one device.
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
        """Number of training devices."""
        return self.layout.mesh.size if self.layout else 1

    @property
    def crops(self) -> int:
        """Number of crops of each test image."""
        return self.config.data.crops if isinstance(self.config.data, Images) else 1

    @property
    def microbatch_choices(self) -> tuple[int, ...] | None:
        """Numbers of microbatches that a memory plan may choose from; None for any."""
        grad = self.config.grad
        fixed = isinstance(grad, Microbatch | PerExample) or self.step.microbatches > 1
        return (self.step.microbatches,) if fixed else None

    def training_batches(self, seed: int) -> grain.DatasetIterator:
        """Return an endless iterator of batches, whose position is in its ``get_state``.

        Args:
          seed: ``data`` of `train.run.seeds.Seeds`.
        """
        dataset, size = self.task.dataset, self.config.data.batch_size
        if dataset.canaries:
            dataset = exclude(dataset, draw_included(dataset.canaries, seed))
        if self.privacy and self.config.examples_per_user:
            k = self.config.examples_per_user
            return users.user_batches(dataset, self.privacy.sampling, k, seed)
        if self.privacy:
            return poisson.poisson_batches(dataset, self.privacy.sampling, seed)
        if longest := _longest(self.config):
            return buckets.bucketed_batches(dataset, size, seed, longest)
        local = self.layout.local_rows(size) if self.layout else None
        return data.training_batches(dataset, size, seed, local)

    def with_batch_size(self, rows: int, microbatches: int = 1) -> "Setup":
        """Return the same run with another batch size, for compilation in microbatches."""
        config = dataclasses.replace(
            self.config, data=dataclasses.replace(self.config.data, batch_size=rows)
        )
        if isinstance(config.grad, Clipped):  # batches are padded to a multiple
            grad = dataclasses.replace(config.grad, microbatches=microbatches)
            config = dataclasses.replace(config, grad=grad)
        return self._replace(config=config).with_batch_shapes(_batch_shapes(self.task, config))

    def put(self, batch: Any) -> Any:
        """Convert a batch to arrays on the step's devices."""
        return self.layout.put(batch) if self.layout else batch

    def with_batch_shapes(self, shapes: Any) -> "Setup":
        """Return the same run with other shapes of batches."""
        return self._replace(batch_shapes=self.layout.batch(shapes) if self.layout else shapes)

    def compile_schedule(self) -> Callable[[int], float]:
        """Compile the learning-rate schedule as one program instead of a dozen eager ones."""
        compiled = jax.jit(self.schedule).lower(jax.ShapeDtypeStruct((), np.int32)).compile()
        return lambda step: float(compiled(np.int32(step)))

    def lower_init(self, variables: Any = None) -> jax.stages.Lowered:
        """Lower ``(key, variables) -> TrainState``; see `compile_init`."""
        out_shardings = shardings(self.state_shapes) if self.layout else None
        # The new state takes the buffers of what is read from a published model.
        donated = (1,) if isinstance(self.task.model, PretrainedNetwork) else ()
        init = jax.jit(self.init, out_shardings=out_shardings, donate_argnums=donated)
        return init.lower(jax.random.key(0), variables)

    def compile_init(self, variables: Any = None) -> Callable[[Array], TrainState]:
        """Compile ``key -> TrainState``, which reads the parameters of a published model.

        Args:
          variables: ``(params, model_state)`` that a network begins with. Arrays that are None
            take their initial values.
        """
        model = self.task.model
        if not isinstance(model, PretrainedNetwork):
            compiled = self.lower_init(variables).compile()
            return lambda key: compiled(key, variables)
        shapes = model.pretrained(self.state_shapes.params, self.state_shapes.model_state)
        compiled = self.lower_init(shapes).compile()
        return lambda key: compiled(key, model.read(shapes))

    def compile_evaluation(self, unreadable: UnreadableFiles, batch_size: int) -> Evaluator:
        """Compile the evaluation on the test examples."""
        return Evaluator(self.task, batch_size, self.state_shapes, unreadable.watch, self.layout)


def setup(config: Config, *, without_data: bool = False, dataset: Dataset | None = None) -> Setup:
    """Set up a run; nothing is compiled or computed yet.

    Args:
      config: Config of the run.
      without_data: Replace data that are not there yet by zeros; see `train.data.placeholder`.
      dataset: Data to use in place of those that the config describes.

    Raises:
      UserError: if sections of the config do not fit each other or the data.
    """
    missing = placeholder.load(config) if without_data else None
    task = build_task(config, missing.dataset if missing else dataset)
    notes = [f"data: {missing.note}"] if missing else []
    if note := size_note(config):
        notes.append(note)
    notes_are_public = not config.is_release_only
    if notes_are_public:  # they depend on training examples
        notes += [f"data: {note}" for note in task.dataset.notes]
    _check_users(config)
    _check_optimizer(config)
    canaries = _draw_canaries(config, task)
    if canaries:
        task = task._replace(
            dataset=add_canaries(task.dataset, config.canaries), loss=canaries.add_to(task.loss)
        )
    if config.examples_per_user:
        task = task._replace(loss=per_user(task.loss))
    steps_per_epoch = _steps_per_epoch(config, task.dataset)
    steps = _num_steps(config, steps_per_epoch)
    o = config.optim
    warmup_steps = o.warmup_steps
    if warmup_steps > steps:
        warmup_steps = steps // _WARMUP_FRACTION
        notes.append(
            f"optim.warmup_steps: {warmup_steps} instead of {o.warmup_steps}, because the run has "
            f"{steps} step{'s' if steps > 1 else ''}"
        )
    if steps < _FEW_STEPS and config.train.steps is None and notes_are_public and not missing:
        notes.append(
            f"train.epochs: {config.train.epochs:g} is only {steps} step{'s' if steps > 1 else ''} "
            f"of {config.data.batch_size} {task.dataset.rows}, because there are "
            f"{data.num_examples(task.dataset.train):,} of them; give more epochs, or a smaller "
            "data.batch_size"
        )
    try:
        schedule = optim.make_schedule(
            o.schedule,
            o.learning_rate,
            steps,
            warmup_steps=warmup_steps,
            decay_steps=[epochs * steps_per_epoch for epochs in o.decay_epochs],
            decay_rate=o.decay_rate,
        )
    except ValueError as error:  # only decay_steps is not checked yet
        given = ", ".join(f"{epochs:g}" for epochs in o.decay_epochs) or "none"
        raise UserError(f"optim.decay_epochs: {given}, counted in steps: {error}") from error
    privacy = privacy_from_config(config, examples=_num_units(task.dataset), steps=steps)
    base_optimizer = optim.make_optimizer(
        o.name,
        schedule,
        momentum=o.momentum,
        nesterov=o.nesterov,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
        classifier_scale=o.classifier_learning_rate
        and o.classifier_learning_rate / o.learning_rate,
        layer_decay=o.layer_decay,
        galore_rank=o.galore_rank,
        galore_every=o.galore_every,
    )

    mode, optimizer = _mode(config, privacy, base_optimizer)
    average = optim.schedule_free_params if o.name in _SCHEDULE_FREE else None

    def init(key: Array, pretrained: Any = None) -> TrainState:
        has_ema = o.ema_decay is not None or average is not None
        model = task.model
        if pretrained is not None:
            place = getattr(model, "place", functools.partial(_place, model))
            model = model._replace(init=lambda key: place(key, pretrained))
        model = _with_params_dtype(model, config)
        return TrainState.create(model, optimizer, key, ema=has_ema)

    # Privacy accounting assumes that steps are never skipped depending on data.
    skip = config.nonfinite.skip and privacy is None
    step = fnet.make_step(
        task.loss, optimizer, mode, ema_decay=o.ema_decay, average=average, skip_nonfinite=skip
    )
    try:
        state_shapes = jax.eval_shape(init, jax.random.key(config.train.seed))
    except ValueError as error:  # galore without matrices
        raise UserError(f"optim.name: {error}") from error
    if o.classifier_learning_rate and not any(
        jax.tree.leaves(optim.classifier_mask(state_shapes.params))
    ):
        raise UserError(
            f"optim.classifier_learning_rate: the network {config.model.name} has no layer named "
            f"{' or '.join(sorted(optim.CLASSIFIERS))}"
        )
    batch_shapes = _batch_shapes(task, config)
    if isinstance(config.grad, PerExample | Clipped):
        try:  # some networks mix the examples of a batch
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
        canaries=canaries,
        notes=tuple(notes),
    )


def check_same_noise(run: Setup, saved: Config) -> None:
    """Check that a resumed run has the same noise as before.

    Args:
      run: setup of the run.
      saved: config that it began with.

    Raises:
      UserError: if the noise was calibrated for another number of steps.
    """
    config = run.config
    if changed_fields(saved, config):
        return  # another run, which `RunFolder.resume` reports
    steps = _num_steps(saved, run.steps_per_epoch)
    if isinstance(config.grad, Clipped) and config.grad.epsilon is not None and steps != run.steps:
        raise UserError(
            f"train.steps: the noise was calibrated to spend epsilon {config.grad.epsilon:g} over "
            f"{steps} steps, not {run.steps}; use grad.noise_multiplier for a run whose length "
            "may change"
        )


def _longest(config: Config) -> int | None:
    """Return the largest length of rows of text; None if all have the same."""
    text = config.data
    if isinstance(text, ChatFile):
        return None if text.packing else text.context
    return text.context if isinstance(text, TextFile) and text.separator else None


def _steps_per_epoch(config: Config, dataset: Dataset) -> float:
    size, longest = config.data.batch_size, _longest(config)
    if longest and not config.is_private:
        return buckets.batches_per_epoch(dataset, size, longest)
    return _num_units(dataset) / size


def _num_units(dataset: Dataset) -> int:
    """Count what privacy protects and batches consist of: training examples, or users."""
    return data.num_examples(dataset.train) if dataset.users is None else users.num_users(dataset)


def _check_users(config: Config) -> None:
    """Check the options of users.

    Raises:
      UserError: if they are incomplete, or the run is not private.
    """
    user = getattr(config.data, "user", None)
    most = getattr(config.data, "examples_per_user", None)
    if user is None and most is not None:
        raise UserError(f"data.examples_per_user: {most}, but there are no users; give data.user")
    sampled = getattr(config.data, "balanced", False) or getattr(config.data, "repeats", 1) > 1
    if config.is_private and sampled:
        raise UserError(
            "data: balanced and repeats choose training examples, but privacy needs Poisson "
            "sampling; leave them out"
        )
    if user is not None and most is None:
        raise UserError(
            "data.examples_per_user: data.user needs it, too; give the largest number of examples "
            "of a user per step, for example 8"
        )
    if user is not None and not config.is_private:
        raise UserError(
            f"data.user: {user}, but users are protected by noise only; give grad.mode clipped "
            "with grad.epsilon or grad.noise_multiplier"
        )


_SCHEDULE_FREE = ("schedule_free_adamw",)


def _check_optimizer(config: Config) -> None:
    """Check that an optimizer fits the dtype of the parameters and its own options.

    Raises:
      UserError: if it does not.
    """
    o, dtype = config.optim, config.train.params_dtype
    is_compact = o.name.startswith("compact_")
    if is_compact and dtype == "float32":
        raise UserError(
            f"optim.name: {o.name} has 8-bit states for bfloat16 parameters, but "
            "train.params_dtype is float32; give train.params_dtype bfloat16"
        )
    if not is_compact and dtype != "float32":
        raise UserError(
            f"train.params_dtype: {dtype}, but optim.name {o.name} loses steps that are below the "
            "precision of bfloat16; give optim.name compact_adamw, compact_sgd or compact_lion"
        )
    if isinstance(config.grad, PerExample | Clipped) and dtype != "float32":
        raise UserError(
            f"train.params_dtype: {dtype}, but grad.mode {config.grad.mode} needs gradients in "
            "float32; give train.params_dtype float32"
        )
    if o.name in _SCHEDULE_FREE and o.schedule != "constant":
        raise UserError(
            f"optim.schedule: {o.schedule}, but optim.name {o.name} averages in place of a decay; "
            "give optim.schedule constant, with optim.warmup_steps"
        )
    if o.name in _SCHEDULE_FREE and o.ema_decay is not None:
        raise UserError(
            f"optim.ema_decay: {o.ema_decay:g}, but optim.name {o.name} evaluates its own average; "
            "give None"
        )
    for field in ("classifier_learning_rate", "layer_decay"):
        value = getattr(o, field)
        if (is_compact or o.name in _SCHEDULE_FREE) and value is not None:
            raise UserError(
                f"optim.{field}: {value:g}, but optim.name {o.name} has one learning rate for all "
                "layers; give None"
            )
    if o.layer_decay is not None and isinstance(config.data, TextFile | ChatFile):
        raise UserError(f"optim.layer_decay: {o.layer_decay:g}, but it is for image networks")


def _with_params_dtype(model: fnet.Layer, config: Config) -> fnet.Layer:
    """Return the network with parameters of ``train.params_dtype``."""
    if config.train.params_dtype == "float32":
        return model

    def init(key: Array) -> tuple[Any, Any]:
        params, state = model.init(key)
        return cast_kernels(params, config.train.params_dtype), state

    return fnet.Layer(init, model.apply)


def _draw_canaries(config: Config, task: Task) -> GradientCanaries | None:
    """Draw the canaries of an audit.

    Raises:
      UserError: if there are too many for delta or the network.
    """
    if not config.canaries:
        return None
    assert isinstance(config.grad, Clipped)
    count, delta = config.canaries, config.grad.delta
    if delta is not None and 2 * count * delta > 1:
        raise UserError(
            f"grad.audit: {count} canaries are too many at grad.delta {delta:g}; expected at most "
            f"1 / (2 delta) = {int(1 / (2 * delta))}"
        )
    params, _ = jax.eval_shape(task.model.init, jax.random.key(0))
    try:
        # Well above the clip, which may adapt.
        return GradientCanaries.draw(params, count, config.train.seed, norm=10 * config.grad.clip)
    except ValueError as error:
        raise UserError(f"grad.audit: {error}") from error


def _place(model: fnet.Layer, key: Array, variables: Any) -> tuple[Any, Any]:
    """Return initial variables of a network, replaced where others are given."""

    def choose(initial: Array, given: Array | None) -> Array:
        return initial if given is None else given.astype(initial.dtype)

    params, state = jax.tree.map(choose, model.init(key), variables)
    return params, state


def _num_steps(config: Config, steps_per_epoch: float) -> int:
    # Rounding errors must not add a step: 15 epochs of 50,000 / 48 steps are 15,625.
    steps = round(config.train.epochs * steps_per_epoch, 6)
    if config.train.steps is None and not steps < 2**31:
        raise UserError(f"train.epochs: {config.train.epochs:g} gives 2^31 steps or more")
    return config.train.steps or max(math.ceil(steps), 1)


def _mode(
    config: Config, privacy: Privacy | None, optimizer: optax.GradientTransformation
) -> tuple[Any, optax.GradientTransformation]:
    """Return the gradient mode, and the optimizer with the state that the mode adds."""
    grad = config.grad
    mixed = isinstance(config.data, Images) and config.data.mixup > 0
    if isinstance(grad, PerExample | Clipped) and mixed:
        raise UserError(
            f"data.mixup: mixes two examples in one image, but grad.mode {grad.mode} needs their "
            "gradients apart; give data.mixup 0"
        )
    if isinstance(grad, PerExample):
        return autodiff.per_example(), optimizer
    if isinstance(grad, Microbatch):
        return autodiff.microbatches(grad.microbatches), optimizer
    if not isinstance(grad, Clipped):
        return autodiff.mean, optimizer
    noise = privacy.noise_multiplier if privacy else 0.0
    batch_size, microbatches = config.data.batch_size, grad.microbatches
    if grad.quantile is None:
        mode = autodiff.clipped(
            grad.clip,
            noise_multiplier=noise,
            expected_batch_size=batch_size,
            per_layer=grad.per_layer,
            automatic=grad.automatic,
            microbatches=microbatches,
            **({"strategy": privacy.strategy} if privacy else {}),
        )
        return mode, optimizer
    if grad.per_layer or grad.automatic is not None:
        other = "per_layer" if grad.per_layer else "automatic"
        raise UserError(
            f"grad.quantile: adapts one clip for whole gradients, so that grad.{other} cannot be "
            "used; give one of them"
        )
    if grad.noise_bands > 1:
        raise UserError(
            f"grad.noise_bands: {grad.noise_bands}, but grad.quantile needs independent noise; "
            "give one of them"
        )
    try:
        adaptive = autodiff.AdaptiveClipping(
            grad.clip,
            quantile=grad.quantile,
            noise_multiplier=noise,
            expected_batch_size=batch_size,
            microbatches=microbatches,
        )
    except ValueError as error:
        raise UserError(f"grad.quantile: {error}") from error
    return adaptive, adaptive.wrap_optimizer(optimizer)


def _batch_shapes(task: Task, config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    dataset, rows = task.dataset, config.data.batch_size
    if config.is_private:
        # The search for the largest batch also tries more than the training examples.
        assert isinstance(config.grad, Clipped)
        examples = max(config.grad.noise_bands * rows, _num_units(dataset))
        rows = sampling_from_config(config, examples).rows
    if config.examples_per_user:
        batch = users.sample_user_batch(dataset, rows, config.examples_per_user)
    else:
        batch = data.sample_batch(dataset, rows)
        if config.is_private or _longest(config):
            batch = data.pad_batch(batch, rows)
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch.items()}
