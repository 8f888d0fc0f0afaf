"""Dense networks: each layer reads what all layers before it in its stage have made."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from fnet import layers
from fnet.layer import Layer, Params, State, apply_child, init_children, serial
from fnet.models import norm_activation
from fnet.models.backbone import backbone, classifier, input_stem, stage_blocks, stage_dilations
from fnet.models.norm_activation import NormActivation
from fnet.models.residual_blocks import convolution

DEPTHS = {
    121: (6, 12, 24, 16),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
    264: (6, 12, 64, 48),
}
"""Layers a stage, by depth (Huang et al. 2017, table 1)."""
_BOTTLENECK = 4


def densenet(
    depth: int,
    *,
    num_classes: int | None,
    in_channels: int = 3,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    norm: str | NormActivation = "abn",
    stem: str = "7x7",
    dilation: Sequence[int] = (1, 1, 1, 1),
    growth: int = 32,
    compression: float = 0.5,
) -> Layer:
    """A dense network for images.

    Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks",
    CVPR 2017 (DenseNet-BC), as mapillary/inplace_abn has it: norms come before the
    convolutions, none after the stem.

    Args:
      depth: 121, 169, 201 or 264.
      num_classes: length of the logits; None: the four stages' outputs instead, the last
        one normed and activated.
      in_channels, activation, activation_param, norm, stem: as for `fnet.models.resnet`.
      dilation: of the 3x3 convolutions of each stage; before a stage that is dilated,
        nothing is pooled (before the first one the stem's maximum stays).
      growth: channels that each layer adds; twice as many come from the stem.
      compression: share of the channels that goes on to the next stage.

    Returns:
      A layer on NHWC images: [N, H, W, in_channels] -> [N, num_classes], or a tuple of
      four features. Names follow mapillary/inplace_abn's: ``mod1`` to ``mod5``, ``tra2``
      to ``tra4``, ``bn_out``, ``classifier``.

    Raises:
      ValueError: for another depth, norm, stem or number of dilations, or an activation that
        is unknown or that the norm does not take.
    """
    counts = stage_blocks("densenet", DEPTHS, depth)
    dilations = stage_dilations("densenet", dilation, 4)
    normed = norm_activation.find("densenet", norm, activation, activation_param)
    n_in = 2 * growth
    children = {"mod1": serial(**input_stem(stem, in_channels, n_in, normed, last_norm=False))}
    for i, (count, spread) in enumerate(zip(counts, dilations, strict=True)):
        if i:
            n_out = int(n_in * compression)
            transition = {"bn": normed(n_in), "conv": convolution(n_in, n_out, 1)}
            if spread == 1:
                transition["pool"] = layers.avg_pool(2)
            children[f"tra{i + 1}"] = serial(**transition)
            n_in = n_out
        children[f"mod{i + 2}"] = dense_stage(n_in, growth, count, normed, dilation=spread)
        n_in += growth * count
    children["bn_out"] = normed(n_in)
    features = ("mod2", "mod3", "mod4", "bn_out")
    return backbone(children, features, classifier(n_in, num_classes))


def dense_stage(
    n_in: int, growth: int, count: int, norm: NormActivation, *, dilation: int = 1
) -> Layer:
    """``count`` layers, each of which reads the input and what all before it have made.

    A layer is norm, 1x1 convolution to 4 ``growth`` channels, norm, 3x3 convolution to
    ``growth``. [N, H, W, n_in] -> [N, H, W, n_in + count * growth].
    """
    children, inner = {}, _BOTTLENECK * growth
    for i in range(count):
        n = n_in + i * growth
        children[str(i)] = serial(
            convs1=serial(bn=norm(n), conv=convolution(n, inner, 1)),
            convs3=serial(bn=norm(inner), conv=convolution(inner, growth, 3, dilation=dilation)),
        )

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        made = [x]
        for name in children:
            y = jnp.concatenate(made, -1)
            y, state = apply_child(children, name, params, state, y, key=key, train=train)
            made.append(y)
        return jnp.concatenate(made, -1), state

    return Layer(lambda key: init_children(children, key), apply)
