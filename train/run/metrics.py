"""Metrics of training steps: means over a window, and the score."""

import concurrent.futures
import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from train.config import Config
from train.errors import TrainingError, UserError, did_you_mean, list_available
from train.output.curves import LOWER_IS_BETTER
from train.output.logged import NOT_PRIVATE

FROM_NOISY_GRADIENT = frozenset({"grad_norm", "clip"})
"""Metrics of a private step that the guarantee covers. Others see training examples."""


class Meter:
    """Collect each step's metrics without waiting for the device until a line is logged.

    Args:
      batch_size: Number of examples of a step; the expected number if batches are sampled.
      private: Whether the gradient has noise. Metrics of training examples do not, and are then
        named ``not_private/...`` in place of ``train/...``, or with ``release_only`` ignored.

    Attributes:
      seconds: Time of the window that ended last, without evaluation and checkpoints.
    """

    def __init__(self, batch_size: int, *, private: bool = False, release_only: bool = False):
        self._private, self._release_only = private, release_only
        self.seconds = 0.0
        self._batch_size = batch_size
        self._window: list[dict[str, jax.Array]] = []
        self._examples: list[int] = []
        self._watcher = concurrent.futures.ThreadPoolExecutor(1)
        self.restart()

    def restart(self) -> None:
        """Start a window; the time since the last one does not count."""
        self._input_wait = 0.0
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time while entered."""
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start

    def next_batch(
        self, batches: Iterator[Any], waiting: contextlib.AbstractContextManager[None] | None = None
    ) -> Any:
        """Return the next batch, while the device computes the last step.

        The loop is at most one step ahead of the device: more would hold a batch each and save no
        time. Waiting for input counts from the end of the last step, because before it the device
        does not wait. Another thread notes when that is. ``waiting`` is entered for the input
        alone: a slow step of the device is no slow input.
        """
        jax.block_until_ready(self._window[-2:-1])
        last, since = self._window[-1:], time.perf_counter()
        ending = None if is_ready(last) else self._watcher.submit(idle_since, last)
        with waiting or contextlib.nullcontext():
            batch = next(batches)
        if is_ready(last):
            since = max(since, ending.result()) if ending else since
            self._input_wait += time.perf_counter() - since
        return batch

    def add(self, batch: Mapping[str, np.ndarray], metrics: dict[str, jax.Array]) -> None:
        """Add a step's batch and metrics, which need not be computed yet."""
        padded = "weight" in batch and not self._private  # a private batch has a secret size
        self._examples.append(
            int(np.count_nonzero(batch["weight"])) if padded else self._batch_size
        )
        if self._release_only:
            metrics = {k: v for k, v in metrics.items() if k in FROM_NOISY_GRADIENT}
        self._window.append(metrics)

    def means(self, step: int) -> dict[str, float]:
        """End the window and return the means of its metrics.

        Skipped steps are only counted, as ``train/skipped``. ``examples_per_second`` counts the
        examples of the other steps, without padding and unreadable files; with privacy, their
        expected number. ``input_wait`` is the fraction of time in which the device waited for a
        batch.

        Raises:
          TrainingError: if a loss or gradient is not finite.
        """
        window = self.check(step)
        self.seconds = seconds = time.perf_counter() - self._start
        applied = [m for m in window if not m.get("skipped")]
        counts = zip(self._examples, window, strict=True)
        examples = sum(n for n, m in counts if not m.get("skipped"))
        self._window, self._examples = [], []
        names = [k for k in window[0] if k != "skipped"] if applied else []
        parts = {k: "train" if self._is_covered(k) else NOT_PRIVATE for k in names}
        means = {f"{parts[k]}/{k}": float(np.mean([m[k] for m in applied])) for k in names}
        if len(applied) < len(window):
            means["train/skipped"] = len(window) - len(applied)
        for name in [n for n in means if n.startswith("train/grad_sq") and means[n] > 0]:
            var = means[name.replace("grad_sq", "grad_var", 1)]
            means[name.replace("grad_sq", "noise_scale", 1)] = var / means[name]
        rates = {"examples_per_second": examples / seconds}
        return means | rates | {"input_wait": self._input_wait / seconds}

    def _is_covered(self, name: str) -> bool:
        return not self._private or name in FROM_NOISY_GRADIENT

    def check(self, step: int) -> list[dict[str, Any]]:
        """Wait for the steps of the window, before their state is saved, and return their metrics.

        Raises:
          TrainingError: if a loss, unless it is private, or a gradient is not finite.
        """
        window = jax.device_get(self._window)
        for number, metrics in enumerate(window, step - len(window) + 1):
            for name, text in (("loss", "loss"), ("grad_norm", "gradient norm")):
                value = metrics.get(name, 0.0) if self._is_covered(name) else 0.0
                if not metrics.get("skipped") and not np.isfinite(value):
                    raise TrainingError(
                        f"the {text} is {value} at step {number}; the last checkpoint is from "
                        "before; try a lower optim.learning_rate, or optim.clip_norm"
                    )
        return window


def is_ready(metrics: Any) -> bool:
    """Whether the device has computed metrics."""
    return all(a.is_ready() for a in jax.tree.leaves(metrics))


def idle_since(metrics: Any) -> float:
    """Wait until the device has computed metrics, and return when that was."""
    jax.block_until_ready(metrics)
    return time.perf_counter()


def best_metric(config: Config) -> str | None:
    """Return the metric of the best checkpoint; numbers have no macro F1, which recipes name."""
    metric = config.checkpoint.metric
    return None if metric == "macro_f1" and config.data.targets == "numbers" else metric


def score_of(metrics: Mapping[str, float], metric: str | None = None) -> float | None:
    """Return the score of a network, which is larger for a better one; None if it is not finite.

    Without a metric, it is mean IoU, else accuracy, else the loss.
    """
    metric = metric or next(n for n in ("mean_iou", "accuracy", "loss") if n in metrics)
    if metric not in metrics:
        raise UserError(
            f"checkpoint.metric: no test metric {metric}{did_you_mean(metric, metrics)}"
            f"{list_available([*metrics], 'metrics')}"
        )
    score = -metrics[metric] if metric.split()[0] in LOWER_IS_BETTER else metrics[metric]
    return score if math.isfinite(score) else None
