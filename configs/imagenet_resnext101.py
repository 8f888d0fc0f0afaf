"""ImageNet: ResNeXt-101 with in-place activated batch norm, batch 256 (authors' settings).

    fnet train imagenet_resnext101 --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50 with batch 256. Not trained here:
the published top-1 / top-5 of the reference are 77.70 / 93.78 (224 x 224),
79.18 / 94.60 (ten-crop), 78.98 / 94.56 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, ResNeXt
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(
        base,
        name="imagenet_resnext101",
        data=replace(base.data, batch_size=256),
        model=ResNeXt(depth=101, stem="3x3"),
        optim=replace(base.optim, learning_rate=0.1),
    )
