"""Folders of small images."""

import numpy as np
from PIL import Image


def color(i):
    """Color of image i, which identifies it."""
    return (10 * i % 250, 3 * i, 255 - 2 * i)


def write_image(path, i=0, size=(12, 10)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color(i)).save(path)


def write_class_folders(root, train=12, test=6, classes=("cat", "dog"), size=(12, 10)):
    """Write ``root/train`` and ``root/val`` with images that alternate between the classes."""
    for split, n in (("train", train), ("val", test)):
        for i in range(n):
            write_image(root / split / classes[i % len(classes)] / f"{i:03}.png", i, size)


def write_mask(path, labels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(labels, np.uint8)).save(path)
