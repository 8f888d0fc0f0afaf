"""Gradient modes: what is made of one loss per example."""

from fnet.autodiff.mean import Aux, Gradient, Loss, mean, weighted_mean

__all__ = ["Aux", "Gradient", "Loss", "mean", "weighted_mean"]
