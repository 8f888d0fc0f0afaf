"""Diffusion transformer (DiT): a denoiser of images, conditioned on timestep and label."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fnet import checks, layers
from fnet.layer import Children, Params, State, composite, init_children, serial
from fnet.layers.attention_context import RATE, Passing
from fnet.layers.norm import layer_norm
from fnet.precision import add, multiply


class Denoiser(NamedTuple):
    """A layer on noisy images, conditioned on timestep and label.

    Attributes:
      init: ``init(key) -> (params, state)``, as for `fnet.Layer`.
      apply: ``apply(params, state, x, *, timestep, label=None, key=None, train) -> (y,
        state)``. ``x`` and ``y`` are [B, H, W, C], ``timestep`` [B] is a step of the schedule,
        and ``label`` int32 [B] is ``num_classes`` for an unconditional prediction.
    """

    init: Callable[[Array], tuple[Params, State]]
    apply: Callable[..., tuple[Array, State]]


def denoiser(
    *,
    image_shape: Sequence[int],
    width: int,
    blocks: Sequence[layers.Block],
    num_classes: int = 0,
    patch: int = 1,
    norm: str = "rms",
    context: Passing | None = None,
    context_rate: float = RATE,
    dropout: float = 0.0,
) -> Denoiser:
    """Diffusion transformer: blocks over patches, with norms modulated by timestep and label.

    Peebles, Xie 2023, "Scalable Diffusion Models with Transformers" (DiT). A dense layer turns
    patches into tokens, and a learned position embedding is added. The condition is
    ``mlp(sinusoids(timestep)) + E[label]``; it scales and shifts each norm. Each block and the
    output layer are initialized to predict 0.

    Args:
      image_shape: (H, W, C).
      width: D, the size of a token.
      blocks: blocks as for `fnet.layers.stack`. Mixers must not be causal, because patches have
        no order.
      num_classes: number of labels. The denoiser embeds one more, for unconditional predictions
        (`fnet.diffusion.guided`). 0: no labels.
      patch: side of a patch; must divide H and W.
      norm, context, context_rate, dropout: as for `fnet.layers.stack`.

    Returns:
      A layer on images [B, H, W, C], conditioned on timestep and label.

    Raises:
      ValueError: if ``patch`` does not divide the image's sides. When applied, for another image
        shape, a missing or unexpected label, or timesteps or labels that are not one per image.

    Example:
      >>> import fnet, jax
      >>> mixer, feed_forward = (
      ...     fnet.layers.attention(32, 2),
      ...     fnet.layers.mlp([32, 32]),
      ... )
      >>> blocks = [fnet.layers.Block(mixer, feed_forward)]
      >>> model = fnet.models.denoiser(image_shape=(8, 8, 1), width=32, blocks=blocks)
      >>> def predict(key, images, t):
      ...     return model.apply(*model.init(key), images, timestep=t, train=False)[0]
      >>> images = jax.ShapeDtypeStruct((5, 8, 8, 1), "float32")
      >>> t = jax.ShapeDtypeStruct((5,), "int32")
      >>> jax.eval_shape(predict, jax.random.key(0), images, t).shape
      (5, 8, 8, 1)
    """
    image_height, image_width, channels = image_shape
    if patch < 1 or image_height % patch or image_width % patch:
        raise ValueError(
            f"denoiser: patch must divide height and width, got patch={patch} and an image of "
            f"{image_height} x {image_width}"
        )
    rows, columns = image_height // patch, image_width // patch
    patch_size = patch * patch * channels
    zeros = jax.nn.initializers.zeros
    children = {
        "patches": layers.dense(patch_size, width),
        "timestep": serial(
            expand=layers.dense(width, width),
            act=layers.activation("silu"),
            contract=layers.dense(width, width),
        ),
        "blocks": layers.stack(
            width,
            blocks,
            norm=norm,
            context=context,
            context_rate=context_rate,
            condition=width,
            dropout=dropout,
        ),
        "modulation": layers.dense(width, 2 * width, kernel_init=zeros),
        "output": layers.dense(width, patch_size, kernel_init=zeros),
    }
    if num_classes:
        children["label"] = layers.embedding(num_classes + 1, width)

    def init(key: Array) -> tuple[Params, State]:
        children_key, pos_key = jax.random.split(key)
        params, state = init_children(children, children_key)
        pos_embedding = jax.random.normal(pos_key, (rows * columns, width), jnp.float32)
        params["pos_embedding"] = 0.02 * pos_embedding
        return params, state

    def apply(
        child: Children,
        x: Float[Array, "b h w c"],
        *,
        timestep: Float[Array, " b"] | Int[Array, " b"],
        label: Int[Array, " b"] | None = None,
    ) -> Float[Array, "b h w c"]:
        if x.shape[1:] != (image_height, image_width, channels):
            raise ValueError(
                f"denoiser: images must have shape {(image_height, image_width, channels)}, "
                f"got {x.shape[1:]}"
            )
        if bool(num_classes) != (label is not None):
            raise ValueError(
                f"denoiser: num_classes is {num_classes}, but got "
                f"{'no label' if label is None else 'labels'}"
            )
        given = f"one entry per image of x {x.shape}"
        expected = x.shape[:1]
        checks.shapes("denoiser", given, timestep=(timestep, expected), label=(label, expected))

        condition = child("timestep", sinusoids(timestep, width).astype(x.dtype))
        if label is not None:
            condition = condition + child("label", label).astype(x.dtype)

        b = x.shape[0]
        # One axis at a time: XLA propagates a sharding through no other reshape.
        tokens = x.reshape(b, rows, patch, image_width, channels)
        tokens = tokens.reshape(b, rows, patch, columns, patch, channels).swapaxes(2, 3)
        tokens = tokens.reshape(b, rows * columns, patch, patch, channels)
        tokens = child("patches", tokens.reshape(b, rows * columns, patch_size))
        tokens = add(tokens, child.params["pos_embedding"][None])
        tokens = child("blocks", tokens, condition=condition)
        scale, shift = jnp.split(child("modulation", jax.nn.silu(condition))[:, None], 2, axis=-1)
        y = child("output", add(multiply(layer_norm(tokens, None, None), 1 + scale), shift))
        y = y.reshape(b, rows * columns, patch, patch, channels)
        y = y.reshape(b, rows, columns, patch, patch, channels).swapaxes(2, 3)
        return y.reshape(b, rows, patch, image_width, channels).reshape(x.shape)

    layer = composite(children, apply, init=init)
    return Denoiser(layer.init, layer.apply)


def sinusoids(timestep: Array, width: int) -> Float[Array, "b d"]:
    """Sinusoidal embedding of timesteps, with frequencies from 1 down to nearly 1 / 10,000.

    Vaswani et al. 2017, in the form of diffusion models (Ho et al. 2020). [B] -> float32 [B, D]:
    cosines, then sines; if D is odd, the last entry is 0.
    """
    half = width // 2
    frequency = jnp.exp(-math.log(10_000) * jnp.arange(half, dtype=jnp.float32) / max(half, 1))
    angle = timestep.astype(jnp.float32)[:, None] * frequency[None]
    embedded = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
    return jnp.pad(embedded, ((0, 0), (0, width - 2 * half)))
