"""What a confusion matrix tells of each class, and of all."""

import numpy as np


def accuracy_by_class(confusion: np.ndarray) -> np.ndarray:
    """The share of each class's examples, or pixels, that is taken for it; nan where it has none.

    Args:
      confusion: [true, predicted], counts.

    Returns:
      [classes], float64; the recall of each.
    """
    return _shares(np.diag(confusion), confusion.sum(1))


def iou_by_class(confusion: np.ndarray) -> np.ndarray:
    """Intersection over union of each class; nan where it is neither there nor predicted.

    What is of the class and taken for it, of all that is either: Everingham et al. 2015, "The
    Pascal Visual Object Classes Challenge: A Retrospective".

    Args:
      confusion: [true, predicted], counts.

    Returns:
      [classes], float64; also called the Jaccard index.
    """
    right = np.diag(confusion)
    return _shares(right, confusion.sum(0) + confusion.sum(1) - right)


def pixel_scores(confusion: np.ndarray) -> dict[str, float]:
    """Scores of a segmentation, each in [0, 1]; 0 where no pixel is counted.

    Returns:
      ``mean_iou``: over classes that are there or predicted; ``pixel_accuracy``: share of all
      pixels; ``class_accuracy``: mean over classes that are there.
    """
    return {
        "mean_iou": _mean(iou_by_class(confusion)),
        "pixel_accuracy": float(np.trace(confusion) / max(confusion.sum(), 1)),
        "class_accuracy": _mean(accuracy_by_class(confusion)),
    }


def _shares(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _mean(values: np.ndarray) -> float:
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else 0.0
