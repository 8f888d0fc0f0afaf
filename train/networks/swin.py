"""Swin transformer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fnet.models.swin import VARIANTS
from train.config.section import Choice, Fraction
from train.networks.convolutional import ImageNetwork


@dataclass(frozen=True)
class Swin(ImageNetwork):
    """Swin transformer (Liu et al. 2021)."""

    name: Literal["swin"] = "swin"
    variant: Annotated[str, Choice(lambda: VARIANTS)] = "swin_t"
    """Name in torchvision or timm, such as swin_s or swin_base_patch4_window12_384."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""
