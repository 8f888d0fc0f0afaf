"""Type of config fields that name an activation."""

from typing import Annotated, Literal

import tyro

from fnet.layers import activations
from train.config.section import Choice

Activation = Annotated[
    str,
    Choice(lambda: activations.ACTIVATIONS),
    tyro.conf.arg(
        constructor_factory=lambda: Literal[tuple(activations.ACTIVATIONS)],
        help_behavior_hint=lambda default: f"(default: {default.strip('[]').strip(chr(39))})",
    ),
]
"""Name of an activation in `fnet.layers.activations.ACTIVATIONS`, a user's included."""
