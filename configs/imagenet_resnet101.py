"""ImageNet: ResNet-101 with in-place activated batch norm (authors' settings).

    fnet train imagenet_resnet101 --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50. Not trained here:
the published top-1 / top-5 of the reference are 77.07 / 93.45 (224 x 224),
78.58 / 94.40 (ten-crop), 78.25 / 94.19 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, ResNet
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(base, name="imagenet_resnet101", model=ResNet(depth=101))
