"""Segmentation of your own images: DeepLabV3 on a ResNet-18, at 320 pixels.

    fnet train segmentation --data.path FOLDER
    fnet train segmentation --data.path FOLDER --model.pretrained resnet18-f37072fd.pth

FOLDER holds images and masks in a layout of the segmentation tutorial. Class names, mask values
and colors come from its class table, or from data.classes or data.mask_values. 13.2 M parameters.
"""

from train.config import Checkpoint, Config, DeepLab, Optim, SegmentationFolder, Train


def config() -> Config:
    return Config(
        name="segmentation",
        data=SegmentationFolder(
            path="segmentation",
            batch_size=8,
            image_size=320,
            scale=(0.5, 2.0),
            color_jitter=0.3,
        ),
        model=DeepLab(backbone="resnet18", hidden=128, dilations=(6, 12, 18)),
        optim=Optim(name="adamw", learning_rate=1e-3, weight_decay=1e-2, warmup_steps=20),
        train=Train(epochs=60, log_every=20),
        checkpoint=Checkpoint(every=200),
    )
