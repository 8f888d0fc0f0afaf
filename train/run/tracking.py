"""Metrics and pictures for TensorBoard and Weights & Biases, the only module that uses them."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image

from train.config import Config, flatten
from train.errors import UserError
from train.run.run_folder import RunFolder


class Tracker(NamedTuple):
    """Receiver of what a run measures and draws.

    Attributes:
      log: ``log(step, line)`` for a line of metrics.
      draw: ``draw(step, path)`` for a picture, a PNG that is named as its file, if there is one.
    """

    log: Callable[[int, Mapping[str, float]], None]
    draw: Callable[[int, Path], None]


def check(config: Config) -> None:
    """Check that the libraries of the config's trackers are installed."""
    for enabled, module, extra in (
        (config.tracking.tensorboard, "tensorboardX", "tensorboard"),
        (config.tracking.wandb, "wandb", "wandb"),
    ):
        if enabled:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise UserError(
                    f"tracking.{extra}: {module} is not installed: pip install 'fnet-jax[{extra}]'"
                ) from error


@contextlib.contextmanager
def tracking(config: Config, folder: RunFolder, start: int) -> Iterator[Tracker]:
    """Yield a tracker that sends metrics and pictures to the config's trackers.

    Of steps after ``start`` that a killed run logged, TensorBoard drops the old values, and Weights
    & Biases the new ones.
    """
    with contextlib.ExitStack() as stack:
        trackers: list[Tracker] = []
        if config.tracking.tensorboard:
            trackers.append(stack.enter_context(_tensorboard(folder.tensorboard, start)))
        # One process is enough. The TensorBoard files of the others are in temporary folders.
        if config.tracking.wandb and jax.process_index() == 0:
            trackers.append(stack.enter_context(_wandb(config, folder)))

        def log_all(step: int, line: Mapping[str, Any]) -> None:
            numbers = {k: v for k, v in line.items() if k != "step" and v is not None}
            for tracker in trackers:
                tracker.log(step, numbers)

        def draw_all(step: int, path: Path) -> None:
            for tracker in trackers if path.is_file() else ():
                tracker.draw(step, path)

        yield Tracker(log_all, draw_all)


@contextlib.contextmanager
def _tensorboard(folder: Path, start: int) -> Iterator[Tracker]:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder), purge_step=start + 1) as writer:

        def log(step: int, line: Mapping[str, float]) -> None:
            for name, value in line.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        def draw(step: int, path: Path) -> None:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            writer.add_image(path.stem, pixels, step, dataformats="HWC")
            writer.flush()

        yield Tracker(log, draw)


@contextlib.contextmanager
def _wandb(config: Config, folder: RunFolder) -> Iterator[Tracker]:
    import wandb

    flat: dict[str, Any] = flatten(config)
    id, into = folder.id, str(folder.private)  # a resumed run continues the same curves
    try:
        run = wandb.init(
            project="fnet", name=config.name, id=id, resume="allow", config=flat, dir=into
        )
    except wandb.errors.Error as error:
        raise UserError(f"tracking.wandb: {error}") from error
    exit_code = 1
    try:
        yield Tracker(
            lambda step, line: run.log(dict(line), step=step),
            lambda step, path: run.log({path.stem: wandb.Image(str(path))}, step=step),
        )
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)
