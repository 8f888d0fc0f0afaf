"""Orders of rows with equally frequent classes, and with repeated augmentation."""

import chex
import numpy as np

from train.data.order import SampledBatches

LABELS = np.array([0] * 30 + [1] * 5 + [2])


def rows_of(batches, steps):
    return np.concatenate([batches(step) for step in range(steps)])


def test_each_class_is_drawn_once_per_round():
    rows = rows_of(SampledBatches(LABELS, len(LABELS), 8, 1, seed=0), 30)
    rounds = LABELS[rows].reshape(-1, 3)
    assert (np.sort(rounds, 1) == [0, 1, 2]).all()
    assert len({tuple(order) for order in rounds.tolist()}) == 6  # in random order


def test_rows_of_a_class_are_shuffled_without_replacement():
    rows = rows_of(SampledBatches(LABELS, len(LABELS), 9, 1, seed=0), 20)
    for label, first, count in ((0, 0, 30), (1, 30, 5), (2, 35, 1)):
        drawn = rows[LABELS[rows] == label]
        epochs = drawn[: len(drawn) // count * count].reshape(-1, count)
        assert (np.sort(epochs, 1) == np.arange(first, first + count)).all()
    fives = rows[LABELS[rows] == 1].reshape(-1, 5)
    assert len({tuple(epoch) for epoch in fives.tolist()}) > 3
    rows = rows_of(SampledBatches(np.repeat([0, 1], 30), 60, 60, 1, seed=0), 1)
    assert (rows[rows < 30] != rows[rows >= 30] - 30).any()  # classes have orders of their own


def test_repeats_follow_each_other_and_epochs_hold_each_row():
    rows = rows_of(SampledBatches(None, 10, 6, 3, seed=1), 10)
    assert (rows.reshape(-1, 3) == rows[::3, None]).all()
    epochs = rows[::3].reshape(2, 10)
    assert (np.sort(epochs, 1) == np.arange(10)).all()
    assert (epochs[0] != epochs[1]).any()


def test_a_batch_depends_on_its_step_and_the_seed_alone():
    first, second = (SampledBatches(LABELS, len(LABELS), 8, 2, seed=3) for _ in range(2))
    expected = [first(step) for step in range(12)]
    chex.assert_trees_all_equal([second(step) for step in reversed(range(12))], expected[::-1])
    other = SampledBatches(LABELS, len(LABELS), 8, 2, seed=4)
    assert (rows_of(other, 12) != np.concatenate(expected)).any()
