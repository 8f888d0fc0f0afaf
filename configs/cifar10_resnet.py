"""CIFAR-10 on two CPU cores: a ResNet-9 with in-place activated batch norm.

    fnet train cifar10_resnet --data.path CIFAR10

CIFAR10 holds train/ and test/, each with a folder a class. 12 of the 15 epochs, as a schedule of
their own (--train.epochs 12), reached 88.0 % in 60 minutes, at 176 images a second with pages of
2 MiB (docs/memory.md says how). The network of half its width, without whitened patches, reached
88.3 % in all 15 epochs and 74 minutes.
"""

from train.config import Checkpoint, Config, ImageFolder, Mesh, Optim, ResNet9, Train


def config() -> Config:
    return Config(
        name="cifar10_resnet",
        data=ImageFolder(
            path="cifar10",
            batch_size=128,
            image_size=32,
            crop="reflected",
            padding=4,
            resize=32,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            cutout=8,
            keep=True,
        ),
        model=ResNet9(widths=(64, 256, 256)),
        optim=Optim(
            name="sgd",
            learning_rate=0.1,
            nesterov=True,
            weight_decay=5e-4,
            schedule="linear",
            warmup_steps=1000,
            label_smoothing=0.2,
        ),
        train=Train(epochs=15, log_every=50),
        mesh=Mesh(data=2),
        checkpoint=Checkpoint(every=400),
    )
