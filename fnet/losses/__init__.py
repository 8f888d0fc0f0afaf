"""Losses, one number per example; what is made of them is the gradient mode's business."""

from fnet.losses.classification import accuracy, cross_entropy
from fnet.losses.linear_cross_entropy import linear_cross_entropy
from fnet.losses.segmentation import pixel_cross_entropy, pixel_predictions

__all__ = [
    "accuracy",
    "cross_entropy",
    "linear_cross_entropy",
    "pixel_cross_entropy",
    "pixel_predictions",
]
