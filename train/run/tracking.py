"""Metrics and pictures for TensorBoard and Weights & Biases, the only module that uses them."""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
      draw: ``draw(step, name, path)`` for a picture, a PNG.
    """

    log: Callable[[int, Mapping[str, float]], None]
    draw: Callable[[int, str, Path], None]


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
def tracking(config: Config, folder: Path, start: int) -> Iterator[Tracker]:
    """Yield a tracker that sends metrics and pictures to the config's trackers.

    Of steps after ``start`` that a killed run logged, TensorBoard drops the old values, and Weights
    & Biases the new ones.
    """
    with contextlib.ExitStack() as stack:
        trackers: list[Tracker] = []
        if config.tracking.tensorboard:
            trackers.append(stack.enter_context(_tensorboard(folder / "tensorboard", start)))
        # One process is enough. The TensorBoard files of the others are in temporary folders.
        if config.tracking.wandb and jax.process_index() == 0:
            trackers.append(stack.enter_context(_wandb(config, folder)))

        def log_all(step: int, line: Mapping[str, Any]) -> None:
            numbers = {k: v for k, v in line.items() if k != "step" and v is not None}
            for tracker in trackers:
                tracker.log(step, numbers)

        def draw_all(step: int, name: str, path: Path) -> None:
            for tracker in trackers:
                tracker.draw(step, name, path)

        yield Tracker(log_all, draw_all)


def draw(tracker: Tracker, step: int, pictures: Iterable[Path]) -> None:
    """Send pictures of a run's folder that exist, under the names of their files."""
    for path in pictures:
        if path.is_file():
            tracker.draw(step, path.stem, path)


@contextlib.contextmanager
def _tensorboard(folder: Path, start: int) -> Iterator[Tracker]:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder), purge_step=start + 1) as writer:

        def log(step: int, line: Mapping[str, float]) -> None:
            for name, value in line.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        def draw(step: int, name: str, path: Path) -> None:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            writer.add_image(name, pixels, step, dataformats="HWC")
            writer.flush()

        yield Tracker(log, draw)


@contextlib.contextmanager
def _wandb(config: Config, folder: Path) -> Iterator[Tracker]:
    import wandb

    flat: dict[str, Any] = flatten(config)
    id = RunFolder(folder).id  # so that a resumed run continues the same curves
    try:
        run = wandb.init(
            project="fnet", name=config.name, id=id, resume="allow", config=flat, dir=str(folder)
        )
    except wandb.errors.Error as error:
        raise UserError(f"tracking.wandb: {error}") from error
    exit_code = 1
    try:
        yield Tracker(
            lambda step, line: run.log(dict(line), step=step),
            lambda step, name, path: run.log({name: wandb.Image(str(path))}, step=step),
        )
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)
