"""Gradient modes: what is made of one loss per example."""

from fnet.autodiff.accumulate import accumulate_grad, microbatches
from fnet.autodiff.in_backward import optimizer_in_backward
from fnet.autodiff.mean import Aux, Gradient, Loss, mean, weighted_mean
from fnet.autodiff.update import Mode, Update

__all__ = [
    "Aux",
    "Gradient",
    "Loss",
    "Mode",
    "Update",
    "accumulate_grad",
    "mean",
    "microbatches",
    "optimizer_in_backward",
    "weighted_mean",
]
