"""The sum of clipped per-example gradients against the plain gradient: time and memory.

    python -m benchmarks.clipped_grad
    python -m benchmarks.clipped_grad --only MLP --rounds 51

Every line is one jitted program that gives gradients alone, on the CPU, in float32.
"plain" is ``jax.grad`` of the mean loss; "time" is to the fastest plain gradient of
the same network in whatever way it is written here, "memory" to the smallest
temporaries of the plain ones. "vmap" makes every example's gradient, then clips and
sums: by a sum, which holds less, and by optax's one product, which is faster.
`per_example_grad` returns all of them. These are left out where they would take more
than 4 GB, results included. "differs" is the largest difference, relative to the
largest gradient, from a loop over single examples, half of which are clipped. The plain
gradient differs from such a loop, too: where a network is deep, a rounding moves some
activation to the other side of its kink. About ten minutes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fnet
from benchmarks import networks
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import interleaved, markdown, temporaries
from benchmarks.networks import Network

MOST_BYTES = 4e9
TOLERANCE = 1e-5
WIDTH = 8
"""How many gradients `fnet.per_example_grad` makes at a time."""

WANTED = {
    "MLP": ("<= 1.1", "<= 1.1"),
    "transformer": ("<= 1.1", "<= 1.1"),
    "CNN": ("<= 1.5", "<= 1.3"),
    "ResNet": ("<= 2.0", ""),
}
"""Of time and of temporaries, by kind of network."""

CASES: dict[str, Callable[[], dict[str, Network]]] = {
    "MLP 784-512-512-10, batch 256": networks.mlp,
    "transformer, width 384, 32 tokens, batch 64": functools.partial(
        networks.fnet_transformer, 384, 32, 64
    ),
    "flax transformer, width 384, 32 tokens, batch 64": functools.partial(
        networks.flax_transformer, 384, 32, 64
    ),
    "transformer, width 256, 128 tokens, batch 32": functools.partial(
        networks.fnet_transformer, 256, 128, 32
    ),
    "flax transformer, width 256, 128 tokens, batch 32": functools.partial(
        networks.flax_transformer, 256, 128, 32
    ),
    "small CNN 28x28, batch 128": networks.cnn,
    "ResNet-18, group norm, 32x32, batch 16": networks.resnet18,
}


def main() -> None:
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--only", default="", help="a part of the networks' names")
    args = parser.parse_args()
    if not any(args.only in name for name in CASES):
        parser.error(f"--only {args.only}: in the name of no network of {list(CASES)}")
    lines: list[dict[str, str]] = []
    claimed: list[Claim] = []
    for name, make in CASES.items():
        if args.only in name:
            found = measured(make(), args.rounds)
            lines += rows(name, found)
            claimed += claims(name, found)
    print(f"Medians of {args.rounds} interleaved rounds, {jax.default_backend()}, float32.\n")
    print(markdown(lines))
    publish(claimed, args, "jax", "jaxlib", "flax")


class Measured(NamedTuple):
    """By program: seconds, bytes, both to the best plain ones; the difference from a loop."""

    seconds: dict[str, float]
    time: dict[str, float]
    size: dict[str, int]
    memory: dict[str, float]
    differs: dict[str, float]


def measured(written: dict[str, Network], rounds: int) -> Measured:
    """Every program of a network, in each way it is written."""
    programs = {f"plain, {way}": compiled(plain(n.loss), n) for way, n in written.items()}
    differs = {}
    for way, n in written.items():
        mean = programs[f"plain, {way}"](n.params, n.x, n.y)
        total = optax.tree.scale(len(n.x), mean)
        rounding = differs[f"plain, {way}"] = difference(total, one_by_one(n, jnp.inf))
        bound = float(jnp.median(norms_one_by_one(n)))
        row, program = f"`clipped_grad`, {way}", compiled(clipped(n.loss, bound), n)
        programs[row] = program
        differs[row] = checked(program(n.params, n.x, n.y), one_by_one(n, bound), rounding)
    first, n = next(iter(written.items()))
    slow = {f"{kind}, {first}": compiled(make(n.loss, 1.0), n) for kind, make in EACH.items()}
    slow = {row: program for row, program in slow.items() if held(program) <= MOST_BYTES}

    def called(which: dict[str, jax.stages.Compiled]) -> dict[str, Callable[[], Any]]:
        ways = {row: written[row.partition(", ")[2]] for row in which}
        return {row: functools.partial(which[row], n.params, n.x, n.y) for row, n in ways.items()}

    # Apart, so that gigabytes coming and going do not disturb what takes milliseconds.
    seconds = interleaved(called(programs), rounds) | interleaved(called(slow), 3)
    programs |= slow
    size = {row: temporaries(program) for row, program in programs.items()}
    fastest = min(seconds[f"plain, {way}"] for way in written)
    smallest = min(size[f"plain, {way}"] for way in written)
    time = {row: s / fastest for row, s in seconds.items()}
    memory = {row: s / smallest for row, s in size.items()}
    return Measured(seconds, time, size, memory, differs)


def rows(name: str, m: Measured) -> list[dict[str, str]]:
    """A line for each program."""
    return [
        {
            "": name,
            "gradient": row,
            "ms": f"{m.seconds[row] * 1e3:.1f}",
            "time": f"{m.time[row]:.2f}",
            "temporaries MB": f"{m.size[row] / 1e6:.1f}",
            "memory": f"{m.memory[row]:.2f}",
            "differs": f"{m.differs[row]:.0e}" if row in m.differs else "",
        }
        for row in m.size
    ]


def claims(name: str, m: Measured) -> Iterator[Claim]:
    """Of one network: the way it is written for which clipping costs most."""
    of_time, of_memory = next(of for kind, of in WANTED.items() if kind in name)
    for kind, ratios, target in (("time", m.time, of_time), ("memory", m.memory, of_memory)):
        worst, row = max((r, row) for row, r in ratios.items() if row.startswith("`clipped_grad`"))
        what = f"clipped_grad, {name} (in {row.partition(', ')[2]}): {kind}"
        yield Claim(what, "best plain gradient", worst, target, kind)


def plain(loss: Any) -> Callable[..., Any]:
    return jax.grad(lambda params, x, y: loss(params, x, y).mean())


def clipped(loss: Any, bound: float) -> Callable[..., Any]:
    return lambda *args: fnet.clipped_grad(loss, bound)(*args)[0]


def every_gradient(loss: Any, bound: float) -> Callable[..., Any]:
    """Each example's gradient, clipped, and then the sum: what vmap makes of it."""

    def one(params: Any, x: Array, y: Array) -> Any:
        return scaled(jax.grad(lambda p: loss(p, x[None], y[None])[0])(params), bound)

    def total(params: Any, x: Array, y: Array) -> Any:
        each = jax.vmap(one, (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda g: g.sum(0), each)

    return total


def by_optax(loss: Any, bound: float) -> Callable[..., Any]:
    """The same, clipped and summed by optax."""

    def one(params: Any, x: Array, y: Array) -> Array:
        return loss(params, x[None], y[None])[0]

    def total(params: Any, x: Array, y: Array) -> Any:
        each = jax.vmap(jax.grad(one), (None, 0, 0))(params, x, y)
        return optax.per_example_global_norm_clip(each, bound)[0]

    return total


def a_few_at_a_time(loss: Any, bound: float) -> Callable[..., Any]:
    del bound
    return fnet.autodiff.per_example_grad(loss, width=WIDTH)


EACH = {
    "vmap and a sum": every_gradient,
    "vmap and optax": by_optax,
    f"`per_example_grad` {WIDTH} at a time": a_few_at_a_time,
}


def scaled(gradient: Any, bound: float) -> Any:
    factor = jnp.minimum(1, bound / optax.global_norm(gradient))
    return jax.tree.map(lambda g: g * factor, gradient)


def compiled(f: Callable[..., Any], n: Network) -> jax.stages.Compiled:
    return jax.jit(f).lower(n.params, n.x, n.y).compile()


def held(program: jax.stages.Compiled) -> int:
    """Bytes of temporaries and results."""
    analysis: Any = program.memory_analysis()
    return temporaries(program) + analysis.output_size_in_bytes


def norms_one_by_one(n: Network) -> Array:
    norm = jax.jit(lambda *args: optax.global_norm(plain(n.loss)(*args)))
    return jnp.stack([norm(n.params, *example) for example in singly(n)])


def one_by_one(n: Network, bound: float) -> Any:
    """The sum of clipped gradients by a loop over batches of one example."""

    @jax.jit
    def add(total: Any, x: Array, y: Array) -> Any:
        return jax.tree.map(jnp.add, total, scaled(plain(n.loss)(n.params, x, y), bound))

    total = jax.tree.map(jnp.zeros_like, n.params)
    for example in singly(n):
        total = add(total, *example)
    return total


def singly(n: Network) -> list[tuple[Array, Array]]:
    return [(n.x[i : i + 1], n.y[i : i + 1]) for i in range(len(n.x))]


def checked(got: Any, expected: Any, rounding: float = 0.0) -> float:
    """The difference.

    Args:
      got: by what is measured.
      expected: by a loop over examples.
      rounding: how much a plain gradient differs from such a loop.

    Raises:
      AssertionError: where it is above the tolerance and above twice the rounding.
    """
    worst = difference(got, expected)
    allowed = max(TOLERANCE, 2 * rounding)
    assert worst <= allowed, f"differs from a loop over examples by {worst:.1e} > {allowed:.1e}"
    return worst


def difference(got: Any, expected: Any) -> float:
    """The largest, relative to the largest gradient."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    largest = max(float(abs(b).max()) for _, b in pairs)
    return max(float(abs(a - b).max()) for a, b in pairs) / largest


if __name__ == "__main__":
    main()
