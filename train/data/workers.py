"""Rows of a batch, shared among processes that know numpy and Pillow, not JAX.

Each function of rows that is called here gives every row for itself, and all that is random
is in the rows: what comes out does not depend on how many processes there are.

Grain has processes of its own (``mp_prefetch``). They import JAX, which takes each of them
a second and 85 MB; the position that they save is that of so many processes; and they stay
where the program is killed.
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

from train.data import Arrays, size
from train.errors import TrainingError

SLOT = 8 * 2**20
"""Bytes of a piece of shared memory, in which a part of a batch comes back."""

_slots: list[Any] = []  # in a worker

_SPAWN = multiprocessing.get_context("spawn")  # a process that is forked from JAX may hang


class Workers:
    """``workers(function, rows) -> function(rows)``, the rows shared among processes.

    They start with the first call of more than one row, and end with the program, however
    that ends.

    Args:
      count: how many; with 0 all is done where it is called.
    """

    def __init__(self, count: int):
        self._count = count
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self._starting = threading.Lock()

    def __call__(self, function: Callable[[Arrays], Arrays], rows: Arrays) -> Arrays:
        """What the function makes of the rows.

        Args:
          function: gives arrays of as many rows; each depends on its own row alone. It is
            pickled, and so must be what it is made of.
          rows: as many of each.

        Raises:
          TrainingError: if a process ended that should not.
        """
        n = size(rows)
        if not self._count or n <= 1:
            return function(rows)
        self._start()
        kinds = function({name: a[:0] for name, a in rows.items()})
        row_bytes = sum(a.dtype.itemsize * math.prod(a.shape[1:]) for a in kinds.values())
        # Two parts a process, so that one that is slow does not hold up all others.
        part = max(min(-(-n // (2 * self._count)), SLOT // max(row_bytes, 1)), 1)
        out = {name: np.empty((n, *a.shape[1:]), a.dtype) for name, a in kinds.items()}
        try:
            self._fill(out, function, rows, range(0, n, part))
        except BrokenProcessPool:
            raise TrainingError(
                "data.workers: a process that decodes images was ended from outside, or crashed; "
                "if memory ran out, give fewer workers"
            ) from None
        return out

    def _fill(
        self, out: Arrays, function: Callable[[Arrays], Arrays], rows: Arrays, starts: range
    ) -> None:
        """Puts what the function makes of the rows into ``out``, a part at each start."""
        assert self._pool is not None
        pending: deque[tuple[int, int, concurrent.futures.Future]] = deque()

        def collect() -> None:
            start, slot, future = pending.popleft()
            try:
                made = future.result()
                made = made if isinstance(made, dict) else _arrays(self._slots[slot], made)
                for name, a in made.items():
                    out[name][start : start + len(a)] = a
            finally:
                self._free.put(slot)

        try:
            for start in starts:
                # Another thread may hold all slots: it gives them back when its own are done.
                while (slot := self._slot(wait=not pending)) is None:
                    collect()
                part = {name: a[start : start + starts.step] for name, a in rows.items()}
                pending.append((start, slot, self._pool.submit(_work, function, part, slot)))
            while pending:
                collect()
        finally:
            for _, slot, future in pending:  # something went wrong with another part
                if not future.cancel():
                    concurrent.futures.wait([future])
                self._free.put(slot)

    def _slot(self, *, wait: bool) -> int | None:
        try:
            return self._free.get(block=wait)
        except queue.Empty:
            return None

    def _start(self) -> None:
        with self._starting:
            if self._pool is not None:
                return
            context = _Context()
            self._slots = [context.RawArray(ctypes.c_uint8, SLOT) for _ in range(2 * self._count)]
            self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
            for slot in range(len(self._slots)):
                self._free.put(slot)
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._count, context, initializer=_begin, initargs=(self._slots,)
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
        self.kill()  # of SIGTERM it would not end: see _begin


class _Context(type(_SPAWN)):  # type: ignore[misc]
    Process = _Process


def _begin(slots: list[Any]) -> None:
    """In a new process: it ends with the one that started it, and not before."""
    _slots.extend(slots)
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal sends to all
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # what is wrong with a file is said by its reason
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


_Where = list[tuple[str, tuple[int, ...], str, int]]


def _work(function: Callable[[Arrays], Arrays], rows: Arrays, slot: int) -> Arrays | _Where:
    """What the function makes of the rows, or where in the slot that lies."""
    made = function(rows)
    if sum(a.nbytes for a in made.values()) > SLOT:
        return made
    where, start = [], 0
    # The larger first: each then begins at a multiple of its own items' size.
    for name, a in sorted(made.items(), key=lambda item: -item[1].dtype.itemsize):
        where.append((name, a.shape, a.dtype.str, start))
        start += a.nbytes
    for name, a in _arrays(_slots[slot], where).items():
        a[...] = made[name]
    return where


def _arrays(slot: Any, where: _Where) -> Arrays:
    """The arrays that lie in a slot."""
    return {
        name: np.frombuffer(slot, dtype, math.prod(shape), start).reshape(shape)
        for name, shape, dtype, start in where
    }
