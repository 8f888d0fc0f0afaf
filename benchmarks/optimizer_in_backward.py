"""Optimizer fused into the backward pass, compared with an optimizer after it: peak and time.

    python -m benchmarks.optimizer_in_backward
    JAX_PLATFORMS=cpu python -m benchmarks.optimizer_in_backward --target h100

The networks are stacks of layers under `fnet.repeat`: dense layers, where most memory is
parameters, and transformer blocks, where most memory is activations. The peak covers the
whole compiled step, in units of the parameters' bytes (P). With ``--target`` the programs are
compiled for that device and not run.
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
from benchmarks.measure import compile_with_each_option, fastest, markdown_table, step_caller
from fnet import Layer, TrainState, layers
from fnet.autodiff.fused_optimizer.mode import optimizer_in_backward
from fnet.memory import peak, tree_bytes
from fnet.memory.target import compile_for, describe

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-4),
    "adam": optax.adam(1e-4),
    "adamw": fnet.optim.make_optimizer("adamw", 1e-4, weight_decay=0.1),
}

TARGETS = {"sgd": 1.15, "adam": 3.2}
"""Target peak of the stack of dense layers, in P."""

MODES = {"after": fnet.autodiff.mean, "inside": optimizer_in_backward("blocks")}


class Network(NamedTuple):
    """A stack of layers and the shapes of its batch."""

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
        block = checkpointed(block)
    return Network(
        f"{depth} transformer blocks of {width}{', checkpointed' if recompute else ''}, "
        f"{batch} x {tokens} tokens",
        fnet.serial(blocks=fnet.repeat(block, depth)),
        {"x": jax.ShapeDtypeStruct((batch, tokens, width), jnp.float32)},
    )


def checkpointed(layer: Layer) -> Layer:
    """The layer under ``jax.checkpoint``, which saves its input only."""

    def apply(params: Any, state: Any, x: Array, *, key: Any = None, train: bool) -> Any:
        run = functools.partial(layer.apply, key=key, train=train)
        return jax.checkpoint(run)(params, state, x)

    return Layer(layer.init, apply)


def jitted_step(
    network: Network, optimizer: optax.GradientTransformation, mode: Any
) -> tuple[jax.stages.Wrapped, Callable[[], TrainState]]:
    """Return the step and a function that creates its state."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        y, state = network.model.apply(params, state, batch["x"], key=key, train=True)
        return jnp.square(y).reshape(len(y), -1).mean(-1), fnet.Aux(state, {})

    create = functools.partial(TrainState.create, network.model, optimizer, jax.random.key(0))
    return fnet.make_step(loss, optimizer, mode), create


class Compared(NamedTuple):
    """Peak bytes, peak in P, and seconds if steps were run, by mode."""

    total: dict[str, int]
    in_p: dict[str, float]
    seconds: dict[str, float]


def compare(network: Network, optimizer: str, rounds: int, target: str | None) -> Compared:
    """Measure one optimizer, inside the backward pass and after it."""
    total, in_p, calls = {}, {}, {}
    for name, mode in MODES.items():
        step, create = jitted_step(network, OPTIMIZERS[optimizer], mode)
        shapes = jax.eval_shape(create)
        if target:
            program = compile_for(describe(target), step, shapes, network.batch)
        else:
            program = fnet.compile_step(step, shapes, network.batch).compiled
            timed = [program]
            if name == "after":  # The baseline may use the fastest options.
                timed = compile_with_each_option(step.lower(shapes, network.batch))
            batch = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), network.batch)
            calls[name] = [step_caller(p, create(), batch) for p in timed]
        total[name] = peak(program).total
        in_p[name] = total[name] / tree_bytes(shapes.params)
    return Compared(total, in_p, fastest(calls, rounds) if calls and rounds else {})


def row(optimizer: str, c: Compared) -> dict[str, str]:
    """Build a row of the table."""
    cells = {"": optimizer}
    for name in MODES:
        cells |= {f"{name}, MB": f"{c.total[name] / 1e6:.1f}", f"{name}, P": f"{c.in_p[name]:.3f}"}
    if c.seconds:
        cells["after, ms"] = f"{c.seconds['after'] * 1e3:.0f}"
        cells["time, inside / after"] = f"{c.seconds['inside'] / c.seconds['after']:.2f}"
    return cells


def claims(network: str, optimizer: str, c: Compared, where: str) -> Iterator[Claim]:
    """Claims for the stack of dense layers."""
    what = f"optimizer in backward, {optimizer}, {network}, {where}"
    if optimizer in TARGETS:
        after, bound = f"optimizer after it: {c.in_p['after']:.2f}", f"<= {TARGETS[optimizer]}"
        yield Claim(f"{what}: peak of the step / P", after, c.in_p["inside"], bound)
    if c.seconds:
        ratio = c.seconds["inside"] / c.seconds["after"]
        yield Claim(f"{what}: time of the step", "optimizer after it", ratio, "<= 1.0", "time")


def main() -> None:
    parser = argument_parser(__doc__, rounds=15, target=True)
    parser.add_argument(
        "--optimizers",
        nargs="+",
        default=list(OPTIMIZERS),
        choices=OPTIMIZERS,
        help="Optimizers to measure.",
    )
    parser.add_argument("--depth", type=int, default=24, help="Number of layers.")
    parser.add_argument("--width", type=int, default=1024, help="Width of dense layers.")
    parser.add_argument("--batch", type=int, default=32, help="Batch size.")
    options = parser.parse_args()
    networks = [
        dense_stack(options.depth, options.width, options.batch),
        transformer_stack(options.depth, options.width // 2, 1, 128, recompute=False),
        transformer_stack(options.depth, options.width // 2, 1, 128, recompute=True),
    ]
    where = options.target or jax.default_backend()
    claimed: list[Claim] = []
    for network in networks:
        results = {
            optimizer: compare(network, optimizer, options.rounds, options.target)
            for optimizer in options.optimizers
        }
        rows = [row(optimizer, c) for optimizer, c in results.items()]
        print(f"{network.name}, float32, {where}:\n\n{markdown_table(rows)}\n")
        if network is networks[0]:
            claimed = [
                claim
                for optimizer, c in results.items()
                for claim in claims(network.name, optimizer, c, where)
            ]
    publish(claimed, options, "jax", "jaxlib", "optax", "jax-cuda13-plugin", "libtpu")


if __name__ == "__main__":
    main()
