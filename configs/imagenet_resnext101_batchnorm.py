"""ImageNet: ResNeXt-101 with plain batch norm and leaky ReLU (authors' settings).

    fnet train imagenet_resnext101_batchnorm --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50 with batch 256. Not trained here:
the published top-1 / top-5 of the reference are 77.04 / 93.50 (224 x 224),
78.72 / 94.47 (ten-crop), 77.92 / 94.28 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, ResNeXt
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(
        base,
        name="imagenet_resnext101_batchnorm",
        data=replace(base.data, batch_size=256),
        model=ResNeXt(depth=101, norm="batch", stem="3x3"),
        optim=replace(base.optim, learning_rate=0.1),
    )
