"""Losses and metrics that return one number per example or token, not their mean.

Train steps take the mean, or clip per example (`fnet.autodiff`). `linear_cross_entropy` and
`pixel_cross_entropy` compute their losses in chunks, so that the logits are never materialized.
"""

from fnet.losses.classification import accuracy, cross_entropy
from fnet.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from fnet.losses.segmentation import pixel_cross_entropy
from fnet.losses.segmentation import pixel_predictions as pixel_predictions

__all__ = ["accuracy", "cross_entropy", "pixel_cross_entropy"]
