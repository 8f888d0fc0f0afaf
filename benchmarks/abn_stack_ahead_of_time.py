"""Batch norm's memory on an H100 and on a TPU v5e, from their compilers alone.

    JAX_PLATFORMS=cpu python -m benchmarks.abn_stack_ahead_of_time --target h100 --target v5e

needs ``fnet-jax[cuda]`` and ``fnet-jax[tpu]``, neither device, and seconds for
the one, ten minutes for the other.
"""

import argparse
import functools
import math
from importlib import metadata

import jax
import jax.numpy as jnp

from benchmarks import abn_stack
from fnet.memory import peak
from fnet.memory.target import TARGETS, Target, compile_for, describe

BLOCKS = 16
IMAGES = jax.ShapeDtypeStruct(abn_stack.IMAGES, jnp.float32)
ACTIVATION_BYTES = math.prod(IMAGES.shape) * IMAGES.dtype.itemsize

STACKS: dict[str, abn_stack.Stack] = {
    "jnp batch norm, leaky_relu": abn_stack.plain_stack,
    "flax linen, leaky_relu": abn_stack.flax_stack,
    "jnp, `jax.checkpoint` a block": functools.partial(abn_stack.plain_stack, recompute=True),
    "`fnet.abn`, leaky_relu": abn_stack.in_place_stack,
    "flax linen, relu": functools.partial(abn_stack.flax_stack, activation="relu"),
    "`fnet.abn`, relu": functools.partial(abn_stack.in_place_stack, activation="relu"),
    "flax linen, gelu": functools.partial(abn_stack.flax_stack, activation="gelu"),
    "`fnet.abn`, gelu": functools.partial(abn_stack.in_place_stack, activation="gelu"),
    "coupled halves, jnp": abn_stack.plain_coupled_stack,
    "coupled halves, `fnet.reversible`": abn_stack.reversible_stack,
}

PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated")
    targets, missing = [], []
    for name in parser.parse_args().target or TARGETS:
        try:
            targets.append(describe(name))
        except RuntimeError as error:
            missing.append(str(error))

    if targets:
        print(_table(targets))
        for target in targets:
            stored = peak(compile_for(target, jax.jit(jnp.negative), IMAGES)).arguments
            print(f"{target.name} stores one activation in {stored / 1e6:.2f} MB.")
    for line in missing:
        print(f"Left out: {line}.")
    print(f"Versions: {_versions()}.")


def _table(targets: list[Target]) -> str:
    columns = [f"{t.name} MB | a block" for t in targets]
    lines = [
        f"{BLOCKS} x (3x3 convolution, batch norm, activation) at {IMAGES.shape}, float32, "
        "gradient of the mean square with respect to the parameters: temporaries, and how they "
        f"grow from {BLOCKS // 2} blocks on, in activations of {ACTIVATION_BYTES / 1e6:.2f} MB.",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---|" + "---:|---:|" * len(targets),
    ]
    for name, stack in STACKS.items():
        cells = []
        for target in targets:
            half, whole = (_temporaries(target, stack, n) for n in (BLOCKS // 2, BLOCKS))
            slope = (whole - half) / (BLOCKS - BLOCKS // 2) / ACTIVATION_BYTES
            cells.append(f"{whole / 1e6:.1f} | {slope:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _temporaries(target: Target, stack: abn_stack.Stack, blocks: int) -> int:
    loss, params = stack(blocks)
    return peak(compile_for(target, jax.jit(jax.grad(loss)), params, IMAGES)).temporaries


def _versions() -> str:
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return ", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)


if __name__ == "__main__":
    main()
