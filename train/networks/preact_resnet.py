"""Pre-activation ResNet."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from train.config.section import Count
from train.networks.convolutional import Convolutional


@dataclass(frozen=True)
class PreactResNet(Convolutional):
    """Pre-activation ResNet for small images (He et al. 2016)."""

    name: Literal["preact_resnet"] = "preact_resnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (16, 32)
    """Channels of each stage; each stage after the first halves the resolution."""
    blocks_per_stage: Count = 2
    """Residual blocks per stage."""
    stem_width: Count | None = None
    """Channels of the first convolution; None is the first stage's width."""
    first_stride: Literal[1, 2] = 1
    """Stride of the first stage; 2 makes the network much cheaper."""
