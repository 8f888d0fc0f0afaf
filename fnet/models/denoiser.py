"""A denoising transformer: patches of a noisy image, told the time and what to draw."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fnet.layer import Params, State, apply_child, init_children, serial
from fnet.layers.activations import activation
from fnet.layers.attention_context import RATE, Passing
from fnet.layers.dense import dense
from fnet.layers.embedding import embedding
from fnet.layers.norm import layer_norm
from fnet.layers.stack import Block, stack
from fnet.precision import add, multiply


class Denoiser(NamedTuple):
    """A layer on noisy images that is also told the time, and the label.

    Attributes:
      init: as of `fnet.Layer`.
      apply: ``apply(params, state, x, *, time, label=None, key=None, train) -> (y,
        state)``: x and y [B, H, W, C]; time [B], in steps of the schedule; label [B]
        int32, ``num_classes`` where nothing is said.
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]


def denoiser(
    *,
    image_shape: Sequence[int],
    width: int,
    blocks: Sequence[Block],
    num_classes: int = 0,
    patch: int = 1,
    norm: str = "rms",
    context: Passing | None = None,
    context_rate: float = RATE,
    dropout: float = 0.0,
) -> Denoiser:
    """Blocks over an image's patches, each norm scaled and shifted by time and label.

    Peebles, Xie 2023, "Scalable Diffusion Models with Transformers" (DiT): patches
    become tokens by a dense layer, with a learned vector for each place; the condition
    is ``mlp(sinusoids(time)) + E[label]``; each block and the last layer begin by
    predicting 0.

    Args:
      image_shape: (H, W, C).
      width: D.
      blocks: their mixers must not be causal: patches have no order.
      num_classes: labels there are; one more says nothing (for guidance). 0: no labels.
      patch: side of a patch; divides H and W.
      norm: as for `fnet.layers.stack`, as all below.
      context: see there.
      context_rate: see there.
      dropout: see there.

    Returns:
      A layer on images [B, H, W, C] that is also told the time, and the label.

    Raises:
      ValueError: if ``patch`` does not divide the image's sides; when applied, for
        another shape, if a label is missing or given in vain, or for a time or label
        that is not one per image.
    """
    height, across, channels = image_shape
    if patch < 1 or height % patch or across % patch:
        raise ValueError(
            f"denoiser: patch must divide height and width, got patch={patch} and an image of "
            f"{height} x {across}"
        )
    rows, columns, numbers = height // patch, across // patch, patch * patch * channels
    zeros = jax.nn.initializers.zeros
    children = {
        "patches": dense(numbers, width),
        "time": serial(
            expand=dense(width, width), act=activation("silu"), contract=dense(width, width)
        ),
        "blocks": stack(
            width,
            blocks,
            norm=norm,
            context=context,
            context_rate=context_rate,
            condition=width,
            dropout=dropout,
        ),
        "modulation": dense(width, 2 * width, kernel_init=zeros),
        "output": dense(width, numbers, kernel_init=zeros),
    }
    if num_classes:
        children["label"] = embedding(num_classes + 1, width)

    def init(key: Array) -> tuple[Params, State]:
        of_children, of_places = jax.random.split(key)
        params, state = init_children(children, of_children)
        places = jax.random.normal(of_places, (rows * columns, width), jnp.float32)
        params["places"] = 0.02 * places
        return params, state

    def apply(
        params: Params,
        state: State,
        x: Float[Array, "b h w c"],
        *,
        time: Float[Array, " b"] | Int[Array, " b"],
        label: Int[Array, " b"] | None = None,
        key: Array | None = None,
        train: bool,
    ) -> tuple[Float[Array, "b h w c"], State]:
        if x.shape[1:] != (height, across, channels):
            raise ValueError(
                f"denoiser: expected images {(height, across, channels)}, got {x.shape[1:]}"
            )
        if bool(num_classes) != (label is not None):
            raise ValueError(
                f"denoiser: made for {num_classes} classes, got "
                f"{'no label' if label is None else 'labels'}"
            )
        for name, given in (("time", time), ("label", label)):
            if given is not None and given.shape != x.shape[:1]:
                raise ValueError(
                    f"denoiser: there are {x.shape[0]} images, but {name} has shape {given.shape}; "
                    "give one per image"
                )

        def child(name: str, x: Array) -> Array:
            return apply_child(children, name, params, {}, x, key=key, train=train)[0]

        condition = child("time", sinusoids(time, width).astype(x.dtype))
        if label is not None:
            condition = condition + child("label", label).astype(x.dtype)

        b = x.shape[0]
        # One axis at a time: a sharding is followed through no other reshape.
        tokens = x.reshape(b, rows, patch, across, channels)
        tokens = tokens.reshape(b, rows, patch, columns, patch, channels).swapaxes(2, 3)
        tokens = tokens.reshape(b, rows * columns, patch, patch, channels)
        tokens = child("patches", tokens.reshape(b, rows * columns, numbers))
        tokens = add(tokens, params["places"][None])
        tokens, state = apply_child(
            children, "blocks", params, state, tokens, key=key, train=train, condition=condition
        )
        scale, shift = jnp.split(child("modulation", jax.nn.silu(condition))[:, None], 2, axis=-1)
        y = child("output", add(multiply(layer_norm(tokens, None, None), 1 + scale), shift))
        y = y.reshape(b, rows * columns, patch, patch, channels)
        y = y.reshape(b, rows, columns, patch, patch, channels).swapaxes(2, 3)
        return y.reshape(b, rows, patch, across, channels).reshape(x.shape), state

    return Denoiser(init, apply)


def sinusoids(time: Array, width: int) -> Float[Array, "b d"]:
    """Cosines and sines of the time at frequencies from 1 down to nearly 1 / 10,000, float32.

    Vaswani et al. 2017, as diffusion models take them (Ho et al. 2020).

    Args:
      time: [B], in steps.
      width: D; the last number is 0 if it is odd.
    """
    half = width // 2
    frequency = jnp.exp(-math.log(10_000) * jnp.arange(half, dtype=jnp.float32) / max(half, 1))
    angle = time.astype(jnp.float32)[:, None] * frequency[None]
    both = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
    return jnp.pad(both, ((0, 0), (0, width - 2 * half)))
