"""Scores from a confusion matrix, by class and overall."""

import numpy as np


def accuracy_by_class(confusion: np.ndarray) -> np.ndarray:
    """Return the recall of each class; NaN for a class without examples.

    Args:
      confusion: counts of examples or pixels [true, predicted].

    Returns:
      float64 [classes].
    """
    return _divide(np.diag(confusion), confusion.sum(1))


def iou_by_class(confusion: np.ndarray) -> np.ndarray:
    """Return the intersection over union (Jaccard index) of each class.

    The intersection is the number of pixels of the class that are predicted as it. The union is
    the number of pixels that are either (Everingham et al. 2015, "The Pascal Visual Object Classes
    Challenge: A Retrospective").

    Args:
      confusion: counts [true, predicted].

    Returns:
      float64 [classes]; NaN for a class that is neither there nor predicted.
    """
    intersection = np.diag(confusion)
    return _divide(intersection, confusion.sum(0) + confusion.sum(1) - intersection)


def pixel_scores(confusion: np.ndarray) -> dict[str, float]:
    """Return the scores of a segmentation in [0, 1]; 0 without pixels.

    Returns:
      ``mean_iou``: mean over classes that are there or predicted; ``pixel_accuracy``: fraction of
      pixels that are correct; ``class_accuracy``: mean recall over classes that are there.
    """
    return {
        "mean_iou": _mean(iou_by_class(confusion)),
        "pixel_accuracy": float(np.trace(confusion) / max(confusion.sum(), 1)),
        "class_accuracy": _mean(accuracy_by_class(confusion)),
    }


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.full(len(b), np.nan), where=b > 0)


def _mean(values: np.ndarray) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if defined.size else 0.0
