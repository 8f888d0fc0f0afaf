"""Swin transformer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fnet import models
from fnet.layer import Layer
from fnet.models.swin import VARIANTS
from train.config.network import Network
from train.config.section import Choice, Fraction


@dataclass(frozen=True)
class Swin(Network):
    """Swin transformer (Liu et al. 2021)."""

    name: Literal["swin"] = "swin"
    """Network; --model.name NAME --help lists the fields of another one."""
    variant: Annotated[str, Choice(lambda: VARIANTS)] = "swin_t"
    """Name in torchvision or timm, such as swin_s or swin_base_patch4_window12_384."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""

    def build(self, image_shape: tuple[int, ...], num_classes: int | None) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.get(
            self.variant,
            num_classes=num_classes,
            in_channels=image_shape[-1],
            stochastic_depth=self.stochastic_depth,
        )
