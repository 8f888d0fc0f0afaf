"""Training and test examples: names of splits, and examples that are held out."""

from collections.abc import Collection
from typing import Protocol

import numpy as np

from train.errors import UserError, did_you_mean, list_available

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
"""Names of the folders, files and arrays of each split."""


class HeldOut(Protocol):
    """Options of a data source that can hold out test examples."""

    @property
    def test_fraction(self) -> float:
        """Fraction that is held out."""

    @property
    def split_seed(self) -> int:
        """Random seed of the choice."""


def choose_training_split(names: Collection[str]) -> str | None:
    """Return the first usual name of the training split; None if there is none."""
    return next((name for name in SPLIT_NAMES["train"] if name in names), None)


def choose_test_split(given: str | None, names: Collection[str], where: object) -> str | None:
    """Return the given name of the test split, else the first usual one, of val before test.

    Raises:
      UserError: if the given one does not exist, or is the training split.
    """
    others = sorted(set(names) - {choose_training_split(names)})
    if given is not None and given not in others:
        if given in names:
            raise UserError(
                f"data.test_split: {given} in {where} is the training split"
                f"{list_available(others, 'others')}"
            )
        raise UserError(
            f"data.test_split: no split {given} in {where}{did_you_mean(given, others)}"
            f"{list_available(others, 'others')}"
        )
    usual = (*SPLIT_NAMES["val"], *SPLIT_NAMES["test"])
    return given or next((name for name in usual if name in others), None)


def hold_out(
    config: HeldOut, labels: np.ndarray, users: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Split the indices of ``labels`` [N] into training and test, shuffled, within each class.

    With ``users`` [N], no user is in both; then classes do not matter.

    Raises:
      UserError: if the fraction leaves a class, or all users, without training or test examples.
    """
    fraction = config.test_fraction
    if users is not None:
        return split_by_user(users, fraction, config.split_seed)
    from sklearn.model_selection import train_test_split  # slow to import

    try:
        train, test = train_test_split(
            np.arange(len(labels)), test_size=fraction, stratify=labels,
            random_state=config.split_seed,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"data.test_fraction: {fraction} does not work: {error}") from error
    return train, test


def split_by_user(
    users: np.ndarray, test_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split the indices of ``users`` [N] into training and test, without a user in both.

    Raises:
      UserError: if the fraction leaves no user for training or for testing.
    """
    count = int(users.max()) + 1
    num_test = count_held_out(count, test_fraction, "users")
    is_test = np.isin(users, np.random.default_rng(seed).permutation(count)[:num_test])
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def count_held_out(count: int, fraction: float, what: str) -> int:
    """Return how many of ``count`` are held out.

    Raises:
      UserError: if that leaves none for training or none for testing.
    """
    num_test = round(fraction * count)
    if not 0 < num_test < count:
        raise UserError(
            f"data.test_fraction: {fraction} of {count} {what} leaves {num_test} for testing and "
            f"{count - num_test} for training; expected at least one each"
        )
    return num_test
