"""A trained network's metrics on examples that it has not seen."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
        def added(totals: Any, params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
            weight = batch["weight"]
            values = measure(params, model_state, batch) | {"weight": jnp.ones_like(weight)}
            return {name: totals[name] + (v * weight).sum() for name, v in values.items()}

        self._batches = functools.partial(evaluation_batches, examples, batch_size)
        batch = next(self._batches())
        arguments = shapes.evaluation_params, shapes.model_state, batch
        names = jax.eval_shape(measure, *arguments).keys() | {"weight"}
        self._zeros = {name: np.zeros((), np.float32) for name in sorted(names)}
        # Each call waits for the last: a device may run what is independent at once, and hold
        # the temporaries of all of it.
        self._added = jax.jit(added, donate_argnums=0).lower(self._zeros, *arguments).compile()
        taken = memory.peak(self._added)
        held = memory.tree_bytes((shapes, batch))
        self.peak = held + taken.outputs + taken.temporaries + taken.workspace

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Means over all examples, with the averaged parameters where they are kept."""
        totals: Any = jax.device_put(self._zeros)
        for batch in self._batches():
            totals = self._added(totals, state.evaluation_params, state.model_state, batch)
        sums = {name: float(total) for name, total in jax.device_get(totals).items()}
        weight = sums.pop("weight")
        return {name: total / weight for name, total in sums.items()}
