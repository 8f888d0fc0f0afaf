"""Measured memory of the process, next to what the compiler predicted."""

import ctypes
import gc
from pathlib import Path

import jax

RUNTIME_OVERHEAD = 64 * 2**20
"""Bytes of a training process on CPU in addition to its compiled programs, prefetched batches and
`FRAGMENTATION`: checkpoints on their way to disk, and code that is loaded late."""

FRAGMENTATION = 1 / 12
"""Bytes that the allocator holds between arrays after checkpoints, relative to the train state's.

Together with `RUNTIME_OVERHEAD`, language models with averaged parameters and states of 73, 290,
651 and 1,151 MiB took 55, 72, 82 and 85 MiB, and after a resume 65, 85, 105 and 120 MiB."""


# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class HighWater:
    """Peak memory since this object was created, above the memory in use at that time.

    On CPU this is the process's resident memory (Linux only), divided by its training devices. On
    other devices the allocator counts it.

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

    def bytes(self) -> int | None:
        """Return the peak in bytes, or None if this system does not count it."""
        peak = _peak()
        if peak is None or self._baseline is None:
            return None
        return max(peak - self._baseline, 0) // self._devices


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
