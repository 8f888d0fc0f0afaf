"""In-place and plain batch norm of other libraries: layers, and conversion of trained weights."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from fnet.layers.abn import abn

EPS = 1e-5
"""Epsilon of `fnet.abn` and of torch's norms."""

_SERIAL_NORM = re.compile(r"(.*downsample\.|head\.(?:0\..*\.)?)(\d)\.gamma")
_UNIT_NORM = re.compile(r"((?:stem|last|stage\d+\..*))\.bn\.gamma")
_RESNET_NORM = re.compile(r"((?:body\.)?(?:layer\d\.\d+\.)?)bn(\d)\.gamma")


def convert(arrays: dict[str, np.ndarray], trained_with: str, norm: str) -> dict[str, np.ndarray]:
    """Convert the arrays of a network, by name, that was trained with another norm.

    In-place norm multiplies by ``|gamma| + eps``, plain batch norm by ``gamma``::

        "abn" -> "batch":   gamma' = |gamma| + eps
        "batch" -> "abn":   m = max(|gamma|, eps);   s = gamma / m;   gamma' = m - eps
                            kernel' = s kernel;      running_mean' = s running_mean

    The kernel belongs to the convolution before the norm. The first conversion is exact. The second
    gives the same function in evaluation, up to rounding. In training it is the same where
    ``|gamma| >= eps``, because s is a sign there. Elsewhere training scales by at most eps instead
    of ``|gamma|``.

    The second needs a convolution whose output only the norm reads. All norms of a ResNet have one.
    In other networks no gamma may be below eps: a ValueError says how many are, and where.
    """
    if trained_with == norm:
        return arrays
    if {trained_with, norm} != {"abn", "batch"}:
        raise ValueError(f"norm: cannot convert weights of norm {trained_with!r} to norm {norm!r}")
    arrays = dict(arrays)
    rejected = {}
    for name in [name for name in arrays if name.endswith("gamma")]:
        gamma = arrays[name]
        if norm == "batch":
            arrays[name] = np.abs(gamma) + EPS
            continue
        magnitude = np.maximum(np.abs(gamma), EPS)
        arrays[name] = magnitude - EPS
        if (gamma == magnitude).all():
            continue
        kernel, mean = convolution_before(name), re.sub("gamma$", "running_mean", name)
        if kernel is None:
            rejected[name] = gamma[gamma != magnitude]
            continue
        for scaled in (kernel, mean):
            arrays[scaled] = arrays[scaled] * (gamma / magnitude)
    if rejected:
        first, total = next(iter(rejected)), sum(map(len, rejected.values()))
        least = min(float(g.min()) for g in rejected.values())
        raise ValueError(
            f"norm: {total} gammas of {len(rejected)} norms are below eps {EPS:g} (the least is "
            f"{least:.3g}; {first} has {len(rejected[first])}), which in-place norm cannot "
            "represent, and no convolution can absorb their sign; use norm='batch'"
        )
    return arrays


def convolution_before(gamma: str) -> str | None:
    """Name of the kernel of the convolution whose output only this norm reads, or None.

    ResNets, RegNets, EfficientNets and the heads of torchvision's DeepLabs have them.
    """
    if match := _RESNET_NORM.fullmatch(gamma):
        return f"{match[1]}conv{match[2]}.kernel"
    if name := _UNIT_NORM.fullmatch(gamma):
        return f"{name[1]}.conv.kernel"
    if match := _SERIAL_NORM.fullmatch(gamma):
        return f"{match[1]}{int(match[2]) - 1}.kernel"
    return None


def abn_of(module: Any, x: Any, *arrays: Any, train: bool, mask: Any) -> Any:
    """`fnet.abn` with the options of a module."""
    dtype = jnp.result_type(x, *arrays[:2]) if module.dtype is None else module.dtype
    given = {name: getattr(module, name) for name in ("activation", "activation_param", "axis")}
    given |= {"eps": module.epsilon, "decay": module.momentum, "train": train, "mask": mask}
    axis_name = module.axis_name if train else None
    return abn(jnp.asarray(x, dtype), *arrays, axis_name=axis_name, **given)
