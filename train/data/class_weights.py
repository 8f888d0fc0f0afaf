"""Weights of classes by how often they occur."""

import numpy as np


def balanced_weights(labels: np.ndarray, classes: int) -> tuple[float, ...]:
    """Compute weights that make all classes count alike, as scikit-learn's ``balanced``.

    The weight of a class is N / (classes x its examples). Of several labels per image, it is the
    number of examples without the label by those with it. Labels are int [N], or [N, labels] of 0
    and 1. A class of no example has the weight 1, and so has a label of all examples.
    """
    if labels.ndim == 2:
        count = labels.sum(0)
        weights = np.where(count < len(labels), len(labels) - count, count) / np.maximum(count, 1)
    else:
        count = np.bincount(labels, minlength=classes)
        weights = len(labels) / (classes * np.maximum(count, 1))
    return tuple(np.where(count > 0, weights, 1.0).tolist())
