"""Fields that convolutional networks have in common."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MaxLen, MinLen

from train.config.network import Network
from train.config.section import Count
from train.networks.activation import Activation

Norm = Literal["abn", "batch", "group"]
Stem = Literal["7x7", "3x3", "deep", "tiered", "wide", "small"]
Dilation = Annotated[tuple[Count, ...], MinLen(4), MaxLen(4)]


@dataclass(frozen=True)
class Convolutional(Network):
    """A convolutional network with a norm and an activation after each convolution."""

    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
