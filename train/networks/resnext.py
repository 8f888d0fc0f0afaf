"""ResNeXt with pre-activation."""

from dataclasses import dataclass
from typing import Literal

from train.config.section import Count
from train.networks.convolutional import Convolutional, Dilation, Stem


@dataclass(frozen=True)
class ResNeXt(Convolutional):
    """ResNeXt with pre-activation (Xie et al. 2017)."""

    name: Literal["resnext"] = "resnext"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[50, 101, 152] = 50
    """Number of layers."""
    stem: Stem = "7x7"
    """Stem: a 7x7 convolution, three 3x3, or one 3x3 at full resolution (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; dilated stages have no stride."""
    groups: Count = 64
    """Groups of each 3x3 convolution; must divide 128."""
