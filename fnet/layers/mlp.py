"""The multilayer perceptron."""

import itertools
from collections.abc import Sequence

from fnet.layer import Layer, serial
from fnet.layers import activations
from fnet.layers.linear import dense


def mlp(sizes: Sequence[int], activation: str = "relu") -> Layer:
    """Dense layers with an activation between each two.

    Args:
      sizes: [n_in, hidden, ..., n_out], at least two.
      activation: name of the activation between layers; none follows the last.

    Returns:
      A layer; ``x`` [..., sizes[0]] -> [..., sizes[-1]]. Params are
      ``{"dense_0": {"kernel", "bias"}, ...}``, no state.

    Raises:
      ValueError: if fewer than two sizes are given, one is below 1, or the activation is unknown.
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp: expected at least an input and an output size, got {list(sizes)}")
    between = activations.activation(activation)
    layers: dict[str, Layer] = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        if i:
            layers[f"activation_{i}"] = between
        layers[f"dense_{i}"] = dense(n_in, n_out)
    return serial(**layers)
