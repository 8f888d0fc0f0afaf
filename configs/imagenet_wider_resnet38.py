"""ImageNet: Wider ResNet-38 with in-place activated batch norm (authors' settings).

    fnet train imagenet_wider_resnet38 --data.path IMAGENET --data.workers 8

The settings of mapillary/inplace_abn, as imagenet_resnet50 with batch 256. Not trained here:
the published top-1 / top-5 of the reference are 79.72 / 94.78 (224 x 224),
81.03 / 95.43 (ten-crop), 80.69 / 95.27 (320 x 320).
"""

from dataclasses import replace

from train.config import Config, WiderResNet
from train.config.recipes import load


def config() -> Config:
    base = load("imagenet_resnet50")
    return replace(
        base,
        name="imagenet_wider_resnet38",
        data=replace(base.data, batch_size=256),
        model=WiderResNet(depth=38),
        optim=replace(base.optim, learning_rate=0.1, schedule="linear"),
    )
