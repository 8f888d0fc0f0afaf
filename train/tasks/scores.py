"""Scores of all test examples, by class and overall."""

import numpy as np

_BINS = 15
"""Bins of the calibration error, as in Guo et al. 2017."""


def accuracy_by_class(confusion: np.ndarray) -> np.ndarray:
    """Return the recall [classes] from counts [true, predicted]; NaN without examples."""
    return _divide(np.diag(confusion), confusion.sum(1))


def iou_by_class(confusion: np.ndarray) -> np.ndarray:
    """Return the intersection over union (Jaccard index) [classes] from counts [true, predicted].

    The intersection is the number of pixels of the class that are predicted as it. The union is
    the number of pixels that are either (Everingham et al. 2015, "The Pascal Visual Object Classes
    Challenge: A Retrospective"). It is NaN for a class that is neither there nor predicted.
    """
    intersection = np.diag(confusion)
    return _divide(intersection, confusion.sum(0) + confusion.sum(1) - intersection)


def pixel_scores(confusion: np.ndarray) -> dict[str, float]:
    """Return the scores of a segmentation in [0, 1]; NaN without pixels.

    ``mean_iou`` is a mean over classes that are there or predicted, ``pixel_accuracy`` the fraction
    of pixels that are correct, ``class_accuracy`` the mean recall over classes that are there.
    """
    return {
        "mean_iou": mean(iou_by_class(confusion)),
        "pixel_accuracy": float(np.trace(confusion) / (confusion.sum() or np.nan)),
        "class_accuracy": mean(accuracy_by_class(confusion)),
    }


def by_class(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """Return precision, recall and F1 of each class, float64 [classes]."""
    return precision_recall_f1(np.diag(confusion), confusion.sum(0), confusion.sum(1))


def precision_recall_f1(
    both: np.ndarray, predicted: np.ndarray, there: np.ndarray
) -> dict[str, np.ndarray]:
    """Return precision, recall and F1 of each class, as scikit-learn; NaN where undefined.

    ``both`` counts the examples of a class that are predicted as it. The precision of a class that
    is never predicted is 0 if it is there. Without examples a class has no recall, and unless it is
    predicted neither precision nor F1; both are 0 if it is.
    """
    return {
        "precision": np.where(predicted + there > 0, both / np.maximum(predicted, 1), np.nan),
        "recall": _divide(both, there),
        "f1": _divide(2 * both, predicted + there),
    }


def auc(outputs: np.ndarray, is_class: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve [K] of each class against the others, of outputs [N, K].

    It is the probability that an example of the class has the larger output than another one, half
    of it for equal outputs (Mann-Whitney U). It is NaN if all or no examples are of the class.
    """
    positive = is_class.sum(0)
    pairs = positive * (len(is_class) - positive)
    return _divide(np.array([*map(_above, outputs.T, is_class.T)]), pairs)


def _above(outputs: np.ndarray, is_class: np.ndarray) -> float:
    """Count how often an example of a class is above another one; half for equal outputs."""
    others, of_class = np.sort(outputs[~is_class]), outputs[is_class]
    sides = (np.searchsorted(others, of_class, side).sum() for side in ("left", "right"))
    return np.nan if np.isnan(outputs).any() else sum(sides) / 2


def calibration_error(probability: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error: how far probabilities are from the accuracy.

    It is the mean of |accuracy - mean probability| over bins of equal width, weighted by their
    examples (Guo et al. 2017, "On Calibration of Modern Neural Networks"); NaN if one is NaN.
    """
    at = np.minimum((np.nan_to_num(probability) * _BINS).astype(int), _BINS - 1)
    difference = np.bincount(at, right - probability.astype(np.float64), _BINS)
    return float(np.abs(difference).sum() / max(len(right), 1))


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.full(len(b), np.nan), where=b > 0)


def mean(values: np.ndarray) -> float:
    """Return the mean of the values that are defined, which are no NaN; NaN without any."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else np.nan
