"""Networks, by function and by name (`get`)."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from fnet.layer import Layer
from fnet.models.deeplab import deeplab as deeplab
from fnet.models.denoiser import Denoiser as Denoiser
from fnet.models.denoiser import denoiser as denoiser
from fnet.models.language_model import LanguageModel as LanguageModel
from fnet.models.language_model import LanguageModelVariant as LanguageModelVariant
from fnet.models.language_model import language_model as language_model
from fnet.models.vit import image_transformer as image_transformer

_files = [info.name for info in pkgutil.iter_modules(__path__)]
_modules = {name: importlib.import_module(f"{__name__}.{name}") for name in _files}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    name: module.VARIANTS for name, module in _modules.items() if hasattr(module, "VARIANTS")
}
"""Options of published networks, by the name of their function and their own."""


def _build(network: str, options: dict[str, Any]) -> Callable[..., Layer]:
    # A depth by position, so that `get` refuses another one for a name that has one.
    depth = [options["depth"]] if "depth" in options else []
    rest = {name: value for name, value in options.items() if name != "depth"}
    return functools.partial(getattr(_modules[network], network), *depth, **rest)


MODELS: dict[str, Callable[..., Layer]] = {
    **{name: _build(name, {}) for name in (*VARIANTS, "mlp", "preact_resnet", "resnet9", "revnet")},
    **{name: _build(n, options) for n, rows in VARIANTS.items() for name, options in rows.items()},
}
"""Networks that `get` knows, by name."""


def get(name: str, **options: Any) -> Layer:
    """Build a network by name.

    Args:
      name: ``resnet10`` to ``resnet200`` and timm's variants of them such as ``resnet50d``,
        ``wide_resnet50_2`` and ``resnext50_32x4d``; ``resnext50`` to ``resnext152``,
        ``densenet121`` to ``densenet264``, ``wider_resnet16`` to ``wider_resnet38``, each of these
        also with ``_a2``; ``vit_tiny``, ``vit_small``, ``vit_base``, ``vit_large``, ``vit_huge``;
        ``convnext_atto`` to ``convnext_huge``, each of these also as ``convnextv2_``;
        EfficientNets, MobileNetV3s, RegNets and Swins by their names in torchvision and timm, such
        as ``efficientnet_v2_s``, ``mobilenet_v3_large``, ``regnety_040`` and ``swin_t``. Or the
        name of a function, for all of its arguments: ``resnet``, ``resnext``, ``densenet``,
        ``wider_resnet``, ``regnet``, ``efficientnet``, ``convnext``, ``swin``, ``vit``,
        ``preact_resnet``, ``resnet9``, ``revnet``, ``mlp``.
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
