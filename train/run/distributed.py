"""Distributed training: several processes, on one machine or many (multi-host)."""

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
    """Connect to the other processes. Call this before JAX looks for devices.

    Arguments that are None are taken from SLURM, Open MPI, Kubernetes or Cloud TPU
    (`jax.distributed.initialize`).

    Args:
      coordinator: host:port of process 0.
      processes: number of processes.
      process: index of this process.

    Returns:
      Whether this is process 0.

    Raises:
      UserError: if an argument is missing, the coordinator has no port, or the other processes
        do not connect.
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


def has_other_processes() -> bool:
    """Whether several processes train together."""
    return jax.process_count() > 1


@contextlib.contextmanager
def run_folder(out: Path, prepare: Callable[[RunFolder], None]) -> Iterator[RunFolder]:
    """Lock the run's folder in process 0 and yield it.

    The other processes write the same files as process 0 into temporary folders. Checkpoints are
    written by all processes together.

    Args:
      out: folder of the run.
      prepare: called once with the folder, in process 0.

    Raises:
      UserError: in every process, if ``prepare`` raises one.
    """
    with contextlib.ExitStack() as stack:
        refused: UserError | None = None
        if jax.process_index() == 0:
            folder = RunFolder(out)
            try:
                stack.enter_context(folder.lock())
                prepare(folder)
            except UserError as error:
                refused = error
        else:
            folder = RunFolder(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            folder.checkpoints = out / "checkpoints"
        if any_process(refused is not None):
            raise refused or UserError("process 0 did not start the run; see its error")
        yield folder


def from_first_process(array: np.ndarray) -> np.ndarray:
    """Return the array that process 0 gives. Every process must call this with its shape."""
    if not has_other_processes():
        return array
    return np.asarray(multihost_utils.broadcast_one_to_all(array))


def union(numbers: set[int]) -> set[int]:
    """Return the numbers that any process gives. Every process must call this."""
    if not has_other_processes():
        return numbers
    counts = multihost_utils.process_allgather(np.asarray(len(numbers)))
    padded = np.full(max(int(counts.max()), 1), -1, np.int32)
    padded[: len(numbers)] = sorted(numbers)
    return set(np.unique(multihost_utils.process_allgather(padded)).tolist()) - {-1}


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process. Every process must call this."""
    if not has_other_processes():
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())
