"""Time of making batches, by its use: computing, waiting for files, waiting for a core.

Processes that decode images import this module, so it must not import JAX.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple


class Work(NamedTuple):
    """Time of threads that make batches, in seconds.

    Attributes:
      seconds: Elapsed time.
      computing: Time on a core.
      queued: Time in which a thread could run but had no core (Linux).
    """

    seconds: float = 0.0
    computing: float = 0.0
    queued: float = 0.0

    @property
    def blocked(self) -> float:
        """Time in which a thread waited, mostly for files."""
        return max(self.seconds - self.computing - self.queued, 0.0)

    def plus(self, other: "Work", sign: int = 1) -> "Work":
        """Return the sum of both; with ``sign`` -1 their difference."""
        return Work(*(a + sign * b for a, b in zip(self, other, strict=True)))


class Totals(NamedTuple):
    """Work so far.

    Attributes:
      thread: Work of the threads of this process that make batches, without ``waiting``.
      waiting: Time in which these threads waited for the processes that decode images.
      workers: Work of these processes.
    """

    thread: Work = Work()
    waiting: Work = Work()
    workers: Work = Work()


class Record:
    """Work that threads add up while they are in `measured`; other work is not counted.

    Attributes:
      totals: The sums.
    """

    def __init__(self) -> None:
        self._lock, self._thread = threading.Lock(), threading.local()
        self.totals = Totals()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Add the work of this thread while entered."""
        self._thread.is_measured, before = True, now()
        try:
            yield
            self.add(thread=now().plus(before, -1))
        finally:
            self._thread.is_measured = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time while entered as waiting for processes."""
        before = now()
        yield
        work = now().plus(before, -1)
        self.add(thread=Work().plus(work, -1), waiting=work)

    def add(self, **work: Work) -> None:
        """Add work to the totals of that name."""
        if getattr(self._thread, "is_measured", False):
            with self._lock:
                sums = {name: getattr(self.totals, name).plus(w) for name, w in work.items()}
                self.totals = self.totals._replace(**sums)


RECORD = Record()
"""Work of this process. A process has one pipeline of batches at a time."""


def now() -> Work:
    """Return the clocks of this thread."""
    return Work(time.perf_counter(), time.thread_time(), _queued())


def _queued() -> float:
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
