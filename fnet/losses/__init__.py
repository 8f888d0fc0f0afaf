"""Losses and metrics that return one number per example or token, not their mean.

Train steps take the mean, or clip per example (`fnet.autodiff`). `fnet.linear_cross_entropy` and
`pixel_cross_entropy` compute their losses in chunks, so that the logits are never materialized.
"""

from fnet.losses.classification import accuracy as accuracy
from fnet.losses.classification import cross_entropy as cross_entropy
from fnet.losses.segmentation import pixel_cross_entropy as pixel_cross_entropy
from fnet.losses.segmentation import pixel_predictions as pixel_predictions
