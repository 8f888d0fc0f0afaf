"""EfficientNet, EfficientNetV2 and MobileNetV3: stages of inverted residual blocks."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fnet import checks, layers
from fnet.layer import Layer, residual, serial
from fnet.models.blocks import NormActivation, resolve_norm, squeeze_excitation


class Stage(NamedTuple):
    """Blocks in a row, of which the first has the stride.

    Attributes:
      blocks: number of blocks.
      window: side of the window of the convolution that has the stride.
      stride: stride.
      expansion: channels inside a block over its input channels.
      channels: output channels.
      squeeze: whether there is squeeze and excitation.
      fused: whether one convolution expands and has the window, in place of a 1x1 convolution and
        one per channel.
      activation: activation; None: the network's.
    """

    blocks: int
    window: int
    stride: int
    expansion: float
    channels: int
    squeeze: bool = True
    fused: bool = False
    activation: str | None = None


# Stages are separated by |, and rows of one stage of timm's names by commas. Each row has blocks,
# window, stride, expansion and channels, then s: squeezed, f: fused, r: ReLU.
_ROWS = """
b0    1 3 1 1 16 s | 2 3 2 6 24 s | 2 5 2 6 40 s | 3 3 2 6 80 s | 3 5 1 6 112 s | 4 5 2 6 192 s \
      | 1 3 1 6 320 s
v2_s  2 3 1 1 24 f | 4 3 2 4 48 f | 4 3 2 4 64 f | 6 3 2 4 128 s | 9 3 1 6 160 s | 15 3 2 6 256 s
v2_m  3 3 1 1 24 f | 5 3 2 4 48 f | 5 3 2 4 80 f | 7 3 2 4 160 s | 14 3 1 6 176 s \
      | 18 3 2 6 304 s | 5 3 1 6 512 s
v2_l  4 3 1 1 32 f | 7 3 2 4 64 f | 7 3 2 4 96 f | 10 3 2 4 192 s | 19 3 1 6 224 s \
      | 25 3 2 6 384 s | 7 3 1 6 640 s
large 1 3 1 1 16 r | 1 3 2 4 24 r, 1 3 1 3 24 r | 3 5 2 3 40 sr \
      | 1 3 2 6 80 -, 1 3 1 2.5 80 -, 2 3 1 2.3 80 - | 2 3 1 6 112 s | 3 5 2 6 160 s
small 1 3 2 1 16 sr | 1 3 2 4.5 24 r, 1 3 1 3.67 24 r | 1 5 2 4 40 s, 2 5 1 6 40 s \
      | 2 5 1 3 48 s | 3 5 2 6 96 s
"""
_SCALES = {
    **{"b0": (1.0, 1.0), "b1": (1.0, 1.1), "b2": (1.1, 1.2), "b3": (1.2, 1.4)},
    **{"b4": (1.4, 1.8), "b5": (1.6, 2.2), "b6": (1.8, 2.6), "b7": (2.0, 3.1)},
}


def _stage(row: str) -> Stage:
    blocks, window, stride, expansion, channels, flags = row.split()
    return Stage(
        *(int(blocks), int(window), int(stride), float(expansion), int(channels)),
        squeeze="s" in flags,
        fused="f" in flags,
        activation="relu" if "r" in flags else None,
    )


def _read_rows() -> dict[str, tuple[tuple[Stage, ...], ...]]:
    named = (line.split(maxsplit=1) for line in _ROWS.split("\n")[1:-1])
    return {
        name: tuple(tuple(map(_stage, stage.split(","))) for stage in stages.split("|"))
        for name, stages in named
    }


_STAGES = _read_rows()
_B0 = tuple(stage for (stage,) in _STAGES["b0"])


def _scaled(width: float, depth: float) -> dict[str, Any]:
    stages = tuple(
        s._replace(blocks=math.ceil(s.blocks * depth), channels=divisible(s.channels * width))
        for s in _B0
    )
    return {"stages": stages, "stem": divisible(32 * width), "last": divisible(1280 * width)}


def _variants() -> dict[str, dict[str, Any]]:
    """Name the rows as torchvision and timm do. timm's ``tf_`` have TensorFlow's padding."""
    variants: dict[str, dict[str, Any]] = {}
    same = {"eps": 1e-3, "padding": "same"}
    for size, scale in _SCALES.items():
        eps = 1e-3 if size in ("b5", "b6", "b7") else 1e-5
        variants[f"efficientnet_{size}"] = _scaled(*scale) | {"eps": eps}
        variants[f"tf_efficientnet_{size}"] = _scaled(*scale) | same
    for size in "sml":
        stages = _STAGES[f"v2_{size}"]
        row: dict[str, Any] = {"stages": stages, "stem": stages[0][0].channels, "last": 1280}
        variants[f"efficientnet_v2_{size}"] = row | {"eps": 1e-3}
        variants[f"tf_efficientnetv2_{size}"] = row | same
    for size, hidden in (("large", 1280), ("small", 1024)):
        stages = _STAGES[size]
        row = {"stages": stages, "stem": 16, "last": 6 * stages[-1][-1].channels, "hidden": hidden}
        row["activation"] = "hard_swish"
        variants[f"mobilenet_v3_{size}"] = row | {"eps": 1e-3}
        variants[f"mobilenetv3_{size}_100"] = row | {"eps": 1e-5}
        variants[f"tf_mobilenetv3_{size}_100"] = row | same
    return variants


def divisible(channels: float) -> int:
    """Round to a multiple of 8 that is not more than a tenth smaller."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


VARIANTS = _variants()
"""Options of the published networks, by their names in torchvision and timm."""


def efficientnet(
    *,
    num_classes: int | None,
    in_channels: int = 3,
    stages: Sequence[Stage | Sequence[Stage]] = _B0,
    stem: int = 32,
    last: int = 1280,
    hidden: int | None = None,
    activation: str = "silu",
    norm: str | NormActivation = "batch",
    eps: float = 1e-5,
    padding: Literal["half", "same"] = "half",
    stochastic_depth: float = 0.0,
    dropout: float = 0.0,
) -> Layer:
    """EfficientNet, EfficientNetV2 or MobileNetV3; the default is EfficientNet-B0.

    Tan, Le, "EfficientNet", ICML 2019, and "EfficientNetV2", ICML 2021; Howard et al., "Searching
    for MobileNetV3", ICCV 2019. A block computes::

        y = x + project(squeeze(spatial(expand(x))))

    Each is a convolution, a norm, and but for the last an activation. ``expand`` and ``project``
    have windows of 1, ``spatial`` convolves each channel for itself. Blocks with a stride or other
    channels have no ``x +``.

    Args:
      num_classes: number of logits. None: the network returns features [N, last], or [N, hidden].
      in_channels: image channels.
      stages: rows of `Stage`; `VARIANTS` has published networks' rows. A sequence in place of a
        row is one stage whose blocks differ.
      stem: channels of the first convolution.
      last: channels of the convolution after the stages.
      hidden: width of a hidden layer of the head, as in MobileNetV3, whose gates are piecewise
        linear and as wide as a quarter of a block; None: no such layer.
      activation: activation of stages that do not name one.
      norm: as for `fnet.models.resnet.resnet`.
      eps: added to the variance by the norms ``batch`` and ``abn``.
      padding: ``"half"``: half a window on each side, as in torch. ``"same"``: as in TensorFlow.
      stochastic_depth: rate at which the last block is skipped for an image in training, as for
        `fnet.models.convnext.convnext`.
      dropout: dropout rate before the logits in training.

    Returns:
      A layer on NHWC images, [N, H, W, in_channels] -> [N, num_classes].

    Raises:
      ValueError: for a size below 1, an unknown norm, activation or padding, or a rate outside
        [0, 1).
    """
    checks.choice("efficientnet", ("half", "same"), padding=padding)
    norm = resolve_norm("efficientnet", norm, activation, None)
    norm = norm if eps == 1e-5 else functools.partial(norm, eps=eps)
    groups = [[s] if isinstance(s, Stage) else list(s) for s in stages]
    total = sum(s.blocks for group in groups for s in group)
    rates = iter(np.linspace(0, stochastic_depth, total, endpoint=False).tolist())

    def unit(n_in: int, n_out: int, window: int = 1, **options: Any) -> Layer:
        act = options.pop("activation", activation)
        half = [(window // 2,) * 2] * 2
        pad = "SAME" if padding == "same" else half
        conv = layers.conv(n_in, n_out, window, padding=pad, bias=False, **options)
        return serial(conv=conv, bn=norm(n_out, activation=act))

    def block(n_in: int, s: Stage, stride: int, rate: float) -> Layer:
        act, inner = s.activation or activation, divisible(n_in * s.expansion)
        parts: dict[str, Layer] = {}
        if s.fused:
            n_out, own = (s.channels, act) if inner == n_in else (inner, act)
            parts["fused"] = unit(n_in, n_out, s.window, stride=stride, activation=own)
        else:
            if inner != n_in:
                parts["expand"] = unit(n_in, inner, activation=act)
            parts["spatial"] = unit(
                inner, inner, s.window, stride=stride, groups=inner, activation=act
            )
        if s.squeeze and hidden is None:
            parts["se"] = squeeze_excitation(inner, max(1, n_in // 4), layers.activation(act))
        elif s.squeeze:
            relu = layers.activation("relu")
            parts["se"] = squeeze_excitation(inner, divisible(inner // 4), relu, "hard_sigmoid")
        if not s.fused or inner != n_in:
            parts["project"] = unit(inner, s.channels, activation="identity")
        if (n_in, stride) != (s.channels, 1):
            return serial(body=serial(**parts))
        if rate:
            parts["stochastic_depth"] = layers.dropout(rate, shared_axes=(1, 2, 3))
        return residual(serial(**parts))

    children: dict[str, Layer] = {"stem": unit(in_channels, stem, 3, stride=2)}
    n_in = stem
    for i, group in enumerate(groups):
        blocks: list[Layer] = []
        for s in group:
            for j in range(s.blocks):
                blocks.append(block(n_in, s, 1 if j else s.stride, next(rates)))
                n_in = s.channels
        children[f"stage{i}"] = serial(*blocks)
    children |= {"last": unit(n_in, last), "pool": layers.global_avg_pool()}
    if hidden is not None:
        act = layers.activation(activation)
        children["hidden"] = serial(dense=layers.dense(last, hidden), act=act)
    if dropout:
        children["dropout"] = layers.dropout(dropout)
    if num_classes is not None:
        children["classifier"] = layers.dense(hidden or last, num_classes)
    return serial(**children)
