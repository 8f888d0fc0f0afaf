"""ImageNet: ResNeXt-101 with in-place activated batch norm, batch 512 (authors' settings).

    fnet train imagenet_resnext101_512 --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50. Not trained here:
the published top-1 / top-5 of the reference are 78.08 / 93.79 (224 x 224),
79.52 / 94.66 (ten-crop), 79.38 / 94.67 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, ResNeXt
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(
        base,
        name="imagenet_resnext101_512",
        model=ResNeXt(depth=101, stem="3x3"),
        optim=replace(base.optim, learning_rate=0.1),
    )
