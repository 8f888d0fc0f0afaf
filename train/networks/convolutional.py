"""Common parts of networks for images: how they are built, and fields of convolutional ones."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen

from fnet import models
from train.config.network import Network
from train.config.section import Count
from train.networks.activation import Activation

Norm = Literal["abn", "batch", "group"]
Stem = Literal["7x7", "3x3", "deep", "tiered", "wide", "small"]
Dilation = Annotated[tuple[Count, ...], MinLen(4), MaxLen(4)]


@dataclass(frozen=True)
class ImageNetwork(Network):
    """A network that `fnet.models.get` knows by its name, or by its field ``variant``.

    The other fields are options of that function.
    """

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Any:
        """Build the network for images [H, W, C]."""
        options = self.options | {"num_classes": num_classes, "in_channels": image_shape[-1]}
        return models.get(options.pop("variant", self.name), **options)


@dataclass(frozen=True)
class Convolutional(ImageNetwork):
    """A convolutional network with a norm and an activation after each convolution."""

    activation: Activation = "leaky_relu"
    """Activation after every norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    norm: Norm = "abn"
    """Norm: in-place activated batch norm, plain batch norm, or group norm."""
