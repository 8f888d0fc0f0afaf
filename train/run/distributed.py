"""Distributed training: several processes, on one machine or many (multi-host)."""

import atexit
import contextlib
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.errors import TrainingError, UserError, warn
from train.run.run_folder import RunFolder

_FAILED = "fnet/failed"
"""Folder of JAX's key-value store with the reasons of processes that failed."""
_READ_SECONDS = 3
"""Time for the other processes to read why one of them failed."""
_LOADING_SECONDS = 24 * 3600
"""How long processes wait for one that loads data or compiles."""


def join(
    coordinator: str | None, processes: int | None, process: int | None, timeout: int = 300
) -> bool:
    """Connect to the other processes. Call this before JAX looks for devices.

    Arguments that are None are taken from SLURM, Open MPI, Kubernetes or Cloud TPU
    (`jax.distributed.initialize`). A process that is still alone after ``timeout`` seconds prints
    one line and ends with exit code 2. Returns whether this is process 0.
    """
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator: expected HOST:PORT, got {coordinator}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would take SIGTERM for itself, and a run could not be stopped while it compiles.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with _gives_up(coordinator, processes, process, timeout):
            # JAX's own timeout, which aborts with a stack trace, comes later.
            jax.distributed.initialize(
                coordinator, processes, process, initialization_timeout=timeout + 60
            )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"--distributed: {reason}; outside of a cluster give --coordinator HOST:PORT, "
            "--processes and --process"
        ) from error
    return jax.process_index() == 0


@contextlib.contextmanager
def _gives_up(
    coordinator: str | None, processes: int | None, process: int | None, timeout: int
) -> Iterator[None]:
    """Report a long wait for the other processes, and end this one after ``timeout`` seconds."""
    is_connected = threading.Event()
    missing = "the other processes" if processes is None else f"all {processes} processes"
    at = f" at {coordinator}" if coordinator else ""

    def reason() -> str:
        if coordinator is None or process == 0:
            return ""
        host, port = coordinator.rsplit(":", 1)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            return f" (process 0 does not answer: {error.strerror or error})"
        return " (process 0 answers)"

    def watch() -> None:
        start = time.monotonic()
        if is_connected.wait(min(10, timeout / 2)):
            return
        warn(f"waiting for {missing}{at}{reason()}; gives up after {timeout} s")
        if is_connected.wait(max(timeout - (time.monotonic() - start), 0)):
            return
        why = reason()
        if not is_connected.is_set():
            warn(
                f"--distributed: {missing} did not meet{at} within {timeout} s{why}; start "
                "each of them, with the address of process 0 as --coordinator"
            )
            _exit(2)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_connected.set()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """End all processes if one fails, each with one line that says why."""
    client = _client()
    if client is None or not has_other_processes():
        yield
        return
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(client, is_over), daemon=True).start()
    try:
        yield
    except BaseException as error:
        is_over.set()
        code = 2 if isinstance(error, UserError) else 1
        lost = lost_connection(error)
        if lost is None:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        else:
            time.sleep(_READ_SECONDS)  # until a process that failed has said why
            reason = next(iter(_failures(client)), (0, lost))[1]
        with contextlib.suppress(Exception):
            client.key_value_set(f"{_FAILED}/{jax.process_index()}", f"{code} {reason}")
        # At exit, JAX would wait for processes that are blocked, and then abort.
        atexit.register(_leave, code)
        if lost is None:
            raise
        others = _failures(client, jax.process_index())
        if others and others[0][1] != lost:
            raise TrainingError(_ended(*others[0])) from None
        raise TrainingError(
            f"the connection to another process was lost ({lost}); see the output of the other "
            "processes, and restart all of them with --resume"
        ) from None
    finally:
        is_over.set()


def _client() -> Any:
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except (ImportError, AttributeError):
        return None


def lost_connection(error: BaseException) -> str | None:
    """Return the message of an error that means that another process is gone, or None."""
    pattern = r"Gloo|NCCL"  # Orbax raises errors of its own around JAX's
    if isinstance(error, jax.errors.JaxRuntimeError):
        pattern += r"|[Cc]oordination|UNAVAILABLE|DEADLINE_EXCEEDED|[Bb]arrier"
    lines = [line for line in str(error).splitlines() if re.search(pattern, line)]
    if not lines:
        return None
    text = re.sub(r"\[external[^\]]*\] |^[A-Z_]+: | \[type.*", "", lines[0])
    return text[:200]


def _failures(client: Any, but: int | None = None) -> list[tuple[int, str, int]]:
    failures = []
    with contextlib.suppress(Exception):
        for key, value in client.key_value_dir_get(_FAILED):
            process, (code, reason) = int(key.rsplit("/", 1)[1]), value.split(" ", 1)
            failures.append((process, reason, int(code)))
    return sorted(f for f in failures if f[0] != but)


def _ended(process: int, reason: str, code: int) -> str:
    then = "correct this" if code == 2 else "see its output"
    return f"process {process} ended: {reason}; {then}, and restart all processes with --resume"


def _watch(client: Any, is_over: threading.Event) -> None:
    """End this process if another one fails while this one waits for it."""
    while not is_over.wait(1):
        failures = _failures(client, jax.process_index())
        # This process may be about to end for the same reason.
        if failures and not is_over.wait(_READ_SECONDS - 1):
            warn(_ended(*failures[0]))
            _exit(failures[0][2])


def _leave(code: int) -> None:
    if jax.process_index() == 0:  # the others read from its store
        time.sleep(_READ_SECONDS + 1)
    _exit(code)


def _exit(code: int) -> None:
    """End the process at once, without JAX's wait for the others."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def wait_for_all(what: str) -> None:
    """Wait until every process is here. Each point has a name of its own.

    JAX's first messages between processes fail if another one comes half a minute later.
    """
    client = _client()
    if client is not None and has_other_processes():
        client.wait_at_barrier(f"fnet/{what}", _LOADING_SECONDS * 1000)


def check_same_data(data: dict[str, Any]) -> None:
    """Check that `train.run.same_data.describe_data` is the same in every process.

    Every process must call this.
    """
    own = np.asarray([data["train"], data["test"], data["crc32"]], np.uint32)
    every = multihost_utils.process_allgather(own)
    for i, other in enumerate(every):
        if (other != every[0]).any():
            first, its = (
                f"{a[0]:,} training and {a[1]:,} test examples" for a in (every[0], other)
            )
            what = f"{its}, process 0 {first}" if first != its else "other rows than process 0"
            raise UserError(
                f"data: process {i} has {what}; give every process the same data, such as a "
                "shared folder"
            )


def has_other_processes() -> bool:
    """Whether several processes train together."""
    return jax.process_count() > 1


@contextlib.contextmanager
def run_folder(out: Path, prepare: Callable[[RunFolder], None]) -> Iterator[RunFolder]:
    """Lock and prepare the run's folder in process 0, and yield it.

    The other processes write the same files as process 0 into temporary folders. Checkpoints are
    written by all processes together.
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


def union(numbers: set[int]) -> set[int]:
    """Return the numbers that any process gives. Every process must call this."""
    counts = multihost_utils.process_allgather(np.asarray(len(numbers)))
    padded = np.full(max(int(counts.max()), 1), -1, np.int32)
    padded[: len(numbers)] = sorted(numbers)
    return set(np.unique(multihost_utils.process_allgather(padded)).tolist()) - {-1}


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process. Every process must call this."""
    if not has_other_processes():
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())
