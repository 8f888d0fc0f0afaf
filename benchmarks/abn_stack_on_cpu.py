"""In-place ABN and reversible stacks compared with flax and plain JAX: memory and time on CPU.

    python -m benchmarks.abn_stack_on_cpu

Every program is compiled with each of the options of `fnet.compile_step`, and the one with the
lowest peak is measured. Baselines are also timed with JAX's default options, and the faster of
the two counts. This takes about four minutes.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import abn_stack
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown_table, temporaries
from fnet.memory import compile_min_memory

ACTIVATION = 4 * math.prod(abn_stack.IMAGES)


class Pair(NamedTuple):
    """Two implementations of one network.

    Attributes:
      baseline: implementation without fnet.
      ours: implementation with fnet.
      ratio: target ratio of temporaries.
      slope: target of saved activations per block, to two digits.
      names: names of baseline and ours.
    """

    baseline: abn_stack.Stack
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
        ("jnp, jax.checkpoint per block", "fnet.abn, leaky_relu"),
    ),
    "coupled: `fnet.reversible` / jnp": Pair(
        abn_stack.plain_coupled_stack,
        abn_stack.reversible_stack,
        0.10,
        0.0,
        ("coupled halves, jnp", "fnet.reversible"),
    ),
}
IN_CHART = (
    "leaky_relu: `fnet.abn` / flax",
    "leaky_relu: `fnet.abn` / `jax.checkpoint`",
    "coupled: `fnet.reversible` / jnp",
)


class Measured(NamedTuple):
    """Bytes, saved activations per block and seconds, by "baseline" and "ours".

    ``seconds`` also has "default", the baseline with JAX's default options.
    """

    size: dict[str, int]
    slope: dict[str, float]
    seconds: dict[str, float]


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--blocks", type=int, default=16, help="Number of blocks.")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=(8, 16, 32), help="Numbers of blocks in the chart."
    )
    args = parser.parse_args()
    measured = {name: measure(pair, args.blocks, args.rounds) for name, pair in PAIRS.items()}
    print(
        f"{args.blocks} blocks at {abn_stack.IMAGES}, float32, gradient of the mean square with "
        f"respect to the parameters; one activation is {ACTIVATION / 1e6:.2f} MB.\n"
    )
    print(markdown_table([row(name, m) for name, m in measured.items()]))
    in_chart = {
        name: stack
        for pair in (PAIRS[name] for name in IN_CHART)
        for name, stack in zip(pair.names, (pair.baseline, pair.ours), strict=True)
    }
    by_depth = {
        name: [temporaries(compiled(stack, n)[0]) for n in args.depths]
        for name, stack in in_chart.items()
    }
    print("\nTemporaries by depth, MB.\n")
    print(markdown_table([depth_row(name, args.depths, sizes) for name, sizes in by_depth.items()]))
    claimed = [c for name, m in measured.items() for c in claims(PAIRS[name], m, args.blocks)]
    reversible = by_depth["fnet.reversible"]
    constant = f"temporaries at {', '.join(map(str, args.depths))} blocks: maximum / minimum"
    claimed.append(Claim(constant, "fnet.reversible", max(reversible) / min(reversible), "<= 1.0"))
    shape = " x ".join(map(str, abn_stack.IMAGES))
    data = {
        "network": f"3x3 convolution, batch norm, activation at {shape}, float32",
        "depths": list(args.depths),
        "temporaries": by_depth,
    }
    publish(claimed, args, "jax", "jaxlib", "flax", data=data)


def measure(pair: Pair, blocks: int, rounds: int) -> Measured:
    """Measure bytes, growth per block and interleaved time of both implementations."""
    x = abn_stack.images()
    sides = {"baseline": pair.baseline, "ours": pair.ours}
    programs = {side: compiled(stack, blocks) for side, stack in sides.items()}
    half = {side: compiled(stack, blocks // 2)[0] for side, stack in sides.items()}
    size = {side: temporaries(program) for side, (program, _) in programs.items()}
    slope = {
        side: (size[side] - temporaries(program)) / (blocks - blocks // 2) / ACTIVATION
        for side, program in half.items()
    }
    loss, params = pair.baseline(blocks)
    programs["default"] = (jax.jit(jax.grad(loss)).lower(params, x).compile(), params)
    calls: dict[str, Callable[[], Any]] = {
        side: functools.partial(program, params, x) for side, (program, params) in programs.items()
    }
    return Measured(size, slope, interleaved(calls, rounds))


def row(name: str, m: Measured) -> dict[str, str]:
    """Build a row of the table."""
    return {
        "": name,
        "baseline MB": f"{m.size['baseline'] / 1e6:.1f}",
        "MB": f"{m.size['ours'] / 1e6:.1f}",
        "ratio": f"{m.size['ours'] / m.size['baseline']:.3f}",
        "target": f"{PAIRS[name].ratio}",
        "baseline per block": f"{m.slope['baseline']:.2f}",
        "per block": f"{m.slope['ours']:.2f}",
        "baseline s": f"{m.seconds['baseline']:.2f}",
        "s": f"{m.seconds['ours']:.2f}",
        "time ratio": f"{m.seconds['ours'] / m.seconds['baseline']:.2f}",
        "time ratio to default options": f"{m.seconds['ours'] / m.seconds['default']:.2f}",
    }


def depth_row(name: str, depths: Sequence[int], sizes: Sequence[int]) -> dict[str, str]:
    """Build a row of the second table."""
    cells = zip(depths, sizes, strict=True)
    return {"": name} | {f"{n} blocks": f"{size / 1e6:.1f}" for n, size in cells}


def claims(pair: Pair, m: Measured, blocks: int) -> Iterator[Claim]:
    """Claims of one pair."""
    (baseline, ours), stack = pair.names, f"{blocks} blocks"
    yield Claim(
        f"{ours}, {stack}: temporaries of the gradient",
        baseline,
        m.size["ours"] / m.size["baseline"],
        f"<= {pair.ratio:.2f}",
    )
    yield Claim(
        f"{ours}: activations saved per block",
        f"{baseline}: {m.slope['baseline']:.2f}",
        m.slope["ours"],
        f"<= {pair.slope + 0.005}",
    )
    fastest = min(m.seconds["baseline"], m.seconds["default"])
    yield Claim(f"{ours}, {stack}: time", baseline, m.seconds["ours"] / fastest, "<= 1.0", "time")


@functools.cache
def compiled(stack: abn_stack.Stack, blocks: int) -> tuple[jax.stages.Compiled, Any]:
    """Compile the gradient with the options that need the least memory; return it and params."""
    loss, params = stack(blocks)
    x = jax.ShapeDtypeStruct(abn_stack.IMAGES, jnp.float32)
    return compile_min_memory(jax.jit(jax.grad(loss)).lower(params, x))[0], params


if __name__ == "__main__":
    main()
