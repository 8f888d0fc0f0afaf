"""Networks and losses that several benchmarks measure: fnet's, flax's and plain JAX's."""

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
"""The small CNN: two 3x3 convolutions, each with relu and 2x2 maximum, and two dense layers."""
WORDS, DEPTH, HEAD_WIDTH = 256, 4, 64
"""The transformer: causal, its head tied to the embedding of so many words."""


class Network(NamedTuple):
    """``loss(params, x, y) -> losses [batch]`` and its arguments."""

    loss: Callable[[Any, Array, Array], Array]
    params: Any
    x: Array
    y: Array


def mlp(batch: int = 256) -> dict[str, Network]:
    """The same multilayer perceptron, relu, written three times."""

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for size in MLP_SIZES[1:-1]:
                x = nn.relu(nn.Dense(size)(x))
            return nn.Dense(MLP_SIZES[-1])(x)

    data = classified(batch, MLP_SIZES[0])
    return {
        "fnet": of_layer(layers.mlp(MLP_SIZES), *data),
        "flax": of_flax(Flax(), *data),
        "JAX": Network(logits_loss(dense_layers), plain_dense(MLP_SIZES), *data),
    }


def cnn(batch: int = 128) -> dict[str, Network]:
    """The same small CNN. Pooling is the maximum of four slices, in every one the fastest on CPU.

    "JAX, patches" multiplies the patches of the images by the first kernel instead of
    convolving, for which its gradient is faster where there is one input channel.
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
    data = classified(batch, IMAGE, IMAGE, CHANNELS[0])
    written = {"JAX": convolution, "JAX, patches": patches_product}
    return {
        "fnet": of_layer(serial(**stages, flatten=flatten, mlp=layers.mlp(sizes)), *data),
        "flax": of_flax(Flax(), *data),
        **{
            name: Network(logits_loss(functools.partial(plain, first)), params, *data)
            for name, first in written.items()
        },
    }


def fnet_transformer(width: int, tokens: int, batch: int) -> dict[str, Network]:
    """`fnet.layers.transformer` (RMS norm, fused query, key and value) between tied embeddings."""
    parts = {
        "words": layers.embedding(WORDS, width),
        "blocks": layers.transformer(width, width // HEAD_WIDTH, DEPTH, causal=True),
        "norm": layers.rms_norm(width),
    }
    body = serial(**parts)

    def loss(params: Any, x: Array, y: Array) -> Array:
        h, _ = body.apply(params, {}, x, train=True)
        return cross_entropy(layers.unembed(h, params["words"]["embedding"]), y).mean(-1)

    return {"fnet": Network(loss, body.init(jax.random.key(0))[0], *text(batch, tokens))}


def flax_transformer(width: int, tokens: int, batch: int) -> dict[str, Network]:
    """A pre-norm transformer of flax's own layers, its head `nn.Embed.attend`."""

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            words, mask = nn.Embed(WORDS, width), nn.make_causal_mask(x)
            h = words(x)
            for _ in range(DEPTH):
                z = nn.LayerNorm()(h)
                h = h + nn.MultiHeadDotProductAttention(width // HEAD_WIDTH)(z, mask=mask)
                h = h + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(h))))
            return words.attend(nn.LayerNorm()(h))

    return {"flax": of_flax(Flax(), *text(batch, tokens))}


def resnet18(batch: int = 16) -> dict[str, Network]:
    """ResNet-18 with group norm for images of 32 x 32."""
    model = models.get("resnet18", num_classes=CLASSES, norm="group", stem="small")
    return {"fnet": of_layer(model, *classified(batch, 32, 32, 3))}


def of_layer(layer: Layer, x: Array, y: Array) -> Network:
    """A layer without state, with the cross-entropy of its logits."""
    params, state = jax.jit(layer.init)(jax.random.key(0))
    return Network(logits_loss(lambda p, x: layer.apply(p, state, x, train=True)[0]), params, x, y)


def of_flax(module: nn.Module, x: Array, y: Array) -> Network:
    """A flax module, with the cross-entropy of its logits."""
    return Network(logits_loss(module.apply), jax.jit(module.init)(jax.random.key(0), x), x, y)


def image_loss(model: Layer) -> Loss:
    """A train step's: the cross-entropy of the logits of ``image``, by ``label``."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, Aux]:
        logits, state = model.apply(params, state, batch["image"], key=key, train=True)
        return cross_entropy(logits, batch["label"]), Aux(state, {})

    return loss


def logits_loss(apply: Callable[..., Any]) -> Callable[[Any, Array, Array], Array]:
    def loss(params: Any, x: Array, y: Array) -> Array:
        losses = cross_entropy(apply(params, x), y)
        return losses.mean(range(1, losses.ndim))

    return loss


def classified(batch: int, *shape: int) -> tuple[Array, Array]:
    """Examples of that shape and their classes."""
    x = jax.random.normal(jax.random.key(3), (batch, *shape))
    return x, jax.random.randint(jax.random.key(4), (batch,), 0, CLASSES)


def text(batch: int, tokens: int) -> tuple[Array, Array]:
    """Words and those that follow each."""
    words = jax.random.randint(jax.random.key(3), (batch, tokens + 1), 0, WORDS)
    return words[:, :-1], words[:, 1:]


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
    """The same convolution, as a product of 3x3 patches and the kernel."""
    height, width = x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifts, -1) @ kernel.reshape(-1, kernel.shape[-1])


def max_pool(x: Array) -> Array:
    return functools.reduce(jnp.maximum, [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])
