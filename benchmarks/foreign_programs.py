"""Losses as users of JAX write them, for `benchmarks.foreign_steps`: none knows of fnet."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels


class Program(NamedTuple):
    """A loss and what it is called with.

    Attributes:
      loss: ``loss(params, batch) -> number`` or ``(number, aux)``.
      params: What is differentiated.
      batch: The rest.
      optimizer: The optimizer of its train step.
      losses: ``losses(params, batch) -> losses [batch]`` if the loss is their mean.
    """

    loss: Callable[..., Any]
    params: Any
    batch: Any
    optimizer: Callable[[], optax.GradientTransformation] = functools.partial(optax.adam, 1e-3)
    losses: Callable[..., Any] | None = None


PROGRAMS: dict[str, Callable[[], Program]] = {}
"""Functions that build the programs, by name."""

DOUBLE = {"double precision"}
"""Programs that need ``jax_enable_x64``."""


def _program(name: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    def register(build: Callable[[], Program]) -> Callable[[], Program]:
        PROGRAMS[name] = build
        return build

    return register


def _of_examples(losses: Callable[..., Any], params: Any, batch: Any, **more: Any) -> Program:
    """A program whose loss is the mean over examples."""
    return Program(lambda p, b: losses(p, b).mean(), params, batch, losses=losses, **more)


def _normal(seed: Any, *shape: int) -> Array:
    return jnp.asarray(
        np.random.default_rng(jax.tree.leaves(seed)).standard_normal(shape), jnp.float32
    )


def _labels(seed: Any, most: int, *shape: int) -> Array:
    return jnp.asarray(
        np.random.default_rng(jax.tree.leaves(seed)).integers(0, most, shape), jnp.int32
    )


def _dense(seed: Any, *widths: int) -> list[Any]:
    """Weights and biases of a multilayer perceptron."""
    return [
        {"w": _normal([seed, i], a, b) / a**0.5, "b": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(widths))
    ]


def _mlp(layers: Any, x: Array, activation: Callable[[Array], Array] = jax.nn.gelu) -> Array:
    for layer in layers[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def _residual(layers: Any, x: Array) -> Array:
    for layer in layers:
        x = x + jax.nn.gelu(_norm(x) @ layer["w"] + layer["b"])
    return x


def _norm(x: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)


def _unit(x: Array) -> Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _tower(seed: Any, inputs: int, width: int, depth: int) -> Any:
    return {
        "in": _dense([seed, 0], inputs, width),
        "blocks": _dense([seed, 1], *[width] * (depth + 1)),
    }


def _encode(tower: Any, x: Array) -> Array:
    return _residual(tower["blocks"], _mlp(tower["in"], x))


def _block(seed: Any, width: int, context: int = 0) -> Any:
    names = ("q", "k", "v", "o") + (("cq", "ck", "cv", "co") if context else ())
    weights = {n: _normal([seed, i], width, width) / width**0.5 for i, n in enumerate(names)}
    return weights | {"mlp": _dense([seed, 99], width, 4 * width, width)}


def _attend(q: Array, k: Array, v: Array, heads: int, causal: bool = False) -> Array:
    def split(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], heads, -1)

    scores = jnp.einsum("bqhd,bkhd->bhqk", split(q), split(k)) / (q.shape[-1] // heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), split(v))
    return mixed.reshape(*q.shape)


def _transform(block: Any, x: Array, causal: bool = False, context: Array | None = None) -> Array:
    h = _norm(x)
    x = x + _attend(h @ block["q"], h @ block["k"], h @ block["v"], 4, causal) @ block["o"]
    if context is not None:
        h = _norm(x)
        mixed = _attend(h @ block["cq"], context @ block["ck"], context @ block["cv"], 4)
        x = x + mixed @ block["co"]
    return x + _mlp(block["mlp"], _norm(x))


# Losses that couple their batch.


@_program("CLIP")
def clip() -> Program:
    """Two towers, a matrix of similarities and a learned scale."""

    def loss(params: Any, batch: Any) -> Array:
        image, text = (_unit(_encode(params[k], batch[k])) for k in ("image", "text"))
        scores = jnp.exp(params["scale"]) * image @ text.T
        labels = jnp.arange(len(scores))
        return (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)).mean() / 2

    params = {"image": _tower(1, 128, 64, 6), "text": _tower(2, 96, 64, 6), "scale": jnp.log(20.0)}
    return Program(loss, params, {"image": _normal(3, 768, 128), "text": _normal(4, 768, 96)})


@_program("SimCLR")
def simclr() -> Program:
    """Two views in one array, each against all others."""

    def loss(params: Any, batch: Any) -> Array:
        z = _unit(_encode(params, jnp.concatenate([batch["a"], batch["b"]])))
        scores = z @ z.T / 0.1
        scores = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, scores)
        return cross_entropy(scores, jnp.roll(jnp.arange(len(z)), len(z) // 2)).mean()

    return Program(loss, _tower(1, 96, 64, 6), {"a": _normal(2, 384, 96), "b": _normal(3, 384, 96)})


@_program("PPO, normalized advantages")
def ppo() -> Program:
    """The clipped objective of a policy and a value."""

    def loss(params: Any, batch: Any) -> Array:
        h = _encode(params["trunk"], batch["obs"])
        logits, value = _mlp(params["policy"], h), _mlp(params["value"], h)[:, 0]
        advantage = batch["returns"] - jax.lax.stop_gradient(value)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        log_prob = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_prob, batch["action"][:, None], 1)[:, 0]
        ratio = jnp.exp(chosen - batch["log_prob"])
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        entropy = -(jnp.exp(log_prob) * log_prob).sum(-1).mean()
        return -gain + 0.5 * jnp.square(value - batch["returns"]).mean() - 0.01 * entropy

    params = {"trunk": _tower(1, 32, 64, 6), "policy": _dense(2, 64, 8), "value": _dense(3, 64, 1)}
    batch = {
        "obs": _normal(4, 4096, 32),
        "action": _labels(5, 8, 4096),
        "log_prob": -2 + 0.1 * _normal(6, 4096),
        "returns": _normal(7, 4096),
    }
    return Program(loss, params, batch)


@_program("batch norm by hand")
def batch_norm() -> Program:
    """Statistics of the batch between dense layers."""

    def loss(params: Any, batch: Any) -> Array:
        x = batch["x"]
        for layer in params[:-1]:
            x = x @ layer["w"] + layer["b"]
            x = jax.nn.relu((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5))
        return cross_entropy(_mlp(params[-1:], x), batch["y"]).mean()

    batch = {"x": _normal(1, 4096, 32), "y": _labels(2, 10, 4096)}
    return Program(loss, _dense(0, 32, 64, 64, 64, 64, 64, 64, 10), batch)


class _NormedNetwork(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        for channels in (16, 16, 32, 32):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(channels, (3, 3))(x)))
        return nn.Dense(10)(x.mean((1, 2)))


@_program("flax BatchNorm, returned state")
def flax_batch_norm() -> Program:
    """The running statistics are an auxiliary result."""
    network = _NormedNetwork()
    batch = {"x": _normal(1, 32, 24, 24, 3), "y": _labels(2, 10, 32)}
    variables = network.init(jax.random.key(0), batch["x"])
    statistics = variables["batch_stats"]

    def loss(params: Any, batch: Any) -> Any:
        given = {"params": params, "batch_stats": statistics}
        logits, new = network.apply(given, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]).mean(), new["batch_stats"]

    return Program(loss, variables["params"], batch)


@_program("ranking in the batch")
def ranking() -> Program:
    """Each pair of examples in the order of their labels."""

    def loss(params: Any, batch: Any) -> Array:
        score = _mlp(params["head"], _encode(params["trunk"], batch["x"]))[:, 0]
        better = batch["y"][:, None] > batch["y"][None]
        return jnp.where(better, jax.nn.softplus(score[None] - score[:, None]), 0).sum() / (
            better.sum()
        )

    params = {"trunk": _tower(1, 64, 64, 6), "head": _dense(2, 64, 1)}
    return Program(loss, params, {"x": _normal(3, 768, 64), "y": _normal(4, 768)})


@_program("mixture of experts")
def experts() -> Program:
    """Top-2 of 8 experts, and a balance of their loads."""

    def loss(params: Any, batch: Any) -> Array:
        x, balance = batch["x"], jnp.zeros(())
        for layer in params["layers"]:
            gates = jax.nn.softmax(_norm(x) @ layer["gate"])
            top, index = jax.lax.top_k(gates, 2)
            weight = (jax.nn.one_hot(index, 8) * top[..., None]).sum(-2)
            hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, layer["up"]))
            x = x + jnp.einsum("teh,ehd,te->td", hidden, layer["down"], weight)
            load = jax.nn.one_hot(index[:, 0], 8).mean(0)
            balance += 8 * (load * gates.mean(0)).sum()
        return jnp.square(x - batch["y"]).mean() + 0.01 * balance

    layers = [
        {
            "gate": _normal([i, 0], 32, 8),
            "up": _normal([i, 1], 8, 32, 64) / 6,
            "down": _normal([i, 2], 8, 64, 32) / 8,
        }
        for i in range(3)
    ]
    return Program(loss, {"layers": layers}, {"x": _normal(8, 1024, 32), "y": _normal(9, 1024, 32)})


@_program("division by the count of valid tokens")
def valid_tokens() -> Program:
    """A sum over tokens that are not padding, divided by their number."""

    def loss(params: Any, batch: Any) -> Array:
        x = params["table"][batch["token"]]
        for block in params["blocks"]:
            x = _transform(block, x, causal=True)
        losses = cross_entropy(_norm(x) @ params["table"].T, batch["next"])
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    params = {"table": _normal(0, 256, 48), "blocks": [_block(i, 48) for i in (1, 2)]}
    mask = (jnp.arange(64) < _labels(5, 64, 16)[:, None] + 1).astype(jnp.float32)
    tokens = {"token": _labels(3, 256, 16, 64), "next": _labels(4, 256, 16, 64)}
    return Program(loss, params, tokens | {"mask": mask})


@_program("Barlow Twins")
def barlow_twins() -> Program:
    """The cross-correlation of normalized features."""

    def loss(params: Any, batch: Any) -> Array:
        a, b = (_encode(params, batch[k]) for k in "ab")
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in (a, b))
        correlation = a.T @ b / len(a)
        on = jnp.square(jnp.diag(correlation) - 1).sum()
        off = jnp.square(correlation).sum() - jnp.square(jnp.diag(correlation)).sum()
        return on + 0.005 * off

    batch = {"a": _normal(2, 1024, 64), "b": _normal(3, 1024, 64)}
    return Program(loss, _tower(1, 64, 64, 6), batch)


@_program("contrastive, a temperature to learn")
def contrastive() -> Program:
    """Similarities with a bank of other examples' features."""

    def loss(params: Any, batch: Any) -> Array:
        z = _unit(_encode(params["tower"], batch["x"]))
        own = (z * batch["positive"]).sum(-1, keepdims=True)
        scores = jnp.concatenate([own, z @ batch["bank"].T], -1) / jax.nn.softplus(params["t"])
        return -jax.nn.log_softmax(scores)[:, 0].mean()

    batch = {"x": _normal(2, 512, 64), "positive": _unit(_normal(3, 512, 64))}
    batch["bank"] = _unit(_normal(4, 2048, 64))
    return Program(loss, {"tower": _tower(1, 64, 64, 4), "t": jnp.zeros(())}, batch)


@_program("triplets, hardest in the batch")
def triplets() -> Program:
    """Distances of all pairs, the farthest positive and the nearest negative."""

    def loss(params: Any, batch: Any) -> Array:
        z = _unit(_encode(params, batch["x"]))
        distance = jnp.sqrt(jnp.maximum(2 - 2 * z @ z.T, 1e-6))
        same = batch["y"][:, None] == batch["y"]
        farthest = jnp.where(same, distance, 0).max(1)
        nearest = jnp.where(same, jnp.inf, distance).min(1)
        return jax.nn.relu(farthest - nearest + 0.2).mean()

    return Program(loss, _tower(1, 64, 64, 6), {"x": _normal(2, 768, 64), "y": _labels(3, 32, 768)})


@_program("GAN, both losses")
def gan() -> Program:
    """The generator's loss, and the discriminator's with stopped samples."""

    def loss(params: Any, batch: Any) -> Array:
        fake = _mlp(params["g"], batch["z"])
        stopped = jax.lax.stop_gradient(params["d"])
        generator = jax.nn.softplus(-_mlp(stopped, fake)).mean()
        on_fake = jax.nn.softplus(_mlp(params["d"], jax.lax.stop_gradient(fake))).mean()
        return generator + on_fake + jax.nn.softplus(-_mlp(params["d"], batch["x"])).mean()

    params = {"g": _dense(1, 16, 64, 64, 64, 32), "d": _dense(2, 32, 64, 64, 64, 1)}
    return Program(loss, params, {"z": _normal(3, 4096, 16), "x": _normal(4, 4096, 32)})


# Losses of points, rays, edges and time.


@_program("physics-informed network")
def physics() -> Program:
    """Residuals of a heat equation, with derivatives by JAX."""

    def u(params: Any, t: Array, x: Array) -> Array:
        return _mlp(params, jnp.stack([t, x]), jnp.tanh)[0]

    def residual(params: Any, point: Array) -> Array:
        t, x = point
        u_t = jax.grad(u, 1)(params, t, x)
        return u_t - 0.1 * jax.grad(jax.grad(u, 2), 2)(params, t, x)

    def loss(params: Any, batch: Any) -> Array:
        inside = jax.vmap(lambda p: residual(params, p))(batch["inside"])
        start = jax.vmap(lambda x: u(params, 0.0 * x, x))(batch["start"])
        return jnp.square(inside).mean() + jnp.square(start - jnp.sin(batch["start"])).mean()

    batch = {"inside": _normal(1, 2048, 2), "start": _normal(2, 256)}
    return Program(loss, _dense(0, 2, 32, 32, 32, 1), batch)


@_program("LSTM, 512 steps")
def lstm() -> Program:
    """A scan over time."""

    def loss(params: Any, batch: Any) -> Array:
        def cell(carry: Any, x: Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ params["w"] + params["b"], 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((len(batch["y"]), 32))
        _, hs = jax.lax.scan(cell, (zeros, zeros), batch["x"])
        return cross_entropy(hs.mean(0) @ params["out"], batch["y"]).mean()

    params = {"w": _normal(0, 48, 128) / 7, "b": jnp.zeros(128), "out": _normal(1, 32, 10) / 6}
    return Program(loss, params, {"x": _normal(2, 512, 16, 16), "y": _labels(3, 10, 16)})


@_program("GPT, 12 scanned layers")
def scanned_gpt() -> Program:
    """Stacked parameters, one block in a scan."""

    def losses(params: Any, batch: Any) -> Array:
        x = params["table"][batch["token"]]
        x, _ = jax.lax.scan(lambda x, b: (_transform(b, x, causal=True), None), x, params["blocks"])
        return cross_entropy(_norm(x) @ params["table"].T, batch["next"]).mean(-1)

    blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[_block(i, 32) for i in range(12)])
    batch = {"token": _labels(3, 256, 8, 64), "next": _labels(4, 256, 8, 64)}
    return _of_examples(losses, {"table": _normal(0, 256, 32), "blocks": blocks}, batch)


@_program("GPT, dropout")
def dropout_gpt() -> Program:
    """A loop over layers in Python, and masks of the whole batch."""

    def drop(key: Array, x: Array) -> Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def loss(params: Any, batch: Any) -> Array:
        key = jax.random.key(batch["seed"])
        x = drop(key, params["table"][batch["token"]])
        for i, block in enumerate(params["blocks"]):
            x = drop(jax.random.fold_in(key, i), _transform(block, x, causal=True))
        return cross_entropy(_norm(x) @ params["table"].T, batch["next"]).mean()

    params = {"table": _normal(0, 256, 48), "blocks": [_block(i, 48) for i in range(3)]}
    batch = {"token": _labels(3, 256, 16, 64), "next": _labels(4, 256, 16, 64)}
    return Program(loss, params, batch | {"seed": jnp.int32(7)})


@_program("DiT")
def dit() -> Program:
    """A transformer of patches, conditioned on time, that predicts noise."""

    def loss(params: Any, batch: Any) -> Array:
        t = batch["t"][:, None, None]
        noisy = jnp.cos(t) * batch["x"] + jnp.sin(t) * batch["noise"]
        h = noisy @ params["in"]
        waves = jnp.exp(-jnp.arange(24) / 4) * batch["t"][:, None]
        condition = _mlp(params["time"], jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1))
        for block in params["blocks"]:
            shift, scale = jnp.split((jax.nn.silu(condition) @ block["ada"])[:, None], 2, -1)
            h = _transform(block, h * (1 + scale) + shift)
        return jnp.square(_norm(h) @ params["out"] - batch["noise"]).mean()

    blocks = [_block(i, 48) | {"ada": _normal([i, 50], 48, 96) / 50} for i in range(3)]
    params = {"in": _normal(4, 16, 48) / 4, "out": _normal(5, 48, 16) / 7, "blocks": blocks}
    params["time"] = _dense(6, 48, 48, 48)
    batch = {"x": _normal(7, 16, 64, 16), "noise": _normal(8, 16, 64, 16)}
    return Program(loss, params, batch | {"t": jnp.abs(_normal(9, 16))})


@_program("encoder and decoder")
def translation() -> Program:
    """Translation with cross-attention and masked labels."""

    def loss(params: Any, batch: Any) -> Array:
        context = params["table"][batch["source"]]
        for block in params["encoder"]:
            context = _transform(block, context)
        x = params["table"][batch["target"]]
        for block in params["decoder"]:
            x = _transform(block, x, True, _norm(context))
        logits = _norm(x) @ params["table"].T
        labels = optax.smooth_labels(jax.nn.one_hot(batch["next"], 256), 0.1)
        weight = (batch["next"] > 0).astype(jnp.float32)
        return (optax.softmax_cross_entropy(logits, labels) * weight).sum() / weight.sum()

    params = {
        "table": _normal(0, 256, 48),
        "encoder": [_block(i, 48) for i in (1, 2)],
        "decoder": [_block(i, 48, 1) for i in (3, 4)],
    }
    names = ("source", "target", "next")
    return Program(loss, params, {n: _labels(i, 256, 16, 48) for i, n in enumerate(names)})


@_program("NeRF")
def nerf() -> Program:
    """Rays of samples, composited by cumulative products."""

    def loss(params: Any, batch: Any) -> Array:
        depth = jnp.linspace(0.1, 2, 32)
        x = batch["origin"][:, None] + depth[:, None] * batch["direction"][:, None]
        waves = x[..., None] * 2.0 ** jnp.arange(4)
        features = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
        raw = _mlp(params, features.reshape(*x.shape[:2], -1), jax.nn.relu)
        alpha = 1 - jnp.exp(-jax.nn.relu(raw[..., 3]) * 0.06)
        through = jnp.cumprod(1 - alpha + 1e-6, -1) / (1 - alpha + 1e-6)
        color = ((alpha * through)[..., None] * jax.nn.sigmoid(raw[..., :3])).sum(1)
        return jnp.square(color - batch["color"]).mean()

    batch = {"origin": _normal(1, 256, 3), "direction": _unit(_normal(2, 256, 3))}
    return Program(
        loss, _dense(0, 24, 48, 48, 48, 4), batch | {"color": jnp.abs(_normal(3, 256, 3))}
    )


@_program("neural ODE, Runge-Kutta")
def neural_ode() -> Program:
    """Classic fourth-order steps in a scan."""

    def loss(params: Any, batch: Any) -> Array:
        def f(y: Array) -> Array:
            return _mlp(params, y, jnp.tanh)

        def step(y: Array, _: Any) -> Any:
            h = 0.05
            a = f(y)
            b = f(y + h / 2 * a)
            c = f(y + h / 2 * b)
            return y + h / 6 * (a + 2 * b + 2 * c + f(y + h * c)), None

        y, _ = jax.lax.scan(step, batch["x"], length=64)
        return jnp.square(y - batch["y"]).mean()

    return Program(
        loss, _dense(0, 4, 32, 32, 4), {"x": _normal(1, 256, 4), "y": _normal(2, 256, 4)}
    )


@_program("graph network")
def graph_network() -> Program:
    """Messages of edges, summed at their receivers."""

    def loss(params: Any, batch: Any) -> Array:
        h = _mlp(params["in"], batch["nodes"])
        for layer in params["layers"]:
            pair = jnp.concatenate([h[batch["from"]], h[batch["to"]]], -1)
            message = _mlp(layer["edge"], pair)
            received = jax.ops.segment_sum(message, batch["to"], len(h))
            h = h + _mlp(layer["node"], jnp.concatenate([h, received], -1))
        return jnp.square(_mlp(params["out"], h) - batch["target"]).mean()

    layers = [
        {"edge": _dense([i, 0], 64, 64, 32), "node": _dense([i, 1], 64, 32, 32)} for i in range(3)
    ]
    params = {"in": _dense(5, 8, 32), "layers": layers, "out": _dense(6, 32, 1)}
    batch = {"nodes": _normal(7, 256, 8), "target": _normal(8, 256, 1)}
    return Program(
        loss, params, batch | {"from": _labels(9, 256, 4096), "to": _labels(10, 256, 4096)}
    )


@_program("fixed point, a rule of its own")
def fixed_point() -> Program:
    """A deep equilibrium model: the backward pass solves for its own fixed point."""

    def f(params: Any, x: Array, z: Array) -> Array:
        h = jnp.tanh(z @ params["a"] + x @ params["b"])
        return jnp.tanh(h @ params["c"] + x)

    def solve(g: Callable[[Array], Array], z: Array) -> Array:
        return jax.lax.fori_loop(0, 24, lambda _, z: g(z), z)

    @jax.custom_vjp
    def equilibrium(params: Any, x: Array) -> Array:
        return solve(lambda z: f(params, x, z), jnp.zeros_like(x))

    def forward(params: Any, x: Array) -> Any:
        z = equilibrium(params, x)
        return z, (params, x, z)

    def backward(saved: Any, cotangent: Array) -> Any:
        params, x, z = saved
        _, of_z = jax.vjp(lambda z: f(params, x, z), z)
        w = solve(lambda w: cotangent + of_z(w)[0], cotangent)
        return jax.vjp(lambda params, x: f(params, x, z), params, x)[1](w)

    equilibrium.defvjp(forward, backward)

    def loss(params: Any, batch: Any) -> Array:
        z = equilibrium(params["f"], _mlp(params["in"], batch["x"]))
        return cross_entropy(_mlp(params["out"], z), batch["y"]).mean()

    small = {
        "a": _normal(0, 64, 64) / 32,
        "b": _normal(1, 64, 64) / 16,
        "c": _normal(2, 64, 64) / 32,
    }
    params = {"f": small, "in": _dense(3, 32, 128, 64), "out": _dense(4, 64, 128, 10)}
    return Program(loss, params, {"x": _normal(5, 4096, 32), "y": _labels(6, 10, 4096)})


@_program("normalizing flow")
def flow() -> Program:
    """Affine couplings and their log determinants."""

    def losses(params: Any, batch: Any) -> Array:
        x, log_det = batch["x"], jnp.zeros(len(batch["x"]))
        for net in params:
            a, b = jnp.split(x, 2, -1)
            scale, shift = jnp.split(_mlp(net, a), 2, -1)
            scale = jnp.tanh(scale)
            x = jnp.concatenate([b * jnp.exp(scale) + shift, a], -1)
            log_det += scale.sum(-1)
        return 0.5 * jnp.square(x).sum(-1) - log_det

    params = [_dense(i, 16, 64, 64, 32) for i in range(5)]
    return _of_examples(losses, params, {"x": _normal(9, 4096, 32)})


def _convolve(x: Array, w: Array, stride: int = 1) -> Array:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _kernel(seed: Any, size: int, a: int, b: int) -> Array:
    return _normal(seed, size, size, a, b) / (size * a**0.5)


def _group_norm(x: Array) -> Array:
    return _norm(x.reshape(*x.shape[:3], 4, -1)).reshape(x.shape)


@_program("U-Net")
def unet() -> Program:
    """Segmentation: down and up again, with skip connections."""

    def loss(params: Any, batch: Any) -> Array:
        x, skips = _convolve(batch["x"], params["in"]), []
        for w, down in params["down"]:
            x = jax.nn.silu(_group_norm(_convolve(x, w)))
            skips.append(x)
            x = _convolve(x, down, 2)
        for w, up in params["up"]:
            x = jax.image.resize(
                x, (x.shape[0], *(2 * s for s in x.shape[1:3]), x.shape[3]), "nearest"
            )
            x = jnp.concatenate([_convolve(x, up), skips.pop()], -1)
            x = jax.nn.silu(_group_norm(_convolve(x, w)))
        return cross_entropy(_convolve(x, params["out"]), batch["y"]).mean()

    params = {
        "in": _kernel(0, 3, 3, 16),
        "down": [(_kernel([1, c], 3, c, c), _kernel([2, c], 3, c, 32)) for c in (16, 32)],
        "up": [(_kernel([3, c], 3, 2 * c, c), _kernel([4, c], 3, 32, c)) for c in (32, 16)],
        "out": _kernel(9, 1, 16, 5),
    }
    return Program(loss, params, {"x": _normal(10, 8, 32, 32, 3), "y": _labels(11, 5, 8, 32, 32)})


@_program("ResNet")
def resnet() -> Program:
    """Residual blocks of convolutions, group norm in place of batch norm."""

    def losses(params: Any, batch: Any) -> Array:
        x = _convolve(batch["x"], params["in"])
        for a, b in params["blocks"]:
            h = _convolve(jax.nn.relu(_group_norm(x)), a)
            x = x + _convolve(jax.nn.relu(_group_norm(h)), b)
        return cross_entropy(_mlp(params["out"], x.mean((1, 2))), batch["y"])

    blocks = [(_kernel([i, 0], 3, 16, 16), _kernel([i, 1], 3, 16, 16) / 4) for i in range(4)]
    params = {"in": _kernel(0, 3, 3, 16), "blocks": blocks, "out": _dense(1, 16, 10)}
    return _of_examples(losses, params, {"x": _normal(2, 16, 24, 24, 3), "y": _labels(3, 10, 16)})


@_program("ViT")
def vit() -> Program:
    """Patches, a class token and learned positions."""

    def losses(params: Any, batch: Any) -> Array:
        n = len(batch["x"])
        patches = batch["x"].reshape(n, 8, 4, 8, 4, 3).transpose(0, 1, 3, 2, 4, 5)
        x = patches.reshape(n, 64, 48) @ params["in"]
        first = jnp.broadcast_to(params["class"], (n, 1, 48))
        x = jnp.concatenate([first, x], 1) + params["positions"]
        for block in params["blocks"]:
            x = _transform(block, x)
        return cross_entropy(_mlp(params["out"], _norm(x[:, 0])), batch["y"])

    params = {
        "in": _normal(0, 48, 48) / 7,
        "class": jnp.zeros((1, 1, 48)),
        "positions": _normal(1, 65, 48) / 50,
        "blocks": [_block(i, 48) for i in range(3)],
        "out": _dense(5, 48, 10),
    }
    return _of_examples(losses, params, {"x": _normal(2, 16, 32, 32, 3), "y": _labels(3, 10, 16)})


@_program("selective scan")
def selective_scan() -> Program:
    """A state space model whose decay depends on the input, by an associative scan."""

    def losses(params: Any, batch: Any) -> Array:
        x = params["table"][batch["token"]]
        for layer in params["layers"]:
            u = _norm(x) @ layer["in"]
            step = jax.nn.softplus(u @ layer["step"])
            b, c = u @ layer["b"], u @ layer["c"]
            decay = jnp.exp(-step[..., None] * jnp.exp(layer["a"]))
            drive = (step * u)[..., None] * b[..., None, :]
            _, h = jax.lax.associative_scan(
                lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (decay, drive), axis=1
            )
            x = x + ((h * c[..., None, :]).sum(-1) * jax.nn.silu(u)) @ layer["out"]
        return cross_entropy(_norm(x) @ params["table"].T, batch["next"]).mean(-1)

    def layer(i: int) -> Any:
        names, shapes = ("in", "step", "out"), (32, 32)
        square = {n: _normal([i, k], *shapes) / 6 for k, n in enumerate(names)}
        return square | {
            "b": _normal([i, 4], 32, 4),
            "c": _normal([i, 5], 32, 4),
            "a": jnp.zeros(4),
        }

    params = {"table": _normal(0, 128, 32), "layers": [layer(i) for i in (1, 2)]}
    return _of_examples(
        losses, params, {"token": _labels(3, 128, 8, 64), "next": _labels(4, 128, 8, 64)}
    )


@_program("VAE")
def vae() -> Program:
    """Reparametrized samples and a divergence."""

    def losses(params: Any, batch: Any) -> Array:
        mean, log_var = jnp.split(_mlp(params["encoder"], batch["x"]), 2, -1)
        noise = jax.random.normal(jax.random.key(0), mean.shape)
        logits = _mlp(params["decoder"], mean + jnp.exp(log_var / 2) * noise)
        likelihood = optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(-1)
        return likelihood - 0.5 * (1 + log_var - mean**2 - jnp.exp(log_var)).sum(-1)

    params = {"encoder": _dense(0, 64, 96, 96, 32), "decoder": _dense(1, 16, 96, 96, 64)}
    return _of_examples(losses, params, {"x": jax.nn.sigmoid(_normal(2, 4096, 64))})


@_program("MAML")
def maml() -> Program:
    """The loss after two gradient steps on each task."""

    def of_task(params: Any, task: Any) -> Array:
        def inner(params: Any) -> Array:
            return jnp.square(_mlp(params, task["x"], jnp.tanh) - task["y"]).mean()

        fast = params
        for _ in range(2):
            fast = jax.tree.map(lambda p, g: p - 0.1 * g, fast, jax.grad(inner)(fast))
        return jnp.square(_mlp(fast, task["u"], jnp.tanh) - task["v"]).mean()

    def losses(params: Any, batch: Any) -> Array:
        return jax.vmap(lambda task: of_task(params, task))(batch)

    batch = {n: _normal(i, 64, 32, 1) for i, n in enumerate("xyuv")}
    return _of_examples(losses, _dense(9, 1, 32, 32, 1), batch)


@_program("DQN")
def dqn() -> Program:
    """A double Q loss with a frozen network in the batch."""

    def loss(params: Any, batch: Any) -> Array:
        q = _mlp(params, batch["obs"], jax.nn.relu)
        chosen = jnp.take_along_axis(q, batch["action"][:, None], 1)[:, 0]
        best = jnp.argmax(_mlp(params, batch["next"], jax.nn.relu), -1)
        later = _mlp(batch["frozen"], batch["next"], jax.nn.relu)
        value = jnp.take_along_axis(later, best[:, None], 1)[:, 0]
        target = jax.lax.stop_gradient(batch["reward"] + 0.99 * value)
        return optax.huber_loss(chosen, target).mean()

    batch: Any = {
        "obs": _normal(2, 4096, 32),
        "next": _normal(3, 4096, 32),
        "reward": _normal(4, 4096),
    }
    batch |= {"action": _labels(5, 6, 4096), "frozen": _dense(1, 32, 96, 96, 96, 6)}
    return Program(loss, _dense(0, 32, 96, 96, 96, 6), batch)


@_program("matrix factorization")
def factorization() -> Program:
    """Tables of users and items, and their biases."""

    def losses(params: Any, batch: Any) -> Array:
        u, v = params["user"][batch["user"]], params["item"][batch["item"]]
        bias = params["user_bias"][batch["user"]] + params["item_bias"][batch["item"]]
        deep = _mlp(params["mlp"], jnp.concatenate([u, v], -1))[:, 0]
        return jnp.square((u * v).sum(-1) + bias + deep - batch["rating"])

    params: Any = {"user": _normal(0, 512, 32) / 6, "item": _normal(1, 256, 32) / 6}
    params |= {"user_bias": jnp.zeros(512), "item_bias": jnp.zeros(256)}
    params["mlp"] = _dense(2, 64, 64, 64, 1)
    batch = {"user": _labels(3, 512, 8192), "item": _labels(4, 256, 8192)}
    return _of_examples(losses, params, batch | {"rating": _normal(5, 8192)})


@_program("GRU with attention")
def gru_attention() -> Program:
    """Sequence to sequence: each step of the decoder attends to the encoder."""

    def cell(params: Any, h: Array, x: Array) -> Array:
        r, z = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ params["gates"]), 2, -1)
        return (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h], -1) @ params["new"])

    def loss(params: Any, batch: Any) -> Array:
        def encode(h: Array, x: Array) -> Any:
            h = cell(params["encoder"], h, x)
            return h, h

        def decode(h: Array, x: Array) -> Any:
            weights = jax.nn.softmax(jnp.einsum("bd,sbd->bs", h @ params["query"], memory))
            context = jnp.einsum("bs,sbd->bd", weights, memory)
            h = cell(params["decoder"], h, jnp.concatenate([x, context], -1))
            return h, h

        source, target = (params["table"][batch[n].T] for n in ("source", "target"))
        h, memory = jax.lax.scan(encode, jnp.zeros((16, 32)), source)
        _, hs = jax.lax.scan(decode, h, target)
        return cross_entropy(hs @ params["out"], batch["next"].T).mean()

    params = {
        "encoder": {"gates": _normal(0, 64, 64) / 8, "new": _normal(1, 64, 32) / 8},
        "decoder": {"gates": _normal(2, 96, 64) / 9, "new": _normal(3, 96, 32) / 9},
        "query": _normal(4, 32, 32) / 6,
        "table": _normal(5, 64, 32),
        "out": _normal(6, 32, 64) / 6,
    }
    names = ("source", "target", "next")
    return Program(loss, params, {n: _labels(i, 64, 16, 64) for i, n in enumerate(names)})


@_program("diffusion, keys in the batch")
def diffusion() -> Program:
    """Noise and times are drawn in the loss."""

    def losses(params: Any, batch: Any) -> Array:
        time_key, noise_key = jax.random.split(batch["key"][0])
        x = batch["x"]
        t = jax.random.uniform(time_key, (len(x), 1))
        noise = jax.random.normal(noise_key, x.shape)
        noisy = jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise
        predicted = _mlp(params["out"], _encode(params["in"], jnp.concatenate([noisy, t], -1)))
        return jnp.square(predicted - noise).mean(-1)

    params = {"in": _tower(0, 33, 64, 6), "out": _dense(1, 64, 32)}
    batch = {"x": _normal(2, 4096, 32), "key": jax.random.split(jax.random.key(3), 4096)}
    return _of_examples(losses, params, batch)


# What JAX allows and planners forget.


def _classifier(width: int = 64, depth: int = 6, rows: int = 4096) -> tuple[Any, Any]:
    params = {"trunk": _tower(0, 32, width, depth), "head": _dense(1, width, 10)}
    return params, {"x": _normal(2, rows, 32), "y": _labels(3, 10, rows)}


def _classify(params: Any, batch: Any) -> Array:
    logits = _mlp(params["head"], _encode(params["trunk"], batch["x"]))
    return cross_entropy(logits, batch["y"])


@_program("debug print")
def debug_print() -> Program:
    """`jax.debug.print` of the mean, in the middle and at the end."""

    def loss(params: Any, batch: Any) -> Array:
        h = _encode(params["trunk"], batch["x"])
        jax.debug.print("mean {m}", m=h.mean())
        value = cross_entropy(_mlp(params["head"], h), batch["y"]).mean()
        jax.debug.print("loss {v}", v=value)
        return value

    return Program(loss, *_classifier())


@_program("io_callback")
def io_callback() -> Program:
    """An ordered callback that records the loss."""

    def loss(params: Any, batch: Any) -> Array:
        value = _classify(params, batch).mean()
        jax.experimental.io_callback(
            lambda v: None, None, jax.lax.stop_gradient(value), ordered=True
        )
        return value

    return Program(loss, *_classifier())


@_program("complex numbers")
def complex_numbers() -> Program:
    """A Fourier neural operator."""

    def losses(params: Any, batch: Any) -> Array:
        h = batch["x"] @ params["in"]
        for layer in params["layers"]:
            modes = jnp.fft.rfft(h, axis=1)[:, :16]
            weight = layer["re"] + 1j * layer["im"]
            mixed = jnp.einsum("bkc,kcd->bkd", modes, weight)
            h = jax.nn.gelu(jnp.fft.irfft(mixed, n=64, axis=1) + h @ layer["w"])
        return jnp.square(h @ params["out"] - batch["y"]).mean((1, 2))

    layers = [
        {"re": _normal([i, 0], 16, 16, 16) / 16, "im": _normal([i, 1], 16, 16, 16) / 16}
        | {"w": _normal([i, 2], 16, 16) / 4}
        for i in range(4)
    ]
    params = {"in": _normal(5, 1, 16), "layers": layers, "out": _normal(6, 16, 1) / 4}
    return _of_examples(losses, params, {"x": _normal(7, 64, 64, 1), "y": _normal(8, 64, 64, 1)})


@_program("2,039 rows")
def prime_rows() -> Program:
    """A batch that no number divides."""
    return _of_examples(_classify, *_classifier(rows=2039))


@_program("a number in the batch")
def scalar_leaf() -> Program:
    """A weight of the loss is a leaf of the batch."""

    def loss(params: Any, batch: Any) -> Array:
        return batch["weight"] * _classify(params, batch).mean()

    params, batch = _classifier()
    return Program(loss, params, batch | {"weight": jnp.float32(0.5)})


@_program("bfloat16 parameters")
def bfloat16() -> Program:
    """Everything in bfloat16 but the loss."""

    def losses(params: Any, batch: Any) -> Array:
        h = _encode(params["trunk"], batch["x"])
        return cross_entropy(_mlp(params["head"], h).astype(jnp.float32), batch["y"])

    params, batch = _classifier()
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    return _of_examples(losses, params, batch | {"x": batch["x"].astype(jnp.bfloat16)})


@_program("double precision")
def double() -> Program:
    """``jax_enable_x64`` and float64."""
    params, batch = jax.tree.map(
        lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, _classifier(rows=2048)
    )
    return _of_examples(_classify, params, batch)


@_program("shared parameters")
def shared() -> Program:
    """One block four times, and a table that is the head, too."""

    def losses(params: Any, batch: Any) -> Array:
        x = params["table"][batch["token"]]
        for _ in range(4):
            x = _transform(params["block"], x, causal=True)
        return cross_entropy(_norm(x) @ params["table"].T, batch["next"]).mean(-1)

    params = {"table": _normal(0, 128, 48), "block": _block(1, 48)}
    return _of_examples(
        losses, params, {"token": _labels(3, 128, 8, 64), "next": _labels(4, 128, 8, 64)}
    )


@_program("integers among the parameters")
def integer_params() -> Program:
    """A permutation of the inputs and a counter are leaves of the parameters."""

    def loss(params: Any, batch: Any) -> Array:
        x = batch["x"][:, params["order"]] * (1 + 0.0 * params["count"])
        return _classify(params, batch | {"x": x}).mean()

    params, batch = _classifier()
    order = jnp.asarray(np.random.default_rng(9).permutation(32), jnp.int32)
    return Program(loss, params | {"order": order, "count": jnp.int32(3)}, batch)


@_program("while loop in a row")
def newton() -> Program:
    """Each row is projected by iterations until all converge, without a gradient of the loop."""

    def loss(params: Any, batch: Any) -> Array:
        h = _encode(params["trunk"], batch["x"])

        def step(state: Any) -> Any:
            y, n = state
            return y - (y**3 - stopped) / (3 * y**2 + 1), n + 1

        stopped = jax.lax.stop_gradient(jnp.abs(h).sum(-1))
        root, _ = jax.lax.while_loop(
            lambda s: (jnp.abs(s[0] ** 3 - stopped).max() > 1e-3) & (s[1] < 30),
            step,
            (jnp.ones(len(h)), 0),
        )
        return (cross_entropy(_mlp(params["head"], h), batch["y"]) * root).mean()

    return Program(loss, *_classifier())


@_program("lax.map over rows")
def mapped() -> Program:
    """The user already maps over examples."""

    def losses(params: Any, batch: Any) -> Array:
        def one(row: Any) -> Array:
            return _classify(params, jax.tree.map(lambda a: a[None], row))[0]

        return jax.lax.map(one, batch)

    return _of_examples(losses, *_classifier(rows=1024))


@_program("Adafactor")
def adafactor() -> Program:
    """The optimizer's state is smaller than the parameters."""
    optimizer = functools.partial(optax.adafactor, 1e-3)
    return _of_examples(_classify, *_classifier(depth=4), optimizer=optimizer)


@_program("Lion")
def lion() -> Program:
    """An update that reads the moment which it replaces."""
    optimizer = functools.partial(optax.lion, 1e-4)
    return _of_examples(_classify, *_classifier(depth=4), optimizer=optimizer)
