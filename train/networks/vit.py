"""Vision transformer."""

from dataclasses import dataclass
from typing import Literal

from fnet import models
from fnet.layer import Layer
from train.config.network import Network
from train.config.section import Count, CountOrZero, Fraction, Positive


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
