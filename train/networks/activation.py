"""Type of config fields that name an activation."""

from typing import Annotated, Any, Literal

import tyro

from fnet.layers import activations
from train.config.section import Choice


def _names() -> list[str]:
    return list(activations.ACTIVATIONS)


def _type() -> Any:
    return Literal[tuple(_names())]


Activation = Annotated[
    str,
    Choice(_names),
    tyro.conf.arg(
        constructor_factory=_type,
        help_behavior_hint=lambda default: f"(default: {default.strip('[]').strip(chr(39))})",
    ),
]
"""Name of an activation in `fnet.layers.activations.ACTIVATIONS`, a user's included."""
