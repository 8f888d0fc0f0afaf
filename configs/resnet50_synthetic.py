"""ResNet-50 with in-place activated batch norm on random images, for measurements.

    fnet memory resnet50_synthetic --budget 600MB
    fnet train resnet50_synthetic --memory.budget 1GiB

Six training steps without a budget take 44 s on two CPU cores, most of it compilation, and
714 MB (predicted: 698 MB). The first command takes about a minute and a half.
"""

from train.config import Checkpoint, Config, Optim, ResNet, Synthetic, Train


def config() -> Config:
    return Config(
        name="resnet50_synthetic",
        data=Synthetic(batch_size=16, image_size=128, classes=1000, examples=64),
        model=ResNet(depth=50),
        optim=Optim(name="sgd", learning_rate=0.1, weight_decay=1e-4, schedule="constant"),
        train=Train(steps=6, log_every=2),
        checkpoint=Checkpoint(every=1000),
    )
