"""Images from a trained denoiser, as a picture with a row for each label."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fnet import diffusion
from fnet.models.denoiser import Denoiser as Model
from train.arguments import ImageArguments
from train.config import Config, Denoiser
from train.data import Dataset, batch_of
from train.errors import UserError
from train.output import plots
from train.run.checkpoint import Checkpoints
from train.run.class_names import check_classes
from train.run.run_folder import RunFolder
from train.tasks.diffusion import network_of, schedule_of


def draw(folder: RunFolder, config: Config, a: ImageArguments) -> Path:
    """Draws images and writes the picture of them; gives its path.

    Raises:
      UserError: for data whose labels now mean something else, an unknown label, more steps
        than the schedule has, guidance of a run that was never trained without a label, a run
        without a checkpoint, or a picture that cannot be written.
    """
    section = config.model
    assert isinstance(section, Denoiser)
    network = network_of(config)
    classes = network[0].classes
    check_classes(folder, classes)
    names = a.labels or classes
    for name in names:
        if name not in classes:
            raise UserError(f"--labels: expected some of {', '.join(classes)}, got {name}")
    if a.steps and a.steps > section.steps:
        raise UserError(f"--steps: the run's schedule has {section.steps}, got {a.steps}")
    if not section.label_dropout and a.guidance not in (None, 1):
        raise UserError(
            "--guidance: the run was trained with model.label_dropout 0, never without a label; "
            f"give 1, got {a.guidance:g}"
        )
    with Checkpoints(folder.checkpoints, best=a.best) as checkpoints:
        params, state, _ = checkpoints.restore_network(network[1].init)
    labels = np.repeat([classes.index(name) for name in names], a.count)
    drawn = samples(config, network, params, state, jnp.asarray(labels), a)
    path = Path(a.out) if a.out else folder.path / "samples.png"
    guidance = f"guidance {_guidance(section, a):g}"
    title = f"{config.name}: {a.sampler}, {_steps(section, a)} steps, {guidance}"
    try:
        plots.image_grid(
            np.asarray(drawn).reshape(len(names), a.count, *drawn.shape[1:]), names, title, path
        )
    except (OSError, ValueError, RuntimeError) as error:  # of LaTeX, which some formats take
        raise UserError(f"cannot write {path}: {error}; choose another --out") from error
    return path


def samples(
    config: Config,
    network: tuple[Dataset, Model],
    params: Any,
    state: Any,
    labels: Array,
    a: ImageArguments,
) -> Array:
    """Images [N, H, W, C] in [0, 1], float32, one for each label [N].

    Args:
      config: of the run.
      network: its data and its model (`train.tasks.diffusion.network_of`).
      params: of its network.
      state: likewise; contexts are read as in training.
      labels: class indices.
      a: how they are drawn.
    """
    section = config.model
    assert isinstance(section, Denoiser)
    dataset, model = network
    # Of a batch: rows of most sources only say where their images are.
    shape, classes = batch_of(dataset, 1)["image"].shape[1:], len(dataset.classes)
    sampler, schedule = diffusion.samplers.get(a.sampler), schedule_of(section)

    @jax.jit
    def run(params: Any, state: Any, labels: Array, key: Array) -> Array:
        def denoise(x: Array, t: Array, label: Array) -> Array:
            return model.apply(params, state, x, timestep=t, label=label, train=False)[0]

        first, later = jax.random.split(key)
        x = jax.random.normal(first, (len(labels), *shape))
        denoise_all = diffusion.guided(denoise, labels, classes, _guidance(section, a))
        steps = _steps(section, a)
        return sampler(
            denoise_all, schedule, x, steps, predicts=section.predicts, clip=1.0, key=later
        )

    drawn = run(params, state, labels.astype(jnp.int32), jax.random.key(a.seed))
    return jnp.clip((drawn + 1) / 2, 0, 1)


def _guidance(section: Denoiser, a: ImageArguments) -> float:
    return (1.5 if section.label_dropout else 1.0) if a.guidance is None else a.guidance


def _steps(section: Denoiser, a: ImageArguments) -> int:
    return a.steps or min(50, section.steps)
