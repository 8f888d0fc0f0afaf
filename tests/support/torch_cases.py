"""State dicts with torch's keys, for the tests of `fnet.interop.torch`."""

import functools

import jax
import numpy as np

from fnet import models
from fnet.interop import families
from fnet.interop.torch import load_state_dict


@functools.cache
def shapes(network):
    return jax.eval_shape(network.init, jax.random.key(0))


@functools.cache
def keys_and_shapes(name, names="reference", **options):
    """``{torch key: torch shape}``, without materializing arrays."""
    return torch_shapes(models.get(name, num_classes=1000, **options), names)


def torch_shapes(network, names):
    variables = {
        ".".join(step.key for step in path[1:]): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes(network))[0]
    }
    shape_by_key = {}
    for t in families.name_tensors(variables, names):
        shape_by_key[t.name] = t.file_shape
    return shape_by_key


def random_state_dict(shape_of, seed=0):
    """A random state dict with gammas of both signs and some of 0."""
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


def load(network, arrays, **options):
    return load_state_dict(*shapes(network), arrays, **options)[:2]


def preact(num_classes=3):
    return models.get("preact_resnet", num_classes=num_classes, widths=(4,), blocks_per_stage=1)
