"""Steps that were left out because they were not finite: recorded, traced to a layer, limited."""

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fnet import TrainState
from fnet.autodiff.mean import mean_loss
from fnet.nonfinite import find_nonfinite
from train.data import Arrays
from train.errors import TrainingError
from train.run.setup import Setup


class _Taken(NamedTuple):
    step: int
    batch: Arrays
    metrics: dict[str, jax.Array]


class Guard:
    """Looks at every step once it has ended; the device is not waited for.

    Of each step that was left out (`fnet.make_step` with ``guard``) a line goes to a file: the
    step, its loss, the training examples of its batch. Of the first of several in a row, what
    made the first NaN or infinity as well, which takes a computation more.

    Args:
      run: what is trained.
      path: of the file, made when there is something to write.
      say: shows a line.

    Attributes:
      in_a_row: how many of the last steps were left out.
    """

    def __init__(self, run: Setup, path: Path, say: Callable[[str], None]):
        self._run, self._path, self._say = run, path, say
        self._taken: deque[_Taken] = deque()
        self._origin = ""  # of the first of those in a row
        self.in_a_row = 0

    def add(self, step: int, batch: Arrays, metrics: dict[str, jax.Array]) -> None:
        """A step that was taken, and may not have ended yet."""
        if "skipped" in metrics:
            self._taken.append(_Taken(step, batch, metrics))

    def look(self, state: TrainState, *, wait: bool = False) -> None:
        """At the steps that have ended.

        Args:
          state: after the last step.
          wait: whether the last step is waited for.

        Raises:
          TrainingError: after more than ``nonfinite.max_skipped`` in a row.
        """
        while len(self._taken) > (0 if wait else 1):
            taken = self._taken.popleft()
            if not taken.metrics["skipped"]:
                self.in_a_row = 0
                continue
            self.in_a_row += 1
            self._note(taken, state)
            most = self._run.config.nonfinite.max_skipped
            if self.in_a_row > most:
                raise TrainingError(
                    f"{self.in_a_row} steps in a row, up to {taken.step}, had a loss or gradient "
                    f"that is not finite (nonfinite.max_skipped {most}): {self._origin}; they were "
                    f"left out, their examples are in {self._path}; the last checkpoint is from "
                    "before; a lower optim.learning_rate or optim.clip_norm may help"
                )

    def _note(self, taken: _Taken, state: TrainState) -> None:
        loss, norm = (float(taken.metrics[name]) for name in ("loss", "grad_norm"))
        if self.in_a_row == 1:
            self._origin = self._find(taken, state)
            self._say(
                f"step {taken.step} left out: loss {loss:g}, gradient norm {norm:g}; "
                f"{self._origin}; its examples are in {self._path}"
            )
        weight = taken.batch.get("weight")
        rows = taken.batch["row"] if weight is None else taken.batch["row"][weight > 0]
        name = self._run.task.dataset.name
        line = {
            "step": taken.step,
            "loss": str(loss),
            "grad_norm": str(norm),
            "origin": self._origin,
            "rows": rows.tolist(),
            "examples": [name(row) for row in np.unique(rows).tolist()],
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _find(self, taken: _Taken, state: TrainState) -> str:
        """What made the first NaN or infinity, by the parameters that there are now."""
        key = jax.random.fold_in(jax.random.clone(state.key), taken.step - 1)
        found = find_nonfinite(
            jax.value_and_grad(mean_loss(self._run.task.loss), has_aux=True),
            state.params,
            state.model_state,
            self._run.put(taken.batch),
            key,
        )
        return str(found) if found else "all is finite with the parameters of the steps after it"
