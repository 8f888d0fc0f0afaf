"""Multilayer perceptron on flattened examples."""

import math
from collections.abc import Sequence

from fnet import layers
from fnet.layer import Layer, serial, stateless


def mlp(
    *,
    num_classes: int,
    in_shape: Sequence[int],
    hidden: Sequence[int] = (256, 256),
    activation: str = "relu",
) -> Layer:
    """Multilayer perceptron on flattened examples.

    Args:
      num_classes: number of logits.
      in_shape: shape of one example.
      hidden: sizes of the hidden layers; may be empty.
      activation: activation after each hidden layer; see `fnet.layers.activation`.

    Returns:
      A layer: [N, *in_shape] -> [N, num_classes].

    Raises:
      ValueError: for a size below 1, or an unknown activation.
    """
    sizes = [math.prod(in_shape), *hidden, num_classes]
    return serial(
        flatten=stateless(lambda x: x.reshape(x.shape[0], -1)), mlp=layers.mlp(sizes, activation)
    )
