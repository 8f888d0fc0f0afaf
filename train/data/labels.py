"""Labels of any source: integers from 0, and the same share of every class held out."""

from collections.abc import Sequence

import numpy as np

from train.data.files import shortened
from train.errors import UserError


def as_labels(labels: np.ndarray, what: str) -> np.ndarray:
    """Labels int32 [N] of integers [N] or [N, 1], or of rows [N, K] with one 1 each.

    Args:
      labels: of any shape and dtype.
      what: the field and what was found for it, which a message begins with.

    Raises:
      UserError: for anything else, and for negative labels.
    """
    shape, kind = labels.shape, labels.dtype.kind
    if labels.ndim == 2 and shape[1] > 1 and kind in "buif":
        wrong = np.flatnonzero(((labels != 0) & (labels != 1)).any(1) | (labels.sum(1) != 1))
        if wrong.size:
            row = [f"{value:g}" for value in labels[wrong[0]].astype(float)]
            raise UserError(
                f"{what} has shape {shape}, but row {wrong[0]} is not one-hot: {shortened(row)}; "
                "give each image one label"
            )
        return labels.argmax(1).astype(np.int32)
    if labels.ndim == 0 or labels.ndim > 2 or (labels.ndim == 2 and shape[1] != 1):
        raise UserError(f"{what} has shape {shape}; labels are [N], [N, 1] or one-hot [N, K]")
    labels = labels.reshape(-1)
    if kind not in "ui":
        raise UserError(f"{what} is {labels.dtype}; labels are integers from 0")
    most = np.iinfo(np.int32).max
    wrong = np.flatnonzero((labels < 0) | (labels > most))
    if wrong.size:
        raise UserError(
            f"{what} has {labels[wrong[0]]} at {wrong[0]}; labels are integers from 0 to {most}"
        )
    return labels.astype(np.int32)


def split_by_class(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Places in ``labels`` [N] to train on and to test on, mixed: the same share of every class.

    Raises:
      UserError: if the share is too small or too large for one of each class in both.
    """
    from sklearn.model_selection import train_test_split  # slow to import

    try:
        train, test = train_test_split(
            np.arange(len(labels)), test_size=share, stratify=labels, random_state=seed
        )
    except ValueError as error:
        raise UserError(f"data.test_fraction: {share} does not work: {error}") from error
    return train, test


def check_several(labels: np.ndarray, what: str) -> None:
    """Refuses training labels [N] of one class only: there is nothing to learn.

    Raises:
      UserError: then; the message begins with ``what``.
    """
    if (labels == labels[0]).all():
        raise UserError(f"{what} has one class only, {labels[0]}; give examples of two or more")


def class_names(
    labels: Sequence[np.ndarray], names: Sequence[str] | None, what: str
) -> tuple[str, ...]:
    """The names of labels 0, 1, ..., by default ``("0", "1", ...)`` up to the largest label.

    Args:
      labels: of the training examples, and of those to test on.
      names: if there are any.
      what: which a message begins with.

    Raises:
      UserError: if a label has no name; without names, if there would be more classes than
        training examples.
    """
    largest = max(int(part.max()) for part in labels)
    if names is None and largest >= len(labels[0]):
        raise UserError(
            f"{what} has label {largest}, which makes more classes than the {len(labels[0]):,} "
            "examples to train on; labels count classes from 0"
        )
    if names is not None and largest >= len(names):
        raise UserError(f"{what} has label {largest}, but the names of {len(names)} classes")
    return tuple(str(label) for label in range(largest + 1)) if names is None else tuple(names)
