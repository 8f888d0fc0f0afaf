"""ResNet, ResNeXt as torchvision has it, and Wide ResNet."""

from dataclasses import dataclass
from typing import Literal

from train.config.section import Count
from train.networks.activation import Activation
from train.networks.convolutional import Convolutional, Dilation, Stem


@dataclass(frozen=True)
class ResNet(Convolutional):
    """ResNet (He et al. 2015)."""

    name: Literal["resnet"] = "resnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[10, 14, 18, 26, 34, 50, 101, 152, 200] = 50
    """Number of layers."""
    activation: Activation = "leaky_relu"
    """Activation after every norm but a block's last, and after every residual sum."""
    stem: Stem = "7x7"
    """Stem: 7x7, three 3x3 (deep, tiered, wide: timm's d, t, s), or one 3x3 (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; dilated stages have no stride."""
    dilate_first: bool = True
    """Dilate the first block of a stage, too; torchvision and timm do not."""
    shortcut: Literal["conv", "pool"] = "conv"
    """Stride of shortcuts: in a convolution, or in average pooling (timm's suffixes d and t)."""
    groups: Count = 1
    """Groups of each 3x3 convolution of bottlenecks (ResNeXt)."""
    group_width: Count = 64
    """Channels of each group in the first stage; 128 in Wide ResNets."""
