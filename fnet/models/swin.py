"""Swin: attention in windows that move from block to block."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from fnet import checks, layers
from fnet.layer import Children, Layer, Params, State, composite, init_children, residual, serial
from fnet.layers.dot_product_attention import MASKED_SCORE
from fnet.precision import upcast

_SIZES = {  # width, blocks per stage, heads of the first stage
    ("swin_t", "swin_tiny"): (96, (2, 2, 6, 2), 3),
    ("swin_s", "swin_small"): (96, (2, 2, 18, 2), 3),
    ("swin_b", "swin_base"): (128, (2, 2, 18, 2), 4),
    ("swin_l", "swin_large"): (192, (2, 2, 18, 2), 6),
}


def _variants() -> dict[str, dict[str, Any]]:
    variants: dict[str, dict[str, Any]] = {}
    for (short, long), (width, blocks, heads) in _SIZES.items():
        row = {"width": width, "blocks": blocks, "heads": heads}
        variants |= {short: row, f"{long}_patch4_window7_224": row}
        if short in ("swin_b", "swin_l"):
            variants[f"{long}_patch4_window12_384"] = row | {"window": 12}
    del variants["swin_l"]  # only timm has it
    return variants


VARIANTS = _variants()
"""Options of the published networks, by their names in torchvision and timm."""


def swin(
    *,
    num_classes: int | None,
    in_channels: int = 3,
    width: int = 96,
    blocks: Sequence[int] = (2, 2, 6, 2),
    heads: int = 3,
    window: int = 7,
    patch: int = 4,
    stochastic_depth: float = 0.0,
    eps: float = 1e-5,
) -> Layer:
    """Swin transformer; the default is Swin-T.

    Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", ICCV
    2021. A block is attention within windows with learned relative positions, then a feed-forward
    layer; in every other block the windows are shifted by half. Between stages, four neighbors
    become one.

    Args:
      num_classes: number of logits. None: the network returns features [N, 8 width] for four
        stages.
      in_channels: image channels.
      width: channels of the first stage. They double in each later one.
      blocks: number of blocks of each stage.
      heads: attention heads of the first stage. They double in each later one.
      window: side of a window, in patches. Images of any size are padded to whole windows, and a
        side without room for a second window is not shifted.
      patch: side of a patch, in pixels.
      stochastic_depth: as for `fnet.models.convnext.convnext`.
      eps: added to the variance in each norm.

    Returns:
      A layer on NHWC images, [N, H, W, in_channels] -> [N, num_classes], without state.

    Raises:
      ValueError: for a size below 1, heads that do not divide the width, or a rate outside [0, 1).
    """
    checks.sizes("swin", patch=patch, window=window, blocks=min(blocks, default=0), heads=heads)
    if width % heads:
        raise ValueError(f"swin: heads must divide width, got heads={heads}, width={width}")
    norm = functools.partial(layers.layer_norm, eps=eps)
    rates = iter(np.linspace(0, stochastic_depth, sum(blocks)).tolist())

    def branch(first: Layer, second: Layer, rate: float) -> Layer:
        skips = {"stochastic_depth": layers.dropout(rate, shared_axes=(1, 2, 3))} if rate else {}
        return residual(serial(layer_norm=first, mixer=second, **skips))

    def block(d: int, num_heads: int, shift: int, rate: float) -> Layer:
        feed_forward = layers.feed_forward(
            d, 4 * d, activation="gelu_exact", gated=False, bias=True
        )
        attention = window_attention(d, num_heads, window, shift)
        return serial(
            attention=branch(norm(d), attention, rate),
            feed_forward=branch(norm(d), feed_forward, rate),
        )

    patches = layers.conv(in_channels, width, patch, stride=patch, padding="VALID")
    children: dict[str, Layer] = {"patches": serial(conv=patches, layer_norm=norm(width))}
    for i, depth in enumerate(blocks):
        d = width * 2**i
        if i:
            reduction = layers.dense(2 * d, d, bias=False)
            merge = {"merge": _merge(), "layer_norm": norm(2 * d), "reduction": reduction}
            children[f"down{i}"] = serial(**merge)
        shifts = [window // 2 * (j % 2) for j in range(depth)]
        children[f"stage{i}"] = serial(
            *(block(d, heads * 2**i, shift, next(rates)) for shift in shifts)
        )
    children |= {"norm": norm(d), "pool": layers.global_avg_pool()}
    if num_classes is not None:
        children["head"] = layers.dense(d, num_classes)
    return serial(**children)


def _merge() -> Layer:
    """[N, H, W, D] -> [N, ceil(H / 2), ceil(W / 2), 4 D], padded with zeros."""

    def merge(child: Children, x: Array) -> Array:
        x = _pad(x, 2, 2)
        n, h, w, d = x.shape
        x = x.reshape(n, h // 2, 2, w // 2, 2, d)
        return x.transpose(0, 1, 3, 4, 2, 5).reshape(n, h // 2, w // 2, 4 * d)

    return composite({}, merge)


def window_attention(width: int, heads: int, window: int, shift: int) -> Layer:
    """Attention within windows of an image, with a learned bias for each relative position.

    [N, H, W, D] -> [N, H, W, D]. Windows are cyclically shifted. Patches that are neighbors only
    because of that do not attend to each other. Params are ``query_key_value``, ``output`` and
    ``position_bias``, whose ``embedding`` is [(2 window - 1)^2, heads].
    """
    children = {
        "query_key_value": layers.dense(width, 3 * width),
        "output": layers.dense(width, width),
    }
    axis = np.arange(window)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    offsets = grid[:, None] - grid[None] + window - 1
    position = offsets @ np.array([2 * window - 1, 1])

    def init(key: Array) -> tuple[Params, State]:
        params, state = init_children(children, key)
        bias_key = jax.random.fold_in(key, len(children))
        shape = ((2 * window - 1) ** 2, heads)
        bias = 0.02 * jax.random.truncated_normal(bias_key, -2, 2, shape)
        params["position_bias"] = {"embedding": bias}
        return params, state

    def apply(child: Children, x: Float[Array, "n h w d"]) -> Float[Array, "n h w d"]:
        n, height, columns, _ = x.shape
        x = _pad(x, window, window)
        _, padded_height, padded_columns, _ = x.shape
        sides = padded_height, padded_columns
        shifts = tuple(shift if side > window else 0 for side in sides)
        x = jnp.roll(x, [-s for s in shifts], (1, 2))
        q, k, v = jnp.split(child("query_key_value", _windows(x, window)), 3, axis=-1)
        # [N, windows, tokens, heads, D / heads]
        q, k, v = (a.reshape(*a.shape[:-1], heads, -1) for a in (q, k, v))
        scores = jnp.einsum("nwqhd,nwkhd->nwhqk", q, k, preferred_element_type=jnp.float32)
        scores *= q.shape[-1] ** -0.5
        bias = upcast(child.params["position_bias"]["embedding"])[position]
        scores += bias.transpose(2, 0, 1)[None, None]
        if any(shifts):
            scores = jnp.where(
                _together(sides, shifts, window)[None, :, None], scores, MASKED_SCORE
            )
        weights = jax.nn.softmax(scores, -1).astype(v.dtype)
        y = jnp.einsum("nwhqk,nwkhd->nwqhd", weights, v).reshape(*q.shape[:3], width)
        y = child("output", y)
        y = y.reshape(n, sides[0] // window, sides[1] // window, window, window, width)
        y = y.transpose(0, 1, 3, 2, 4, 5).reshape(n, *sides, width)
        return jnp.roll(y, shifts, (1, 2))[:, :height, :columns]

    return composite(children, apply, init=init)


def _pad(x: Array, *sides: int) -> Array:
    """Pad the ends of height and width with zeros to multiples of the sides."""
    pad = [(0, -n % side) for n, side in zip(x.shape[1:3], sides, strict=True)]
    return jnp.pad(x, [(0, 0), *pad, (0, 0)])


def _windows(x: Any, window: int) -> Any:
    """[N, H, W, ...] -> [N, windows, window^2, ...]."""
    n, h, w, *rest = x.shape
    x = x.reshape(n, h // window, window, w // window, window, *rest)
    return x.swapaxes(2, 3).reshape(n, -1, window * window, *rest)


def _together(
    sides: tuple[int, ...], shifts: tuple[int, ...], window: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether two patches of a shifted window are from the same part of the image."""
    parts = [
        (np.arange(side) >= side - window).astype(int) + (np.arange(side) >= side - shift)
        if shift
        else np.zeros(side, int)
        for side, shift in zip(sides, shifts, strict=True)
    ]
    part = _windows((3 * parts[0][:, None] + parts[1])[None], window)[0]
    return np.asarray(part[:, :, None] == part[:, None, :])
