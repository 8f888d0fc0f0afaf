"""Folders of small images, made where they are needed."""

import numpy as np
from PIL import Image


def colour(i):
    """Of image i, so that it is known again."""
    return (10 * i % 250, 3 * i, 255 - 2 * i)


def write(path, i=0, size=(12, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour(i)).save(path)


def class_folders(root, train=12, test=6, classes=("cat", "dog"), size=(12, 10)):
    """``root/train`` and ``root/val`` with that many images, in turns of the classes."""
    for split, n in (("train", train), ("val", test)):
        for i in range(n):
            write(root / split / classes[i % len(classes)] / f"{i:03}.png", i, size)


def write_mask(path, labels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(labels, np.uint8)).save(path)
