"""DenseNets: each layer reads the outputs of all earlier layers of its stage."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from fnet import layers
from fnet.layer import Children, Layer, composite, serial
from fnet.models import blocks as parts

VARIANTS = {f"densenet{depth}": {"depth": depth} for depth in parts.STAGES["densenet"]}
"""Options of the networks that `fnet.models.get` knows, by name."""
GROWTH = {161: 48}
"""Channels that each layer adds by default, by depth, if not 32."""
_BOTTLENECK = 4


def densenet(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float | None = None,
    norm: str | parts.NormActivation = "abn",
    stem: str = "7x7",
    dilation: Sequence[int] = (1, 1, 1, 1),
    growth: int | None = None,
    stem_norm: bool = False,
    compression: float = 0.5,
) -> Layer:
    """DenseNet-BC for images.

    Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks",
    CVPR 2017, in the layout of mapillary/inplace_abn: norms come before the convolutions, and
    none follows the stem.

    Args:
      depth: 121, 161, 169, 201 or 264.
      num_classes: as for `fnet.models.resnet.resnet`; the last features have a norm.
      in_channels, activation, activation_param, norm, stem: as for `fnet.models.resnet.resnet`.
      dilation: dilation of the 3x3 convolutions, per stage. There is no pooling before a dilated
        stage, except that the stem's pooling stays.
      growth: channels that each layer adds. The stem has twice as many. None: 48 for depth 161,
        otherwise 32.
      stem_norm: whether a norm follows the stem, as in torchvision and timm.
      compression: fraction of the channels that a transition passes to the next stage.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      four features. Parameter names follow mapillary/inplace_abn: ``mod1`` to ``mod5``, ``tra2``
      to ``tra4``, ``bn_out``, ``classifier``.

    Raises:
      ValueError: for an unknown depth, norm, stem or activation, a wrong number of dilations, or
        an activation that the norm does not support.
    """
    layers_per_stage = parts.stage_blocks("densenet", depth)
    dilations = parts.stage_dilations("densenet", dilation, 4)
    norm = parts.resolve_norm("densenet", norm, activation, activation_param)
    growth = GROWTH.get(depth, 32) if growth is None else growth
    stem_layers, n_in = parts.input_stem(stem, in_channels, 2 * growth, norm, last_norm=stem_norm)
    children = {"mod1": serial(**stem_layers)}
    for i, (num_layers, rate) in enumerate(zip(layers_per_stage, dilations, strict=True)):
        if i:
            n_out = int(n_in * compression)
            transition = {"bn": norm(n_in), "conv": parts.convolution(n_in, n_out, 1)}
            if rate == 1:
                transition["pool"] = layers.avg_pool(2)
            children[f"tra{i + 1}"] = serial(**transition)
            n_in = n_out
        children[f"mod{i + 2}"] = dense_stage(n_in, growth, num_layers, norm, dilation=rate)
        n_in += growth * num_layers
    return parts.pre_activation_network(children, n_in, norm, num_classes)


def dense_stage(
    n_in: int, growth: int, num_layers: int, norm: parts.NormActivation, *, dilation: int = 1
) -> Layer:
    """Layers that each read the stage's input and the outputs of all earlier layers.

    Each layer is a norm, a 1x1 convolution to 4 ``growth`` channels, a norm and a 3x3
    convolution to ``growth`` channels. [N, H, W, n_in] -> [N, H, W, n_in + num_layers * growth].
    """
    children, inner = {}, _BOTTLENECK * growth
    wide = parts.convolution(inner, growth, 3, dilation=dilation)
    for i in range(num_layers):
        n = n_in + i * growth
        children[str(i)] = serial(
            convs1=serial(bn=norm(n), conv=parts.convolution(n, inner, 1)),
            convs3=serial(bn=norm(inner), conv=wide),
        )

    def apply(child: Children, x: Array) -> Array:
        outputs = [x]
        for name in children:
            outputs.append(child(name, jnp.concatenate(outputs, -1)))
        return jnp.concatenate(outputs, -1)

    return composite(children, apply)
