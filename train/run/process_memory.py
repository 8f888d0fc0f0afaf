"""Measured memory of the process, next to what the compiler predicted."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fnet.cpu.heap import release_free_memory, separate_mappings
from fnet.measured import ALLOCATOR, LARGEST_GAPS, RUNTIME
from fnet.memory import format_bytes, tree_bytes
from train.platform import keeps_freed_memory

IN_FLIGHT = 32 * 2**20
"""Bytes of a state, besides its largest array, that are written or read at a time on CPU."""


class Overhead(NamedTuple):
    """Memory of a training process on CPU in addition to its compiled programs, in bytes.

    On an accelerator all parts are 0: there, programs and their arguments have their own memory.

    Attributes:
      runtime: Threads of XLA and the data pipeline, and code that is loaded late.
      batches: Batches that are read ahead, and those that the loop and the device hold.
      background: Copies of a small state that is written while steps run.
      checkpoint: Arrays of a large state on their way to disk, while no step runs.
      allocator: Gaps that the C library leaves between arrays.
    """

    runtime: int = 0
    batches: int = 0
    background: int = 0
    checkpoint: int = 0
    allocator: int = 0

    @property
    def always(self) -> int:
        """Bytes in addition to a program that runs."""
        return self.runtime + self.batches + self.background + self.allocator

    def __str__(self) -> str:
        """Describe the parts in one line."""
        parts = {
            "runtime": self.runtime,
            "batches read ahead": self.batches,
            "checkpoints": self.background,
            "gaps between arrays": self.allocator,
        }
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())

    def peak(self, state_bytes: int, *programs: int) -> int:
        """Return the peak of the process while a program runs, or a checkpoint is written."""
        return self.always + max(state_bytes + self.checkpoint, *programs)


def overhead(state: Any, batch: Any, batches: int) -> Overhead:
    """Estimate the memory of a training process on CPU besides its compiled programs.

    State and batch are shapes; ``batches`` is the number of batches that exist at once.
    """
    sizes = [tree_bytes(leaf) for leaf in jax.tree.leaves(state)]
    in_background = sum(sizes) <= IN_FLIGHT
    in_flight = 0 if in_background else IN_FLIGHT + max(sizes)
    return Overhead(
        runtime=RUNTIME,
        batches=batches * tree_bytes(batch),
        background=2 * sum(sizes) if in_background else 0,  # the copy, and what is written
        checkpoint=in_flight,
        allocator=min(int(ALLOCATOR * sum(sizes)), LARGEST_GAPS),
    )


class FirstApart:
    """A compiled program whose first run leaves no gaps in the heap (`separate_mappings`)."""

    def __init__(self, program: Any) -> None:
        self.program, self._has_run = program, False

    def __call__(self, *args: Any) -> Any:
        """Run the program; the first time, wait for it."""
        if self._has_run or keeps_freed_memory():
            return self.program(*args)
        self._has_run = True
        with separate_mappings():
            return jax.block_until_ready(self.program(*args))


class HighWater:
    """Peak memory since this object was created, above the memory in use at that time.

    On CPU this is the process's resident memory (Linux only) without pages of files, such as code
    that is loaded late, divided by its training devices. On other devices the allocator counts it,
    from the start of the process: there it is unknown until it exceeds what compiling took, because
    XLA tries kernels on the device.

    Args:
      devices: number of training devices of this process.
    """

    def __init__(self, devices: int = 1) -> None:
        self._is_cpu = jax.default_backend() == "cpu"
        self._devices = devices if self._is_cpu else 1
        self._above = 0
        self._baseline = self._begin()

    def _begin(self) -> int | None:
        """Begin to look for a peak, and return the bytes in use."""
        if self._is_cpu:
            gc.collect()
            release_free_memory()
            with contextlib.suppress(OSError):  # resets the peak
                Path("/proc/self/clear_refs").write_text("5")
        self._files, self._peak = _status("RssFile") or 0, 0
        self._earlier = 0 if self._is_cpu else _peak() or 0
        return _status("VmRSS") if self._is_cpu else _device("bytes_in_use")

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Leave out what the process takes meanwhile, and keeps, such as to compile a program."""
        self.bytes()
        before = self._begin()
        yield
        after = self._begin()
        if self._baseline is not None and before is not None and after is not None:
            self._baseline += after - before

    def bytes(self) -> int | None:
        """Return the peak in bytes, or None if it is not known."""
        peak = _peak()
        if peak is None or self._baseline is None:
            return None
        if peak <= self._earlier:
            return self._above // self._devices or None
        if peak > self._peak:
            self._peak = peak
            files = _status("RssFile") if self._is_cpu else None
            # Files may have been read after the peak, so each difference is a lower bound.
            new_files = max((files or 0) - self._files, 0)
            self._above = max(self._above, peak - new_files - self._baseline)
        return self._above // self._devices


def _peak() -> int | None:
    return _status("VmHWM") if jax.default_backend() == "cpu" else _device("peak_bytes_in_use")


def _device(key: str) -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get(key)


def _status(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(key + ":")]
    return int(values[0]) * 1024 if values else None
