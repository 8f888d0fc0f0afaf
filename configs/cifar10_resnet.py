"""CIFAR-10 on two CPU cores: ResNet-9 with in-place activated batch norm.

    fnet train cifar10_resnet --data.path CIFAR10
    fnet eval runs/cifar10_resnet --crops 10 --border 1

CIFAR10 holds train/ and test/, each with one folder per class. 18 epochs reach 89.9 % test
accuracy, 90.5 % with ten-crop and 89.1 % with one crop. 2.0 M parameters. Training takes 370
to 437 images/s on two cores, and 160 MiB; 18 epochs took 77 minutes at 195 images/s, before
convolutions were fast. 2.6 epochs (--train.epochs 2.6 --optim.warmup-steps 240) reach 83.7 %,
and 12 epochs (--optim.warmup-steps 1000) 89.4 %. The images were JPEGs of quality 75 with
halved color resolution, which is less than CIFAR-10 as published.
"""

from train.config import Checkpoint, Config, ImageFolder, Optim, ResNet9, Train


def config() -> Config:
    return Config(
        name="cifar10_resnet",
        data=ImageFolder(
            path="cifar10",
            batch_size=128,
            image_size=32,
            crop="reflected",
            padding=2,
            resize=32,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            crops=2,
            cache=True,
        ),
        model=ResNet9(widths=(64, 256, 256)),
        optim=Optim(
            name="sgd",
            learning_rate=0.15,
            nesterov=True,
            weight_decay=1.3e-3,
            schedule="linear",
            warmup_steps=1500,
            label_smoothing=0.2,
        ),
        train=Train(epochs=18, log_every=50),
        checkpoint=Checkpoint(every=400),
    )
