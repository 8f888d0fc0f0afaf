"""Trace of some steps, for TensorBoard's profiler and Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from train.run.run_folder import quote

_WARMUP = 5
"""Steps before the trace; the first ones of a run are not typical."""


class Profile:
    """Trace ``steps`` steps of a loop that begins after step ``start``, from its sixth on."""

    def __init__(self, steps: int, folder: Path, start: int, log: Callable[[str], None]):
        first = start + _WARMUP + 1
        self._steps, self._folder, self._log = range(first, first + steps), folder, log
        self._is_running, self._num_traced = False, 0

    @contextlib.contextmanager
    def step(self, step: int, state: Any) -> Iterator[None]:
        """Enter around one step of the loop; ``state`` is the state before it."""
        if step not in self._steps:
            if self._is_running:
                jax.block_until_ready(state)
                self.close()
            yield
            return
        if not self._is_running:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._is_running = True
        self._num_traced += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def close(self) -> None:
        """End the trace, and log where it is or that it did not begin."""
        if self._is_running:
            jax.profiler.stop_trace()
            self._is_running = False
            self._log(
                f"profile of {self._num_traced} steps in {self._folder}; open it with tensorboard "
                f"--logdir {quote(self._folder)}, or load perfetto_trace.json.gz in "
                "https://ui.perfetto.dev"
            )
        elif self._steps and not self._num_traced:
            self._log(f"no profile: the run ended before step {self._steps[0]}, where it begins")
