"""RevNet, which is reversible."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from train.config.section import Count, EvenCount
from train.networks.activation import Activation
from train.networks.convolutional import ImageNetwork


@dataclass(frozen=True)
class RevNet(ImageNetwork):
    """RevNet: its backward pass recomputes activations and saves none per block."""

    name: Literal["revnet"] = "revnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    widths: Annotated[tuple[EvenCount, ...], MinLen(1)] = (32, 64)
    """Channels of each stage; each stage after the first halves the resolution."""
    blocks: Annotated[tuple[Count, ...], MinLen(1)] = (3, 3)
    """Reversible blocks per stage; each is worth two residual blocks."""
    bottleneck: bool = False
    """Use bottleneck blocks of three convolutions instead of two."""
    activation: Activation = "leaky_relu"
    """Activation of every in-place activated batch norm."""
    activation_param: float | None = None
    """Slope of leaky_relu (None is 0.01) or alpha of elu (None is 1), above 0."""
    small_images: bool = True
    """Use a stem at full resolution; otherwise it divides height and width by 4."""
