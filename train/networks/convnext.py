"""ConvNeXt."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from train.config.section import Count, Fraction, Positive
from train.networks.convolutional import ImageNetwork


@dataclass(frozen=True)
class ConvNeXt(ImageNetwork):
    """ConvNeXt, the first and the second version (Liu et al. 2022; Woo et al. 2023)."""

    name: Literal["convnext"] = "convnext"
    """Network; --model.name NAME --help lists the fields of another one."""
    blocks: Annotated[tuple[Count, ...], MinLen(1)] = (3, 3, 9, 3)
    """Number of blocks of each stage."""
    widths: Annotated[tuple[Count, ...], MinLen(1)] = (96, 192, 384, 768)
    """Channels of each stage; each stage after the first halves the resolution."""
    patch: Count = 4
    """Window and stride of the first convolution, in pixels."""
    response_norm: bool = False
    """Use global response norm, as in ConvNeXt V2; then set layer_scale to none."""
    layer_scale: Positive | None = 1e-6
    """Initial scale of each block; None is no scale."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""
