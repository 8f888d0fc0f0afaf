"""CIFAR-10 on two CPU cores: a reversible network, which keeps nothing a block.

    fnet train cifar10_revnet --data.path CIFAR10

CIFAR10 holds train/ and test/, each with a folder a class. Data and training are those of
cifar10_resnet.
"""

import dataclasses

from train import recipes
from train.config import Config, RevNet


def config() -> Config:
    return dataclasses.replace(
        recipes.load("cifar10_resnet"),
        name="cifar10_revnet",
        model=RevNet(widths=(32, 64, 128), blocks=(2, 2, 2)),
    )
