"""Length bucketing: rows are padded to powers of two, so that few programs are compiled."""

import functools
from typing import SupportsIndex

import grain
import numpy as np

from train.data import Arrays, Dataset, augment_rows, pad_batch, prefetch, select_rows

SMALLEST_BUCKET = 16
"""Smallest padded length in tokens. Overhead dominates programs for shorter rows."""


def bucket_lengths(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Round each length up to a power of two, from `SMALLEST_BUCKET` to ``longest``."""
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return np.minimum(np.maximum(power, SMALLEST_BUCKET), longest)


def bucketed_batches(
    dataset: Dataset, batch_size: int, seed: int, longest: int
) -> grain.DatasetIterator:
    """Iterate over batches of rows of similar length without end.

    Each batch has ``tokens`` [batch, bucket + 1], ``length`` [batch] and ``weight`` [batch]. Some
    sources add ``target_mask`` [batch, bucket]. The weight is the number of targets / bucket, so
    that all targets of a batch count the same, and 0.0 for padding. An epoch holds every row once,
    in a new order; the last batch of a bucket is padded.

    The iterator's ``get_state()`` returns its position as JSON. After ``set_state`` it continues
    with the same batches.

    Args:
      dataset: Dataset with ``length`` in ``train``, whose ``augment`` returns ``tokens``.
      batch_size: Rows per batch.
      seed: Seed of the order.
      longest: Largest bucket, in tokens of input.
    """
    source = _BucketedBatches(dataset, batch_size, seed, longest)
    return prefetch(grain.MapDataset.source(source))


def batches_per_epoch(dataset: Dataset, batch_size: int, longest: int) -> int:
    """Count the batches that hold every row once."""
    lengths = bucket_lengths(dataset.train["length"], longest)
    return sum(-(-int((lengths == b).sum()) // batch_size) for b in np.unique(lengths))


class _BucketedBatches:
    """Random access source for grain, with one batch per index."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, longest: int):
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle_epoch)
        lengths = bucket_lengths(dataset.train["length"], longest)
        self._buckets = {int(b): np.flatnonzero(lengths == b) for b in np.unique(lengths)}
        # (bucket, index of its batch): the same set in each epoch, in a new order.
        self._batches = [
            (b, i) for b, rows in self._buckets.items() for i in range(-(-len(rows) // batch_size))
        ]

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: SupportsIndex) -> Arrays:
        epoch, position = divmod(int(index), len(self._batches))
        order, shuffled = self._epoch(epoch)
        bucket, i = self._batches[order[position]]
        rows = shuffled[bucket][i * self._batch_size : (i + 1) * self._batch_size]
        generator = np.random.Generator(np.random.Philox([self._seed, epoch, position]))
        batch = augment_rows(self._dataset, select_rows(self._dataset.train, rows), generator)
        batch["tokens"] = batch["tokens"][:, : bucket + 1]
        count = batch["length"]
        if "target_mask" in batch:
            batch["target_mask"] = batch["target_mask"][:, :bucket]
            count = batch["target_mask"].sum(1)
        batch["weight"] = (count / bucket).astype(np.float32)
        return pad_batch(batch, self._batch_size)

    def _shuffle_epoch(self, epoch: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Shuffle the batches of an epoch, and the rows of each bucket."""
        generator = np.random.Generator(np.random.Philox([self._seed, epoch]))
        shuffled = {b: generator.permutation(rows) for b, rows in self._buckets.items()}
        return generator.permutation(len(self._batches)), shuffled
