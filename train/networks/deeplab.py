"""DeepLabV3 for semantic segmentation."""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import jax
import numpy as np
from annotated_types import MinLen

from fnet import models
from fnet.layer import Layer
from train.config.section import Count
from train.networks.images import Convolutional

# Not all of `models.VARIANTS`: only networks that can be dilated are backbones.
# fmt: off
Backbone = Literal[
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet18d", "resnet34d",
    "resnet50d", "resnet101d", "resnet152d", "wide_resnet50_2", "wide_resnet101_2",
    "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "resnext50", "resnext101",
    "resnext152", "densenet121", "densenet161", "densenet169", "densenet201", "densenet264",
    "wider_resnet16_a2", "wider_resnet20_a2", "wider_resnet38_a2",
]
# fmt: on


@dataclass(frozen=True)
class DeepLab(Convolutional):
    """DeepLabV3 for semantic segmentation (Chen et al. 2017)."""

    task: ClassVar[str] = "segmentation"

    name: Literal["deeplab"] = "deeplab"
    """Network; --model.name NAME --help lists the fields of another one."""
    backbone: Backbone = "resnet50"
    """Backbone, whose features have an eighth of the image's resolution."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """Stem of the backbone: a 7x7 convolution or three 3x3; some backbones have their own."""
    dilate_first: bool = True
    """Dilate the first block of a stage of a ResNet, too; torchvision does not."""
    head: Literal["sum", "concat"] = "sum"
    """Head (ASPP): branches are summed, or concatenated as in torchvision."""
    hidden: Count = 256
    """Channels of each branch of the head (ASPP)."""
    dilations: Annotated[tuple[Count, ...], MinLen(1)] = (12, 24, 36)
    """Dilations of the head's 3x3 convolutions."""
    pooling_size: tuple[Count, Count] | None = None
    """Window of the head's average pooling in evaluation; None is the whole image."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        common = {n: getattr(self, n) for n in ("activation", "activation_param", "norm")}
        network = next(n for n, names in models.VARIANTS.items() if self.backbone in names)
        wider, own = network == "wider_resnet", models.VARIANTS[network][self.backbone]
        if self.stem != "7x7" and (wider or own.keys() > {"depth"}):
            raise ValueError(f"stem: {self.backbone} has its own stem; leave model.stem out")
        dilated: dict[str, Any] = {"dilated": True} if wider else {"dilation": (1, 1, 2, 4)}
        if self.stem != "7x7":
            dilated["stem"] = self.stem
        if not self.dilate_first:
            if network != "resnet":
                raise ValueError(
                    f"dilate_first: only ResNets can leave it out, not {self.backbone}"
                )
            dilated["dilate_first"] = False
        if network == "densenet" and self.head == "concat":
            dilated["stem_norm"] = True
        channels = image_shape[-1]
        backbone = models.get(
            self.backbone, num_classes=None, in_channels=channels, **common, **dilated
        )
        image = jax.ShapeDtypeStruct((1, 64, 64, channels), np.float32)
        params, state = jax.eval_shape(backbone.init, jax.random.key(0))
        features, _ = jax.eval_shape(
            functools.partial(backbone.apply, train=False), params, state, image
        )
        return models.deeplab(
            backbone,
            features[-1].shape[-1],
            num_classes=num_classes,
            hidden=self.hidden,
            dilations=self.dilations,
            pooling_size=self.pooling_size,
            head=self.head,
            interpolate=False,  # the loss upsamples the logits
            **common,
        )
