"""CIFAR-10 on two CPU cores: a reversible network, which keeps nothing a block.

    fnet train cifar10_revnet --data.path CIFAR10

CIFAR10 holds train/ and test/, each with a folder a class. Data and training are those of
cifar10_resnet. 0.40 M parameters; the step takes 69 MiB on each of the two cores, where that
one's takes 130, and 184 images a second go through it: 18 epochs are 82 minutes, and what they
reach was not measured. 150 steps (--train.steps 150 --optim.warmup-steps 20) reached 54 %.
"""

import dataclasses

from train.config import Config, RevNet, recipes


def config() -> Config:
    return dataclasses.replace(
        recipes.load("cifar10_resnet"),
        name="cifar10_revnet",
        model=RevNet(widths=(32, 64, 128), blocks=(2, 2, 2)),
    )
