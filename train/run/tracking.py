"""Metrics for TensorBoard and Weights & Biases, beside metrics.jsonl; the only import of both."""

import contextlib
import importlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from train.config import Config, flatten
from train.errors import UserError

Log = Callable[[int, Mapping[str, float]], None]
"""``log(step, line)``: takes a line of metrics."""


def check(config: Config) -> None:
    """Refuses at once what is wanted and not installed.

    Raises:
      UserError: naming what to install.
    """
    for wanted, module, extra in (
        (config.tracking.tensorboard, "tensorboardX", "tensorboard"),
        (config.tracking.wandb, "wandb", "wandb"),
    ):
        if wanted:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise UserError(
                    f"tracking.{extra}: {module} is not installed: pip install 'fnet-jax[{extra}]'"
                ) from error


@contextlib.contextmanager
def tracking(config: Config, folder: Path, start: int) -> Iterator[Log]:
    """While entered, lines go wherever the config says.

    Args:
      config: of the run.
      folder: the run's; TensorBoard finds its files in ``tensorboard``.
      start: the step after which the run goes on. What a killed run told of later ones
        TensorBoard drops; Weights & Biases keeps it, and drops what comes again.

    Raises:
      UserError: if Weights & Biases does not begin, for want of a login or of a network.
    """
    with contextlib.ExitStack() as stack:
        logs: list[Log] = []
        if config.tracking.tensorboard:
            logs.append(stack.enter_context(_tensorboard(folder / "tensorboard", start)))
        # Of several processes one: the others' folders are dropped, their runs there would not be.
        if config.tracking.wandb and jax.process_index() == 0:
            logs.append(stack.enter_context(_wandb(config, folder)))

        def log(step: int, line: Mapping[str, float]) -> None:
            numbers = {k: v for k, v in line.items() if k != "step"}
            for one in logs:
                one(step, numbers)

        yield log


@contextlib.contextmanager
def _tensorboard(folder: Path, start: int) -> Iterator[Log]:
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder), purge_step=start + 1) as writer:

        def log(step: int, line: Mapping[str, float]) -> None:
            for name, value in line.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield log


@contextlib.contextmanager
def _wandb(config: Config, folder: Path) -> Iterator[Log]:
    import wandb

    known: dict[str, Any] = flatten(config)
    # The run's own folder names it, so that a resume goes on with the same curves. Not in
    # wandb/ or .wandb, of which names it makes folders itself.
    name = folder / "wandb_run.txt"
    id = name.read_text().strip() if name.is_file() else secrets.token_hex(4)
    name.write_text(id + "\n")
    try:
        run = wandb.init(
            project="fnet", name=config.name, id=id, resume="allow", config=known, dir=str(folder)
        )
    except wandb.errors.Error as error:
        raise UserError(f"tracking.wandb: {error}") from error
    failed = 1
    try:
        yield lambda step, line: run.log(dict(line), step=step)
        failed = 0
    finally:
        run.finish(exit_code=failed)
