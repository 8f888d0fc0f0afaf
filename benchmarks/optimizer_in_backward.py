"""The optimizer inside the backward pass against the optimizer after it: peak and time of a step.

    python -m benchmarks.optimizer_in_backward
    JAX_PLATFORMS=cpu python -m benchmarks.optimizer_in_backward --target h100

Stacks of layers under `fnet.repeat`: dense layers, where parameters are most of
what a step holds, and transformer blocks, where activations are. The peak is
that of the whole compiled step, in bytes of the parameters (P). With a target
the programs are compiled for that device and not run.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compiled_each_way, fastest, markdown, stepping
from fnet import Layer, TrainState, layers
from fnet.autodiff.fused_optimizer import optimizer_in_backward
from fnet.memory import peak, tree_bytes
from fnet.memory.target import compile_for, describe

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-4),
    "adam": optax.adam(1e-4),
    "adamw": fnet.optim.make_optimizer("adamw", 1e-4, weight_decay=0.1),
}

WANTED = {"sgd": 1.15, "adam": 3.2}
"""Of the peak of the stack of dense layers, in P."""

MODES = {"after": fnet.autodiff.mean, "inside": optimizer_in_backward("blocks")}


class Network(NamedTuple):
    """A stack and its input."""

    name: str
    model: Layer
    batch: dict[str, Any]


def dense_stack(depth: int, width: int, batch: int) -> Network:
    block = fnet.serial(dense=layers.dense(width, width), act=layers.activation("relu"))
    return Network(
        f"{depth} dense layers of {width}, batch {batch}",
        fnet.serial(blocks=fnet.repeat(block, depth)),
        {"x": jax.ShapeDtypeStruct((batch, width), jnp.float32)},
    )


def transformer_stack(depth: int, width: int, batch: int, tokens: int, recompute: bool) -> Network:
    block = layers.transformer(width, width // 64, 1, causal=True)
    if recompute:
        block = recomputed(block)
    return Network(
        f"{depth} transformer blocks of {width}{', recomputed' if recompute else ''}, "
        f"{batch} x {tokens} tokens",
        fnet.serial(blocks=fnet.repeat(block, depth)),
        {"x": jax.ShapeDtypeStruct((batch, tokens, width), jnp.float32)},
    )


def recomputed(layer: Layer) -> Layer:
    """The layer, of which the backward pass keeps the input only."""

    def apply(params: Any, state: Any, x: Array, *, key: Any = None, train: bool) -> Any:
        run = functools.partial(layer.apply, key=key, train=train)
        return jax.checkpoint(run)(params, state, x)

    return Layer(layer.init, apply)


def jitted_step(
    network: Network, optimizer: optax.GradientTransformation, mode: Any
) -> tuple[jax.stages.Wrapped, Callable[[], TrainState]]:
    """The step, and what makes its first state."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        y, state = network.model.apply(params, state, batch["x"], key=key, train=True)
        return jnp.square(y).reshape(len(y), -1).mean(-1), fnet.Aux(state, {})

    create = functools.partial(TrainState.create, network.model, optimizer, jax.random.key(0))
    return fnet.make_step(loss, optimizer, mode), create


class Compared(NamedTuple):
    """Of both modes: bytes at the peak, the same in P, and seconds where steps were run."""

    total: dict[str, int]
    in_p: dict[str, float]
    seconds: dict[str, float]


def compared(network: Network, optimizer: str, rounds: int, target: str | None) -> Compared:
    """One optimizer, inside the backward pass and after it."""
    total, in_p, calls = {}, {}, {}
    for name, mode in MODES.items():
        step, create = jitted_step(network, OPTIMIZERS[optimizer], mode)
        shapes = jax.eval_shape(create)
        if target:
            program = compile_for(describe(target), step, shapes, network.batch)
        else:
            program = fnet.compile_step(step, shapes, network.batch).compiled
            timed = [program]
            if name == "after":  # the peer may be compiled to be fast, ours is to be small
                timed = compiled_each_way(step.lower(shapes, network.batch))
            batch = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), network.batch)
            calls[name] = [stepping(p, create(), batch) for p in timed]
        total[name] = peak(program).total
        in_p[name] = total[name] / tree_bytes(shapes.params)
    return Compared(total, in_p, fastest(calls, rounds) if calls and rounds else {})


def row(optimizer: str, c: Compared) -> dict[str, str]:
    """A line of the table."""
    cells = {"": optimizer}
    for name in MODES:
        cells |= {f"{name}, MB": f"{c.total[name] / 1e6:.1f}", f"{name}, P": f"{c.in_p[name]:.3f}"}
    if c.seconds:
        cells["after, ms"] = f"{c.seconds['after'] * 1e3:.0f}"
        cells["time, inside / after"] = f"{c.seconds['inside'] / c.seconds['after']:.2f}"
    return cells


def claims(network: str, optimizer: str, c: Compared, where: str) -> Iterator[Claim]:
    """Of the stack of dense layers, for which there are targets."""
    what = f"optimizer in backward, {optimizer}, {network}, {where}"
    if optimizer in WANTED:
        after, bound = f"after it: {c.in_p['after']:.2f}", f"<= {WANTED[optimizer]}"
        yield Claim(f"{what}: peak of the step / P", after, c.in_p["inside"], bound)
    if c.seconds:
        ratio = c.seconds["inside"] / c.seconds["after"]
        yield Claim(f"{what}: time of the step", "after it", ratio, "<= 1.0", "time")


def main() -> None:
    parser = argument_parser(__doc__, rounds=15, target=True)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    networks = [
        dense_stack(options.depth, options.width, options.batch),
        transformer_stack(options.depth, options.width // 2, 1, 128, recompute=False),
        transformer_stack(options.depth, options.width // 2, 1, 128, recompute=True),
    ]
    where = options.target or jax.default_backend()
    claimed: list[Claim] = []
    for network in networks:
        found = {
            optimizer: compared(network, optimizer, options.rounds, options.target)
            for optimizer in options.optimizers
        }
        rows = [row(optimizer, c) for optimizer, c in found.items()]
        print(f"{network.name}, float32, {where}:\n\n{markdown(rows)}\n")
        if network is networks[0]:
            claimed = [
                claim
                for optimizer, c in found.items()
                for claim in claims(network.name, optimizer, c, where)
            ]
    publish(claimed, options, "jax", "jaxlib", "optax", "jax-cuda13-plugin", "libtpu")


if __name__ == "__main__":
    main()
