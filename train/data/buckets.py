"""Length bucketing: rows are padded to powers of two, so that few programs are compiled."""

import functools
from typing import TYPE_CHECKING

import numpy as np

from train.data import Arrays, Dataset, augment_rows, batches_by_step, select_rows

if TYPE_CHECKING:
    import grain

SMALLEST_BUCKET = 16
"""Smallest padded length in tokens. Overhead dominates programs for shorter rows."""


def bucket_lengths(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Round each length up to a power of two, from `SMALLEST_BUCKET` to ``longest``."""
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return np.minimum(np.maximum(power, SMALLEST_BUCKET), longest)


def truncate(batch: Arrays, length: int) -> Arrays:
    """Return a batch with rows of so many inputs."""
    sizes = {"tokens": length + 1, "loss_mask": length}
    return {name: a[..., : sizes.get(name)] if name in sizes else a for name, a in batch.items()}


def bucketed_batches(
    dataset: Dataset, batch_size: int, seed: int, longest: int
) -> "grain.DatasetIterator":
    """Iterate over full batches of rows of similar length without end.

    Each batch has ``tokens`` [batch, bucket + 1], ``length`` [batch] and ``weight`` [batch]. Some
    sources add ``loss_mask`` [batch, bucket]. The weight is the number of learned targets / bucket,
    so that all of a batch count the same, unless the source gives another one. Pairs of rows have
    one more axis.

    Each epoch has all rows in a new order. Windows of this order, as long as an epoch rounded up to
    whole batches, are sorted by bucket and cut into batches. So no batch is padded with rows: one
    row and padding would take as large a step as a full batch.

    Rows of ``train`` have a ``length``. The largest bucket is ``longest``. The iterator's
    ``get_state()`` returns its position as JSON. After ``set_state`` it continues with the same
    batches.
    """
    lengths = dataset.train["length"]
    buckets = bucket_lengths(lengths.reshape(len(lengths), -1).max(1), longest)
    count = -(-len(buckets) // batch_size)

    @functools.lru_cache(maxsize=2)
    def shuffle_epoch(epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox([seed, epoch])).permutation(len(buckets))

    @functools.lru_cache(maxsize=2)
    def window_batches(window: int) -> np.ndarray:
        """Return the rows of each batch of a window [count, batch_size]."""
        epochs, places = np.divmod(
            window * count * batch_size + np.arange(count * batch_size), len(buckets)
        )
        rows = np.concatenate([shuffle_epoch(e)[places[epochs == e]] for e in np.unique(epochs)])
        rows = rows[np.argsort(buckets[rows], kind="stable")].reshape(count, batch_size)
        return np.random.Generator(np.random.Philox([seed, window, 1])).permutation(rows)

    def make_batch(step: int) -> Arrays:
        window, i = divmod(step, count)
        index = window_batches(window)[i]
        bucket = int(buckets[index].max())
        generator = np.random.Generator(np.random.Philox([seed, window, i, 2]))
        batch = augment_rows(dataset, select_rows(dataset.train, index), generator)
        batch = truncate(batch, bucket)
        learned = batch["loss_mask"].sum(-1) if "loss_mask" in batch else batch["length"]
        return {"weight": (learned / bucket).astype(np.float32)} | batch

    return batches_by_step(make_batch)
