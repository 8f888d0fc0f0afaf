"""Batches of a data set by Poisson sampling, augmented and padded; see `PoissonSampling`."""

from typing import SupportsIndex

import grain
import numpy as np

from fnet.privacy import PoissonSampling
from train.data import Arrays, Dataset, augment_rows, pad_batch, prefetch, select_rows


def poisson_batches(
    dataset: Dataset, sampling: PoissonSampling, seed: int
) -> grain.DatasetIterator:
    """Iterate over augmented batches without end.

    The batch of step i depends only on ``seed`` and i. The iterator's ``get_state()`` returns its
    position as JSON. After ``set_state`` it continues with the same batches.

    Each batch has ``weight`` [rows]: 1.0 for a sampled example, 0.0 for padding.
    """
    return prefetch(grain.MapDataset.source(_PoissonBatches(dataset, sampling, seed)))


class _PoissonBatches:
    """Random access source for grain, with one batch per index."""

    def __init__(self, dataset: Dataset, sampling: PoissonSampling, seed: int):
        self._dataset = dataset
        self._sampling = sampling
        self._seed = seed

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        step = int(index)
        rows = select_rows(self._dataset.train, self._sampling.indices(self._seed, step))
        # Sampling has other streams, so that the sampled examples do not depend on augmentation.
        stream = np.random.SeedSequence(self._seed, spawn_key=(step, 1))
        augmenting = np.random.Generator(np.random.Philox(stream))
        return pad_batch(augment_rows(self._dataset, rows, augmenting), self._sampling.rows)
