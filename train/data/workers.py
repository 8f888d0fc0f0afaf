"""Worker processes that decode the rows of a batch, without importing JAX.

The functions that workers run treat each row separately, and all randomness is in the rows. The
result does not depend on the number of workers.

Grain's own workers (``mp_prefetch``) have three drawbacks here: they import JAX, which takes each
a second and 85 MB; their saved position depends on their number; and they survive a killed parent.
"""

import concurrent.futures
import ctypes
import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from train.data import Arrays, num_examples
from train.data.work import RECORD, Work, now
from train.errors import TrainingError

SLOT_BYTES = 8 * 2**20
"""Bytes of a slot: shared memory in which a worker returns a part of a batch."""
SLOTS_PER_WORKER = 2

_slots: list[Any] = []  # set in workers only

_SPAWN = multiprocessing.get_context("spawn")  # forking a process that runs JAX can deadlock


class Workers:
    """``workers(function, rows) -> function(rows)``, with the rows split among processes.

    The processes start at the first call with more than one row. They end with the program, even
    if it is killed.

    Args:
      count: number of processes; 0 calls the function in this process.
    """

    def __init__(self, count: int):
        self._count = count
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._starting = threading.Lock()

    def __call__(self, function: Callable[[Arrays], Arrays], rows: Arrays) -> Arrays:
        """Call a function on rows.

        Args:
          function: returns arrays with as many rows; each must depend only on its own row. It
            must be picklable.
          rows: arrays with equally many rows.

        Raises:
          TrainingError: if a worker process died.
        """
        n = num_examples(rows)
        if not self._count or n <= 1:
            return function(rows)
        self._start()
        empty = function({name: a[:0] for name, a in rows.items()})
        row_bytes = sum(a.dtype.itemsize * math.prod(a.shape[1:]) for a in empty.values())
        # Two parts per process, so that a slow one does not delay all others.
        part = max(min(-(-n // (2 * self._count)), SLOT_BYTES // max(row_bytes, 1)), 1)
        out = {name: np.empty((n, *a.shape[1:]), a.dtype) for name, a in empty.items()}
        try:
            with RECORD.waiting():
                self._fill(out, function, rows, range(0, n, part))
        except BrokenProcessPool:
            raise TrainingError(
                "data.workers: a process that decodes images was killed or crashed; if memory ran "
                "out, give fewer workers"
            ) from None
        return out

    def _fill(
        self, out: Arrays, function: Callable[[Arrays], Arrays], rows: Arrays, starts: range
    ) -> None:
        """Fill ``out`` with the function's results, one part per start."""
        assert self._pool is not None
        pending: deque[tuple[int, int, concurrent.futures.Future]] = deque()

        def collect() -> None:
            start, slot, future = pending.popleft()
            try:
                result, work = future.result()
                RECORD.add(workers=work)
                arrays = result if isinstance(result, dict) else _views(self._slots[slot], result)
                for name, a in arrays.items():
                    out[name][start : start + len(a)] = a
            finally:
                self._free.put(slot)

        try:
            for start in starts:
                # Another thread can hold all slots; it frees them when its parts are done.
                while (slot := self._take_slot(wait=not pending)) is None:
                    collect()
                part = {name: a[start : start + starts.step] for name, a in rows.items()}
                pending.append((start, slot, self._pool.submit(_work, function, part, slot)))
            while pending:
                collect()
        finally:
            for _, slot, future in pending:  # after an error in another part
                if not future.cancel():
                    concurrent.futures.wait([future])
                self._free.put(slot)

    def _take_slot(self, *, wait: bool) -> int | None:
        try:
            return self._free.get(block=wait)
        except queue.Empty:
            return None

    def _start(self) -> None:
        with self._starting:
            if self._pool is not None:
                return
            context = _Context()
            self._slots = [
                context.RawArray(ctypes.c_uint8, SLOT_BYTES)
                for _ in range(SLOTS_PER_WORKER * self._count)
            ]
            self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
            for slot in range(len(self._slots)):
                self._free.put(slot)
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._count, context, initializer=_initialize, initargs=(self._slots,)
            )
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)


class _Process(_SPAWN.Process):
    def start(self) -> None:
        """Start a process that imports this package, even next to a train.py of the user's."""
        root = str(Path(__file__).parents[2])
        sys.path.insert(0, root)  # the process gets a copy
        try:
            super().start()
        finally:
            sys.path.remove(root)

    def terminate(self) -> None:
        self.kill()  # workers ignore SIGTERM: see _initialize


class _Context(type(_SPAWN)):  # type: ignore[misc]
    Process = _Process


def _initialize(slots: list[Any]) -> None:
    """Prepare a new worker, so that it ends with its parent and not before."""
    _slots.extend(slots)
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # errors already name what is wrong with a file
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


_Layout = list[tuple[str, tuple[int, ...], str, int]]
"""Name, shape, dtype and first byte of each array in a slot."""


def _work(
    function: Callable[[Arrays], Arrays], rows: Arrays, slot: int
) -> tuple[Arrays | _Layout, Work]:
    """Call the function in a worker; return its arrays, or their layout in the slot."""
    before = now()
    arrays = function(rows)
    work = now().plus(before, -1)
    if sum(a.nbytes for a in arrays.values()) > SLOT_BYTES:
        return arrays, work
    layout, start = [], 0
    # Larger items first, so that each array is aligned.
    for name, a in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        layout.append((name, a.shape, a.dtype.str, start))
        start += a.nbytes
    for name, view in _views(_slots[slot], layout).items():
        view[...] = arrays[name]
    return layout, work


def _views(slot: Any, layout: _Layout) -> Arrays:
    """View the arrays in a slot."""
    return {
        name: np.frombuffer(slot, dtype, math.prod(shape), start).reshape(shape)
        for name, shape, dtype, start in layout
    }
