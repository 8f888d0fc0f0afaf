"""One network in several implementations: blocks of 3x3 convolution, batch norm, activation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

import fnet
from benchmarks.networks import convolution
from fnet import Layer, layers, serial
from fnet.layers import activations

Loss = Callable[[Any, Array], Array]
Stack = Callable[[int], tuple[Loss, Any]]
Block = Callable[[dict[str, Array], Array], Array]

WIDTH = 64
IMAGES = (16, 56, 56, WIDTH)
"""Shape of the input, and of every activation: [batch, height, width, channels]."""

_EPS = 1e-5


def images(seed: int = 0) -> Array:
    """Standard normal input of shape `IMAGES`, float32."""
    return jax.random.normal(jax.random.key(seed), IMAGES)


def plain_stack(
    blocks: int,
    activation: str = "leaky_relu",
    *,
    recompute: bool = False,
    seed: int = 0,
    width: int = WIDTH,
) -> tuple[Loss, Any]:
    """Plain jnp implementation, optionally with ``jax.checkpoint`` around each block.

    Returns:
      ``(loss, params)``: ``loss(params, x)`` is the mean square of the output
      [] for ``x`` [N, H, W, C]; params are one dict per block of ``kernel``
      [3, 3, C, C], ``gamma`` and ``beta`` [C], float32.
    """
    block = _plain_block(activation)
    return _stack(jax.checkpoint(block) if recompute else block), _parameters(blocks, seed, width)


def in_place_stack(
    blocks: int, activation: str = "leaky_relu", *, seed: int = 0, width: int = WIDTH
) -> tuple[Loss, Any]:
    """Implementation with fnet's layers under `fnet.recompute`; returns as `plain_stack`."""
    block = serial(conv=layers.conv(width, width, bias=False), abn=_abn(width, activation))
    return _from_layer(serial(*[block] * blocks), seed, wrap=fnet.recompute)


def reversible_stack(
    blocks: int,
    activation: str = "leaky_relu",
    *,
    restore: bool = True,
    seed: int = 0,
    width: int = WIDTH,
) -> tuple[Loss, Any]:
    """Reversible stack with the same blocks on the halves of the channels.

    A coupled block has two convolutions of half the width, with a quarter of the FLOPs each.
    ``restore=False`` saves all activations instead. Returns as `plain_stack`.
    """
    half = width // 2
    block = serial(conv=layers.conv(half, half, bias=False), abn=_abn(half, activation))
    return _from_layer(fnet.reversible([(block, block)] * blocks, restore=restore), seed)


def flax_stack(
    blocks: int, activation: str = "leaky_relu", *, seed: int = 0, width: int = WIDTH
) -> tuple[Loss, Any]:
    """Implementation in flax linen; returns as `plain_stack`, with flax's params."""
    act = activations.get(activation).forward

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for _ in range(blocks):
                x = nn.Conv(width, (3, 3), use_bias=False)(x)
                x = act(nn.BatchNorm(use_running_average=False, epsilon=_EPS)(x), 0.01)
            return x

    model = Stack()
    # A 2 x 2 image is enough to initialize the parameters.
    variables = model.init(jax.random.key(seed), jnp.zeros((1, 2, 2, width)))
    statistics = variables["batch_stats"]

    def loss(params: Any, x: Array) -> Array:
        y, _ = model.apply(
            {"params": params, "batch_stats": statistics}, x, mutable=["batch_stats"]
        )
        return jnp.square(y).mean()

    return loss, variables["params"]


def plain_coupled_stack(
    blocks: int, activation: str = "leaky_relu", *, seed: int = 0, width: int = WIDTH
) -> tuple[Loss, Any]:
    """Plain jnp implementation of `reversible_stack`, without rounding to a grid."""
    half = _plain_block(activation)

    def loss(params: list[dict[str, Array]], x: Array) -> Array:
        x1, x2 = jnp.split(x, 2, axis=-1)
        for f, g in zip(params[::2], params[1::2], strict=True):
            x1 = x1 + half(f, x2)
            x2 = x2 + half(g, x1)
        return jnp.square(jnp.concatenate([x1, x2], -1)).mean()

    return loss, _parameters(2 * blocks, seed, width // 2)


def _abn(width: int, activation: str) -> Layer:
    return layers.abn(width, activation=activation, eps=_EPS)


def _from_layer(
    layer: Layer, seed: int, wrap: Callable[[Callable], Callable] = lambda f: f
) -> tuple[Loss, Any]:
    params, state = layer.init(jax.random.key(seed))
    apply = wrap(lambda params, x: layer.apply(params, state, x, train=True)[0])
    return lambda params, x: jnp.square(apply(params, x)).mean(), params


def _plain_block(activation: str) -> Block:
    act = activations.get(activation).forward

    def block(p: dict[str, Array], x: Array) -> Array:
        x = convolution(x, p["kernel"])
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return act((x - mean) / jnp.sqrt(var + _EPS) * p["gamma"] + p["beta"], 0.01)

    return block


def _parameters(blocks: int, seed: int, width: int) -> list[dict[str, Array]]:
    he = jax.nn.initializers.he_normal()
    return [
        {
            "kernel": he(key, (3, 3, width, width)),
            "gamma": jnp.ones(width),
            "beta": jnp.zeros(width),
        }
        for key in jax.random.split(jax.random.key(seed), blocks)
    ]


def _stack(block: Block) -> Loss:
    def loss(params: list[dict[str, Array]], x: Array) -> Array:
        for p in params:
            x = block(p, x)
        return jnp.square(x).mean()

    return loss
