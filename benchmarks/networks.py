"""Networks and losses that several benchmarks share, in fnet, flax and plain JAX."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from fnet import Aux, Layer, layers, models, serial
from fnet.autodiff import Loss
from fnet.layer import stateless
from fnet.losses import cross_entropy

MLP_SIZES = (784, 512, 512, 10)
IMAGE, CHANNELS, HIDDEN, CLASSES = 28, (1, 32, 64), 256, 10
"""Small CNN: two 3x3 convolutions, each with relu and 2x2 max pooling, and two dense layers."""
VOCABULARY, DEPTH, HEAD_WIDTH = 256, 4, 64
"""Transformer: causal, with a tied embedding of this vocabulary."""


class Network(NamedTuple):
    """``loss(params, x, y) -> losses [batch]`` and its arguments."""

    loss: Callable[[Any, Array, Array], Array]
    params: Any
    x: Array
    y: Array


def mlp(batch: int = 256) -> dict[str, Network]:
    """A multilayer perceptron with relu in three implementations."""

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for size in MLP_SIZES[1:-1]:
                x = nn.relu(nn.Dense(size)(x))
            return nn.Dense(MLP_SIZES[-1])(x)

    data = random_examples(batch, MLP_SIZES[0])
    return {
        "fnet": from_layer(layers.mlp(MLP_SIZES), *data),
        "flax": from_flax(Flax(), *data),
        "JAX": Network(logits_loss(dense_layers), plain_dense(MLP_SIZES), *data),
    }


def cnn(batch: int = 128) -> dict[str, Network]:
    """A small CNN in four implementations.

    Pooling is the maximum of four slices, which is fastest on CPU in all of them. "JAX, patches"
    multiplies image patches by the first kernel instead of convolving, which has a faster gradient
    for one input channel.
    """

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for channels in CHANNELS[1:]:
                x = max_pool(nn.relu(nn.Conv(channels, (3, 3))(x)))
            x = nn.relu(nn.Dense(HIDDEN)(x.reshape(x.shape[0], -1)))
            return nn.Dense(CLASSES)(x)

    sizes = ((IMAGE // 4) ** 2 * CHANNELS[-1], HIDDEN, CLASSES)
    stages = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(CHANNELS)):
        stages[f"conv{i}"] = layers.conv(n_in, n_out)
        stages[f"relu{i}"], stages[f"pool{i}"] = layers.activation("relu"), layers.max_pool(2)
    flatten = stateless(lambda x: x.reshape(x.shape[0], -1))

    def plain(first: Callable[[Array, Array], Array], params: Any, x: Array) -> Array:
        for convolve, (kernel, bias) in zip((first, convolution), params["conv"], strict=True):
            x = max_pool(nn.relu(convolve(x, kernel) + bias))
        return dense_layers(params["dense"], x.reshape(x.shape[0], -1))

    keys = jax.random.split(jax.random.key(2), len(CHANNELS) - 1)
    params = {
        "conv": [
            (jax.random.normal(key, (3, 3, n_in, n_out)) * (2 / 9 / n_in) ** 0.5, jnp.zeros(n_out))
            for key, (n_in, n_out) in zip(keys, itertools.pairwise(CHANNELS), strict=True)
        ],
        "dense": plain_dense(sizes),
    }
    data = random_examples(batch, IMAGE, IMAGE, CHANNELS[0])
    first_layers = {"JAX": convolution, "JAX, patches": patches_product}
    return {
        "fnet": from_layer(serial(**stages, flatten=flatten, mlp=layers.mlp(sizes)), *data),
        "flax": from_flax(Flax(), *data),
        **{
            name: Network(logits_loss(functools.partial(plain, first)), params, *data)
            for name, first in first_layers.items()
        },
    }


def fnet_transformer(width: int, tokens: int, batch: int) -> dict[str, Network]:
    """`fnet.layers.transformer` (RMS norm, fused query, key and value) with a tied embedding."""
    parts = {
        "embedding": layers.embedding(VOCABULARY, width),
        "blocks": layers.transformer(width, width // HEAD_WIDTH, DEPTH, causal=True),
        "norm": layers.rms_norm(width),
    }
    body = serial(**parts)

    def loss(params: Any, x: Array, y: Array) -> Array:
        h, _ = body.apply(params, {}, x, train=True)
        return cross_entropy(layers.unembed(h, params["embedding"]["embedding"]), y).mean(-1)

    return {"fnet": Network(loss, body.init(jax.random.key(0))[0], *random_tokens(batch, tokens))}


def flax_transformer(width: int, tokens: int, batch: int) -> dict[str, Network]:
    """A pre-norm transformer of flax layers, with the head `nn.Embed.attend`."""

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            embed, mask = nn.Embed(VOCABULARY, width), nn.make_causal_mask(x)
            h = embed(x)
            for _ in range(DEPTH):
                z = nn.LayerNorm()(h)
                h = h + nn.MultiHeadDotProductAttention(width // HEAD_WIDTH)(z, mask=mask)
                h = h + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(h))))
            return embed.attend(nn.LayerNorm()(h))

    return {"flax": from_flax(Flax(), *random_tokens(batch, tokens))}


def resnet18(batch: int = 16) -> dict[str, Network]:
    """ResNet-18 with group norm for images of 32 x 32."""
    model = models.get("resnet18", num_classes=CLASSES, norm="group", stem="small")
    return {"fnet": from_layer(model, *random_examples(batch, 32, 32, 3))}


def from_layer(layer: Layer, x: Array, y: Array) -> Network:
    """A network from a layer, with the cross-entropy of its logits."""
    params, state = jax.jit(layer.init)(jax.random.key(0))
    return Network(logits_loss(lambda p, x: layer.apply(p, state, x, train=True)[0]), params, x, y)


def from_flax(module: nn.Module, x: Array, y: Array) -> Network:
    """A network from a flax module, with the cross-entropy of its logits."""
    return Network(logits_loss(module.apply), jax.jit(module.init)(jax.random.key(0), x), x, y)


def image_loss(model: Layer) -> Loss:
    """Loss for a train step: cross-entropy of ``batch["image"]`` and ``batch["label"]``."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, Aux]:
        logits, state = model.apply(params, state, batch["image"], key=key, train=True)
        return cross_entropy(logits, batch["label"]), Aux(state, {})

    return loss


def logits_loss(apply: Callable[..., Any]) -> Callable[[Any, Array, Array], Array]:
    def loss(params: Any, x: Array, y: Array) -> Array:
        losses = cross_entropy(apply(params, x), y)
        return losses.mean(range(1, losses.ndim))

    return loss


def random_examples(batch: int, *shape: int) -> tuple[Array, Array]:
    """Random examples of the given shape, and random labels."""
    x = jax.random.normal(jax.random.key(3), (batch, *shape))
    return x, jax.random.randint(jax.random.key(4), (batch,), 0, CLASSES)


def random_tokens(batch: int, tokens: int) -> tuple[Array, Array]:
    """Random tokens, and the tokens that follow them."""
    tokens_and_next = jax.random.randint(jax.random.key(3), (batch, tokens + 1), 0, VOCABULARY)
    return tokens_and_next[:, :-1], tokens_and_next[:, 1:]


def plain_dense(sizes: tuple[int, ...]) -> list[tuple[Array, Array]]:
    keys = jax.random.split(jax.random.key(1), len(sizes) - 1)
    return [
        (jax.random.normal(key, shape) * (2 / shape[0]) ** 0.5, jnp.zeros(shape[1]))
        for key, shape in zip(keys, itertools.pairwise(sizes), strict=True)
    ]


def dense_layers(params: list[tuple[Array, Array]], x: Array) -> Array:
    for kernel, bias in params[:-1]:
        x = nn.relu(x @ kernel + bias)
    kernel, bias = params[-1]
    return x @ kernel + bias


def convolution(x: Array, kernel: Array) -> Array:
    form = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=form)


def patches_product(x: Array, kernel: Array) -> Array:
    """Convolution as a matrix product of 3x3 patches and the kernel."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifts, -1) @ kernel.reshape(-1, kernel.shape[-1])


def max_pool(x: Array) -> Array:
    return functools.reduce(jnp.maximum, [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])
