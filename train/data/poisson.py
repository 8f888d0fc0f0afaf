"""Poisson sampling: each example joins each batch independently, with the same probability.

Privacy amplification by subsampling is proven for this sampling, and not for batches of fixed size
from shuffled epochs. Batches vary in size; their arrays do not, and rows beyond the sampled
examples are padding of weight 0.
"""

from typing import SupportsIndex

import grain
import numpy as np

from train.data import Arrays, Dataset, augment_rows, num_examples, pad_batch, prefetch, select_rows

OVERFLOW_PROBABILITY = 1e-15
"""Largest probability that a step samples more examples than its arrays have rows."""


def padded_batch_size(examples: int, batch_size: int, multiple: int = 1) -> int:
    """Compute the rows of a batch's arrays, which overflow with probability <= 1e-15.

    The number of sampled examples has a binomial distribution. A batch of all examples never
    overflows.

    Args:
      examples: Number of training examples.
      batch_size: Expected number of sampled examples.
      multiple: The result is rounded up to a multiple of this number.
    """
    from scipy.stats import binom  # slow to import

    if batch_size < examples:
        rows = int(binom.isf(OVERFLOW_PROBABILITY, examples, batch_size / examples))
    else:
        rows = batch_size
    return rows + -rows % multiple


def poisson_batches(
    dataset: Dataset, batch_size: int, seed: int, rows: int
) -> grain.DatasetIterator:
    """Iterate over augmented batches without end, sampled with batch_size / examples.

    The batch of step i depends only on ``seed`` and i. The iterator's ``get_state()`` returns its
    position as JSON. After ``set_state`` it continues with the same batches.

    Each batch has ``weight`` [rows]: 1.0 for a sampled example, 0.0 for padding. If more than
    ``rows`` examples are sampled, a uniform choice of ``rows`` of them remains.

    The generator is NumPy's Philox, which is not cryptographically secure. See
    docs/private_training.md.
    """
    source = _PoissonBatches(dataset, batch_size / num_examples(dataset.train), seed, rows)
    return prefetch(grain.MapDataset.source(source))


class _PoissonBatches:
    """Random access source for grain, with one batch per index."""

    def __init__(self, dataset: Dataset, probability: float, seed: int, rows: int):
        self._dataset = dataset
        self._probability = probability
        self._seed = seed
        self._rows = rows

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        # Sampling and augmentation have their own streams, so that the sampled examples do not
        # depend on the augmentation.
        streams = np.random.SeedSequence(self._seed, spawn_key=(int(index),)).spawn(2)
        sampling, augmenting = (np.random.Generator(np.random.Philox(s)) for s in streams)
        chosen = np.flatnonzero(
            sampling.random(num_examples(self._dataset.train)) < self._probability
        )
        if len(chosen) > self._rows:
            chosen = np.sort(sampling.choice(chosen, self._rows, replace=False))
        rows = select_rows(self._dataset.train, chosen)
        return pad_batch(augment_rows(self._dataset, rows, augmenting), self._rows)
