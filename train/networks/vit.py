"""Vision transformers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fnet import models
from fnet.layer import Layer
from fnet.models.swin import VARIANTS
from train.config.network import Network
from train.config.section import Choice, Count, CountOrZero, Fraction, Positive
from train.networks.convolutional import ImageNetwork


@dataclass(frozen=True)
class ViT(Network):
    """Vision transformer (Dosovitskiy et al. 2021)."""

    name: Literal["vit"] = "vit"
    patch: Count = 4
    """Patch size in pixels; pixels beyond the last whole patch are cut off."""
    width: Count = 192
    """Model width: features per patch; 192, 384, 768 and 1024 in the papers."""
    blocks: Count = 12
    """Number of blocks."""
    heads: Count = 3
    """Number of attention heads; must divide width."""
    hidden: Count | None = None
    """Width of the feed-forward layers (GELU); None is 4 times width."""
    registers: CountOrZero = 0
    """Number of register tokens, which are neither image nor output."""
    pooling: Literal["token", "mean"] = "token"
    """Features of the classifier: the class token, or the mean of the patches."""
    layer_scale: Positive | None = None
    """Initial scale of each residual branch; None is no scale."""
    dropout: Fraction = 0.0
    """Dropout rate of each residual branch."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        return models.get("vit", num_classes=num_classes, image_shape=image_shape, **self.options)


@dataclass(frozen=True)
class Swin(ImageNetwork):
    """Swin transformer (Liu et al. 2021)."""

    name: Literal["swin"] = "swin"
    variant: Annotated[str, Choice(lambda: VARIANTS)] = "swin_t"
    """Name in torchvision or timm, such as swin_s or swin_base_patch4_window12_384."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""
