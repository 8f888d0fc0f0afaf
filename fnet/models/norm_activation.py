"""The norm and the activation of a network for images, in one layer, by name."""

import functools
import math
from collections.abc import Callable

from fnet import layers
from fnet.layer import Layer, serial

NormActivation = Callable[..., Layer]
"""``(channels, *, activation, activation_param) -> Layer``: a norm and the activation behind it."""


def group(channels: int, *, activation: str, activation_param: float) -> Layer:
    """Group norm (Wu, He 2018), then the activation.

    With 32 groups, or as many of them as divide the channels.
    """
    return serial(
        norm=layers.group_norm(channels, math.gcd(32, channels)),
        act=layers.activation(activation, activation_param),
    )


NORMS: dict[str, NormActivation] = {
    "abn": layers.abn,
    "batch": layers.batch_norm,
    "group": group,
}


def find(
    where: str, norm: str | NormActivation, activation: str, activation_param: float
) -> NormActivation:
    """The norm of that name, with that activation behind it unless a place asks for another.

    Args:
      where: whose argument it is, for the message.
      norm: ``"abn"``: `fnet.abn`, which keeps its output alone. ``"batch"``: plain batch
        norm, gamma of any sign, for weights trained with it elsewhere. ``"group"``: group
        norm, by which no example depends on another. Or ``(channels, *, activation,
        activation_param) -> Layer``.
      activation, activation_param: of the whole network.

    Returns:
      ``(channels) -> Layer``; with ``activation="identity"``, the norm alone.

    Raises:
      ValueError: for another name.
    """
    if not callable(norm):
        if norm not in NORMS:
            raise ValueError(f"{where}: norm must be one of {sorted(NORMS)}, got {norm!r}")
        norm = NORMS[norm]
    return functools.partial(norm, activation=activation, activation_param=activation_param)
