"""ConvNeXt, the first and the second version."""

import functools
from collections.abc import Sequence

import numpy as np

from fnet import checks, layers
from fnet.layer import Layer, residual, serial
from fnet.layers.global_response_norm import global_response_norm
from fnet.layers.layer_scale import layer_scale as layer_scale_layer
from fnet.models.blocks import check_stages

SIZES = {
    "atto": ((2, 2, 6, 2), (40, 80, 160, 320)),
    "femto": ((2, 2, 6, 2), (48, 96, 192, 384)),
    "pico": ((2, 2, 6, 2), (64, 128, 256, 512)),
    "nano": ((2, 2, 8, 2), (80, 160, 320, 640)),
    "tiny": ((3, 3, 9, 3), (96, 192, 384, 768)),
    "small": ((3, 3, 27, 3), (96, 192, 384, 768)),
    "base": ((3, 3, 27, 3), (128, 256, 512, 1024)),
    "large": ((3, 3, 27, 3), (192, 384, 768, 1536)),
    "xlarge": ((3, 3, 27, 3), (256, 512, 1024, 2048)),
    "huge": ((3, 3, 27, 3), (352, 704, 1408, 2816)),
}
"""Blocks and channels of each stage, by size."""
VARIANTS = {
    f"{version}_{size}": {"blocks": blocks, "widths": widths} | options
    for size, (blocks, widths) in SIZES.items()
    for version, options in (
        ("convnext", {}),
        ("convnextv2", {"response_norm": True, "layer_scale": None}),
    )
}
"""Options of the networks that `fnet.models.get` knows, by name."""


def convnext(
    *,
    num_classes: int | None,
    in_channels: int = 3,
    blocks: Sequence[int] = (3, 3, 9, 3),
    widths: Sequence[int] = (96, 192, 384, 768),
    patch: int = 4,
    response_norm: bool = False,
    layer_scale: float | None = 1e-6,
    stochastic_depth: float = 0.0,
    activation: str = "gelu_exact",
    eps: float = 1e-6,
    final_eps: float | None = None,
    head_hidden: int | None = None,
) -> Layer:
    """ConvNeXt: 7x7 convolutions per channel, layer norms and feed-forward layers.

    Liu et al. 2022, "A ConvNet for the 2020s". With ``response_norm`` and without layer scale it is
    ConvNeXt V2 (Woo et al. 2023). A block computes::

        y = x + scale feed_forward(norm(conv(x)))

    Args:
      num_classes: number of logits. None: the network returns features [N, widths[-1]].
      in_channels: image channels.
      blocks: number of blocks of each stage.
      widths: channels of each stage. Each stage after the first halves the resolution.
      patch: window and stride of the first convolution.
      response_norm: whether a global response norm follows each activation.
      layer_scale: initial scale of each block; None: no scale.
      stochastic_depth: rate at which the last block is skipped for an image in training; rates
        grow linearly from 0 (Huang et al. 2016, "Deep Networks with Stochastic Depth").
      activation: activation of the feed-forward layers, as for `fnet.layers.activation`.
      eps: added to the variance in each norm.
      final_eps: the same for the norm of the pooled features; None: ``eps``.
      head_hidden: width of a hidden layer of the head; None: no such layer.

    Returns:
      A layer on NHWC images, [N, H, W, in_channels] -> [N, num_classes], without state. Rows and
      columns that do not fill a window of a strided convolution are cut off.

    Raises:
      ValueError: unless there is a width for each number of blocks; for a size below 1, or a rate
        outside [0, 1).
    """
    check_stages("convnext", blocks, widths)
    checks.sizes("convnext", patch=patch, blocks=min(blocks))
    norm = functools.partial(layers.layer_norm, eps=eps)
    rates = iter(np.linspace(0, stochastic_depth, sum(blocks)).tolist())

    def block(width: int, rate: float) -> Layer:
        feed_forward = layers.feed_forward(
            width,
            4 * width,
            activation=activation,
            gated=False,
            bias=True,
            hidden_norm=global_response_norm(4 * width) if response_norm else None,
        )
        body = {
            "conv": layers.conv(width, width, 7, groups=width),
            "norm": norm(width),
            "feed_forward": feed_forward,
        }
        if layer_scale is not None:
            body["scale"] = layer_scale_layer(width, initial=layer_scale)
        if rate:
            body["stochastic_depth"] = layers.dropout(rate, shared_axes=(1, 2, 3))
        return residual(serial(**body))

    stem = layers.conv(in_channels, widths[0], patch, stride=patch, padding="VALID")
    children = {"stem": serial(conv=stem, norm=norm(widths[0]))}
    n_in = widths[0]
    for i, (depth, width) in enumerate(zip(blocks, widths, strict=True)):
        stage = {}
        if i:
            conv = layers.conv(n_in, width, 2, stride=2, padding="VALID")
            stage["downsample"] = serial(norm=norm(n_in), conv=conv)
        stage |= {f"block{j}": block(width, next(rates)) for j in range(depth)}
        children[f"stage{i}"] = serial(**stage)
        n_in = width
    children["pool"] = layers.global_avg_pool()
    children["norm"] = layers.layer_norm(n_in, eps=eps if final_eps is None else final_eps)
    if head_hidden is not None:
        hidden = layers.dense(n_in, head_hidden)
        children["hidden"] = serial(dense=hidden, act=layers.activation("gelu_exact"))
        n_in = head_hidden
    if num_classes is not None:
        children["head"] = layers.dense(n_in, num_classes)
    return serial(**children)
