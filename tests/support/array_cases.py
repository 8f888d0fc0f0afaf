"""Small .npz files of images and labels."""

import functools

import numpy as np
from data_cases import error_message

from train.config import ArrayFile

N, CLASSES = 30, 3


def make_images(n=N, shape=(4, 5, 3), dtype=np.uint8, seed=0):
    """Make random images [n, *shape]."""
    values = np.random.default_rng(seed).integers(0, 256, (n, *shape))
    return values.astype(dtype) if dtype == np.uint8 else (values / 255).astype(dtype)


def make_labels(n=N, classes=CLASSES):
    return np.arange(n) % classes


def write_npz(path, save=np.savez, **named):
    save(path, **named)
    return path


def load(path, **options):
    return ArrayFile(path=str(path), **{"batch_size": 4} | options).load()


load_error = functools.partial(error_message, load)

X, Y = make_images(), make_labels()
