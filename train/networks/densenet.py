"""DenseNet."""

from dataclasses import dataclass
from typing import Literal

from train.config.section import Count
from train.networks.convolutional import Convolutional, Dilation, Stem


@dataclass(frozen=True)
class DenseNet(Convolutional):
    """DenseNet (Huang et al. 2017)."""

    name: Literal["densenet"] = "densenet"
    """Network; --model.name NAME --help lists the fields of another one."""
    depth: Literal[121, 161, 169, 201, 264] = 121
    """Number of layers."""
    stem: Stem = "7x7"
    """Stem: a 7x7 convolution, three 3x3, or one 3x3 at full resolution (small)."""
    dilation: Dilation = (1, 1, 1, 1)
    """Dilation of each stage; there is no pooling before a dilated stage."""
    growth: Count | None = None
    """Growth rate: channels that each layer adds; None is 48 for depth 161, otherwise 32."""
    stem_norm: bool = False
    """Norm after the stem, as in torchvision and timm."""
