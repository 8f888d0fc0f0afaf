"""Sum of clipped per-example gradients compared with the plain gradient: time and memory.

    python -m benchmarks.clipped_grad
    python -m benchmarks.clipped_grad --only MLP --rounds 51

Every row is one jitted program that returns gradients only, on the CPU, in float32. It takes
about ten minutes.

- "plain" is ``jax.grad`` of the mean loss. "time" is relative to the fastest plain gradient of
  the network in any implementation, "memory" to the smallest temporaries of the plain gradients.
- "vmap" materializes every per-example gradient, then clips and sums them: with a sum, which
  needs less memory, or with optax's matrix product, which is faster.
- `per_example_grad` returns all per-example gradients. It and vmap are skipped if they would need
  more than 4 GB, including results.
- "differs" is the largest difference, relative to the largest gradient, from a loop over
  examples, of which half are clipped. The plain gradient differs from such a loop too, because in
  a deep network rounding flips the sign of some activations.
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
from benchmarks.measure import interleaved, markdown_table, temporaries
from benchmarks.networks import Network

MAX_BYTES = 4e9
TOLERANCE = 1e-5
WIDTH = 8
"""Number of gradients that `fnet.per_example_grad` computes at a time."""

TARGETS = {
    "MLP": ("<= 1.1", "<= 1.1"),
    "transformer": ("<= 1.1", "<= 1.1"),
    "CNN": ("<= 1.5", "<= 1.3"),
    "ResNet": ("<= 2.0", ""),
}
"""Targets of time and of temporaries, by kind of network."""

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
    parser.add_argument("--only", default="", help="Part of the names of networks.")
    args = parser.parse_args()
    if not any(args.only in name for name in CASES):
        parser.error(f"--only {args.only}: matches no network of {list(CASES)}")
    lines: list[dict[str, str]] = []
    claimed: list[Claim] = []
    for name, make in CASES.items():
        if args.only in name:
            measured = measure(make(), args.rounds)
            lines += rows(name, measured)
            claimed += claims(name, measured)
    print(f"Medians of {args.rounds} interleaved rounds, {jax.default_backend()}, float32.\n")
    print(markdown_table(lines))
    publish(claimed, args, "jax", "jaxlib", "flax")


class Measured(NamedTuple):
    """Measurements by program.

    Attributes:
      seconds: seconds per call.
      time: seconds relative to the fastest plain gradient.
      size: bytes of temporaries.
      memory: bytes relative to the smallest plain gradient.
      differs: largest relative difference from a loop over examples.
    """

    seconds: dict[str, float]
    time: dict[str, float]
    size: dict[str, int]
    memory: dict[str, float]
    differs: dict[str, float]


def measure(implementations: dict[str, Network], rounds: int) -> Measured:
    """Measure every program of a network, for each implementation."""
    programs = {
        f"plain, {key}": compile_program(plain(n.loss), n) for key, n in implementations.items()
    }
    differs = {}
    for key, n in implementations.items():
        mean = programs[f"plain, {key}"](n.params, n.x, n.y)
        total = optax.tree.scale(len(n.x), mean)
        rounding = differs[f"plain, {key}"] = difference(total, loop_over_examples(n, jnp.inf))
        bound = float(jnp.median(norms_of_examples(n)))
        row, program = f"`clipped_grad`, {key}", compile_program(clipped(n.loss, bound), n)
        programs[row] = program
        differs[row] = check(program(n.params, n.x, n.y), loop_over_examples(n, bound), rounding)
    first, n = next(iter(implementations.items()))
    slow = {
        f"{kind}, {first}": compile_program(make(n.loss, 1.0), n) for kind, make in UNFUSED.items()
    }
    slow = {row: program for row, program in slow.items() if total_bytes(program) <= MAX_BYTES}

    def calls(programs: dict[str, jax.stages.Compiled]) -> dict[str, Callable[[], Any]]:
        networks = {row: implementations[row.partition(", ")[2]] for row in programs}
        return {
            row: functools.partial(programs[row], n.params, n.x, n.y) for row, n in networks.items()
        }

    # Timed separately, because allocating gigabytes would slow down the fast programs.
    seconds = interleaved(calls(programs), rounds) | interleaved(calls(slow), 3)
    programs |= slow
    size = {row: temporaries(program) for row, program in programs.items()}
    fastest = min(seconds[f"plain, {key}"] for key in implementations)
    smallest = min(size[f"plain, {key}"] for key in implementations)
    time = {row: s / fastest for row, s in seconds.items()}
    memory = {row: s / smallest for row, s in size.items()}
    return Measured(seconds, time, size, memory, differs)


def rows(name: str, m: Measured) -> list[dict[str, str]]:
    """Build a row for each program."""
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
    """Claim the implementation of a network for which clipping costs most."""
    time_target, memory_target = next(t for kind, t in TARGETS.items() if kind in name)
    for kind, ratios, target in (
        ("time", m.time, time_target),
        ("memory", m.memory, memory_target),
    ):
        worst, row = max((r, row) for row, r in ratios.items() if row.startswith("`clipped_grad`"))
        what = f"clipped_grad, {name} (in {row.partition(', ')[2]}): {kind}"
        yield Claim(what, "best plain gradient", worst, target, kind)


def plain(loss: Any) -> Callable[..., Any]:
    return jax.grad(lambda params, x, y: loss(params, x, y).mean())


def clipped(loss: Any, bound: float) -> Callable[..., Any]:
    return lambda *args: fnet.clipped_grad(loss, bound)(*args)[0]


def clip_and_sum(loss: Any, bound: float) -> Callable[..., Any]:
    """Clip materialized per-example gradients, then sum them."""

    def clipped_example(params: Any, x: Array, y: Array) -> Any:
        return scaled(jax.grad(lambda p: loss(p, x[None], y[None])[0])(params), bound)

    def total(params: Any, x: Array, y: Array) -> Any:
        grads = jax.vmap(clipped_example, (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda g: g.sum(0), grads)

    return total


def by_optax(loss: Any, bound: float) -> Callable[..., Any]:
    """Clip and sum materialized per-example gradients with optax."""

    def example_loss(params: Any, x: Array, y: Array) -> Array:
        return loss(params, x[None], y[None])[0]

    def total(params: Any, x: Array, y: Array) -> Any:
        grads = jax.vmap(jax.grad(example_loss), (None, 0, 0))(params, x, y)
        return optax.per_example_global_norm_clip(grads, bound)[0]

    return total


def all_gradients(loss: Any, bound: float) -> Callable[..., Any]:
    del bound
    return fnet.autodiff.per_example_grad(loss, width=WIDTH)


UNFUSED = {
    "vmap and a sum": clip_and_sum,
    "vmap and optax": by_optax,
    f"`per_example_grad` {WIDTH} at a time": all_gradients,
}


def scaled(gradient: Any, bound: float) -> Any:
    factor = jnp.minimum(1, bound / optax.global_norm(gradient))
    return jax.tree.map(lambda g: g * factor, gradient)


def compile_program(f: Callable[..., Any], n: Network) -> jax.stages.Compiled:
    return jax.jit(f).lower(n.params, n.x, n.y).compile()


def total_bytes(program: jax.stages.Compiled) -> int:
    """Bytes of temporaries and results."""
    analysis: Any = program.memory_analysis()
    return temporaries(program) + analysis.output_size_in_bytes


def norms_of_examples(n: Network) -> Array:
    norm = jax.jit(lambda *args: optax.global_norm(plain(n.loss)(*args)))
    return jnp.stack([norm(n.params, *example) for example in single_examples(n)])


def loop_over_examples(n: Network, bound: float) -> Any:
    """Sum of clipped gradients by a loop over examples."""

    @jax.jit
    def add(total: Any, x: Array, y: Array) -> Any:
        return jax.tree.map(jnp.add, total, scaled(plain(n.loss)(n.params, x, y), bound))

    total = jax.tree.map(jnp.zeros_like, n.params)
    for example in single_examples(n):
        total = add(total, *example)
    return total


def single_examples(n: Network) -> list[tuple[Array, Array]]:
    return [(n.x[i : i + 1], n.y[i : i + 1]) for i in range(len(n.x))]


def check(got: Any, expected: Any, rounding: float = 0.0) -> float:
    """Check gradients, also by the ``rounding`` of the plain one; return their difference."""
    worst = difference(got, expected)
    allowed = max(TOLERANCE, 2 * rounding)
    assert worst <= allowed, f"differs from a loop over examples by {worst:.1e} > {allowed:.1e}"
    return worst


def difference(got: Any, expected: Any) -> float:
    """Largest difference, relative to the largest gradient."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    largest = max(float(abs(b).max()) for _, b in pairs)
    return max(float(abs(a - b).max()) for a, b in pairs) / largest


if __name__ == "__main__":
    main()
