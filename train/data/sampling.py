"""Order of training rows with equally frequent classes, or with repeated augmentation."""

import functools

import numpy as np


class SampledBatches:
    """``batches(step) -> rows`` [batch_size] of a training batch; depends on nothing else.

    Args:
      labels: [N], label of each row, for equally frequent classes: each class is drawn once
        per round, in random order, and its rows are shuffled within the class. None shuffles all
        rows in each epoch.
      num_rows: N.
      batch_size: number of rows of a batch.
      repeats: how often a row follows itself, each time with another augmentation (Hoffer et al.
        2020, "Augment Your Batch").
      seed: seed of the order.

    Example:
      >>> batches = SampledBatches(np.array([0, 0, 0, 1]), 4, 8, 1, seed=0)
      >>> np.bincount(np.array([0, 0, 0, 1])[batches(5)]).tolist()
      [4, 4]
    """

    def __init__(
        self,
        labels: np.ndarray | None,
        num_rows: int,
        batch_size: int,
        repeats: int,
        seed: int,
    ):
        self._batch_size, self._repeats, self._seed = batch_size, repeats, seed
        groups = [np.arange(num_rows)]
        if labels is not None:
            groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        self._groups = groups
        # A batch needs at most a few permutations at a time.
        self._permutation = functools.lru_cache(maxsize=4 * len(groups) + 4)(self._permute)

    def __call__(self, step: int) -> np.ndarray:
        """Return the rows of a batch."""
        first = step * self._batch_size
        places = range(first, first + self._batch_size)
        return np.array([self._row(place // self._repeats) for place in places])

    def _row(self, place: int) -> int:
        turn, slot = divmod(place, len(self._groups))
        group = 0 if len(self._groups) == 1 else int(self._permutation(-1, turn)[slot])
        rows = self._groups[group]
        epoch, i = divmod(turn, len(rows))
        return int(rows[self._permutation(group, epoch)[i]])

    def _permute(self, group: int, epoch: int) -> np.ndarray:
        count = len(self._groups) if group < 0 else len(self._groups[group])
        return np.random.default_rng([self._seed, group + 1, epoch]).permutation(count)
