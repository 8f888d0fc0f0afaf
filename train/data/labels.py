"""Labels: checks, class names, and the train/test split within each class."""

from collections.abc import Sequence

import numpy as np

from train.errors import UserError, shorten


def as_labels(labels: np.ndarray, what: str) -> np.ndarray:
    """Convert labels to int32 [N], from integers [N] or [N, 1], or from one-hot rows [N, K].

    Args:
      labels: array of any shape and dtype.
      what: config field and array, which begin the error message.

    Raises:
      UserError: for anything else, and for negative labels.
    """
    shape, kind = labels.shape, labels.dtype.kind
    if labels.ndim == 2 and shape[1] > 1 and kind in "buif":
        invalid = np.flatnonzero(((labels != 0) & (labels != 1)).any(1) | (labels.sum(1) != 1))
        if invalid.size:
            row = [f"{value:g}" for value in labels[invalid[0]].astype(float)]
            raise UserError(
                f"{what} has shape {shape}, but row {invalid[0]} is not one-hot: {shorten(row)}; "
                "give each image one label"
            )
        return labels.argmax(1).astype(np.int32)
    if labels.ndim == 0 or labels.ndim > 2 or (labels.ndim == 2 and shape[1] != 1):
        raise UserError(f"{what} has shape {shape}; expected [N], [N, 1] or one-hot [N, K]")
    labels = labels.reshape(-1)
    if kind not in "ui":
        raise UserError(f"{what} is {labels.dtype}; expected integers from 0")
    most = np.iinfo(np.int32).max
    invalid = np.flatnonzero((labels < 0) | (labels > most))
    if invalid.size:
        raise UserError(
            f"{what} has {labels[invalid[0]]} at index {invalid[0]}; expected integers from 0 to "
            f"{most}"
        )
    return labels.astype(np.int32)


def split_by_class(
    labels: np.ndarray, test_fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Split the indices of ``labels`` [N] into training and test, shuffled, within each class.

    Raises:
      UserError: if the fraction leaves a class without training or test examples.
    """
    from sklearn.model_selection import train_test_split  # slow to import

    try:
        train, test = train_test_split(
            np.arange(len(labels)), test_size=test_fraction, stratify=labels, random_state=seed
        )
    except ValueError as error:
        raise UserError(f"data.test_fraction: {test_fraction} does not work: {error}") from error
    return train, test


def check_several_classes(labels: np.ndarray, what: str) -> None:
    """Check that training labels [N] have more than one class.

    Raises:
      UserError: if not. ``what`` begins the message.
    """
    if (labels == labels[0]).all():
        raise UserError(f"{what} has only the class {labels[0]}; give examples of two or more")


def class_names(
    labels: Sequence[np.ndarray], names: Sequence[str] | None, what: str
) -> tuple[str, ...]:
    """Return the names of labels 0, 1, ...; ``("0", "1", ...)`` if there are no names.

    Args:
      labels: training labels, and test labels.
      names: class names, if there are any.
      what: config field and array, which begin the error message.

    Raises:
      UserError: if a label has no name, or if there are more classes than training examples and
        no names.
    """
    largest = max(int(split.max()) for split in labels)
    if names is None and largest >= len(labels[0]):
        raise UserError(
            f"{what} has label {largest}, which makes more classes than the {len(labels[0]):,} "
            "training examples; labels count classes from 0"
        )
    if names is not None and largest >= len(names):
        raise UserError(f"{what} has label {largest}, but there are {len(names)} class names")
    return tuple(str(label) for label in range(largest + 1)) if names is None else tuple(names)
