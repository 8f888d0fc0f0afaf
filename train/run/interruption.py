"""Interruption of a run by Ctrl-C or SIGTERM."""

import signal
from types import FrameType
from typing import Any, Self


class Interruption:
    """Record SIGINT or SIGTERM instead of ending the process, so that a run can save first.

    Only the first signal is recorded; a second one ends the process.

    Attributes:
      signal: Name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _record(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
