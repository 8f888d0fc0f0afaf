"""What is made of one loss per example: gradient modes, and gradients of single examples."""

from fnet.autodiff.accumulate import accumulate_grad, microbatches
from fnet.autodiff.batched import jvps, vjps
from fnet.autodiff.in_backward import optimizer_in_backward
from fnet.autodiff.jacobian import hvps, jacobian
from fnet.autodiff.mean import Aux, Gradient, Loss, mean, weighted_mean
from fnet.autodiff.per_example.adaptive import AdaptiveClipping, adapted_clip
from fnet.autodiff.per_example.clipped import Clipped, clipped_grad, routes
from fnet.autodiff.per_example.gradients import (
    NoiseScale,
    influence,
    noise_scale,
    per_example_grad,
    per_example_norms,
)
from fnet.autodiff.per_example.modes import clipped, per_example
from fnet.autodiff.update import Mode, Update

__all__ = [
    "AdaptiveClipping",
    "Aux",
    "Clipped",
    "Gradient",
    "Loss",
    "Mode",
    "NoiseScale",
    "Update",
    "accumulate_grad",
    "adapted_clip",
    "clipped",
    "clipped_grad",
    "hvps",
    "influence",
    "jacobian",
    "jvps",
    "mean",
    "microbatches",
    "noise_scale",
    "optimizer_in_backward",
    "per_example",
    "per_example_grad",
    "per_example_norms",
    "routes",
    "vjps",
    "weighted_mean",
]
