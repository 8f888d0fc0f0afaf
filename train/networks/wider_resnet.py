"""Wider ResNet."""

from dataclasses import dataclass
from typing import Literal

from train.networks.convolutional import Convolutional


@dataclass(frozen=True)
class WiderResNet(Convolutional):
    """Wider ResNet with pre-activation (Wu et al. 2016)."""

    name: Literal["wider_resnet"] = "wider_resnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[16, 20, 38] = 38
    """Number of layers."""
    a2: bool = False
    """Use the A2 variant: strides instead of max pooling, dropout in the last two stages."""
    dilated: bool = False
    """Dilate the last two stages instead of striding them (A2 only)."""
