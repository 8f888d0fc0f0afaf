"""Sums over the test examples."""

import jax
import jax.numpy as jnp
import numpy as np

from fnet import TrainState
from train.data import Dataset
from train.run.evaluation import Evaluator
from train.tasks import BatchMetrics, Task


def test_examples_count_by_their_weight_and_padding_does_not():
    weight = np.array([1.0, 2.0, 0.5], np.float32)
    test = {"x": np.array([1.0, 10.0, 100.0], np.float32), "weight": weight}
    dataset = Dataset(test, test, ("a", "b"), lambda rows, generator: rows)
    key = jax.random.key(0)
    state = TrainState(jnp.int32(0), {"w": jnp.ones(())}, {}, (), None, key)

    def measure(params, model_state, batch):
        # Padding has x 0, whose loss is infinite.
        x = batch["x"] * params["w"]
        label = (x > 5).astype(jnp.int32)
        return BatchMetrics({"loss": jnp.where(x > 0, x, jnp.inf)}, (label, label), x)

    task = Task(dataset, None, None, measure)
    evaluation = Evaluator(task, 2, jax.eval_shape(lambda: state))(state)
    assert evaluation.metrics["loss"] == (1 + 2 * 10 + 0.5 * 100) / 3.5
    np.testing.assert_array_equal(evaluation.confusion, [[1, 0], [0, 2]])
