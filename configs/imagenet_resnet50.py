"""ImageNet: ResNet-50 with in-place activated batch norm (authors' settings).

    fnet train imagenet_resnet50 --data.path IMAGENET --data.workers 8
    fnet eval runs/imagenet_resnet50 --crops 10

IMAGENET holds train/ and val/, each with one folder per class; any other image folder
works too. Not trained here: the published top-1 / top-5 of the reference are 75.53 / 92.59
(224 x 224), 77.04 / 93.57 (ten-crop), 76.60 / 93.49 (320 x 320). Batch 512, 90 epochs,
learning rate divided by 10 every 30 epochs. Unlike the reference, weight decay applies to
kernels only, and kernels have He initialization. To save memory: --memory.budget 20GiB.
"""

from train.config import Checkpoint, Config, ImageFolder, Optim, ResNet, Train


def config() -> Config:
    return Config(
        name="imagenet_resnet50",
        data=ImageFolder(
            path="imagenet",
            batch_size=512,
            image_size=224,
            color_jitter=0.4,
            lighting=0.1,
        ),
        model=ResNet(depth=50),
        optim=Optim(
            name="sgd",
            learning_rate=0.2,
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
            schedule="step",
            decay_epochs=(30.0,),
            decay_rate=0.1,
        ),
        train=Train(epochs=90, log_every=50),
        checkpoint=Checkpoint(every=1000),
    )
