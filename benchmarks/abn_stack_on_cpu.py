"""In-place ABN and reversible stacks against flax and plain JAX: memory and time on CPU.

    python -m benchmarks.abn_stack_on_cpu

Every program is compiled with each of the options that `fnet.compile_step` tries and
the one with the lowest peak is measured, the peers' too; the peers are timed under
JAX's default options as well, and count as what is faster. About four minutes.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import abn_stack
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown, temporaries
from fnet.memory import compile_min_memory

ACTIVATION = 4 * math.prod(abn_stack.IMAGES)


class Pair(NamedTuple):
    """Two ways to write one network.

    Attributes:
      peer: by others' layers.
      ours: by fnet's.
      ratio: what is wanted of their temporaries.
      slope: what is wanted of ours a block, in activations; to two digits.
      names: of both, in words.
    """

    peer: abn_stack.Stack
    ours: abn_stack.Stack
    ratio: float
    slope: float
    names: tuple[str, str]


PAIRS: dict[str, Pair] = {
    f"{name}: `fnet.abn` / flax": Pair(
        functools.partial(abn_stack.flax_stack, activation=name),
        functools.partial(abn_stack.in_place_stack, activation=name),
        0.39,
        1.0,
        (f"flax BatchNorm, {name}", f"fnet.abn, {name}"),
    )
    for name in ("leaky_relu", "gelu", "relu")
} | {
    "leaky_relu: `fnet.abn` / `jax.checkpoint`": Pair(
        functools.partial(abn_stack.plain_stack, recompute=True),
        abn_stack.in_place_stack,
        1.0,
        1.0,
        ("jnp, jax.checkpoint a block", "fnet.abn, leaky_relu"),
    ),
    "coupled: `fnet.reversible` / jnp": Pair(
        abn_stack.plain_coupled_stack,
        abn_stack.reversible_stack,
        0.10,
        0.0,
        ("coupled halves, jnp", "fnet.reversible"),
    ),
}
DRAWN = ("leaky_relu: `fnet.abn` / flax", "coupled: `fnet.reversible` / jnp")


class Measured(NamedTuple):
    """Bytes, activations a block and seconds of "peer" and "ours"; of "default", seconds."""

    size: dict[str, int]
    slope: dict[str, float]
    seconds: dict[str, float]


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--depths", type=int, nargs="+", default=(8, 16, 32), help="of the chart")
    args = parser.parse_args()
    found = {name: measured(pair, args.blocks, args.rounds) for name, pair in PAIRS.items()}
    print(
        f"{args.blocks} blocks at {abn_stack.IMAGES}, float32, gradient of the mean square with "
        f"respect to the parameters; one activation is {ACTIVATION / 1e6:.2f} MB.\n"
    )
    print(markdown([row(name, m) for name, m in found.items()]))
    drawn = {
        name: stack
        for pair in (PAIRS[name] for name in DRAWN)
        for name, stack in zip(pair.names, (pair.peer, pair.ours), strict=True)
    }
    held = {
        name: [temporaries(compiled(stack, n)[0]) for n in args.depths]
        for name, stack in drawn.items()
    }
    print("\nTemporaries by depth, MB.\n")
    print(markdown([depth_row(name, args.depths, sizes) for name, sizes in held.items()]))
    claimed = [c for name, m in found.items() for c in claims(PAIRS[name], m, args.blocks)]
    reversible = held["fnet.reversible"]
    same = f"the same temporaries at {', '.join(map(str, args.depths))} blocks: most / least"
    claimed.append(Claim(same, "fnet.reversible", max(reversible) / min(reversible), "<= 1.0"))
    shape = " x ".join(map(str, abn_stack.IMAGES))
    data = {
        "network": f"3x3 convolution, batch norm, activation at {shape}, float32",
        "depths": list(args.depths),
        "temporaries": held,
    }
    publish(claimed, args, "jax", "jaxlib", "flax", data=data)


def measured(pair: Pair, blocks: int, rounds: int) -> Measured:
    """Both sides' bytes, growth per block and time, interleaved."""
    x = abn_stack.images()
    sides = {"peer": pair.peer, "ours": pair.ours}
    programs = {side: compiled(stack, blocks) for side, stack in sides.items()}
    half = {side: compiled(stack, blocks // 2)[0] for side, stack in sides.items()}
    size = {side: temporaries(program) for side, (program, _) in programs.items()}
    slope = {
        side: (size[side] - temporaries(program)) / (blocks - blocks // 2) / ACTIVATION
        for side, program in half.items()
    }
    loss, params = pair.peer(blocks)
    programs["default"] = (jax.jit(jax.grad(loss)).lower(params, x).compile(), params)
    calls: dict[str, Callable[[], Any]] = {
        side: functools.partial(program, params, x) for side, (program, params) in programs.items()
    }
    return Measured(size, slope, interleaved(calls, rounds))


def row(name: str, m: Measured) -> dict[str, str]:
    """One line of the table."""
    return {
        "": name,
        "peer MB": f"{m.size['peer'] / 1e6:.1f}",
        "MB": f"{m.size['ours'] / 1e6:.1f}",
        "ratio": f"{m.size['ours'] / m.size['peer']:.3f}",
        "wanted": f"{PAIRS[name].ratio}",
        "peer a block": f"{m.slope['peer']:.2f}",
        "a block": f"{m.slope['ours']:.2f}",
        "peer s": f"{m.seconds['peer']:.2f}",
        "s": f"{m.seconds['ours']:.2f}",
        "s / peer": f"{m.seconds['ours'] / m.seconds['peer']:.2f}",
        "s / peer by default": f"{m.seconds['ours'] / m.seconds['default']:.2f}",
    }


def depth_row(name: str, depths: Sequence[int], sizes: Sequence[int]) -> dict[str, str]:
    """One line of the second table."""
    cells = zip(depths, sizes, strict=True)
    return {"": name} | {f"{n} blocks": f"{size / 1e6:.1f}" for n, size in cells}


def claims(pair: Pair, m: Measured, blocks: int) -> Iterator[Claim]:
    """Of one pair."""
    (peer, ours), stack = pair.names, f"{blocks} blocks"
    yield Claim(
        f"{ours}, {stack}: temporaries of the gradient",
        peer,
        m.size["ours"] / m.size["peer"],
        f"<= {pair.ratio:.2f}",
    )
    yield Claim(
        f"{ours}: activations kept a block",
        f"{peer}: {m.slope['peer']:.2f}",
        m.slope["ours"],
        f"<= {pair.slope + 0.005}",
    )
    fastest = min(m.seconds["peer"], m.seconds["default"])
    yield Claim(f"{ours}, {stack}: time", peer, m.seconds["ours"] / fastest, "<= 1.0", "time")


@functools.cache
def compiled(stack: abn_stack.Stack, blocks: int) -> tuple[jax.stages.Compiled, Any]:
    """The gradient's program, with the options that need the least memory, and its params."""
    loss, params = stack(blocks)
    x = jax.ShapeDtypeStruct(abn_stack.IMAGES, jnp.float32)
    return compile_min_memory(jax.jit(jax.grad(loss)).lower(params, x))[0], params


if __name__ == "__main__":
    main()
