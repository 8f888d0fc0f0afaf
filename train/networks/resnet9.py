"""ResNet-9."""

from dataclasses import dataclass
from typing import Literal

from train.config.section import Count
from train.networks.convolutional import Convolutional


@dataclass(frozen=True)
class ResNet9(Convolutional):
    """ResNet-9 for small images, which trains in few epochs (Page 2018)."""

    name: Literal["resnet9"] = "resnet9"
    """Network; --model.name NAME --help lists the fields of another one."""
    widths: tuple[Count, Count, Count] = (128, 256, 512)
    """Channels of the three stages; each halves the resolution."""
