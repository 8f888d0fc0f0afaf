"""Memory plans of networks in flax and Equinox, compared with hand-placed `jax.checkpoint`.

    python -m benchmarks.planning [--gemma FLAX/examples/gemma]

A ResNet-50 (flax linen, 224 x 224), a transformer of unrolled blocks (Equinox), a diffusion U-Net
(flax nnx) and gemma (flax nnx; from a checkout of google/flax) are planned with
`fnet.plan_step` at 70, 50 and 35 % of the peak of their plain step. Microbatches are not allowed.
Then each network is compiled with ``jax.checkpoint`` around every block, around every second
block, and around every block with saved matrix products. A plan gets the same bytes as each of
these. FLOPs are counted in the traced step (`fnet.memory.estimate_cost`), peaks in the compiled
step. Nothing is run.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import in_fresh_process, markdown_table
from benchmarks.networks import image_loss
from benchmarks.resnet50_step import Bottleneck, ResNet50, flax_layer
from fnet.memory import BudgetError, Plan, estimate_cost

SHARES = {0.7: "<= 1.05", 0.5: "<= 1.15", 0.35: "<= 1.35"}
DOTS = jax.checkpoint_policies.dots_saveable

Wrap = Callable[[Callable[..., Any], int], Callable[..., Any]]
"""``wrap(block, number) -> block``, perhaps under `jax.checkpoint`."""


class Problem(NamedTuple):
    """A train step and the shapes of its arguments."""

    step: fnet.step.Step
    state: fnet.TrainState
    batch: dict[str, Any]


# Hand-placed checkpoints, by name.
HAND: dict[str, Wrap] = {
    "none": lambda block, number: block,
    "every block": lambda block, number: jax.checkpoint(block),
    "every second block": lambda block, number: jax.checkpoint(block) if number % 2 else block,
    "every block, dots saved": lambda block, number: jax.checkpoint(block, policy=DOTS),
}


def problem(loss: Any, params: Any, batch: Any, model_state: Any = None) -> Problem:
    """Make a train step with Adam from a loss and shapes."""
    optimizer = optax.adamw(1e-4)

    def create(params: Any) -> fnet.TrainState:
        return fnet.TrainState.create(
            params=params, optimizer=optimizer, key=jax.random.key(0), model_state=model_state
        )

    return Problem(fnet.make_step(loss, optimizer), jax.eval_shape(create, params), batch)


def tokens(batch: int, length: int) -> dict[str, Any]:
    """Shapes of a batch of text."""
    shape = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return {"token": shape, "next": shape}


def resnet50(wrap: Wrap, size: int) -> Problem:
    """ResNet-50 of flax linen, batch 8 at 224 x 224."""
    numbers = iter(range(10**9))

    def block(*args: Any) -> nn.Module:
        # ``nn.remat`` of a module is ``jax.checkpoint`` around it.
        number = next(numbers) % 16
        marker = wrap(_marker, number)
        if marker is _marker:
            return Bottleneck(*args)
        policy = DOTS if wrap is HAND["every block, dots saved"] else None
        return nn.remat(Bottleneck, policy=policy)(*args)

    model = flax_layer(ResNet50(nn.relu, cast(Any, block)))
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = jax.eval_shape(
        lambda key: fnet.TrainState.create(model, optimizer, key), jax.random.key(0)
    )
    batch = {
        "image": jax.ShapeDtypeStruct((8, size, size, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((8,), jnp.int32),
    }
    return Problem(fnet.make_step(image_loss(model), optimizer), state, batch)


def _marker(x: Any) -> Any:
    return x


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


def gpt(wrap: Wrap, size: int) -> Problem:
    """Transformer of Equinox: unrolled blocks, width 256, batch 8 of 256 tokens."""
    width, vocabulary, length = 256, 4096, 256

    def init(key: Array) -> Any:
        keys = jax.random.split(key, size + 2)
        blocks = [GptBlock(width, k) for k in keys[2:]]
        embedding = jax.random.normal(keys[0], (vocabulary, width))
        return embedding, blocks, jax.random.normal(keys[1], (width, vocabulary))

    shapes = eqx.filter_eval_shape(init, jax.random.key(0))
    params, static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        embedding, blocks, head = eqx.combine(params, static)
        mask = jnp.tril(jnp.ones((length, length), bool))
        x = embedding[batch["token"]]
        for number, block in enumerate(blocks):
            arrays, rest = eqx.partition(block, eqx.is_array)

            def run(arrays: Any, x: Array, rest: Any = rest) -> Array:
                return jax.vmap(eqx.combine(arrays, rest), (0, None))(x, mask)

            x = wrap(run, number)(arrays, x)
        return fnet.losses.cross_entropy(x @ head, batch["next"]).mean(-1)

    return problem(loss, params, tokens(8, length))


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

    def __call__(self, x: Array, time: Array, wrap: Wrap) -> Array:
        numbers = iter(range(1000))

        def run(block: UNetBlock, x: Array) -> Array:
            graph, params = nnx.split(block)

            def pure(params: Any, x: Array, time: Array) -> Array:
                return nnx.merge(graph, params)(x, time)

            return wrap(pure, next(numbers))(params, x, time)

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


def unet(wrap: Wrap, size: int) -> Problem:
    """Diffusion U-Net of flax nnx, batch 8 at 64 x 64."""
    graph, params = nnx.split(nnx.eval_shape(lambda: UNet((64, 128, 256), nnx.Rngs(0))))

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        noise = jax.random.normal(key, batch["image"].shape)
        mixed = batch["image"] * 0.5 + noise
        got = nnx.merge(graph, params)(mixed, batch["time"], wrap)
        return ((got - noise) ** 2).mean((1, 2, 3))

    batch = {
        "image": jax.ShapeDtypeStruct((8, size, size, 3), jnp.float32),
        "time": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    return problem(loss, nnx.to_pure_dict(params), batch)


def gemma(wrap: Wrap, size: int) -> Problem:
    """Gemma 3 of google/flax examples, width 256, batch 4 of 256 tokens."""
    modules, transformer, transformer_cfg = map(
        importlib.import_module, ("modules", "transformer", "transformer_cfg")
    )
    kinds = (modules.AttentionType.LOCAL_SLIDING,) * 5 + (modules.AttentionType.GLOBAL,)
    config = transformer_cfg.TransformerConfig.gemma3_1b()
    config = dataclasses.replace(
        config,
        num_layers=size,
        num_embed=8192,
        embed_dim=256,
        hidden_dim=1024,
        num_heads=4,
        head_dim=64,
        num_kv_heads=1,
        attention_types=tuple(kinds[i % 6] for i in range(size)),
        sliding_window_size=128,
    )
    model = nnx.eval_shape(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)))
    split: Any = nnx.split
    graph, params, rest = split(model, nnx.Param, ...)
    length = 256

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        model = nnx.merge(graph, params, rest)
        for number, layer in enumerate(model.layers):
            block_graph, block_state = nnx.split(layer)
            model.layers[number] = _Pure(block_graph, block_state, wrap, number)
        rows = batch["token"].shape[0]
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
        logits, _ = model(batch["token"], positions, None, mask)
        return fnet.losses.cross_entropy(logits, batch["next"]).mean(-1)

    return problem(loss, params, tokens(4, length))


class _Pure(nnx.Module):
    """A block as a pure function under ``wrap``."""

    def __init__(self, graph: Any, state: Any, wrap: Wrap, number: int):
        self.graph, self.state = nnx.static(graph), nnx.data(state)
        self.wrap, self.number = nnx.static(wrap), number

    def __call__(self, x: Array, positions: Array, cache: Any, mask: Array, **_: Any) -> Any:
        def pure(state: Any, x: Array) -> Any:
            return nnx.merge(self.graph, state)(x, positions, cache, mask)

        return self.wrap(pure, self.number)(self.state, x)


PROBLEMS: dict[str, tuple[Callable[[Wrap, int], Problem], int]] = {
    "resnet50": (resnet50, 224),
    "gpt": (gpt, 12),
    "unet": (unet, 64),
    "gemma": (gemma, 12),
}


def hand_placed(name: str) -> dict[str, tuple[int, int]]:
    """FLOPs and peak of each hand-placed variant, compiled with the options of a plan."""
    build, size = PROBLEMS[name]
    results = {}
    for variant, wrap in HAND.items():
        p = build(wrap, size)
        flops = estimate_cost(p.step.trace(p.state, p.batch).jaxpr).flops
        peak = fnet.compile_step(p.step, p.state, p.batch).report.peak.total
        results[variant] = (flops, peak)
    return results


def plan(name: str, budget: int) -> dict[str, Any]:
    """Plan in this process; with the seconds and the host memory that it takes."""
    build, size = PROBLEMS[name]
    p = build(HAND["none"], size)
    start = time.perf_counter()
    cpu = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def progress(candidate: Any) -> None:
        print(
            f"{time.perf_counter() - start:.0f} s: {candidate}, "
            f"{candidate.peak.total / budget:.3f} of the budget",
            file=sys.stderr,
        )

    try:
        found: Plan = fnet.plan_step(
            p.step, p.state, p.batch, budget, microbatch_choices=(1,), progress=progress
        )
    except BudgetError as error:
        return {"error": str(error), "seconds": time.perf_counter() - start}
    chosen = found.chosen
    return {
        "flops": chosen.cost.flops,
        "peak": chosen.peak.total,
        "policy": f"{chosen.policy}: {chosen.policy.saves}",
        "programs": len(found.candidates),
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "host_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=0)
    parser.add_argument("--gemma", type=Path, help="Folder examples/gemma of google/flax.")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, help="Networks.")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, budget, folder = options.worker
        sys.path.insert(0, folder)
        worker = hand_placed(name) if budget == "hand" else plan(name, int(budget))
        print(json.dumps(worker))
        return
    names = options.problems or [n for n in PROBLEMS if n != "gemma" or options.gemma]
    run = functools.partial(in_fresh_process, "planning")
    rows, claims = [], []
    for name in names:
        hand = run(name, "hand", options.gemma or ".")
        plain_flops, plain_peak = hand["none"]
        cases: list[tuple[str, int, float | None, str]] = [
            (f"{share:.0%} of the plain peak", int(share * plain_peak), None, target)
            for share, target in SHARES.items()
        ]
        cases += [
            (f"jax.checkpoint: {variant}", peak, flops / plain_flops, "")
            for variant, (flops, peak) in hand.items()
            if variant != "none" and peak < plain_peak
        ]
        for case, budget, baseline, target in cases:
            result = run(name, budget, options.gemma or ".")
            ratio = result.get("flops", float("nan")) / plain_flops
            rows.append(
                {
                    "network": name,
                    "budget": case,
                    "bytes, relative": f"{budget / plain_peak:.3f}",
                    "peak / budget": f"{result.get('peak', float('nan')) / budget:.3f}",
                    "FLOPs": f"{ratio:.3f}",
                    "FLOPs by hand": "" if baseline is None else f"{baseline:.3f}",
                    "programs": str(result.get("programs", "")),
                    "seconds": f"{result['seconds']:.0f}",
                    "host memory, MB": f"{result.get('host_bytes', 0) / 1e6:.0f}",
                }
            )
            against = "the plain step" if baseline is None else case
            claims.append(
                Claim(
                    f"{name}: FLOPs of the plan within {case}",
                    against,
                    ratio / (baseline or 1.0),
                    target or "<= 1.0",
                    "count",
                )
            )
    print(markdown_table(rows, left=2))
    publish(claims, options, "jax", "jaxlib", "flax", "equinox")


if __name__ == "__main__":
    main()
