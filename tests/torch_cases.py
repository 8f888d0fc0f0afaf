"""Weights under torch's names, for the tests that read and write them."""

import functools

import jax
import numpy as np

from fnet import models
from fnet.interop import torch_keys
from fnet.interop.torch import fill


@functools.cache
def shapes(network):
    return jax.eval_shape(network.init, jax.random.key(0))


@functools.cache
def keys_and_shapes(name, names="reference", **options):
    """{key in torch: shape there}, found without any array."""
    return in_torch(models.get(name, num_classes=1000, **options), names)


def in_torch(network, names):
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes(network))[0]:
        name = ".".join(step.key for step in path[1:])
        order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[leaf.ndim]
        found[torch_keys.torch_key(name, names)] = tuple(leaf.shape[i] for i in order)
    return found


def drawn(shape_of, seed=0):
    """A state dict of these shapes; gammas of both signs, some of them 0."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for key, shape in shape_of.items():
        a = generator.normal(size=shape)
        if key.endswith("running_var"):
            a = np.exp(a / 2)
        elif len(shape) > 1:
            a /= np.sqrt(np.prod(shape[1:]))
        elif key.endswith("weight"):
            a[:: max(len(a) // 2, 1)] = 0
        arrays[key] = a.astype(np.float32)
    return arrays


def read(network, arrays, **options):
    return fill(*shapes(network), arrays, **options)[:2]


def preact(num_classes=3):
    return models.get("preact_resnet", num_classes=num_classes, widths=(4,), blocks_per_stage=1)
