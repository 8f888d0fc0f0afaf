"""Whole networks by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fnet.layer import Layer
from fnet.models.deeplab import deeplab
from fnet.models.denoiser import Denoiser, denoiser
from fnet.models.densenet import DEPTHS as DENSENETS
from fnet.models.densenet import densenet
from fnet.models.language_model import LanguageModel, language_model
from fnet.models.mlp import mlp
from fnet.models.preact_resnet import preact_resnet
from fnet.models.resnet import DEPTHS as RESNETS
from fnet.models.resnet import resnet
from fnet.models.resnet9 import resnet9
from fnet.models.resnext import DEPTHS as RESNEXTS
from fnet.models.resnext import resnext
from fnet.models.revnet import revnet
from fnet.models.wider_resnet import DEPTHS as WIDER_RESNETS
from fnet.models.wider_resnet import wider_resnet

MODELS: dict[str, Callable[..., Layer]] = {
    "mlp": mlp,
    "preact_resnet": preact_resnet,
    "resnet9": resnet9,
    "revnet": revnet,
}
"""What `get` knows, by name; networks that come in depths are added below."""

MODELS |= {f"resnet{depth}": partial(resnet, depth) for depth in RESNETS}
MODELS |= {f"resnext{depth}": partial(resnext, depth) for depth in RESNEXTS}
MODELS |= {f"densenet{depth}": partial(densenet, depth) for depth in DENSENETS}
for _depth in WIDER_RESNETS:
    MODELS[f"wider_resnet{_depth}"] = partial(wider_resnet, _depth)
    MODELS[f"wider_resnet{_depth}_a2"] = partial(wider_resnet, _depth, a2=True)


def get(name: str, **options: Any) -> Layer:
    """A network by name.

    Args:
      name: ``mlp``, ``preact_resnet``, ``resnet9``, ``revnet``, ``resnet18`` to ``resnet152``,
        ``resnext50`` to ``resnext152``, ``densenet121`` to ``densenet264``,
        ``wider_resnet16`` to ``wider_resnet38`` and each with ``_a2``.
      **options: of the function of that name in this room.

    Returns:
      A layer; of networks for images, [N, H, W, C] -> logits [N, num_classes].

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
    "deeplab",
    "denoiser",
    "densenet",
    "get",
    "language_model",
    "mlp",
    "preact_resnet",
    "resnet",
    "resnet9",
    "resnext",
    "revnet",
    "wider_resnet",
]
