"""Users with several examples each: their numbers, their split, and batches of them."""

import grain
import numpy as np

from fnet.privacy import PoissonSampling
from fnet.privacy.users import EXAMPLE_WEIGHT
from train.data import (
    Arrays,
    Dataset,
    augment_rows,
    batches_by_step,
    pad_batch,
    sample_batch,
    select_rows,
)
from train.data.poisson import stream
from train.errors import UserError


def number_users(ids: np.ndarray, examples: int, what: str) -> np.ndarray:
    """Number the users of examples from 0, int32 [N].

    Args:
      ids: one id per example, integers or strings [N] or [N, 1].
      examples: number of examples N.
      what: config field and array, which begin the error message.

    Raises:
      UserError: for another shape or dtype.
    """
    if ids.shape not in ((examples,), (examples, 1)) or ids.dtype.kind not in "uiUS":
        raise UserError(
            f"{what} is {ids.dtype} of shape {ids.shape}; expected one integer or string for each "
            f"of the {examples} examples"
        )
    return np.unique(ids.reshape(-1), return_inverse=True)[1].astype(np.int32)


def split_by_user(
    users: np.ndarray, test_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split the indices of ``users`` [N] into training and test, without a user in both.

    Raises:
      UserError: if the fraction leaves no user for training or for testing.
    """
    count = int(users.max()) + 1
    num_test = round(test_fraction * count)
    if not 0 < num_test < count:
        raise UserError(
            f"data.test_fraction: {test_fraction} of {count} users leaves {num_test} users for "
            "testing and the others for training; expected at least one each"
        )
    is_test = np.isin(users, np.random.default_rng(seed).permutation(count)[:num_test])
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def num_users(dataset: Dataset) -> int:
    """Count the users of the training examples."""
    assert dataset.users is not None
    return int(dataset.users.max()) + 1


def user_batches(
    dataset: Dataset, sampling: PoissonSampling, examples_per_user: int, seed: int
) -> grain.DatasetIterator:
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
    k = examples_per_user

    def make_batch(step: int) -> Arrays:
        # Sampling has other streams, so that the sampled users depend on nothing else.
        augmenting, choosing = stream(seed, step, 1), stream(seed, step, 3)
        chosen = [
            choosing.permutation(rows_of_user[user])[:k] for user in sampling.indices(seed, step)
        ]
        # A user's examples are repeated: padding of zeros could have a gradient that is not finite.
        rows = np.array([np.resize(own, k) for own in chosen], np.int64).reshape(-1)
        weight = np.array([np.arange(k) < len(own) for own in chosen], np.float32).reshape(-1)
        batch = augment_rows(dataset, select_rows(dataset.train, rows), augmenting)
        batch[EXAMPLE_WEIGHT] = weight * batch.pop("weight", np.float32(1))
        grouped = {name: a.reshape(len(chosen), k, *a.shape[1:]) for name, a in batch.items()}
        return pad_batch(grouped, sampling.rows)

    return batches_by_step(make_batch)


def sample_user_batch(dataset: Dataset, users: int, examples_per_user: int) -> Arrays:
    """Make a batch with the shapes and dtypes of `user_batches` from one example."""
    batch = {"weight": np.ones(1, np.float32)} | sample_batch(dataset, 1)
    shape = users, examples_per_user
    repeated = {name: np.broadcast_to(a, (*shape, *a.shape[1:])) for name, a in batch.items()}
    return repeated | {EXAMPLE_WEIGHT: repeated.pop("weight"), "weight": np.ones(users, np.float32)}
