"""CamVid: DeepLabV3 on a ResNet-18, semantic segmentation of street scenes.

    fnet train camvid_deeplab --data.path CamVid
    fnet eval runs/camvid_deeplab --split test

SegNet's version of CamVid, as published: train/, trainannot/, val/, ... with 367, 101 and 233
images of 480 x 360, 11 classes, and void, which is ignored. 13.2 M parameters; the step takes
1.8 GiB. The whole recipe has not been trained. A small run from random weights,

    fnet train camvid_deeplab --data.path CamVid --data.image-size 160 --train.steps 300

has mean IoU 32.1 % on val and 27.5 % on test after 200 of its steps. These took 8 minutes of
CPU time, on two cores that were busy with other work. The step takes 0.5 GiB.
"""

from train.config import Checkpoint, Config, DeepLab, Optim, SegmentationFolder, Train


def config() -> Config:
    return Config(
        name="camvid_deeplab",
        data=SegmentationFolder(
            path="CamVid",
            format="camvid",
            batch_size=8,
            image_size=480,
            scale=(0.5, 2.0),
            color_jitter=0.3,
        ),
        model=DeepLab(backbone="resnet18", hidden=128, dilations=(6, 12, 18)),
        optim=Optim(name="adamw", learning_rate=1e-3, weight_decay=1e-2, warmup_steps=100),
        train=Train(epochs=60, log_every=20),
        checkpoint=Checkpoint(every=200),
    )
