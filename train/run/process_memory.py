"""Measured memory of the process, next to what the compiler predicted."""

import ctypes
import functools
import gc
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fnet.memory import format_bytes, tree_bytes
from train.data.workers import SLOT_BYTES, SLOTS_PER_WORKER

IN_FLIGHT = 32 * 2**20
"""Bytes of a state, besides its largest array, that are written or read at a time on CPU."""

# Threads and late code take 7 to 12 MiB in steps of small networks, and 5 more after an evaluation.
_RUNTIME = 16 * 2**20
# Gaps after checkpoints, relative to the state.
_ALLOCATOR = 1 / 12


class Overhead(NamedTuple):
    """Memory of a training process on CPU in addition to its compiled programs, in bytes.

    On an accelerator all parts are 0: there, programs and their arguments have their own memory.

    Attributes:
      runtime: Threads of XLA and the data pipeline, and code that is loaded late.
      batches: Batches that are read ahead, and those that the loop and the device hold.
      background: Copies of a small state that is written while steps run.
      checkpoint: Arrays of a large state on their way to disk, while no step runs.
      allocator: Gaps that the C library leaves between arrays.
      workers: Memory that this process shares with those that decode images.
    """

    runtime: int = 0
    batches: int = 0
    background: int = 0
    checkpoint: int = 0
    allocator: int = 0
    workers: int = 0

    @property
    def always(self) -> int:
        """Bytes in addition to a program that runs."""
        return self.runtime + self.batches + self.background + self.allocator + self.workers

    def __str__(self) -> str:
        """Describe the parts in one line."""
        parts = {
            "runtime": self.runtime,
            "batches read ahead": self.batches,
            "checkpoints": self.background,
            "gaps between arrays": self.allocator,
        }
        if self.workers:
            parts["shared with data.workers"] = self.workers
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())

    def peak(self, state_bytes: int, *programs: int) -> int:
        """Return the peak of the process: while a program runs, or while a checkpoint is written.

        Args:
          state_bytes: Bytes of the train state.
          *programs: Peaks of the compiled programs, of which one runs at a time.
        """
        return self.always + max(state_bytes + self.checkpoint, *programs)


def overhead(state: Any, batch: Any, batches: int, workers: int = 0) -> Overhead:
    """Estimate the memory of a training process on CPU besides its compiled programs.

    Args:
      state: Shapes of the train state.
      batch: Shapes of a batch.
      batches: Number of batches that exist at once.
      workers: Number of processes that decode images.
    """
    sizes = [tree_bytes(leaf) for leaf in jax.tree.leaves(state)]
    in_background = sum(sizes) <= IN_FLIGHT
    in_flight = 0 if in_background else IN_FLIGHT + max(sizes)
    return Overhead(
        runtime=_RUNTIME,
        batches=batches * tree_bytes(batch),
        background=2 * sum(sizes) if in_background else 0,  # the copy, and what is written
        checkpoint=in_flight,
        allocator=int(_ALLOCATOR * sum(sizes)),
        workers=SLOTS_PER_WORKER * workers * SLOT_BYTES,
    )


# Blocks that occupy gaps. Larger arrays are mapped separately, smaller ones do not add up.
_LARGEST_GAP, _SMALLEST_GAP = 2**23, 2**16

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class HighWater:
    """Peak memory since this object was created, above the memory in use at that time.

    On CPU this is the process's resident memory (Linux only) without pages of files, such as code
    that is loaded late, divided by its training devices. On other devices the allocator counts it.

    Args:
      devices: number of training devices of this process.
    """

    def __init__(self, devices: int = 1) -> None:
        self._devices = devices if jax.default_backend() == "cpu" else 1
        if jax.default_backend() == "cpu":
            gc.collect()
            release_free_memory()
            _reset_peak()
        self._baseline = _in_use()
        self._files = _status("RssFile") or 0
        self._peak = self._new_files = 0

    def bytes(self) -> int | None:
        """Return the peak in bytes, or None if this system does not count it."""
        peak = _peak()
        if peak is None or self._baseline is None:
            return None
        if peak > self._peak and jax.default_backend() == "cpu":
            # Files that are read after the peak are not in it.
            self._new_files = max((_status("RssFile") or 0) - self._files, 0)
        self._peak = max(self._peak, peak)
        return max(self._peak - self._new_files - self._baseline, 0) // self._devices


def limit_freed_memory() -> None:
    """Keep the C library from holding much freed memory (Linux). Call this before threads start.

    All threads share one arena: a ResNet-50 step in 16 microbatches then holds 140 MB less.
    Arrays from 16 MiB on are mapped separately. By default glibc takes arrays of up to 32 MiB from
    its heap. There, checkpoints leave gaps that arrays of the next step do not fit. With the limit,
    a small transformer holds 56 MiB above the prediction instead of 117.

    Separate mappings cost a page fault per 4 KiB. The steps of a small ResNet take 1.1 times as
    long as with glibc's defaults. With a threshold of 2 MiB they would take 1.3 times as long.
    """
    limits = {_M_ARENA_MAX: 1, _M_MMAP_THRESHOLD: 16 * 2**20, _M_TRIM_THRESHOLD: 32 * 2**20}
    try:
        for name, value in limits.items():
            ctypes.CDLL("libc.so.6").mallopt(name, value)
    except (OSError, AttributeError):
        return


def release_free_memory() -> None:
    """Return free memory of the C library to the system, so that it does not count as used."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


@functools.cache
def occupy_gaps() -> None:
    """Occupy the gaps that compilation left in the C library's heap (Linux), once in a process.

    Compilers free gigabytes between small blocks that stay. Arrays of the next steps would spread
    over these gaps, and each page that an array once touched stays in memory: with a U-Net planned
    for 652 MB, a process took 763 MB. With its gaps occupied, it takes 641 MB.

    Occupied gaps are address space without memory: their pages were returned, and are not written.
    """
    release_free_memory()
    try:
        library = ctypes.CDLL("libc.so.6")
        library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
        library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
        library.sbrk.argtypes = [ctypes.c_ssize_t]
        size = _LARGEST_GAP
        while size >= _SMALLEST_GAP:
            end = library.sbrk(0)
            block = library.malloc(size)
            if library.sbrk(0) != end or (block or end) >= end:
                # No gap has this size: the heap grew, or the block lies outside of it.
                library.free(block)
                size //= 2
    except (OSError, AttributeError):
        return


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _in_use() -> int | None:
    return _status("VmRSS") if jax.default_backend() == "cpu" else _device("bytes_in_use")


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
