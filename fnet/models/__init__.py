"""Networks, by function and by name (`get`)."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from fnet.layer import Layer
from fnet.models.convnext import convnext as convnext
from fnet.models.deeplab import deeplab
from fnet.models.denoiser import Denoiser as Denoiser
from fnet.models.denoiser import denoiser
from fnet.models.densenet import densenet as densenet
from fnet.models.efficientnet import efficientnet as efficientnet
from fnet.models.language_model import LanguageModel as LanguageModel
from fnet.models.language_model import LanguageModelVariant as LanguageModelVariant
from fnet.models.language_model import language_model
from fnet.models.mlp import mlp as mlp
from fnet.models.preact_resnet import preact_resnet as preact_resnet
from fnet.models.regnet import regnet as regnet
from fnet.models.resnet import resnet as resnet
from fnet.models.resnet9 import resnet9 as resnet9
from fnet.models.resnext import resnext as resnext
from fnet.models.revnet import revnet as revnet
from fnet.models.swin import swin as swin
from fnet.models.vit import image_transformer as image_transformer
from fnet.models.vit import vit as vit
from fnet.models.wider_resnet import wider_resnet as wider_resnet


def _variants() -> dict[str, dict[str, dict[str, Any]]]:
    """Find the ``VARIANTS`` of each module, which are options of the function of its name."""
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: m.VARIANTS for name, m in modules.items() if hasattr(m, "VARIANTS")}


def _build(network: str, options: dict[str, Any]) -> Callable[..., Layer]:
    build = getattr(importlib.import_module(f"{__name__}.{network}"), network)
    # By position, so that `get` refuses another depth for a name that has one.
    depth = [options["depth"]] if "depth" in options else []
    rest = {name: value for name, value in options.items() if name != "depth"}
    return functools.partial(build, *depth, **rest)


VARIANTS = _variants()
"""Options of published networks, by the name of their function and their own."""
MODELS: dict[str, Callable[..., Layer]] = {
    **{"mlp": mlp, "preact_resnet": preact_resnet, "resnet9": resnet9, "revnet": revnet},
    **{name: _build(n, options) for n, rows in VARIANTS.items() for name, options in rows.items()},
}
"""Networks that `get` knows, by name."""


def get(name: str, **options: Any) -> Layer:
    """Build a network by name.

    Args:
      name: ``mlp``, ``preact_resnet``, ``resnet9``, ``revnet``, ``resnet10`` to ``resnet200``
        and timm's variants of them such as ``resnet50d``, ``wide_resnet50_2`` and
        ``resnext50_32x4d``; ``resnext50`` to ``resnext152``, ``densenet121`` to ``densenet264``,
        ``wider_resnet16`` to ``wider_resnet38``, each of these also with ``_a2``; ``vit_tiny``,
        ``vit_small``, ``vit_base``, ``vit_large``, ``vit_huge``; ``convnext_atto`` to
        ``convnext_huge``, each of these also as ``convnextv2_``; EfficientNets, MobileNetV3s,
        RegNets and Swins by their names in torchvision and timm, such as ``efficientnet_v2_s``,
        ``mobilenet_v3_large``, ``regnety_040`` and ``swin_t``.
      **options: arguments of the network's function, such as ``num_classes``.

    Returns:
      A layer. Image networks map [N, H, W, C] to logits [N, num_classes].

    Raises:
      ValueError: for an unknown name. The message lists the known ones.

    Example:
      >>> import fnet, jax
      >>> model = fnet.models.get("resnet50", num_classes=1000)
      >>> params, state = jax.eval_shape(model.init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      25557032
    """
    if name not in MODELS:
        raise ValueError(f"models: name must be one of {sorted(MODELS)}, got {name!r}")
    return MODELS[name](**options)


__all__ = ["deeplab", "denoiser", "get", "language_model"]
