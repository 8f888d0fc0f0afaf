"""Length bucketing: rows are padded to powers of two, so that few programs are compiled."""

import functools

import grain
import numpy as np

from train.data import Arrays, Dataset, augment_rows, batches_by_step, pad_batch, select_rows

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
    lengths = bucket_lengths(dataset.train["length"], longest)
    buckets = {int(b): np.flatnonzero(lengths == b) for b in np.unique(lengths)}
    # (bucket, index of its batch): the same set in each epoch, in a new order.
    batches = [(b, i) for b, rows in buckets.items() for i in range(-(-len(rows) // batch_size))]

    @functools.lru_cache(maxsize=2)
    def shuffle_epoch(epoch: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Shuffle the batches of an epoch, and the rows of each bucket."""
        generator = np.random.Generator(np.random.Philox([seed, epoch]))
        shuffled = {b: generator.permutation(rows) for b, rows in buckets.items()}
        return generator.permutation(len(batches)), shuffled

    def make_batch(step: int) -> Arrays:
        epoch, position = divmod(step, len(batches))
        order, shuffled = shuffle_epoch(epoch)
        bucket, i = batches[order[position]]
        rows = select_rows(dataset.train, shuffled[bucket][i * batch_size : (i + 1) * batch_size])
        generator = np.random.Generator(np.random.Philox([seed, epoch, position]))
        batch = augment_rows(dataset, rows, generator)
        batch["tokens"] = batch["tokens"][:, : bucket + 1]
        count = batch["length"]
        if "target_mask" in batch:
            batch["target_mask"] = batch["target_mask"][:, :bucket]
            count = batch["target_mask"].sum(1)
        batch["weight"] = (count / bucket).astype(np.float32)
        return pad_batch(batch, batch_size)

    return batches_by_step(make_batch)


def batches_per_epoch(dataset: Dataset, batch_size: int, longest: int) -> int:
    """Count the batches that hold every row once."""
    lengths = bucket_lengths(dataset.train["length"], longest)
    return sum(-(-int((lengths == b).sum()) // batch_size) for b in np.unique(lengths))
