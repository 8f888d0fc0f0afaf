"""Poisson sampling: each example joins each step's batch independently, with one probability.

The sampling that privacy amplification is proven for: batches differ in size, and a
batch of fixed size, drawn from a shuffled epoch, has no such proof. Arrays keep one
shape all the same: rows beyond the drawn examples are padding, of weight 0.
"""

from typing import SupportsIndex

import grain
import numpy as np

from train.data import Arrays, Dataset, augmented, numbered, padded, read_ahead, size

OVERFLOW = 1e-15
"""Most probability that a step draws more examples than its arrays have rows."""


def rows_of(examples: int, batch_size: int, multiple: int = 1) -> int:
    """Rows of a padded batch: the least that a step overflows with probability <= OVERFLOW.

    The number drawn is binomial; a batch of all examples is always whole.

    Args:
      examples: how many there are to draw from.
      batch_size: examples drawn on average.
      multiple: the rows are rounded up to a multiple of it.
    """
    from scipy.stats import binom  # slow to import

    if batch_size < examples:
        rows = int(binom.isf(OVERFLOW, examples, batch_size / examples))
    else:
        rows = batch_size
    return rows + -rows % multiple


def poisson_batches(
    dataset: Dataset, batch_size: int, seed: int, rows: int
) -> grain.DatasetIterator:
    """Endless augmented batches, each example in each with probability batch_size / examples.

    The batch of step i depends on ``seed`` and i alone. The iterator's ``get_state()``
    is its position as JSON; after ``set_state`` the same batches follow.

    Each batch has ``weight`` [rows]: 1.0 for a drawn example, 0.0 for padding. Where
    more than ``rows`` are drawn, that many of them are kept, chosen uniformly.

    Numpy's Philox is a good generator, not a cryptographic one: see docs/private_training.md.
    """
    source = _Batches(dataset, batch_size / size(dataset.train), seed, rows)
    return read_ahead(grain.MapDataset.source(source))


class _Batches:
    """Grain's random access source: one whole batch an index."""

    def __init__(self, dataset: Dataset, probability: float, seed: int, rows: int):
        self._dataset = dataset
        self._probability = probability
        self._seed = seed
        self._rows = rows

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        # A stream for every step, and augmentation apart from drawing: what is drawn
        # does not depend on what was done with the examples.
        streams = np.random.SeedSequence(self._seed, spawn_key=(int(index),)).spawn(2)
        drawing, augmenting = (np.random.Generator(np.random.Philox(s)) for s in streams)
        drawn = np.flatnonzero(drawing.random(size(self._dataset.train)) < self._probability)
        if len(drawn) > self._rows:
            drawn = np.sort(drawing.choice(drawn, self._rows, replace=False))
        rows = numbered(self._dataset.train, drawn)
        return padded(augmented(self._dataset, rows, augmenting), self._rows)
