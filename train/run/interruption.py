"""Interruption of a run by Ctrl-C or SIGTERM."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


class Interrupted(BaseException):
    """A signal came during a wait that it ends."""


class Interruption:
    """Record SIGINT or SIGTERM instead of ending the process, so that a run can save first.

    Only the first signal is recorded; a second one ends the process.

    Attributes:
      signal: Name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._handlers: dict[int, Any] = {}
        self._ends_wait = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
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
        if self._ends_wait:
            raise Interrupted

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
