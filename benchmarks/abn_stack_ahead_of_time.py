"""Batch norm's memory on an H100 and on a TPU v5e, from their compilers alone.

    JAX_PLATFORMS=cpu python -m benchmarks.abn_stack_ahead_of_time --target h100 --target v5e

needs ``fnet-jax[target-gpu]`` and ``fnet-jax[target-tpu]``, neither device, and seconds
for the one, ten minutes for the other.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import abn_stack
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown
from fnet.memory import estimate_cost, peak
from fnet.memory.target import TARGETS, Target, compile_for, describe

BLOCKS = 16
IMAGES = jax.ShapeDtypeStruct(abn_stack.IMAGES, jnp.float32)
ACTIVATION_BYTES = math.prod(IMAGES.shape) * IMAGES.dtype.itemsize

CHECKPOINT = "jnp, `jax.checkpoint` a block"

STACKS: dict[str, abn_stack.Stack] = {
    "jnp batch norm, leaky_relu": abn_stack.plain_stack,
    "flax linen, leaky_relu": abn_stack.flax_stack,
    CHECKPOINT: functools.partial(abn_stack.plain_stack, recompute=True),
    "`fnet.abn`, leaky_relu": abn_stack.in_place_stack,
    "flax linen, relu": functools.partial(abn_stack.flax_stack, activation="relu"),
    "`fnet.abn`, relu": functools.partial(abn_stack.in_place_stack, activation="relu"),
    "flax linen, gelu": functools.partial(abn_stack.flax_stack, activation="gelu"),
    "`fnet.abn`, gelu": functools.partial(abn_stack.in_place_stack, activation="gelu"),
    "coupled halves, jnp": abn_stack.plain_coupled_stack,
    "coupled halves, `fnet.reversible`": abn_stack.reversible_stack,
}

PEERS = {
    "`fnet.abn`, leaky_relu": ("flax linen, leaky_relu", CHECKPOINT),
    "`fnet.abn`, relu": ("flax linen, relu",),
    "`fnet.abn`, gelu": ("flax linen, gelu",),
    "coupled halves, `fnet.reversible`": ("coupled halves, jnp",),
}
KEPT = {name: 0.0 if "reversible" in name else 1.0 for name in PEERS}
"""Activations a block that are wanted, to two digits."""

PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "libtpu")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated")
    args = parser.parse_args()
    targets, missing = [], []
    for name in args.target or TARGETS:
        try:
            targets.append(describe(name))
        except RuntimeError as error:
            missing.append(str(error))

    found = {target.name: measured(target) for target in targets}
    if found:
        print(
            f"{BLOCKS} x (3x3 convolution, batch norm, activation) at {IMAGES.shape}, float32, "
            "gradient of the mean square with respect to the parameters: temporaries, and their "
            f"growth from {BLOCKS // 2} blocks on, in activations of {ACTIVATION_BYTES / 1e6:.2f} "
            "MB.\n"
        )
        print(markdown([row(name, found) for name in STACKS]))
    for target in targets:
        stored = peak(compile_for(target, jax.jit(jnp.negative), IMAGES)).arguments
        print(f"\n{target.name} stores one activation in {stored / 1e6:.2f} MB.")
    claimed = [c for target, sizes in found.items() for c in claims(target, sizes)]
    publish(claimed, args, *PACKAGES, missing=missing)


def measured(target: Target) -> dict[str, tuple[int, float]]:
    """By stack: bytes of temporaries, and activations a block."""
    sizes = {}
    for name, stack in STACKS.items():
        half, whole = (_temporaries(target, stack, n) for n in (BLOCKS // 2, BLOCKS))
        sizes[name] = whole, (whole - half) / (BLOCKS - BLOCKS // 2) / ACTIVATION_BYTES
    return sizes


def row(name: str, found: dict[str, dict[str, tuple[int, float]]]) -> dict[str, str]:
    """One line of the table."""
    cells = {"": name, "GFLOP": f"{_flops(STACKS[name]) / 1e9:,.0f}"}
    for target, sizes in found.items():
        whole, slope = sizes[name]
        cells |= {f"{target} MB": f"{whole / 1e6:.1f}", f"{target} a block": f"{slope:.2f}"}
    return cells


def claims(target: str, sizes: dict[str, tuple[int, float]]) -> Iterator[Claim]:
    """Of one device."""
    for ours, peers in PEERS.items():
        what, (held, slope) = ours.replace("`", ""), sizes[ours]
        for peer in peers:
            ratio = held / sizes[peer][0]
            yield Claim(f"{what}, {BLOCKS} blocks, {target}: temporaries", peer, ratio, "<= 1.0")
        theirs, bound = f"{peers[0]}: {sizes[peers[0]][1]:.2f}", f"<= {KEPT[ours] + 0.005}"
        yield Claim(f"{what}, {target}: activations kept a block", theirs, slope, bound)


def _flops(stack: abn_stack.Stack) -> float:
    """Of the gradient as it is written, recomputation included."""
    loss, params = stack(BLOCKS)
    return estimate_cost(jax.make_jaxpr(jax.grad(loss))(params, IMAGES)).flops


def _temporaries(target: Target, stack: abn_stack.Stack, blocks: int) -> int:
    loss, params = stack(blocks)
    return peak(compile_for(target, jax.jit(jax.grad(loss)), params, IMAGES)).temporaries


if __name__ == "__main__":
    main()
