"""Canaries for an audit of privacy, as rows of a data set that a coin flip includes."""

import numpy as np

from fnet.privacy.batch_names import CANARY
from train.data import Arrays, Dataset, num_examples

_FIXED = {"weight": 1, "id": -1}


def add_canaries(dataset: Dataset, count: int) -> Dataset:
    """Append canaries to the training examples.

    A training batch has their number as ``canary``, -1 for other examples, and ``weight``. The
    other arrays of a canary are zeros, so that they depend on no training example. With users,
    each canary is a user with one example.
    """
    n = num_examples(dataset.train)
    shapes = np.arange(count) % n
    train = {name: np.concatenate([a, a[shapes]]) for name, a in dataset.train.items()}
    train[CANARY] = np.concatenate([np.full(n, -1), np.arange(count)]).astype(np.int32)
    users = dataset.users
    if users is not None:
        users = np.concatenate([users, users.max() + 1 + np.arange(count, dtype=np.int32)])

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        numbers = rows[CANARY]
        others = {name: a for name, a in rows.items() if name != CANARY}
        batch = dataset.augmented(others, generator)
        batch = {"weight": np.ones(len(numbers), np.float32)} | batch
        is_canary = numbers >= 0
        for name, a in batch.items():
            mask = is_canary.reshape(-1, *[1] * (a.ndim - 1))
            batch[name] = np.where(mask, np.asarray(_FIXED.get(name, 0), a.dtype), a)
        return batch | {CANARY: numbers}

    def name(row: int) -> str:
        return f"canary {row - n}" if row >= n else dataset.name(row)

    return dataset._replace(train=train, users=users, augment=augment, name=name, canaries=count)


def draw_included(count: int, seed: int) -> np.ndarray:
    """Flip a coin for each canary: whether it is in the training set, bool [count]."""
    stream = np.random.SeedSequence(seed, spawn_key=(0, 4))  # sampling has the streams 0 to 3
    return np.random.Generator(np.random.Philox(stream)).random(count) < 0.5


def exclude(dataset: Dataset, included: np.ndarray) -> Dataset:
    """Give each canary that is not included weight 0 in training batches.

    With Poisson sampling this equals a training set without it, sampled with the same probability.
    """

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        batch = dataset.augmented(rows, generator)
        keep = (batch[CANARY] < 0) | included[batch[CANARY]]
        return batch | {"weight": batch["weight"] * keep}

    return dataset._replace(augment=augment)
