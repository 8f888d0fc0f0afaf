"""Time in which the device waits for input, and the reason for it."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from train.data.work import RECORD, Totals, Work

LONG_WAIT = 0.2
"""Share of the time above which waiting for input is reported."""
_INTERVAL = 10.0
"""Seconds of training over which the share is taken."""
_PATIENCE = 30.0
"""Seconds after which a wait for one batch is reported."""


class InputWait:
    """Report once if the device waits too long for input, and each wait that seems to hang.

    The share is taken over about ten seconds of training steps. The steps before the first log
    line do not count, because they include the start of worker processes.

    Args:
      workers: Number of processes that decode images; None for a source without such processes.
      totals: Returns the work of all threads so far.

    Attributes:
      reason: Why the device waits, and what to do. None if it does not wait long.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        workers: int | None,
        cores: int | None = None,
        now: Callable[[], float] = time.monotonic,
        totals: Callable[[], Totals] = lambda: RECORD.totals,
    ):
        self._log, self._workers = log, workers
        self._cores = cores or len(os.sched_getaffinity(0))
        self._now, self._totals = now, totals
        self._started, self._before = False, totals()
        self._seconds = self._waited = 0.0
        self._since: float | None = None
        self._patience, self._ended = _PATIENCE, threading.Event()
        self.reason: str | None = None

    def __enter__(self) -> Self:
        def watch() -> None:
            while not self._ended.wait(1.0):
                self.check()

        threading.Thread(target=watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Enter while the loop waits for a batch."""
        self._patience, self._since = _PATIENCE, self._now()
        try:
            yield
        finally:
            self._since = None

    def check(self) -> None:
        """Report a wait for one batch that seems to hang, every half minute."""
        since = self._since
        if since is not None and (seconds := self._now() - since) >= self._patience:
            self._patience = seconds + _PATIENCE
            self._log(
                f"no batch for {seconds:.0f} s: a file is slow to read, or a worker hangs; Ctrl-C "
                "saves and stops"
            )

    def add(self, seconds: float, share: float) -> None:
        """Add the seconds between two log lines, of which the device waited a share."""
        if not self._started:
            self._started, self._before = True, self._totals()
            return
        self._seconds += seconds
        self._waited += share * seconds
        if self._seconds < _INTERVAL:
            return
        waited, totals = self._waited / self._seconds, self._totals()
        if waited > LONG_WAIT and self.reason is None:
            parts = zip(totals, self._before, strict=True)
            thread, waiting, processes = (after.plus(before, -1) for after, before in parts)
            if waiting.seconds > thread.seconds:
                self.reason = explain(processes, self._workers, self._cores)
            else:
                self.reason = explain(thread, None if self._workers else self._workers, self._cores)
            self._log(f"input wait: the device waits {waited:.0%} of the time: {self.reason}")
        self._seconds = self._waited = 0.0
        self._before = totals


def explain(work: Work, workers: int | None, cores: int) -> str:
    """Say why batches are late, from the work of the processes or of the thread that made them.

    ``workers`` is the number of these processes; 0 for a thread whose work they could do, None for
    one whose work they could not do.
    """
    by, its = (f"{workers} workers", "their") if workers else ("one thread", "its")
    s = "" if workers else "s"
    name, time_spent = max(
        ("blocked", work.blocked), ("queued", work.queued), ("computing", work.computing),
        key=lambda item: item[1],
    )  # fmt: skip
    share = f"{time_spent / max(work.seconds, 1e-9):.0%} of {its} time"
    if name == "blocked":
        more = "" if workers is None else f", or give --data.workers {2 * max(workers, 1)}"
        return f"{by} wait{s} for files {share}; copy the data to a faster disk{more}"
    if name == "computing" and workers is not None and workers < cores:
        return f"{by} decode{s} and augment{s} {share}; give --data.workers {cores}, one per core"
    if name == "queued":
        return f"{by} wait{s} for a free core {share}, on {cores} cores; stop other programs"
    return f"{by} compute{s} {share}, on {cores} cores; prepare smaller files"
