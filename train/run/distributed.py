"""Several processes, on one machine or many, that train one network together."""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.errors import UserError
from train.run.run_folder import RunFolder


def join(coordinator: str | None, processes: int | None, process: int | None) -> bool:
    """Waits for the other processes; to be called before JAX looks for devices.

    Gives whether this one is the first of them.

    Args:
      coordinator: host:port of the first process; None, as the others: what SLURM, Open MPI,
        Kubernetes or Cloud TPU say (`jax.distributed.initialize`).
      processes: how many there are.
      process: which of them this one is, from 0.

    Raises:
      UserError: if nobody says so, the coordinator has no port, or the others do not come.
    """
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator: expected HOST:PORT, got {coordinator}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"--distributed: {reason}; outside of a cluster give --coordinator HOST:PORT, "
            "--processes and --process"
        ) from error
    return jax.process_index() == 0


def several() -> bool:
    """Whether there are other processes."""
    return jax.process_count() > 1


@contextlib.contextmanager
def run_folder(out: Path, begin: Callable[[RunFolder], None]) -> Iterator[RunFolder]:
    """The run's folder, which the first process owns; checkpoints are written by all.

    What the others write beside checkpoints is what the first one writes too: theirs goes to a
    folder that is dropped.

    Args:
      out: the run's folder.
      begin: what is done in it first, by the first process alone.

    Raises:
      UserError: whatever ``begin`` raises, in every process.
    """
    with contextlib.ExitStack() as stack:
        refused: UserError | None = None
        if jax.process_index() == 0:
            folder = RunFolder(out)
            try:
                stack.enter_context(folder.lock())
                begin(folder)
            except UserError as error:
                refused = error
        else:
            folder = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            folder.checkpoints = out / "checkpoints"
        if any_process(refused is not None):
            raise refused or UserError("the first process refused to begin: it says why")
        yield folder


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; all must ask."""
    if not several():
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())
