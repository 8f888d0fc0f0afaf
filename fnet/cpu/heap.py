"""The heap of the C library (glibc), where arrays of the CPU backend live.

These functions change the whole process. Nothing in `fnet` calls them: the program does.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from fnet.measured import LARGEST_GAP, MAPPED_SEPARATELY, SMALLEST_GAP, TRIMMED

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_freed_memory() -> None:
    """Keep the C library from holding much freed memory (Linux). Call this before threads start.

    All threads share one arena: a ResNet-50 step in 16 microbatches then holds 140 MB less.
    Arrays from 16 MiB on are mapped separately. By default glibc takes arrays of up to 32 MiB from
    its heap. There, checkpoints leave gaps that arrays of the next step do not fit. With the limit,
    a small transformer holds 56 MiB above the prediction instead of 117.

    Separate mappings cost a page fault per 4 KiB. The steps of a small ResNet take 1.1 times as
    long as with glibc's defaults. With a threshold of 2 MiB they would take 1.3 times as long.
    Without any, steps of MobileNetV3 (32 images of 96 x 96) would take 0.66 of the time, but the
    process would hold 507 MiB instead of 274, where 332 are predicted.
    """
    if library := _glibc():
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED_SEPARATELY)
        library.mallopt(_M_TRIM_THRESHOLD, TRIMMED)


def release_free_memory() -> None:
    """Return free memory of the C library to the system, so that it does not count as used."""
    if library := _glibc():
        library.malloc_trim(0)


@functools.cache
def occupy_gaps() -> None:
    """Occupy the gaps that compilation left in the C library's heap (Linux), once in a process.

    Compilers free gigabytes between small blocks that stay. Arrays of the next steps would spread
    over these gaps, and each page that an array once touched stays in memory: with a U-Net planned
    for 652 MB, a process took 763 MB. With its gaps occupied, it takes 641 MB.

    Occupied gaps are address space without memory: their pages were returned, and are not written.
    """
    release_free_memory()
    library = _glibc()
    size = LARGEST_GAP
    while library and size >= SMALLEST_GAP:
        end = library.sbrk(0)
        block = library.malloc(size)
        if library.sbrk(0) != end or (block or end) >= end:
            # No gap has this size: the heap grew, or the block lies outside of it.
            library.free(block)
            size //= 2


@contextlib.contextmanager
def separate_mappings() -> Iterator[None]:
    """Map arrays from 256 KiB on separately while entered, afterwards as `limit_freed_memory`.

    On a CPU, the first run of a program makes small objects that stay, between its workspaces. On
    the heap, the next workspaces would not fit between them: with JAX 0.12, steps of a ResNet-34
    (8 images of 128 x 128) held 468 MB instead of 408, until free memory was released.
    """
    library = _glibc()
    if library:
        library.mallopt(_M_MMAP_THRESHOLD, 2**18)
    try:
        yield
    finally:
        if library:
            library.mallopt(_M_MMAP_THRESHOLD, MAPPED_SEPARATELY)


@functools.cache
def _glibc() -> Any:
    try:
        library = ctypes.CDLL("libc.so.6")  # a name that only glibc has
        library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
        library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
        library.sbrk.argtypes = [ctypes.c_ssize_t]
    except (OSError, AttributeError):
        return None
    return library
