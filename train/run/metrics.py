"""Metrics between two lines of the log, averaged, with the rate at which they came."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from train.errors import TrainingError


class Meter:
    """Collects each step's metrics without waiting for them; waits only when a line is due.

    Attributes:
      examples: all examples metered; where batches are sampled, as many as on average.
      seconds: the time they took, without what came between two windows.
    """

    def __init__(self, batch_size: int):
        self.examples = 0
        self.seconds = 0.0
        self._batch_size = batch_size
        self._window: list[dict[str, jax.Array]] = []
        self.restart()

    def restart(self) -> None:
        """Begins a window: what happened since the last one is not a step's time."""
        self._waited = 0.0
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile is no step's time."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def take(self, batches: Iterator[Any]) -> Any:
        """The next batch, taken while the last step is at work and none is behind it.

        More steps ahead would make nothing faster and hold a batch each. A wait is metered
        where it outlasts the last step: only then does the device wait as well.
        """
        jax.block_until_ready(self._window[-2:-1])
        asked = time.perf_counter()
        batch = next(batches)
        if all(a.is_ready() for a in jax.tree.leaves(self._window[-1:])):
            self._waited += time.perf_counter() - asked
        return batch

    def add(self, metrics: dict[str, jax.Array]) -> None:
        """Takes a step's metrics, which may not be computed yet."""
        self._window.append(metrics)

    def means(self, step: int) -> dict[str, float]:
        """Ends the window: its metrics' means, ``examples_per_second`` and ``input_wait``.

        Of steps that were left out only their number is told: ``train/skipped``.
        The last is the share of the time in which the device may have waited for a batch.

        Raises:
          TrainingError: if a loss or a gradient in it is not finite.
        """
        window = self._computed(step)
        seconds, examples = time.perf_counter() - self._began, len(window) * self._batch_size
        applied = [m for m in window if not m.get("skipped")]
        self.examples += examples
        self.seconds += seconds
        self._window = []
        names = [k for k in window[0] if k != "skipped"] if applied else []
        means = {f"train/{k}": float(np.mean([m[k] for m in applied])) for k in names}
        if len(applied) < len(window):
            means["train/skipped"] = len(window) - len(applied)
        if means.get("train/grad_sq", 0) > 0:
            means["train/noise_scale"] = means["train/grad_var"] / means["train/grad_sq"]
        return means | {
            "examples_per_second": examples / seconds,
            "input_wait": self._waited / seconds,
        }

    def check(self, step: int) -> None:
        """Waits for the window's steps, before their state is saved.

        Raises:
          TrainingError: if a loss or a gradient in it is not finite.
        """
        self._computed(step)

    def _computed(self, step: int) -> list[dict[str, Any]]:
        window = jax.device_get(self._window)
        for at, metrics in enumerate(window, step - len(window) + 1):
            for name, what in (("loss", "loss"), ("grad_norm", "gradient's norm")):
                value = metrics.get(name, 0.0)
                if not metrics.get("skipped") and not np.isfinite(value):
                    raise TrainingError(
                        f"the {what} is {value} at step {at}; the last checkpoint is from "
                        "before; a lower optim.learning_rate or optim.clip_norm may help"
                    )
        return window


def score(metrics: Mapping[str, float]) -> float | None:
    """How good a network is: its mean IoU, or else accuracy, or else minus its loss.

    None where that is not finite.
    """
    found = metrics.get("mean_iou", metrics.get("accuracy", -metrics["loss"]))
    return found if math.isfinite(found) else None


def noise_scale(lines: Sequence[dict[str, Any]]) -> float | None:
    """The simple noise scale at the end of a run; None where it was not, or cannot be measured."""
    course = noise_scale_course(lines)
    return course[-1][1] if course and course[-1][0] == lines[-1]["step"] else None


def noise_scale_course(lines: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """The simple noise scale over a run, in examples: (step, tr(Sigma) / |G|^2).

    The batch size at which the noise of the gradient is as large as the gradient
    (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A).
    Both estimates are unbiased and noisy, their ratio is not unbiased: each is
    averaged exponentially (half-life: a tenth of the run), and then divided. Steps
    where the average of |G|^2 is not above 0 are left out: there noise is all there is.

    Args:
      lines: of metrics.jsonl, with ``train/grad_var`` and ``train/grad_sq``.
    """
    measured = [r for r in lines if "train/grad_sq" in r and r["step"] > 0]
    course = []
    var = sq = last = 0.0
    for line in measured:
        step = line["step"]
        keep = 0.5 ** ((step - last) / (measured[-1]["step"] / 10))
        var = keep * var + (1 - keep) * line["train/grad_var"]
        sq = keep * sq + (1 - keep) * line["train/grad_sq"]
        last = step
        if sq > 0:
            course.append((step, var / sq))
    return course
