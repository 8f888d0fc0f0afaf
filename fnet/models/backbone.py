"""Image networks as named stages that return either logits or the features of each stage."""

from collections.abc import Mapping, Sequence

from jax import Array

from fnet import layers
from fnet.layer import Layer, Params, State, apply_child, init_children, serial
from fnet.models.blocks import NormActivation, convolution

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
    """Build the layers before the first stage.

    Args:
      kind: ``"7x7"``: a 7x7 convolution with stride 2. ``"3x3"``: three 3x3 convolutions, the
        first with stride 2. ``"deep"``, ``"tiered"`` and ``"wide"``: the same with the channels
        of timm's ResNets with the suffixes d, t and s. A 3x3 max pooling with stride 2 follows all
        of these, so the image shrinks by 4 in each direction. ``"small"``: one 3x3 convolution,
        for images of about 32 x 32.
      n_in: image channels.
      n_out: output channels; twice as many for ``"wide"``.
      norm: norm after each convolution.
      last_norm: whether a norm follows the last convolution too. Pass False if the first block
        begins with a norm.

    Returns:
      Layers by name, in order, and the number of output channels.

    Raises:
      ValueError: for an unknown kind.
    """
    if kind not in STEMS:
        raise ValueError(f"stem must be one of {tuple(STEMS)}, got {kind!r}")
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


def classifier(n_in: int, num_classes: int | None) -> dict[str, Layer] | None:
    """Build global average pooling and a dense layer, or None if ``num_classes`` is None."""
    if num_classes is None:
        return None
    logits = serial(avg_pool=layers.global_avg_pool(), fc=layers.dense(n_in, num_classes))
    return {"classifier": logits}


def stage_blocks(
    network: str, depths: Mapping[int, tuple[int, ...]], depth: int
) -> tuple[int, ...]:
    """Look up the number of blocks per stage for ``depth``.

    Raises:
      ValueError: for an unknown depth.
    """
    if depth not in depths:
        raise ValueError(f"{network}: depth must be one of {sorted(depths)}, got {depth}")
    return depths[depth]


def stage_dilations(network: str, dilation: Sequence[int], stages: int) -> tuple[int, ...]:
    """Check that ``dilation`` has one number per stage.

    Raises:
      ValueError: if the length differs from ``stages``, or a dilation is below 1.
    """
    if len(dilation) != stages or any(d < 1 for d in dilation):
        raise ValueError(
            f"{network}: dilation needs {stages} numbers >= 1, one per stage, got {tuple(dilation)}"
        )
    return tuple(dilation)


def backbone(
    children: dict[str, Layer], features: Sequence[str], head: dict[str, Layer] | None
) -> Layer:
    """Apply layers in order and return the head's output, or intermediate features.

    Args:
      children: layers by name, in order.
      features: names of the layers whose outputs are returned if ``head`` is None.
      head: layers that compute the logits, or None.

    Returns:
      A layer on images [N, H, W, C]. With a head it returns the head's output, otherwise a tuple
      of features. Parameter names are the same in both cases.
    """
    if head is not None:
        return serial(**children, **head)

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[tuple[Array, ...], State]:
        outputs = []
        for name in children:
            x, state = apply_child(children, name, params, state, x, key=key, train=train)
            if name in features:
                outputs.append(x)
        return tuple(outputs), state

    return Layer(lambda key: init_children(children, key), apply)  # type: ignore[arg-type]
