"""Metrics between two lines of the log, averaged, with the rate at which they came."""

import time

import jax
import numpy as np

from train.errors import TrainingError


class Meter:
    """Collects each step's metrics without waiting for them; waits only when a line is due.

    Attributes:
      examples: all examples metered.
      seconds: the time they took, without what came between two windows.
    """

    def __init__(self, batch_size: int):
        self.examples = 0
        self.seconds = 0.0
        self._batch_size = batch_size
        self._window: list[dict[str, jax.Array]] = []
        self._began = time.perf_counter()

    def restart(self) -> None:
        """Begins a window: what happened since the last one is not a step's time."""
        self._began = time.perf_counter()

    def add(self, metrics: dict[str, jax.Array]) -> None:
        """Takes a step's metrics, which may not be computed yet."""
        self._window.append(metrics)

    def means(self, step: int) -> dict[str, float]:
        """Ends the window: the means of its metrics, and ``examples_per_second``.

        Raises:
          TrainingError: if a loss in it is not finite.
        """
        window = jax.device_get(self._window)
        seconds, examples = time.perf_counter() - self._began, len(window) * self._batch_size
        for back, metrics in enumerate(reversed(window)):
            if not np.isfinite(metrics["loss"]):
                raise TrainingError(
                    f"the loss is {metrics['loss']} at step {step - back}; the last checkpoint "
                    "is from before; a lower optim.learning_rate or optim.clip_norm may help"
                )
        self.examples += examples
        self.seconds += seconds
        self._window = []
        means = {f"train/{k}": float(np.mean([m[k] for m in window])) for k in window[0]}
        return means | {"examples_per_second": examples / seconds}
