"""Whole networks by name."""

import functools
from collections.abc import Callable
from typing import Any

from fnet.layer import Layer
from fnet.models.denoiser import Denoiser, denoiser
from fnet.models.language_model import LanguageModel, language_model
from fnet.models.mlp import mlp
from fnet.models.preact_resnet import preact_resnet
from fnet.models.resnet import DEPTHS, resnet
from fnet.models.revnet import revnet

MODELS: dict[str, Callable[..., Layer]] = {
    "mlp": mlp,
    "preact_resnet": preact_resnet,
    "revnet": revnet,
}
MODELS |= {f"resnet{depth}": functools.partial(resnet, depth) for depth in DEPTHS}


def get(name: str, **options: Any) -> Layer:
    """A network by name.

    Args:
      name: ``mlp``, ``preact_resnet``, ``resnet18`` to ``resnet152``, ``revnet``.
      **options: of the function of that name in this room.

    Raises:
      ValueError: for an unknown name; the message lists those there are.
    """
    if name not in MODELS:
        raise ValueError(f"models: expected one of {sorted(MODELS)}, got {name!r}")
    return MODELS[name](**options)


__all__ = [
    "MODELS",
    "Denoiser",
    "LanguageModel",
    "denoiser",
    "get",
    "language_model",
    "mlp",
    "preact_resnet",
    "resnet",
    "revnet",
]
