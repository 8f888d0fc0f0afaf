"""ImageNet: DenseNet-264 with in-place activated batch norm (authors' settings).

    fnet train imagenet_densenet264 --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50 with batch 256. Not trained here:
the published top-1 / top-5 of the reference are 78.57 / 94.17 (224 x 224),
79.72 / 94.93 (ten-crop), 79.49 / 94.89 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, DenseNet
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(
        base,
        name="imagenet_densenet264",
        data=replace(base.data, batch_size=256),
        model=DenseNet(depth=264, stem="3x3"),
        optim=replace(base.optim, learning_rate=0.1),
    )
