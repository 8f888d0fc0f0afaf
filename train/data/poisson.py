"""Batches of a private run, augmented and padded; see `fnet.privacy.Sampling`."""

import grain
import numpy as np

from fnet.privacy import Sampling
from train.data import Arrays, Dataset, augment_rows, batches_by_step, pad_batch, select_rows


def poisson_batches(dataset: Dataset, sampling: Sampling, seed: int) -> grain.DatasetIterator:
    """Iterate over augmented batches without end.

    The batch of step i depends only on ``seed`` and i. The iterator's ``get_state()`` returns its
    position as JSON. After ``set_state`` it continues with the same batches.

    Each batch has ``weight`` [rows]: 1.0 for a sampled example, 0.0 for padding.
    """
    draw = sampling.draws(seed)

    def make_batch(step: int) -> Arrays:
        rows = select_rows(dataset.train, draw(step))
        # Sampling has other streams, so that the sampled examples do not depend on augmentation.
        return pad_batch(augment_rows(dataset, rows, stream(seed, step, 1)), sampling.rows)

    return batches_by_step(make_batch)


def stream(seed: int, step: int, number: int) -> np.random.Generator:
    """Return a random stream of a step that is independent of its other streams."""
    sequence = np.random.SeedSequence(seed, spawn_key=(step, number))
    return np.random.Generator(np.random.Philox(sequence))
