"""Image networks as named stages that return either logits or the features of each stage."""

from collections.abc import Mapping, Sequence

from jax import Array

from fnet import layers
from fnet.layer import Layer, Params, State, apply_child, init_children, serial
from fnet.models.blocks import NormActivation, convolution

STEMS = ("7x7", "3x3", "small")
"""Stems that `input_stem` accepts."""


def input_stem(
    kind: str, n_in: int, n_out: int, norm: NormActivation, *, last_norm: bool
) -> dict[str, Layer]:
    """Build the layers before the first stage.

    Args:
      kind: ``"7x7"``: a 7x7 convolution with stride 2. ``"3x3"``: three 3x3 convolutions, the
        first with stride 2. A 3x3 max pooling with stride 2 follows both, so the image shrinks by
        4 in each direction. ``"small"``: one 3x3 convolution, for images of about 32 x 32.
      n_in: image channels.
      n_out: output channels of each convolution.
      norm: norm after each convolution.
      last_norm: whether a norm follows the last convolution too. Pass False if the first block
        begins with a norm.

    Returns:
      Layers by name, in order.

    Raises:
      ValueError: for an unknown kind.
    """
    if kind not in STEMS:
        raise ValueError(f"stem must be one of {STEMS}, got {kind!r}")
    windows = {"7x7": (7,), "3x3": (3, 3, 3), "small": (3,)}[kind]
    stem: dict[str, Layer] = {}
    for i, window in enumerate(windows, start=1):
        stride = 1 if i > 1 or kind == "small" else 2
        stem[f"conv{i}"] = convolution(n_in, n_out, window, stride=stride)
        if last_norm or i < len(windows):
            stem[f"bn{i}"] = norm(n_out)
        n_in = n_out
    if kind != "small":
        stem["pool"] = layers.max_pool(3, stride=2, padding=1)
    return stem


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
