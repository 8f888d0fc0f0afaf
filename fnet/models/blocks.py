"""Parts of image networks: norms by name, stems, residual blocks, stages, heads."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from fnet import checks, layers
from fnet.layer import Children, Layer, composite, serial
from fnet.precision import multiply, upcast

NormActivation = Callable[..., Layer]
"""``(channels, *, activation, activation_param) -> Layer``: a norm followed by an activation."""


def group_norm_activation(
    channels: int, *, activation: str, activation_param: float | None
) -> Layer:
    """Group norm (Wu, He 2018) with gcd(32, channels) groups, followed by the activation."""
    return serial(
        norm=layers.group_norm(channels, math.gcd(32, channels)),
        act=layers.activation(activation, activation_param),
    )


NORMS: dict[str, NormActivation] = {
    "abn": layers.abn,
    "batch": layers.batch_norm,
    "group": group_norm_activation,
}
"""Norms that image networks accept by name."""


def check_stages(network: str, blocks: Sequence[int], widths: Sequence[int]) -> None:
    """Raise ValueError unless each stage has a number of blocks and a width."""
    if not blocks or len(blocks) != len(widths):
        raise ValueError(
            f"{network}: needs one width per stage, got blocks={tuple(blocks)} and "
            f"widths={tuple(widths)}"
        )


def resolve_norm(
    network: str, norm: str | NormActivation, activation: str, activation_param: float | None
) -> NormActivation:
    """Look up a norm, as for `fnet.models.resnet.resnet`, and set its default activation.

    Returns ``(channels) -> Layer``. Pass ``activation="identity"`` for the norm alone.
    """
    if not callable(norm):
        checks.choice(network, sorted(NORMS), norm=norm)
        norm = NORMS[norm]
    return functools.partial(norm, activation=activation, activation_param=activation_param)


def convolution(
    n_in: int, n_out: int, window: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> Layer:
    """Convolution without bias, with torch's symmetric padding (half a window on each side)."""
    pad = [(dilation * (window // 2),) * 2] * 2
    return layers.conv(
        n_in,
        n_out,
        window,
        stride=stride,
        dilation=dilation,
        groups=groups,
        padding=pad,
        bias=False,
    )


def post_activation(
    n_in: int,
    channels: Sequence[int],
    norm: NormActivation,
    activation: Layer,
    *,
    stride: int = 1,
    dilation: int = 1,
    first_dilation: int | None = None,
    groups: int = 1,
    shortcut: str = "conv",
    squeeze: bool = False,
) -> Layer:
    """Post-activation residual block: ``act(shortcut(x) + body(x))``.

    He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016. ``channels`` are
    the output channels of two convolutions (3x3, 3x3) or three (1x1, 3x3 in ``groups``, 1x1). The
    first 3x3 has the stride and ``first_dilation``, and the last norm no activation. If the size or
    the channels change, the shortcut is a 1x1 convolution and a norm; with ``shortcut="pool"``,
    average pooling has its stride (He et al., "Bag of Tricks for Image Classification", CVPR 2019).
    ``squeeze`` puts `squeeze_excitation` before the last convolution. Names are torchvision's.
    """
    convs = _convolutions(
        n_in, channels, dilation, groups, stride=stride, first_dilation=first_dilation
    )
    children: dict[str, Layer] = {}
    for i, (conv, n_out) in enumerate(zip(convs, channels, strict=True), start=1):
        last = {"activation": "identity"} if i == len(convs) else {}
        if squeeze and last:
            children["se"] = squeeze_excitation(channels[-2], n_in // 4, activation)
        children |= {f"conv{i}": conv, f"bn{i}": norm(n_out, **last)}
    body = tuple(children)
    if (n_in, stride) != (channels[-1], 1):
        pools = shortcut == "pool"
        conv = convolution(n_in, channels[-1], 1, stride=1 if pools else stride)
        parts = conv, norm(channels[-1], activation="identity")
        children["downsample"] = serial(*[layers.avg_pool(stride, partial=True)] * pools, *parts)

    def apply(child: Children, x: Array) -> Array:
        y = child.in_order(body, x)
        if "downsample" in child:
            x = child("downsample", x)
        y, _ = activation.apply({}, {}, x + y, train=child.train)
        return y

    return composite(children, apply)


def squeeze_excitation(
    channels: int, hidden: int, activation: Layer, gate: str = "sigmoid"
) -> Layer:
    """Scale each channel by a number between 0 and 1 that depends on the means of all channels.

    Hu, Shen, Sun, "Squeeze-and-Excitation Networks", CVPR 2018::

        y = x gate(expand(activation(reduce(mean(x)))))
    """
    children = {
        "reduce": layers.conv(channels, hidden, 1),
        "act": activation,
        "expand": layers.conv(hidden, channels, 1),
        "gate": layers.activation(gate),
    }

    def apply(child: Children, x: Array) -> Array:
        means = upcast(x).mean((1, 2), keepdims=True).astype(x.dtype)
        return multiply(x, child.in_order(children, means))

    return composite(children, apply)


def pre_activation(
    n_in: int,
    channels: Sequence[int],
    norm: NormActivation,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    dropout: float = 0.0,
) -> Layer:
    """Pre-activation residual block: ``shortcut + body(a)`` with ``a = act(norm(x))``.

    He, Zhang, Ren, Sun, "Identity Mappings in Deep Residual Networks", ECCV 2016, in the layout and
    with the names of mapillary/inplace_abn: the first convolution has the stride. The shortcut is
    ``x``, or a 1x1 convolution of ``a`` if the size or the channels change. ``channels`` and
    ``groups`` are as in `post_activation`. ``dropout`` drops whole channels before the last
    convolution.
    """
    layers_by_name: dict[str, Layer] = {}
    parts = _convolutions(n_in, channels, dilation, groups, first_stride=stride)
    for i, conv in enumerate(parts):
        if i:
            layers_by_name[f"bn{i + 1}"] = norm(channels[i - 1])
        if dropout and i == len(channels) - 1:
            layers_by_name["dropout"] = layers.dropout(dropout, shared_axes=(1, 2))
        layers_by_name[f"conv{i + 1}"] = conv
    children = {"bn1": norm(n_in), "convs": serial(**layers_by_name)}
    if (n_in, stride) != (channels[-1], 1):
        children["proj_conv"] = convolution(n_in, channels[-1], 1, stride=stride)

    def apply(child: Children, x: Array) -> Array:
        activated = child("bn1", x)
        y = child("convs", activated)
        return (child("proj_conv", activated) if "proj_conv" in child else x) + y

    return composite(children, apply)


def _convolutions(
    n_in: int,
    channels: Sequence[int],
    dilation: int,
    groups: int,
    *,
    stride: int = 1,
    first_stride: int = 1,
    first_dilation: int | None = None,
) -> list[Layer]:
    """Build the convolutions of a residual block: two 3x3, or 1x1, 3x3 (in groups), 1x1.

    ``stride`` and ``first_dilation`` are of the first 3x3, ``first_stride`` of the first of all.
    """
    windows = (3, 3) if len(channels) == 2 else (1, 3, 1)
    sizes, wide = [n_in, *channels], windows.index(3)
    return [
        convolution(
            sizes[i],
            sizes[i + 1],
            window,
            stride=(stride if i == wide else 1) * (1 if i else first_stride),
            dilation=1 if window == 1 else (i == wide and first_dilation) or dilation,
            groups=groups if windows == (1, 3, 1) and window == 3 else 1,
        )
        for i, window in enumerate(windows)
    ]


def stage(
    n_in: int,
    channels: Sequence[int],
    blocks: int,
    block: Callable[..., Layer],
    first: dict[str, Any],
    names: str = "block{}",
    start: int = 1,
    **options: Any,
) -> Layer:
    """Build blocks in a row, ``block(n_in, channels, **options)``, numbered from ``start``.

    ``first`` are options of the first block alone.
    """
    children = {}
    for j in range(blocks):
        own = options if j else options | first
        children[names.format(j + start)] = block(channels[-1] if j else n_in, channels, **own)
    return serial(**children)


STAGES: dict[str, dict[int, tuple[int, ...]]] = {
    "resnet": {  # He et al. 2015, table 1; 10, 14, 26 and 200 as in timm
        10: (1, 1, 1, 1),
        14: (1, 1, 1, 1),
        18: (2, 2, 2, 2),
        26: (2, 2, 2, 2),
        34: (3, 4, 6, 3),
        50: (3, 4, 6, 3),
        101: (3, 4, 23, 3),
        152: (3, 8, 36, 3),
        200: (3, 24, 36, 3),
    },
    "resnext": {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)},
    "densenet": {  # Huang et al. 2017, table 1
        121: (6, 12, 24, 16),
        161: (6, 12, 36, 24),
        169: (6, 12, 32, 32),
        201: (6, 12, 48, 32),
        264: (6, 12, 64, 48),
    },
    "wider_resnet": {  # Wu et al. 2016
        16: (1, 1, 1, 1, 1, 1),
        20: (1, 1, 1, 3, 1, 1),
        38: (3, 3, 6, 3, 1, 1),
    },
}
"""Blocks per stage of networks that are named by their depth."""


STEMS: dict[str, tuple[int, tuple[float, ...]]] = {
    "7x7": (7, (1,)),
    "3x3": (3, (1, 1, 1)),
    "deep": (3, (1 / 2, 1 / 2, 1)),
    "tiered": (3, (3 / 8, 1 / 2, 1)),
    "wide": (3, (1, 1, 2)),
    "small": (3, (1,)),
}
"""Window of the convolutions of each stem of `input_stem`, and their channels over ``n_out``."""


def input_stem(
    kind: str, n_in: int, n_out: int, norm: NormActivation, *, last_norm: bool
) -> tuple[dict[str, Layer], int]:
    """Build the layers before the first stage, by name, and the number of output channels.

    ``kind`` is the ``stem`` of a ResNet. A 3x3 max pooling with stride 2 follows all but
    ``"small"``, so the image shrinks by 4 in each direction. Pass ``last_norm=False`` if the first
    block begins with a norm.
    """
    checks.choice("input_stem", tuple(STEMS), stem=kind)
    window, shares = STEMS[kind]
    stem: dict[str, Layer] = {}
    for i, share in enumerate(shares, start=1):
        stride = 1 if i > 1 or kind == "small" else 2
        channels = int(n_out * share)
        stem[f"conv{i}"] = convolution(n_in, channels, window, stride=stride)
        if last_norm or i < len(shares):
            stem[f"bn{i}"] = norm(channels)
        n_in = channels
    if kind != "small":
        stem["pool"] = layers.max_pool(3, stride=2, padding=1)
    return stem, n_in


def stage_blocks(network: str, depth: int) -> tuple[int, ...]:
    """Look up the number of blocks per stage in `STAGES`; ValueError for an unknown depth."""
    checks.choice(network, sorted(STAGES[network]), depth=depth)
    return STAGES[network][depth]


def stage_dilations(network: str, dilation: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return ``dilation``; ValueError unless it has one number >= 1 per stage."""
    if len(dilation) != stages or any(d < 1 for d in dilation):
        raise ValueError(
            f"{network}: dilation needs {stages} numbers >= 1, one per stage, got {tuple(dilation)}"
        )
    return tuple(dilation)


def classifier(children: dict[str, Layer], n_in: int, num_classes: int | None) -> Layer:
    """Add pooling and a dense layer; without classes, return the outputs of ``layer1``, ...

    Parameter names are the same in both cases.
    """
    if num_classes is None:
        return outputs_of(children, [name for name in children if name.startswith("layer")])
    return serial(**children, avgpool=layers.global_avg_pool(), fc=layers.dense(n_in, num_classes))


def outputs_of(children: dict[str, Layer], features: Sequence[str]) -> Layer:
    """Apply layers in order and return a tuple of the named outputs."""

    def apply(child: Children, x: Array) -> tuple[Array, ...]:
        outputs = []
        for name in children:
            x = child(name, x)
            if name in features:
                outputs.append(x)
        return tuple(outputs)

    return composite(children, apply)


def pre_activation_network(
    stages: dict[str, Layer], n_in: int, norm: NormActivation, num_classes: int | None
) -> Layer:
    """Add a norm, pooling and a dense layer to ``mod1``, a stem, and stages ``mod2``, ...

    Without classes it returns the features of the stages; the last ones are normalized.
    """
    children = stages | {"bn_out": norm(n_in)}
    features = [name for name in stages if name.startswith("mod")][1:-1]
    if num_classes is None:
        return outputs_of(children, [*features, "bn_out"])
    logits = serial(avg_pool=layers.global_avg_pool(), fc=layers.dense(n_in, num_classes))
    return serial(**children, classifier=logits)
