"""A network for images as named stages: with a classifier, or giving what each stage makes."""

from collections.abc import Mapping, Sequence

from jax import Array

from fnet import layers
from fnet.layer import Layer, Params, State, apply_child, init_children, serial
from fnet.models.norm_activation import NormActivation
from fnet.models.residual_blocks import convolution

STEMS = ("7x7", "3x3", "small")
"""Inputs of a network: see `input_stem`."""


def input_stem(
    kind: str, n_in: int, n_out: int, norm: NormActivation, *, last_norm: bool
) -> dict[str, Layer]:
    """What comes before the first stage.

    Args:
      kind: ``"7x7"``: a 7x7 convolution of stride 2. ``"3x3"``: three 3x3 convolutions, the
        first of stride 2. Both quarter height and width with the 3x3 maximum of stride 2
        that follows. ``"small"``: one 3x3 convolution, for images of about 32 x 32.
      n_in: channels of the images.
      n_out: channels of each convolution.
      norm: between convolutions.
      last_norm: whether the last convolution is normed as well; without it, the first
        block begins with a norm.

    Raises:
      ValueError: for another kind.
    """
    if kind not in STEMS:
        raise ValueError(f"stem must be one of {STEMS}, got {kind!r}")
    windows = {"7x7": (7,), "3x3": (3, 3, 3), "small": (3,)}[kind]
    parts: dict[str, Layer] = {}
    for i, window in enumerate(windows, start=1):
        stride = 1 if i > 1 or kind == "small" else 2
        parts[f"conv{i}"] = convolution(n_in, n_out, window, stride=stride)
        if last_norm or i < len(windows):
            parts[f"bn{i}"] = norm(n_out)
        n_in = n_out
    if kind != "small":
        parts["pool"] = layers.max_pool(3, stride=2, padding=1)
    return parts


def classifier(n_in: int, num_classes: int | None) -> dict[str, Layer] | None:
    """``classifier``, the mean over all positions and logits of it; None for no classes."""
    if num_classes is None:
        return None
    logits = serial(avg_pool=layers.global_avg_pool(), fc=layers.dense(n_in, num_classes))
    return {"classifier": logits}


def stage_blocks(where: str, depths: Mapping[int, tuple[int, ...]], depth: int) -> tuple[int, ...]:
    """Blocks of each stage of the network of that depth.

    Raises:
      ValueError: for a depth that there is not.
    """
    if depth not in depths:
        raise ValueError(f"{where}: depth must be one of {sorted(depths)}, got {depth}")
    return depths[depth]


def stage_dilations(where: str, dilation: Sequence[int], stages: int) -> tuple[int, ...]:
    """The dilation of each stage, checked.

    Raises:
      ValueError: if there are not as many as stages, or one is below 1.
    """
    if len(dilation) != stages or any(d < 1 for d in dilation):
        raise ValueError(
            f"{where}: dilation needs {stages} numbers of at least 1, one a stage, "
            f"got {tuple(dilation)}"
        )
    return tuple(dilation)


def backbone(
    children: dict[str, Layer], features: Sequence[str], head: dict[str, Layer] | None
) -> Layer:
    """Layers one after the other; without a head, the output of some of them.

    Args:
      children: by name, in order.
      features: names of those whose outputs are given where there is no head.
      head: further layers, which make logits; or None.

    Returns:
      A layer on images [N, H, W, C]; with a head it gives the head's output, without one
      a tuple of the features' outputs. Names of parameters are the same in both.
    """
    if head is not None:
        return serial(**children, **head)

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[tuple[Array, ...], State]:
        found = []
        for name in children:
            x, state = apply_child(children, name, params, state, x, key=key, train=train)
            if name in features:
                found.append(x)
        return tuple(found), state

    return Layer(lambda key: init_children(children, key), apply)  # type: ignore[arg-type]
