"""Sums over the test examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import TrainState
from train.data import Dataset
from train.run import evaluation
from train.run.evaluation import Evaluator
from train.tasks import BatchMetrics, Task


@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("limit", [5, 6])
def test_examples_count_by_their_weight_and_padding_does_not(limit, classes, monkeypatch):
    monkeypatch.setattr(evaluation, "_KEPT_OUTPUTS", limit)
    weight = np.array([1.0, 2.0, 0.5], np.float32)
    test = {"x": np.array([1.0, 10.0, 100.0], np.float32), "weight": weight}
    dataset = Dataset(test, test, ("a", "b"), lambda rows, generator: rows)
    key = jax.random.key(0)
    state = TrainState(jnp.int32(0), {"w": jnp.ones(())}, {}, (), None, key)

    def measure(params, model_state, batch):
        # Padding has x 0, whose loss is infinite.
        x = batch["x"] * params["w"]
        label = (x > 5).astype(jnp.int32)
        confusion, outputs = (label, label) if classes else None, {"outputs": jnp.stack([x, x], -1)}
        return BatchMetrics({"loss": jnp.where(x > 0, x, jnp.inf)}, confusion, x, outputs)

    task = Task(dataset, None, None, measure)
    found = Evaluator(task, 2, jax.eval_shape(lambda: state))(state)
    assert found.metrics["loss"] == (1 + 2 * 10 + 0.5 * 100) / 3.5
    np.testing.assert_array_equal(found.confusion, [[1, 0], [0, 2]] if classes else None)
    # Only probabilities of classes, here 3 x 2, are too many to be kept.
    assert ("outputs" in found.examples) == (limit == 6 or not classes)
