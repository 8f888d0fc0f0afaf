"""In-place ABN and reversible stacks against flax and plain JAX: memory and time on CPU.

    python -m benchmarks.abn_stack_on_cpu

Every program is compiled with each of the options that `fnet.compile_step` tries and
the one with the lowest peak is measured, the peers' too; the peers are timed under
JAX's default options as well. About four minutes.
"""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import abn_stack
from benchmarks.measure import interleaved, markdown, temporaries, versions
from fnet.memory import compile_smallest

ACTIVATION = 4 * math.prod(abn_stack.IMAGES)

# Peer, ours, and what is wanted of the ratio of temporaries.
PAIRS: dict[str, tuple[abn_stack.Stack, abn_stack.Stack, float]] = {
    f"{name}: `fnet.abn` / flax": (
        functools.partial(abn_stack.flax_stack, activation=name),
        functools.partial(abn_stack.in_place_stack, activation=name),
        0.39,
    )
    for name in ("leaky_relu", "gelu", "relu")
} | {
    "coupled: `fnet.reversible` / jnp": (
        abn_stack.plain_coupled_stack,
        abn_stack.reversible_stack,
        0.10,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=16)
    options = parser.parse_args()
    rows = [row(name, *pair, options.blocks, options.rounds) for name, pair in PAIRS.items()]
    print(
        f"{options.blocks} blocks at {abn_stack.IMAGES}, float32, gradient of the mean square with "
        f"respect to the parameters; one activation is {ACTIVATION / 1e6:.2f} MB.\n"
    )
    print(markdown(rows))
    depths = (8, 16, 32)
    constant = [temporaries(compiled(abn_stack.reversible_stack, n)[0]) for n in depths]
    print(f"\nReversible at {depths} blocks: {[f'{c / 1e6:.1f} MB' for c in constant]}")
    print(f"\nVersions: {versions('jax', 'jaxlib', 'flax')}.")


def row(
    name: str,
    peer: abn_stack.Stack,
    ours: abn_stack.Stack,
    wanted: float,
    blocks: int,
    rounds: int,
) -> dict[str, str]:
    """One line of the table: both sides' bytes, growth per block and time, interleaved."""
    x = abn_stack.images()
    programs = {side: compiled(s, blocks) for side, s in (("peer", peer), ("ours", ours))}
    half = {side: compiled(s, blocks // 2) for side, s in (("peer", peer), ("ours", ours))}
    size = {side: temporaries(c) for side, (c, _) in programs.items()}
    slope = {
        side: (size[side] - temporaries(c)) / (blocks - blocks // 2) / ACTIVATION
        for side, (c, _) in half.items()
    }
    loss, params = peer(blocks)
    programs["default"] = (jax.jit(jax.grad(loss)).lower(params, x).compile(), params)
    calls: dict[str, Callable[[], Any]] = {
        side: functools.partial(c, params, x) for side, (c, params) in programs.items()
    }
    seconds = interleaved(calls, rounds)
    return {
        "": name,
        "peer MB": f"{size['peer'] / 1e6:.1f}",
        "MB": f"{size['ours'] / 1e6:.1f}",
        "ratio": f"{size['ours'] / size['peer']:.3f}",
        "wanted": f"{wanted}",
        "peer a block": f"{slope['peer']:.2f}",
        "a block": f"{slope['ours']:.2f}",
        "peer s": f"{seconds['peer']:.2f}",
        "s": f"{seconds['ours']:.2f}",
        "s / peer": f"{seconds['ours'] / seconds['peer']:.2f}",
        "s / peer by default": f"{seconds['ours'] / seconds['default']:.2f}",
    }


def compiled(stack: abn_stack.Stack, blocks: int) -> tuple[jax.stages.Compiled, Any]:
    """The gradient's program, with the options that need the least memory, and its params."""
    loss, params = stack(blocks)
    x = jax.ShapeDtypeStruct(abn_stack.IMAGES, jnp.float32)
    return compile_smallest(jax.jit(jax.grad(loss)).lower(params, x))[0], params


if __name__ == "__main__":
    main()
