"""Worker processes that decode the rows of a batch, without importing JAX.

The functions that workers run treat each row separately, and all randomness is in the rows. The
result does not depend on the number of workers.

Grain's own workers (``mp_prefetch``) have three drawbacks here: they import JAX, which takes each
a second and 85 MB; their saved position depends on their number; and they survive a killed parent.
"""

import concurrent.futures
import functools
import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from train.data import Arrays, num_examples
from train.data.work import RECORD, Work, now
from train.errors import TrainingError

_PARTS = 4
"""Parts of a batch per process, so that a slow one does not delay all others."""

_SPAWN = multiprocessing.get_context("spawn")  # forking a process that runs JAX can deadlock


class Workers:
    """``workers(function, rows) -> function(rows)``, with the rows split among processes.

    The processes start at the first call with more than one row. They end with the program, even
    if it is killed. Without any, the function is called in this process.
    """

    def __init__(self, count: int):
        self._count, self._starting = count, threading.Lock()

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
        with self._starting:
            pool = self._pool
        empty = function({name: a[:0] for name, a in rows.items()})
        shapes = {name: (n, *a.shape[1:]) for name, a in empty.items()}
        sizes = [math.prod(shapes[name]) * a.itemsize for name, a in empty.items()]
        # Of whole pages, so that each array is aligned.
        ends = np.cumsum([-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes])
        starts = dict(zip(empty, [0, *ends.tolist()], strict=False))
        size = -(-n // (_PARTS * self._count))
        futures = []
        # Memory without a name: it ends with the process, even if that is killed.
        file = os.memfd_create("batch")
        try:
            os.ftruncate(file, int(ends[-1]))
            path = f"/proc/{os.getpid()}/fd/{file}"
            for i in range(0, n, size):
                part = {name: a[i : i + size] for name, a in rows.items()}
                futures.append(pool.submit(_work, function, part, path, starts, i))
            with RECORD.waiting():
                for future in futures:
                    RECORD.add(workers=future.result())
            memory = mmap.mmap(file, int(ends[-1]))
        except BrokenProcessPool:
            raise TrainingError(
                "data.workers: a process that decodes images was killed or crashed; if memory ran "
                "out, give fewer workers"
            ) from None
        finally:  # no process may write to this number of a file when another one has it
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            os.close(file)
        return {
            name: np.frombuffer(memory, a.dtype, math.prod(shapes[name]), starts[name]).reshape(
                shapes[name]
            )
            for name, a in empty.items()
        }

    @functools.cached_property
    def _pool(self) -> concurrent.futures.ProcessPoolExecutor:
        pool = concurrent.futures.ProcessPoolExecutor(
            self._count, _Context(), initializer=_initialize
        )
        weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)
        return pool


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


def _initialize() -> None:
    """Prepare a new worker, so that it ends with its parent and not before."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # errors already name what is wrong with a file
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _work(
    function: Callable[[Arrays], Arrays],
    rows: Arrays,
    path: str,
    starts: dict[str, int],
    first: int,
) -> Work:
    before = now()
    arrays = function(rows)
    with open(path, "r+b", buffering=0) as file:
        for name, a in arrays.items():
            file.seek(starts[name] + first * a[:1].nbytes)
            file.write(np.ascontiguousarray(a).data)
    return now().plus(before, -1)
