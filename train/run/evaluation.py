"""A trained network's metrics on examples that it has not seen."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fnet import TrainState, memory
from train.data import Arrays, evaluation_batches, num_examples, sample_evaluation_batch
from train.run.mesh import Layout
from train.tasks import Task


class Trained(Protocol):
    """A train state, or as much of one as evaluation needs."""

    @property
    def evaluation_params(self) -> Any:
        """The averaged parameters where they are kept, else the parameters."""

    @property
    def model_state(self) -> Any:
        """What the forward pass renews in training."""


class Evaluation(NamedTuple):
    """What a network makes of the held-out examples.

    Attributes:
      metrics: means over all examples.
      confusion: [true, predicted]: how many examples, or pixels, of one class were taken
        for another; None where nothing is classified.
    """

    metrics: dict[str, float]
    confusion: np.ndarray | None


class Shown(NamedTuple):
    """A batch of held-out examples, and what is made of them.

    Attributes:
      batch: with ``weight`` 0 for what is no example.
      predictions: [batch, ...], labels.
      probability: [batch], of each; None where there are several an example.
    """

    batch: Arrays
    predictions: np.ndarray
    probability: np.ndarray | None


class Evaluate:
    """``evaluate(trained) -> Evaluation``, compiled when made.

    A last partial batch is padded and its padding weighted 0, so that every
    example counts exactly once.

    Args:
      task: its data and its measure.
      batch_size: examples a call.
      shapes: of the train state (``jax.eval_shape``).
      watch: sees each batch before it is evaluated: `UnreadableFiles.watch`.
      layout: where the shapes are placed; None: on one device.

    Attributes:
      peak: bytes held at most while it is called: the whole train state, a batch
        and what the compiled program takes beside them.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        shapes: TrainState,
        watch: Callable[[Iterator[Arrays]], Iterator[Arrays]] = lambda batches: batches,
        layout: Layout | None = None,
    ):
        classes = len(task.dataset.classes)

        def added(totals: Any, params: Any, model_state: Any, batch: Any) -> Any:
            weight = batch["weight"]
            metrics, confusion, probability = task.measure(params, model_state, batch)
            metrics = metrics | {"weight": jnp.ones_like(weight)}
            sums, counts = totals
            # By selection: zero times an infinite number is not zero.
            real = weight != 0
            sums = {n: sums[n] + jnp.where(real, v * weight, 0).sum() for n, v in metrics.items()}
            if confusion is None:
                return (sums, counts), None
            weights = weight.reshape(-1, *[1] * (confusion[0].ndim - 1))
            counts = counts.at[confusion].add(weights.astype(counts.dtype), mode="drop")
            return (sums, counts), (confusion[1], probability)

        self._dataset, self._batch_size, self._watch = task.dataset, batch_size, watch
        batch: Any = sample_evaluation_batch(task.dataset, batch_size)
        self._everywhere = layout.everywhere if layout else None
        self._put = layout.put if layout else lambda batch: batch
        batch = layout.batch(batch) if layout else batch
        arguments = shapes.evaluation_params, shapes.model_state, batch
        measured = jax.eval_shape(task.measure, *arguments)
        names = sorted(measured.metrics.keys() | {"weight"})
        self._scores = task.scores
        self._counts = measured.confusion[0].size if measured.confusion else 0
        self._zeros = (
            {name: np.zeros((), np.float32) for name in names},
            np.zeros((classes, classes), np.int32) if measured.confusion else None,
        )
        # Each call waits for the last: a device may run what is independent at once, and hold
        # the temporaries of all of it.
        jitted = jax.jit(added, donate_argnums=0, out_shardings=self._everywhere)
        self._added = jitted.lower(self._begin(), *arguments).compile()
        taken = memory.peak(self._added)
        held = memory.tree_bytes((shapes, batch))
        self.peak = held + taken.outputs + taken.temporaries + taken.workspace

    def _begin(self) -> Any:
        return jax.device_put(self._zeros, self._everywhere)

    def __call__(self, trained: Trained) -> Evaluation:
        """Over all held-out examples, with the averaged parameters where they are kept."""
        found: Any = jax.tree.map(lambda a: a.astype(np.promote_types(a.dtype, "i8")), self._zeros)
        totals, counted = self._begin(), 0
        for batch in self._watch(evaluation_batches(self._dataset, self._batch_size)):
            counted += self._counts
            if counted >= 2**31:  # a cell of the matrix could overflow
                found, counted = jax.tree.map(np.add, found, jax.device_get(totals)), self._counts
                totals = self._begin()
            arguments = trained.evaluation_params, trained.model_state, self._put(batch)
            totals, _ = self._added(totals, *arguments)
        sums, confusion = jax.tree.map(np.add, found, jax.device_get(totals))
        weight = float(sums.pop("weight"))
        metrics = {name: float(total) / weight for name, total in sums.items()}
        metrics |= {} if confusion is None else self._scores(confusion)
        return Evaluation(metrics, confusion)

    def shown(self, trained: Trained, most: int) -> Iterator[Shown]:
        """What is made of at most so many held-out examples, from the whole of them, evenly.

        By the same program, so that nothing is compiled; nothing where nothing is classified.
        """
        if not self._counts:
            return
        n = num_examples(self._dataset.test)
        rows = np.arange(n) if n <= most else np.linspace(0, n - 1, most).astype(int)
        some = {name: a[rows] for name, a in self._dataset.test.items()}
        for batch in evaluation_batches(self._dataset._replace(test=some), self._batch_size):
            arguments = trained.evaluation_params, trained.model_state, self._put(batch)
            _, (predictions, probability) = jax.device_get(self._added(self._begin(), *arguments))
            yield Shown(batch, predictions, probability)
