"""Rows of many lengths in batches of few: padded to powers of two, so that few programs exist."""

import functools
from typing import SupportsIndex

import grain
import numpy as np

from train.data import Arrays, Dataset, augmented, numbered, padded, read_ahead

SMALLEST = 16
"""Fewest tokens a row is padded to: below, a program's overhead is more than its work."""


def bucket_of(length: np.ndarray, longest: int) -> np.ndarray:
    """The least power of two that holds each length, from `SMALLEST` up to ``longest``."""
    power = 2 ** np.ceil(np.log2(np.maximum(length, 1))).astype(np.int64)
    return np.minimum(np.maximum(power, SMALLEST), longest)


def bucketed_batches(
    dataset: Dataset, batch_size: int, seed: int, longest: int
) -> grain.DatasetIterator:
    """Endless batches of rows of about one length, cut to it; a last one of an epoch is padded.

    Each batch has ``tokens`` [batch, bucket + 1], ``length`` [batch], and ``weight``
    [batch]: the share of the bucket that is real, 0.0 for padding, so that every token
    counts the same within a batch. An epoch holds every row once, in another order each
    time. The iterator's ``get_state()`` is its position as JSON; after ``set_state`` the
    same batches follow.

    Args:
      dataset: with ``length`` in ``train``; its ``augment`` gives ``tokens``.
      batch_size: rows a batch.
      seed: of the order.
      longest: the last bucket, in tokens that are read.
    """
    source = _Batches(dataset, batch_size, seed, longest)
    return read_ahead(grain.MapDataset.source(source))


def batches_an_epoch(dataset: Dataset, batch_size: int, longest: int) -> int:
    """How many batches hold every row once."""
    bucket = bucket_of(dataset.train["length"], longest)
    return sum(-(-int((bucket == b).sum()) // batch_size) for b in np.unique(bucket))


class _Batches:
    """Grain's random access source: one whole batch an index."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, longest: int):
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._orders)
        bucket = bucket_of(dataset.train["length"], longest)
        self._buckets = {int(b): np.flatnonzero(bucket == b) for b in np.unique(bucket)}
        # (bucket, which of its batches): the same in each epoch, in another order.
        self._batches = [
            (b, i) for b, rows in self._buckets.items() for i in range(-(-len(rows) // batch_size))
        ]

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        epoch, turn = divmod(int(index), len(self._batches))
        order, mixed = self._epoch(epoch)
        bucket, i = self._batches[order[turn]]
        rows = mixed[bucket][i * self._batch_size : (i + 1) * self._batch_size]
        generator = np.random.Generator(np.random.Philox([self._seed, epoch, turn]))
        batch = augmented(self._dataset, numbered(self._dataset.train, rows), generator)
        batch["tokens"] = batch["tokens"][:, : bucket + 1]
        batch["weight"] = (batch["length"] / bucket).astype(np.float32)
        return padded(batch, self._batch_size)

    def _orders(self, epoch: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """The order of batches, and that of each bucket's rows."""
        generator = np.random.Generator(np.random.Philox([self._seed, epoch]))
        mixed = {b: generator.permutation(rows) for b, rows in self._buckets.items()}
        return generator.permutation(len(self._batches)), mixed
