"""ImageNet: ResNeXt-152 with in-place activated batch norm (authors' settings).

    fnet train imagenet_resnext152 --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50 with batch 256. Not trained here:
the published top-1 / top-5 of the reference are 78.28 / 94.04 (224 x 224),
79.73 / 94.82 (ten-crop), 79.56 / 94.67 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, ResNeXt
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(
        base,
        name="imagenet_resnext152",
        data=replace(base.data, batch_size=256),
        model=ResNeXt(depth=152, stem="3x3"),
        optim=replace(base.optim, learning_rate=0.1),
    )
