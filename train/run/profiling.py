"""A trace of some steps, for TensorBoard's profiler and for Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from train.run.run_folder import quote

_BEFORE = 5
"""Steps before the trace: the first ones are not like those that follow."""


class Profile:
    """Traces ``steps`` steps of a loop, from the sixth of it on.

    Args:
      steps: how many; 0 for no trace.
      folder: where the trace is written.
      start: the step that the loop goes on after.
      say: shows a line.
    """

    def __init__(self, steps: int, folder: Path, start: int, say: Callable[[str], None]):
        first = start + _BEFORE + 1
        self._traced, self._folder, self._say = range(first, first + steps), folder, say
        self._running, self._seen = False, 0

    @contextlib.contextmanager
    def step(self, step: int, state: Any) -> Iterator[None]:
        """Around one step of the loop; ``state`` is that before it."""
        if step not in self._traced:
            if self._running:
                jax.block_until_ready(state)
                self.close()
            yield
            return
        if not self._running:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._running = True
        self._seen += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def close(self) -> None:
        """Ends the trace if it has begun and not ended; says so if it never began."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
            self._say(
                f"profile of {self._seen} steps in {self._folder}: tensorboard --logdir "
                f"{quote(self._folder)}, or perfetto_trace.json.gz in https://ui.perfetto.dev"
            )
        elif self._traced and not self._seen:
            self._say(f"no profile: the run ended before step {self._traced[0]}, where it begins")
