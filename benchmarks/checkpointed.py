"""Networks with `jax.checkpoint` placed by hand around their blocks.

`benchmarks.planning` compares them with plans of the same networks.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import fnet
from benchmarks.networks import image_loss
from benchmarks.resnet50_step import Bottleneck, ResNet50, flax_layer


class Hand(NamedTuple):
    """Blocks under ``jax.checkpoint``, placed by hand.

    Attributes:
      every: 0 for no block, 1 for every block, 2 for every second one.
      policy: policy of ``jax.checkpoint``, or None to save nothing.
    """

    every: int = 0
    policy: Callable[..., Any] | None = None

    def covers(self, number: int) -> bool:
        """Whether the block with this number is under ``jax.checkpoint``."""
        return self.every > 0 and number % self.every == self.every - 1

    def wrap(self, block: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Return the block as a pure function, perhaps under ``jax.checkpoint``."""
        return jax.checkpoint(block, policy=self.policy) if self.covers(number) else block


HAND = {
    "none": Hand(),
    "every block": Hand(1),
    "every second block": Hand(2),
    "every block, dots saved": Hand(1, jax.checkpoint_policies.dots_saveable),
}


class Problem(NamedTuple):
    """A train step.

    Attributes:
      step: the step.
      init: makes the first state from a key.
      batch: shapes of a batch.
    """

    step: fnet.step.Step
    init: Callable[[Array], fnet.TrainState]
    batch: dict[str, Any]


def problem(loss: Any, init: Callable[[Array], Any], batch: Any) -> Problem:
    """Make a train step with AdamW from a loss, and a function that makes its parameters."""
    optimizer = optax.adamw(1e-4)

    def create(key: Array) -> fnet.TrainState:
        return fnet.TrainState.create(params=init(key), optimizer=optimizer, key=key)

    return Problem(fnet.make_step(loss, optimizer), create, batch)


def tokens(batch: int, length: int) -> dict[str, Any]:
    """Shapes of a batch of text."""
    shape = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return {"token": shape, "next": shape}


def linen_blocks(hand: Hand, block: type[nn.Module], calls: int, **options: Any) -> Any:
    """Return a function in place of a linen class: it makes blocks, perhaps under ``nn.remat``."""
    covered: Any = nn.remat(block, policy=hand.policy, **options)
    numbers = itertools.count()

    def make(*args: Any, **kwargs: Any) -> nn.Module:
        return (covered if hand.covers(next(numbers) % calls) else block)(*args, **kwargs)

    return make


def resnet50(hand: Hand) -> Problem:
    """ResNet-50 of flax linen, batch 8 at 224 x 224."""
    model = flax_layer(ResNet50(nn.relu, linen_blocks(hand, Bottleneck, 16)))
    optimizer = optax.sgd(0.1, momentum=0.9)
    batch = {
        "image": jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((8,), jnp.int32),
    }
    create = functools.partial(fnet.TrainState.create, model, optimizer)
    return Problem(fnet.make_step(image_loss(model), optimizer), create, batch)


class GptBlock(eqx.Module):
    """Pre-norm transformer block."""

    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: list[eqx.nn.Linear]

    def __init__(self, width: int, key: Array):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(8, width, key=keys[0])
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.mlp = [
            eqx.nn.Linear(width, 4 * width, key=keys[1]),
            eqx.nn.Linear(4 * width, width, key=keys[2]),
        ]

    def __call__(self, x: Array, mask: Array) -> Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask)
        y = jax.nn.gelu(jax.vmap(self.mlp[0])(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.mlp[1])(y)


def gpt(hand: Hand) -> Problem:
    """Transformer of Equinox: unrolled blocks, width 256, batch 8 of 256 tokens."""
    depth, width, vocabulary, length = 12, 256, 4096, 256

    def init(key: Array) -> Any:
        keys = jax.random.split(key, depth + 2)
        blocks = [GptBlock(width, k) for k in keys[2:]]
        embedding = jax.random.normal(keys[0], (vocabulary, width))
        return embedding, blocks, jax.random.normal(keys[1], (width, vocabulary))

    shapes = eqx.filter_eval_shape(init, jax.random.key(0))
    static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        embedding, blocks, head = eqx.combine(params, static)
        mask = jnp.tril(jnp.ones((length, length), bool))
        x = embedding[batch["token"]]
        for number, block in enumerate(blocks):
            arrays, rest = eqx.partition(block, eqx.is_array)

            def run(arrays: Any, x: Array, rest: Any = rest) -> Array:
                return jax.vmap(eqx.combine(arrays, rest), (0, None))(x, mask)

            x = hand.wrap(run, number)(arrays, x)
        return fnet.losses.cross_entropy(x @ head, batch["next"]).mean(-1)

    return problem(loss, lambda key: eqx.filter(init(key), eqx.is_array), tokens(8, length))


class UNetBlock(nnx.Module):
    """Residual block of a diffusion U-Net, conditioned on the timestep."""

    def __init__(self, before: int, after: int, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.GroupNorm(before, num_groups=8, rngs=rngs)
        self.conv1 = conv(before, after)
        self.time = nnx.Linear(256, after, rngs=rngs)
        self.norm2 = nnx.GroupNorm(after, num_groups=8, rngs=rngs)
        self.conv2 = conv(after, after)
        self.skip = nnx.Linear(before, after, rngs=rngs)

    def __call__(self, x: Array, time: Array) -> Array:
        y = self.conv1(nnx.silu(self.norm1(x))) + self.time(time)[:, None, None]
        return self.skip(x) + self.conv2(nnx.silu(self.norm2(y)))


class UNet(nnx.Module):
    """Diffusion U-Net of Ho et al. 2020, without attention."""

    def __init__(self, widths: tuple[int, ...], rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, widths[0], (3, 3), rngs=rngs)
        self.head = nnx.Conv(widths[0], 3, (3, 3), rngs=rngs)
        down, up, skips, width = [], [], [widths[0]], widths[0]
        for w in widths:
            for _ in range(2):
                down.append(UNetBlock(width, w, rngs))
                width = w
                skips.append(w)
        for w in widths[::-1]:
            for _ in range(2):
                up.append(UNetBlock(width + skips.pop(), w, rngs))
                width = w
        self.down, self.up = nnx.List(down), nnx.List(up)

    def __call__(self, x: Array, time: Array, hand: Hand) -> Array:
        numbers = itertools.count()

        def run(block: UNetBlock, x: Array) -> Array:
            graph, params = nnx.split(block)

            def pure(params: Any, x: Array, time: Array) -> Array:
                return nnx.merge(graph, params)(x, time)

            return hand.wrap(pure, next(numbers))(params, x, time)

        angles = time[:, None] * jnp.exp(-jnp.arange(128) / 14)
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        x = self.stem(x)
        skips = []
        for i, block in enumerate(self.down):
            x = run(block, x)
            skips.append(x)
            if i % 2 and i < len(self.down) - 1:
                x = nnx.avg_pool(x, (2, 2), (2, 2))
        for i, block in enumerate(self.up):
            x = run(block, jnp.concatenate([x, skips.pop()], -1))
            if i % 2 and i < len(self.up) - 1:
                x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        return self.head(x)


def unet(hand: Hand) -> Problem:
    """Diffusion U-Net of flax nnx, batch 8 at 64 x 64."""

    def init(key: Array) -> Any:
        return UNet((64, 128, 256), nnx.Rngs(key))

    graph = nnx.graphdef(nnx.eval_shape(init, jax.random.key(0)))

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        noise = jax.random.normal(key, batch["image"].shape)
        mixed = batch["image"] * 0.5 + noise
        got = nnx.merge(graph, params)(mixed, batch["time"], hand)
        return ((got - noise) ** 2).mean((1, 2, 3))

    batch = {
        "image": jax.ShapeDtypeStruct((8, 64, 64, 3), jnp.float32),
        "time": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    return problem(loss, lambda key: nnx.to_pure_dict(nnx.state(init(key))), batch)
