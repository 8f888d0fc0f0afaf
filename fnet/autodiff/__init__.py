"""What is made of one loss per example: gradient modes, and gradients of single examples."""

from fnet.autodiff.accumulate import accumulate_grad, microbatches
from fnet.autodiff.clipped import Clipped, clipped_grad, routes
from fnet.autodiff.in_backward import optimizer_in_backward
from fnet.autodiff.mean import Aux, Gradient, Loss, mean, weighted_mean
from fnet.autodiff.modes import clipped, per_example
from fnet.autodiff.per_example import (
    NoiseScale,
    influence,
    noise_scale,
    per_example_grad,
    per_example_norms,
)
from fnet.autodiff.update import Mode, Update

__all__ = [
    "Aux",
    "Clipped",
    "Gradient",
    "Loss",
    "Mode",
    "NoiseScale",
    "Update",
    "accumulate_grad",
    "clipped",
    "clipped_grad",
    "influence",
    "mean",
    "microbatches",
    "noise_scale",
    "optimizer_in_backward",
    "per_example",
    "per_example_grad",
    "per_example_norms",
    "routes",
    "weighted_mean",
]
