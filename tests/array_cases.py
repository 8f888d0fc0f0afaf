"""Small .npz files, and what is loaded of them."""

import functools

import numpy as np
from data_cases import refusal

from train.config import ArrayFile
from train.data import arrays

N, CLASSES = 30, 3


def pixels(n=N, shape=(4, 5, 3), dtype=np.uint8, seed=0):
    """Images that differ from each other."""
    values = np.random.default_rng(seed).integers(0, 256, (n, *shape))
    return values.astype(dtype) if dtype == np.uint8 else (values / 255).astype(dtype)


def numbers(n=N, classes=CLASSES):
    return np.arange(n) % classes


def written(path, save=np.savez, **named):
    save(path, **named)
    return path


def load(path, **options):
    return arrays.load(ArrayFile(path=str(path), **{"batch_size": 4} | options))


refused = functools.partial(refusal, load)

X, Y = pixels(), numbers()
