"""Ctrl-C and SIGTERM: finish the step, save, say so."""

import signal
from types import FrameType
from typing import Any, Self


class Interruption:
    """While entered, the first SIGINT or SIGTERM only sets ``requested``; the next ends at once."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.requested = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
