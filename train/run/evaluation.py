"""Evaluate a trained network on test examples."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet import TrainState, memory
from fnet.cpu.convolutions import count_cpus, for_cpus
from fnet.fsdp import gather_at_use
from train.data import Arrays, evaluation_batches, num_examples, sample_evaluation_batch
from train.errors import UserError
from train.run.checkpoints import RestoredNetwork
from train.run.mesh import Layout, shardings
from train.run.process_memory import FirstApart
from train.tasks import Task

Trained = TrainState | RestoredNetwork
"""A train state, or its part that evaluation needs."""
_KEPT_OUTPUTS = 2**22
"""Largest number of probabilities of classes of all test examples that are kept, 16 MiB."""


class Evaluation(NamedTuple):
    """Means of metrics over all test examples, and what is known of each.

    Attributes:
      metrics: {name: mean}; NaN if it is undefined.
      confusion: counts of examples or pixels [true, predicted]; None without classes.
      examples: Arrays with a row per test example: its metrics, ``weight``, ``prediction`` and
        ``probability`` if it has one label, and what `BatchMetrics.examples` names. ``outputs`` of
        classes are missing if they are more than 16 MiB.
    """

    metrics: dict[str, float]
    confusion: np.ndarray | None
    examples: Arrays = {}  # noqa: RUF012 (it is not changed)

    @property
    def test_metrics(self) -> dict[str, float | None]:
        """Metrics by their names in metrics.jsonl; None if undefined."""
        return {
            f"test/{name}": None if math.isnan(value) and name != "loss" else value
            for name, value in self.metrics.items()
        }


class Evaluator:
    """``evaluate(trained) -> Evaluation``, compiled once it is needed.

    The last batch is padded with examples of weight 0, so that each example counts exactly once.

    Args:
      shapes: shapes of the train state.
      watch: wraps the iterator of batches (`UnreadableFiles.watch`).
      layout: layout of the shapes; None for one device.
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        shapes: TrainState,
        watch: Callable[[Iterator[Arrays]], Iterator[Arrays]] = lambda batches: batches,
        layout: Layout | None = None,
    ):
        num_classes = len(task.dataset.classes)

        def add_batch(totals: Any, params: Any, model_state: Any, batch: Any) -> Any:
            weight = batch["weight"]
            metrics, confusion, probability, examples = task.measure(params, model_state, batch)
            examples = {n: a for n, a in examples.items() if n in kept} | metrics
            metrics = metrics | {"weight": jnp.ones_like(weight)}
            sums, counts = totals
            # Select, because zero times infinity is NaN.
            is_real = weight != 0
            sums = {
                n: sums[n] + jnp.where(is_real, v * weight, 0).sum() for n, v in metrics.items()
            }
            examples |= {"weight": weight}
            if confusion is None:
                return (sums, counts), (None, examples)
            if confusion[1].ndim == 1:
                examples |= {"prediction": confusion[1]}
            if probability is not None:
                examples |= {"probability": probability}
            weights = weight.reshape(-1, *[1] * (confusion[0].ndim - 1))
            counts = counts.at[confusion].add(weights.astype(counts.dtype), mode="drop")
            return (sums, counts), (confusion[1], examples)

        self._dataset, self.batch_size, self._watch = task.dataset, batch_size, watch
        batch: Any = sample_evaluation_batch(task.dataset, batch_size)
        self._replicated = layout.replicated if layout else None
        self._put = layout.put if layout else lambda batch: batch
        self._local = layout.local_rows(batch_size) if layout else None
        batch = layout.batch(batch) if layout else batch
        arguments = shapes.evaluation_params, shapes.model_state, batch
        measured = jax.eval_shape(task.measure, *arguments)
        names = sorted(measured.metrics.keys() | {"weight"})
        rows = num_examples(task.dataset.test)
        kept = {
            name
            for name, a in measured.examples.items()
            if name != "outputs" or not measured.confusion or rows * a.shape[-1] <= _KEPT_OUTPUTS
        }
        self._scores = task.scores
        self._counts_per_batch = measured.confusion[0].size if measured.confusion else 0
        self._zeros = (
            {name: np.zeros((), np.float32) for name in names},
            np.zeros((num_classes, num_classes), np.int32) if measured.confusion else None,
        )
        self._outputs = functools.partial(jax.eval_shape, add_batch, self._zeros, *arguments)
        if layout:
            sharded = shardings(shapes.evaluation_params)
            add_batch = gather_at_use(add_batch, (None, sharded, None, None))
        # Donated totals make each call wait for the one before. Otherwise the device could run
        # several at once and hold the temporaries of all.
        add_batch = for_cpus(add_batch, count_cpus(shapes))
        jitted = jax.jit(add_batch, donate_argnums=0, out_shardings=self._replicated)
        # The options keep the order of gathers.
        options = memory.CANDIDATE_OPTIONS.get(jax.default_backend(), ({},))[0] if layout else {}
        self._options, self._argument_bytes = dict(options), memory.tree_bytes((shapes, batch))
        self._lower = functools.partial(jitted.lower, self._zero_totals(), *arguments)

    @functools.cached_property
    def _add_batch(self) -> FirstApart:
        return FirstApart(self._lower().compile(compiler_options=self._options))

    @property
    def is_compiled(self) -> bool:
        """Whether the program is there."""
        return "_add_batch" in vars(self)

    @property
    def peak(self) -> int:
        """Peak memory in bytes while it runs: train state, a batch, outputs, temporaries."""
        program = memory.peak(self._add_batch.program)
        made = program.outputs + program.temporaries + program.workspace + program.constants
        return self._argument_bytes + made

    def __call__(self, trained: Trained) -> Evaluation:
        """Evaluate on all test examples, with averaged parameters if there are any."""
        # Sums in 64 bits on the host; on the device in 32 bits, as long as no count overflows.
        sums: Any = jax.tree.map(lambda a: a.astype(np.promote_types(a.dtype, "i8")), self._zeros)
        totals, max_count = self._zero_totals(), 0
        kept: list[Any] = []
        for batch in self._watch(evaluation_batches(self._dataset, self.batch_size, self._local)):
            max_count += self._counts_per_batch
            if max_count >= 2**31:
                sums = jax.tree.map(np.add, sums, jax.device_get(totals))
                totals, max_count = self._zero_totals(), self._counts_per_batch
            arguments = trained.evaluation_params, trained.model_state, self._put(batch)
            totals, (_, examples) = self._add_batch(totals, *arguments)
            kept.append(examples)
        metric_sums, confusion = jax.tree.map(np.add, sums, jax.device_get(totals))
        weight = float(metric_sums.pop("weight"))
        if not weight or (confusion is not None and not confusion.any()):
            raise UserError(
                f"data: none of the {num_examples(self._dataset.test):,} test examples has a label "
                "that counts, so that there is nothing to measure; see data.ignore for masks"
            )
        metrics = {name: float(total) / weight for name, total in metric_sums.items()}
        test, n = self._dataset.test, num_examples(self._dataset.test)
        kept = jax.device_get(kept)
        examples = {name: np.concatenate([part[name] for part in kept])[:n] for name in kept[0]}
        if self._dataset.scaling:
            examples["outputs"] = self._dataset.scaling.restore(examples["outputs"])
        is_real = examples["weight"] != 0
        counted, rows = ({k: a[is_real] for k, a in arrays.items()} for arrays in (examples, test))
        return Evaluation(metrics | self._scores(counted, rows, confusion), confusion, examples)

    def trial(self) -> dict[str, float]:
        """Return metrics of outputs of zeros: all names, and NaN where the labels define none."""
        test, n = self._dataset.test, num_examples(self._dataset.test)
        _, (_, kept) = self._outputs()
        examples = {name: np.zeros((n, *a.shape[1:]), a.dtype) for name, a in kept.items()}
        scores = self._scores(examples, test, np.eye(len(self._dataset.classes), dtype=int))
        return {name: 0.0 for name in self._zeros[0] if name != "weight"} | scores

    def predict(self, trained: Trained, max_examples: int) -> Iterator[tuple[Arrays, np.ndarray]]:
        """Yield batches of test examples at regular intervals, with predicted labels [batch, ...].

        The compiled program of the evaluation is used. Without classes, nothing is yielded.
        """
        if not self._counts_per_batch:
            return
        n = num_examples(self._dataset.test)
        rows = np.arange(n)
        if n > max_examples:
            rows = np.linspace(0, n - 1, max_examples).astype(int)
        test = {name: a[rows] for name, a in self._dataset.test.items()}
        for batch in evaluation_batches(self._dataset._replace(test=test), self.batch_size):
            arguments = trained.evaluation_params, trained.model_state, self._put(batch)
            _, (predictions, _) = self._add_batch(self._zero_totals(), *arguments)
            yield batch, jax.device_get(predictions)

    def _zero_totals(self) -> Any:
        return jax.device_put(self._zeros, self._replicated)
