"""EfficientNet, EfficientNetV2 and MobileNetV3."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typing_extensions import override

from fnet.models.efficientnet import VARIANTS
from train.config.section import Choice, Fraction, Positive
from train.networks.convolutional import ImageNetwork, Norm


@dataclass(frozen=True)
class EfficientNet(ImageNetwork):
    """EfficientNet, EfficientNetV2 or MobileNetV3 (Tan, Le 2019, 2021; Howard et al. 2019)."""

    name: Literal["efficientnet"] = "efficientnet"
    """Network; --model.name NAME --help lists the fields of another one."""
    variant: Annotated[str, Choice(lambda: VARIANTS)] = "efficientnet_b0"
    """Name in torchvision or timm, such as efficientnet_v2_s, mobilenet_v3_large."""
    norm: Norm = "batch"
    """Norm: plain batch norm, in-place activated batch norm, or group norm."""
    eps: Positive | None = None
    """Added to the variance in each norm but group norm; None is the publisher's."""
    stochastic_depth: Fraction = 0.0
    """Rate at which the last block is skipped for an image; grows linearly over the blocks."""
    dropout: Fraction = 0.0
    """Dropout rate before the classifier; 0.2 to 0.5 in the papers."""

    @property
    @override
    def options(self) -> dict[str, Any]:
        row = VARIANTS[self.variant]
        eps, is_group = self.eps or row["eps"], self.norm == "group"
        padding = row.get("padding", "half")
        return super().options | {"eps": 1e-5 if is_group else eps, "padding": padding}
