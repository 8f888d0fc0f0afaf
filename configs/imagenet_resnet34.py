"""ImageNet: ResNet-34 with in-place activated batch norm (authors' settings).

    fnet train imagenet_resnet34 --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50. Not trained here:
the published top-1 / top-5 of the reference are 73.27 / 91.34 (224 x 224),
75.19 / 92.66 (ten-crop), 74.87 / 92.42 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, ResNet
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(base, name="imagenet_resnet34", model=ResNet(depth=34))
