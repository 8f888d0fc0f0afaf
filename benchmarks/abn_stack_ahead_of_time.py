"""Memory of batch norm on an H100 and a TPU v5e, compiled ahead of time.

    JAX_PLATFORMS=cpu python -m benchmarks.abn_stack_ahead_of_time --target h100 --target v5e

This needs ``fnet-jax[target-gpu]`` and ``fnet-jax[target-tpu]``, but no device. It takes seconds
for the H100 and ten minutes for the TPU.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import abn_stack
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet.memory import estimate_cost, peak
from fnet.memory.target import TARGETS, Target, compile_for, describe

BLOCKS = 16
IMAGES = jax.ShapeDtypeStruct(abn_stack.IMAGES, jnp.float32)
ACTIVATION_BYTES = math.prod(IMAGES.shape) * IMAGES.dtype.itemsize

CHECKPOINT = "jnp, `jax.checkpoint` per block"

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

BASELINES = {
    "`fnet.abn`, leaky_relu": ("flax linen, leaky_relu", CHECKPOINT),
    "`fnet.abn`, relu": ("flax linen, relu",),
    "`fnet.abn`, gelu": ("flax linen, gelu",),
    "coupled halves, `fnet.reversible`": ("coupled halves, jnp",),
}
SAVED_TARGETS = {name: 0.0 if "reversible" in name else 1.0 for name in BASELINES}
"""Target of saved activations per block, to two digits."""

PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda13-plugin", "libtpu")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="Device to compile for; may be repeated."
    )
    args = parser.parse_args()
    targets, missing = [], []
    for name in args.target or TARGETS:
        try:
            targets.append(describe(name))
        except RuntimeError as error:
            missing.append(str(error))

    measured = {target.name: measure(target) for target in targets}
    if measured:
        print(
            f"{BLOCKS} x (3x3 convolution, batch norm, activation) at {IMAGES.shape}, float32, "
            "gradient of the mean square with respect to the parameters: temporaries, and their "
            f"growth per block from {BLOCKS // 2} blocks on, in units of one activation, "
            f"{ACTIVATION_BYTES / 1e6:.2f} MB.\n"
        )
        print(markdown_table([row(name, measured) for name in STACKS]))
    for target in targets:
        arguments = peak(compile_for(target, jax.jit(jnp.negative), IMAGES)).arguments
        print(f"\nOn {target.name} one activation takes {arguments / 1e6:.2f} MB.")
    claimed = [c for target, sizes in measured.items() for c in claims(target, sizes)]
    publish(claimed, args, *PACKAGES, missing=missing)


def measure(target: Target) -> dict[str, tuple[int, float]]:
    """Bytes of temporaries and saved activations per block, by stack."""
    sizes = {}
    for name, stack in STACKS.items():
        half, whole = (_temporaries(target, stack, n) for n in (BLOCKS // 2, BLOCKS))
        sizes[name] = whole, (whole - half) / (BLOCKS - BLOCKS // 2) / ACTIVATION_BYTES
    return sizes


def row(name: str, measured: dict[str, dict[str, tuple[int, float]]]) -> dict[str, str]:
    """Build a row of the table."""
    cells = {"": name, "GFLOP": f"{_flops(STACKS[name]) / 1e9:,.0f}"}
    for target, sizes in measured.items():
        whole, slope = sizes[name]
        cells |= {f"{target} MB": f"{whole / 1e6:.1f}", f"{target} per block": f"{slope:.2f}"}
    return cells


def claims(target: str, sizes: dict[str, tuple[int, float]]) -> Iterator[Claim]:
    """Claims for one device."""
    for ours, baselines in BASELINES.items():
        what, (temporaries, slope) = ours.replace("`", ""), sizes[ours]
        for baseline in baselines:
            ratio = temporaries / sizes[baseline][0]
            claim = f"{what}, {BLOCKS} blocks, {target}: temporaries"
            yield Claim(claim, baseline, ratio, "<= 1.0")
        theirs = f"{baselines[0]}: {sizes[baselines[0]][1]:.2f}"
        bound = f"<= {SAVED_TARGETS[ours] + 0.005}"
        yield Claim(f"{what}, {target}: activations saved per block", theirs, slope, bound)


def _flops(stack: abn_stack.Stack) -> float:
    """FLOPs of the gradient, including rematerialization."""
    loss, params = stack(BLOCKS)
    return estimate_cost(jax.make_jaxpr(jax.grad(loss))(params, IMAGES)).flops


def _temporaries(target: Target, stack: abn_stack.Stack, blocks: int) -> int:
    loss, params = stack(blocks)
    return peak(compile_for(target, jax.jit(jax.grad(loss)), params, IMAGES)).temporaries


if __name__ == "__main__":
    main()
