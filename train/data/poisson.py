"""Batches of a private run, of examples or of users, augmented and padded."""

from typing import TYPE_CHECKING

import numpy as np

from fnet.privacy.batch_names import EXAMPLE_WEIGHT
from train import data

if TYPE_CHECKING:
    import grain

    from fnet.privacy import Sampling


def poisson_batches(
    dataset: data.Dataset, sampling: "Sampling", seed: int
) -> "grain.DatasetIterator":
    """Iterate over augmented batches without end, see `fnet.privacy.Sampling`.

    The batch of step i depends only on ``seed`` and i. The iterator's ``get_state()`` returns its
    position as JSON. After ``set_state`` it continues with the same batches.

    Each batch has ``weight`` [rows]: 1.0 for a sampled example, 0.0 for padding.
    """
    draw = sampling.draws(seed)

    def make_batch(step: int) -> data.Arrays:
        rows = data.select_rows(dataset.train, draw(step))
        # Sampling has other streams, so that the sampled examples do not depend on augmentation.
        return data.pad_batch(
            data.augment_rows(dataset, rows, stream(seed, step, 1)), sampling.rows
        )

    return data.batches_by_step(make_batch)


def stream(seed: int, step: int, number: int) -> np.random.Generator:
    """Return a random stream of a step that is independent of its other streams."""
    sequence = np.random.SeedSequence(seed, spawn_key=(step, number))
    return np.random.Generator(np.random.Philox(sequence))


def num_users(dataset: data.Dataset) -> int:
    """Count the users of the training examples."""
    assert dataset.users is not None
    return int(dataset.users.max()) + 1


def user_batches(
    dataset: data.Dataset, sampling: "Sampling", examples_per_user: int, seed: int
) -> "grain.DatasetIterator":
    """Iterate over augmented batches of users without end.

    Users are sampled, and of each a uniform choice of at most ``examples_per_user`` examples.
    The batch of step i depends only on ``seed`` and i. The iterator's ``get_state()`` returns its
    position as JSON. After ``set_state`` it continues with the same batches.

    Arrays are [users, examples_per_user, ...]. ``example_weight`` [users, examples_per_user] is 0.0
    for padding, which repeats a user's examples, and for unreadable files. ``weight`` [users] is
    1.0 for a sampled user, 0.0 for padding.
    """
    assert dataset.users is not None
    by_user = np.argsort(dataset.users, kind="stable")
    rows_of_user = np.split(by_user, np.cumsum(np.bincount(dataset.users))[:-1])
    k, draw = examples_per_user, sampling.draws(seed)

    def make_batch(step: int) -> data.Arrays:
        # Sampling has other streams, so that the sampled users depend on nothing else.
        augmenting, choosing = stream(seed, step, 1), stream(seed, step, 3)
        chosen = [choosing.permutation(rows_of_user[user])[:k] for user in draw(step)]
        # A user's examples are repeated: padding of zeros could have a gradient that is not finite.
        rows = np.array([np.resize(own, k) for own in chosen], np.int64).reshape(-1)
        weight = np.array([np.arange(k) < len(own) for own in chosen], np.float32).reshape(-1)
        batch = data.augment_rows(dataset, data.select_rows(dataset.train, rows), augmenting)
        batch[EXAMPLE_WEIGHT] = weight * batch.pop("weight", np.float32(1))
        grouped = {name: a.reshape(len(chosen), k, *a.shape[1:]) for name, a in batch.items()}
        return data.pad_batch(grouped, sampling.rows)

    return data.batches_by_step(make_batch)


def sample_user_batch(dataset: data.Dataset, users: int, examples_per_user: int) -> data.Arrays:
    """Make a batch with the shapes and dtypes of `user_batches` from one example."""
    batch = {"weight": np.ones(1, np.float32)} | data.sample_batch(dataset, 1)
    repeated = data.repeat_row(batch, users, examples_per_user)
    return repeated | {EXAMPLE_WEIGHT: repeated.pop("weight"), "weight": np.ones(users, np.float32)}
