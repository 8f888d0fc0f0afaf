"""The optimizer inside the backward pass against the optimizer after it: peak and time of a step.

    python -m benchmarks.optimizer_in_backward
    JAX_PLATFORMS=cpu python -m benchmarks.optimizer_in_backward --target h100

Stacks of layers under `fnet.repeat`: dense layers, where parameters are most of
what a step holds, and transformer blocks, where activations are. The peak is
that of the whole compiled step, in bytes of the parameters (P). With a target
the programs are compiled for that device and not run.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fnet
from benchmarks.measure import interleaved, markdown, versions
from fnet import Layer, TrainState, layers
from fnet.autodiff.in_backward import optimizer_in_backward
from fnet.memory import peak, tree_bytes
from fnet.memory.target import compile_for, describe

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-4),
    "adam": optax.adam(1e-4),
    "adamw": fnet.optim.make_optimizer("adamw", 1e-4, weight_decay=0.1),
}

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


def compared(network: Network, optimizer: str, rounds: int, target: str | None) -> dict[str, str]:
    """A row: one optimizer, inside the backward pass and after it."""
    row, calls = {"": optimizer}, {}
    for name, mode in MODES.items():
        step, create = jitted_step(network, OPTIMIZERS[optimizer], mode)
        shapes = jax.eval_shape(create)
        if target:
            program = compile_for(describe(target), step, shapes, network.batch)
        else:
            program = fnet.compile_step(step, shapes, network.batch).compiled
            calls[name] = functools.partial(advance, program, [create()], network.batch)
        total = peak(program).total
        row[f"{name}, MB"] = f"{total / 1e6:.1f}"
        row[f"{name}, P"] = f"{total / tree_bytes(shapes.params):.3f}"
    if calls and rounds:
        seconds = interleaved(calls, rounds)
        row["after, ms"] = f"{seconds['after'] * 1e3:.0f}"
        row["time, inside / after"] = f"{seconds['inside'] / seconds['after']:.2f}"
    return row


def advance(program: jax.stages.Compiled, box: list[TrainState], batch: Any) -> Any:
    """One step of the state in the box."""
    x = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), batch)
    box[0], metrics = program(box[0], x)
    return metrics, box[0].params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="a device to compile for, such as h100")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each")
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
    for network in networks:
        rows = [compared(network, o, options.rounds, options.target) for o in options.optimizers]
        print(f"{network.name}, float32, {where}:\n\n{markdown(rows)}\n")
    print(f"Versions: {versions('jax', 'jaxlib', 'optax', 'jax-cuda13-plugin', 'libtpu')}.")


if __name__ == "__main__":
    main()
