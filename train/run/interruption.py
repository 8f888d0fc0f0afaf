"""Interruption of a run by Ctrl-C, SIGTERM, or a terminal that closes."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


class Interrupted(BaseException):
    """A signal came during a wait that it ends."""


class Interruption:
    """Record SIGINT, SIGTERM or SIGHUP instead of ending the process, so that a run saves first.

    Only the first signal is recorded; a second one ends the process. Under ``nohup`` a terminal
    may close, and the run goes on.

    Attributes:
      signal: Name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._handlers: dict[int, Any] = {}
        self._terminals: list[int] = []
        self._ends_wait = False

    def __enter__(self) -> Self:
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @contextlib.contextmanager
    def ends_wait(self) -> Iterator[None]:
        """Let a signal end what happens while entered.

        Raises:
          Interrupted: if a signal came.
        """
        self._ends_wait = True
        try:
            if self.signal:
                raise Interrupted
            yield
        finally:
            self._ends_wait = False

    def _record(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = signal.Signals(number).name
        self._restore()
        if number == signal.SIGHUP:  # writing to a terminal that is gone would fail
            for terminal in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        if self._ends_wait:
            raise Interrupted

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
