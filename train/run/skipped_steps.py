"""Steps skipped because of a NaN or infinity: recorded, traced to a layer, limited in number."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fnet import TrainState
from fnet.autodiff.mean import mean_loss, replace_padding
from fnet.nonfinite import find_nonfinite
from train.data import Arrays
from train.errors import TrainingError
from train.run.setup import Setup


class _Step(NamedTuple):
    number: int
    batch: Arrays
    metrics: dict[str, jax.Array]


class SkippedSteps:
    """Record each step that was skipped because its loss or gradient was not finite.

    `fnet.make_step` with ``skip_nonfinite`` skips such a step on the device. Here, once it has
    ended, a line with its loss and its training examples is appended to a file. For the first of
    several consecutive ones, the source of the NaN or infinity is found, too, which computes the
    gradient once more.

    Attributes:
      consecutive: Number of consecutive skipped steps up to the last one that was checked.
    """

    def __init__(self, run: Setup, path: Path, log: Callable[[str], None]):
        self._run, self._path, self._log = run, path, log
        self._unchecked: deque[_Step] = deque()
        self._source = ""  # of the first of the consecutive steps
        self.consecutive = 0

    def add(self, step: int, batch: Arrays, metrics: dict[str, jax.Array]) -> None:
        """Add a step, which need not have ended yet."""
        if "skipped" in metrics:
            self._unchecked.append(_Step(step, batch, metrics))

    def check(self, state: TrainState, *, wait: bool = False) -> None:
        """Check the steps that have ended, without waiting for the device, or with ``wait`` all.

        Raises:
          TrainingError: after more than ``nonfinite.max_skipped`` consecutive skipped steps.
        """
        while len(self._unchecked) > (0 if wait else 1):
            step = self._unchecked.popleft()
            if not step.metrics["skipped"]:
                self.consecutive = 0
                continue
            self.consecutive += 1
            self._record(step, state)
            limit = self._run.config.nonfinite.max_skipped
            if self.consecutive > limit:
                raise TrainingError(
                    f"skipped {self.consecutive} consecutive steps, up to step {step.number}: "
                    f"their loss or gradient was not finite (nonfinite.max_skipped {limit}): "
                    f"{self._source}; their examples are in {self._path}; the last checkpoint is "
                    "from before; try a lower optim.learning_rate, or optim.clip_norm"
                )

    def _record(self, step: _Step, state: TrainState) -> None:
        loss, norm = (float(step.metrics[name]) for name in ("loss", "grad_norm"))
        if self.consecutive == 1:
            self._source = self._find_source(step, state)
            self._log(
                f"skipped step {step.number}: loss {loss:g}, gradient norm {norm:g}; "
                f"{self._source}; its examples are in {self._path}"
            )
        weight = step.batch.get("weight")
        rows = step.batch["row"] if weight is None else step.batch["row"][weight > 0]
        name = self._run.task.dataset.name
        line = {
            "step": step.number,
            "loss": str(loss),
            "grad_norm": str(norm),
            "origin": self._source,
            "rows": rows.tolist(),
            "examples": [name(row) for row in np.unique(rows).tolist()],
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _find_source(self, step: _Step, state: TrainState) -> str:
        source = find_nonfinite(
            jax.value_and_grad(mean_loss(self._run.task.loss), has_aux=True),
            state.params,
            state.model_state,
            replace_padding(self._run.put(step.batch)),
            jax.random.fold_in(jax.random.clone(state.key), step.number - 1),
        )
        return str(source) if source else "everything is finite with the parameters of later steps"
