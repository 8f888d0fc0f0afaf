"""Networks, by function and by name (`get`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fnet.layer import Layer
from fnet.models.convnext import SIZES as _CONVNEXTS
from fnet.models.convnext import convnext as convnext
from fnet.models.deeplab import deeplab
from fnet.models.denoiser import Denoiser as Denoiser
from fnet.models.denoiser import denoiser
from fnet.models.densenet import DEPTHS as _DENSENETS
from fnet.models.densenet import densenet as densenet
from fnet.models.efficientnet import VARIANTS as _EFFICIENTNETS
from fnet.models.efficientnet import efficientnet as efficientnet
from fnet.models.language_model import LanguageModel as LanguageModel
from fnet.models.language_model import LanguageModelVariant as LanguageModelVariant
from fnet.models.language_model import language_model
from fnet.models.mlp import mlp as mlp
from fnet.models.preact_resnet import preact_resnet as preact_resnet
from fnet.models.regnet import VARIANTS as _REGNETS
from fnet.models.regnet import regnet as regnet
from fnet.models.resnet import DEPTHS as _RESNETS
from fnet.models.resnet import VARIANTS as _RESNET_VARIANTS
from fnet.models.resnet import resnet as resnet
from fnet.models.resnet9 import resnet9 as resnet9
from fnet.models.resnext import DEPTHS as _RESNEXTS
from fnet.models.resnext import resnext as resnext
from fnet.models.revnet import revnet as revnet
from fnet.models.swin import VARIANTS as _SWINS
from fnet.models.swin import swin as swin
from fnet.models.vit import SIZES as _VITS
from fnet.models.vit import image_transformer as image_transformer
from fnet.models.vit import vit as vit
from fnet.models.wider_resnet import DEPTHS as _WIDER_RESNETS
from fnet.models.wider_resnet import wider_resnet as wider_resnet

MODELS: dict[str, Callable[..., Layer]] = {
    "mlp": mlp,
    "preact_resnet": preact_resnet,
    "resnet9": resnet9,
    "revnet": revnet,
    **{f"resnet{depth}": partial(resnet, depth) for depth in _RESNETS},
    **{
        name: partial(resnet, depth, **options)
        for name, (depth, options) in _RESNET_VARIANTS.items()
    },
    **{f"resnext{depth}": partial(resnext, depth) for depth in _RESNEXTS},
    **{f"densenet{depth}": partial(densenet, depth) for depth in _DENSENETS},
    **{f"wider_resnet{depth}": partial(wider_resnet, depth) for depth in _WIDER_RESNETS},
    **{
        f"vit_{size}": partial(vit, width=width, blocks=blocks, heads=heads)
        for size, (width, blocks, heads) in _VITS.items()
    },
    **{
        f"convnext_{size}": partial(convnext, blocks=blocks, widths=widths)
        for size, (blocks, widths) in _CONVNEXTS.items()
    },
    **{
        f"convnextv2_{size}": partial(
            convnext, blocks=blocks, widths=widths, response_norm=True, layer_scale=None
        )
        for size, (blocks, widths) in _CONVNEXTS.items()
    },
    **{name: partial(efficientnet, **options) for name, options in _EFFICIENTNETS.items()},
    **{name: partial(regnet, **options) for name, options in _REGNETS.items()},
    **{name: partial(swin, **options) for name, options in _SWINS.items()},
    **{
        f"wider_resnet{depth}_a2": partial(wider_resnet, depth, a2=True) for depth in _WIDER_RESNETS
    },
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
