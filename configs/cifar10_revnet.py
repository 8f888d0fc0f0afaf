"""CIFAR-10 on two CPU cores: a reversible network, which keeps nothing a block.

    fnet train cifar10_revnet --data.path CIFAR10

CIFAR10 holds train/ and test/, each with a folder a class.
"""

from train.config import Checkpoint, Config, ImageFolder, Mesh, Optim, RevNet, Train


def config() -> Config:
    return Config(
        name="cifar10_revnet",
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
        model=RevNet(widths=(32, 64, 128), blocks=(2, 2, 2)),
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
