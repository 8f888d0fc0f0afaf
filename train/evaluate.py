"""A trained network's metrics on examples that it has not seen."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fnet import TrainState, memory
from train.data import Arrays, evaluation_batches


class Evaluate:
    """``evaluate(state) -> {metric: mean over all examples}``, compiled when made.

    A last partial batch is padded and its padding weighted 0, so that every
    example counts exactly once.

    Args:
      measure: ``(params, model_state, batch) -> {metric: [batch]}``.
      examples: what is evaluated on.
      batch_size: examples a call.
      shapes: of the train state (``jax.eval_shape``).

    Attributes:
      peak: bytes held at most while it is called: the whole train state, a batch
        and what the compiled program takes beside them.
    """

    def __init__(
        self,
        measure: Callable[[Any, Any, Any], dict[str, jax.Array]],
        examples: Arrays,
        batch_size: int,
        shapes: TrainState,
    ):
        def sums(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
            weight = batch["weight"]
            values = measure(params, model_state, batch)
            return {"weight": weight.sum()} | {k: (v * weight).sum() for k, v in values.items()}

        self._batches = functools.partial(evaluation_batches, examples, batch_size)
        batch = next(self._batches())
        lowered = jax.jit(sums).lower(shapes.evaluation_params, shapes.model_state, batch)
        self._sums = lowered.compile()
        taken = memory.peak(self._sums)
        held = memory.tree_bytes((shapes, batch))
        self.peak = held + taken.outputs + taken.temporaries + taken.workspace

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Means over all examples, with the averaged parameters where they are kept."""
        each = [
            self._sums(state.evaluation_params, state.model_state, batch)
            for batch in self._batches()
        ]
        totals = jax.tree.map(lambda *v: float(np.sum(v)), *jax.device_get(each))
        weight = totals.pop("weight")
        return {name: total / weight for name, total in totals.items()}
