"""Weights that were trained with one batch norm, for a network with the other."""

import re

import numpy as np

EPS = 1e-5
"""Of `fnet.abn`, as of torch's norms."""

_NORM_OF_A_RESNET = re.compile(r"((?:body\.)?(?:layer\d\.\d+\.)?)bn(\d)\.gamma")


def change(arrays: dict[str, np.ndarray], there: str, here: str) -> dict[str, np.ndarray]:
    """A network's arrays for the norm ``here``, which were trained with the norm ``there``.

    In place, a norm multiplies by ``|gamma| + eps``, plain batch norm by ``gamma``::

        "abn" -> "batch":   gamma' = |gamma| + eps
        "batch" -> "abn":   m = max(|gamma|, eps);   s = gamma / m;   gamma' = m - eps
                            kernel' = s kernel;      running_mean' = s running_mean

    with the kernel of the convolution before the norm. The first is exact. The second is the
    same function in evaluation, to rounding; in training too where ``|gamma| >= eps``, s
    being a sign. Below, training scales by eps or less, in place of ``|gamma|``.

    The second needs a convolution whose output the norm alone reads, as all norms of a
    ResNet have; of other networks, no gamma may be below eps.

    Args:
      arrays: by their names here (``"layer1.0.bn1.gamma"``).
      there, here: ``"abn"`` or ``"batch"``; the same name twice changes nothing.

    Raises:
      ValueError: for another norm; for a gamma below eps that no convolution can take the
        sign of, with how many there are and where.
    """
    if there == here:
        return arrays
    if {there, here} != {"abn", "batch"}:
        raise ValueError(f"norm: weights are for 'abn' or 'batch', not for {there!r} in {here!r}")
    arrays = dict(arrays)
    refused = {}
    for name in [name for name in arrays if name.endswith("gamma")]:
        gamma = arrays[name]
        if here == "batch":
            arrays[name] = np.abs(gamma) + EPS
            continue
        size = np.maximum(np.abs(gamma), EPS)
        arrays[name] = size - EPS
        if (gamma == size).all():
            continue
        kernel, mean = convolution_before(name), re.sub("gamma$", "running_mean", name)
        if kernel is None:
            refused[name] = gamma[gamma != size]
            continue
        for scaled in (kernel, mean):
            arrays[scaled] = arrays[scaled] * (gamma / size)
    if refused:
        first, total = next(iter(refused)), sum(map(len, refused.values()))
        least = min(float(g.min()) for g in refused.values())
        raise ValueError(
            f"norm: in place, a norm multiplies by |gamma| + eps, and {total} gammas of "
            f"{len(refused)} norms are below eps {EPS:g} (the least is {least:.3g}; {first} has "
            f"{len(refused[first])}), where no convolution can take their sign; norm='batch' has "
            "any gamma"
        )
    return arrays


def convolution_before(gamma: str) -> str | None:
    """The kernel of the convolution whose output is read by this norm and nothing else.

    None for the norms of all networks but ResNets.
    """
    if found := _NORM_OF_A_RESNET.fullmatch(gamma):
        return f"{found[1]}conv{found[2]}.kernel"
    if gamma.endswith("downsample.1.gamma"):
        return gamma.removesuffix("1.gamma") + "0.kernel"
    return None
