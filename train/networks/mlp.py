"""Multilayer perceptron."""

from dataclasses import dataclass
from typing import Literal

from fnet import models
from fnet.layer import Layer
from train.config.network import Network
from train.config.section import Count
from train.networks.activation import Activation


@dataclass(frozen=True)
class Mlp(Network):
    """Multilayer perceptron on flattened images."""

    name: Literal["mlp"] = "mlp"
    hidden: tuple[Count, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: Activation = "relu"
    """Activation between layers."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images of a shape."""
        return models.get("mlp", num_classes=num_classes, in_shape=image_shape, **self.options)
