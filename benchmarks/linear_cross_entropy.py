"""A linear layer and its cross-entropy, fused or not: memory and time of value and gradients.

    python -m benchmarks.linear_cross_entropy
    JAX_PLATFORMS=cpu python -m benchmarks.linear_cross_entropy --target h100

The first runs here, every program compiled with each of the options that
`fnet.compile_step` tries and the one with the lowest peak taken, the peers' too; optax is
timed under JAX's default options as well, and counts as what is faster. About two
minutes on a CPU. The second compiles for a device that is not there and tells memory
alone; it needs ``fnet-jax[target-gpu]`` or ``fnet-jax[target-tpu]``.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import Measured, beside, markdown
from fnet.losses import linear_cross_entropy
from fnet.memory.target import Target, describe

Losses = Callable[[Array, Array, Array], Array]


def optax_losses(x: Array, kernel: Array, labels: Array) -> Array:
    """As one writes it down; optax's losses are in the dtype of the logits."""
    logits = (x @ kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Sizes(NamedTuple):
    """What is compared at which size: x [tokens, width], kernel [width, words]."""

    tokens: int = 1024
    width: int = 256
    words: int = 32_768
    dtype: str = "float32"

    @property
    def in_words(self) -> str:
        return f"{self.tokens:,} x {self.width:,} x {self.words:,}"

    def arrays(self, seed: int = 0) -> tuple[Array, Array, Array]:
        x_key, kernel_key, label_key = jax.random.split(jax.random.key(seed), 3)
        x = jax.random.normal(x_key, (self.tokens, self.width), self.dtype)
        kernel = jax.random.normal(kernel_key, (self.width, self.words), self.dtype)
        labels = jax.random.randint(label_key, (self.tokens,), 0, self.words)
        return x, kernel * self.width**-0.5, labels


OPTAX, OURS = "`x @ kernel`, optax", "`fnet.linear_cross_entropy`"
BOTH: dict[str, Losses] = {
    OPTAX: optax_losses,
    OURS: linear_cross_entropy,
}
VARIANTS: dict[str, Losses] = {
    "optax under `jax.checkpoint`": jax.checkpoint(optax_losses),
    "fnet, 256 words at a time": functools.partial(linear_cross_entropy, chunk=256),
    "fnet, 4,096 words at a time": functools.partial(linear_cross_entropy, chunk=4096),
}


def value_and_gradients(losses: Losses) -> Callable[..., Any]:
    """The mean loss and its gradients by x and kernel."""
    return jax.value_and_grad(lambda *arrays: losses(*arrays).mean(), argnums=(0, 1))


GRADIENTS: dict[Sizes, dict[str, Losses]] = {
    Sizes(): BOTH | VARIANTS,
    Sizes(width=768): BOTH,
    Sizes(words=131_072): BOTH,
}
AHEAD_OF_TIME: dict[Sizes, dict[str, Losses]] = GRADIENTS | {
    Sizes(dtype="bfloat16"): BOTH,
    Sizes(8192, 2048, 131_072, "bfloat16"): BOTH,
}
LOSSES_ALONE: dict[Sizes, dict[str, Losses]] = {Sizes(): BOTH}


def main() -> None:
    options = argument_parser(__doc__, rounds=7, target=True).parse_args()
    target = describe(options.target) if options.target else None
    gradients = AHEAD_OF_TIME if target else GRADIENTS
    where = options.target or jax.default_backend()
    print(f"Value and gradients by x and kernel, {where}.\n")
    found = measured(gradients, value_and_gradients, options.rounds, target)
    print(markdown(rows(found)))
    print("\nThe losses alone.\n")
    alone = measured(LOSSES_ALONE, lambda losses: losses, options.rounds, target)
    print(markdown(rows(alone)))
    packages = "jax", "jaxlib", "optax", "jax-cuda13-plugin", "libtpu"
    publish(claims(found, where), options, *packages)


def measured(
    cases: dict[Sizes, dict[str, Losses]],
    wanted: Callable[[Losses], Callable[..., Any]],
    rounds: int,
    target: Target | None,
) -> dict[Sizes, Measured]:
    """Each way at each size."""
    found = {}
    for sizes, ways in cases.items():
        jitted = {name: jax.jit(wanted(way)) for name, way in ways.items()}
        found[sizes] = beside(OPTAX, jitted, sizes.arrays, rounds, target)
    return found


def rows(found: dict[Sizes, Measured]) -> list[dict[str, str]]:
    """A line for each size and each way; ratios are to optax at the same size."""
    lines = []
    for sizes, (held, seconds) in found.items():
        for name, size in held.items():
            line = {
                "": name,
                "tokens x width x words": sizes.in_words,
                "dtype": sizes.dtype,
                "temporaries, MB": f"{size / 1e6:,.1f}",
                "of optax's": f"{size / held[OPTAX]:.3f}",
            }
            if seconds:
                line |= {
                    "s": f"{seconds[name]:.3f}",
                    "of optax's time": f"{seconds[name] / seconds[OPTAX]:.2f}",
                }
            lines.append(line)
    return lines


def claims(found: dict[Sizes, Measured], where: str) -> Iterator[Claim]:
    """At the usual size, and how memory grows with the words."""
    held, seconds = found[Sizes()]
    what = f"linear_cross_entropy, {Sizes().in_words}, value and gradients, {where}"
    yield Claim(f"{what}: temporaries", "optax", held[OURS] / held[OPTAX], "<= 0.03")
    if seconds:
        ratio = seconds[OURS] / seconds[OPTAX]
        yield Claim(f"{what}: time", "optax", ratio, "<= 0.85", "time")
    many = Sizes(words=131_072)
    grown = found[many].held[OURS] / held[OURS]
    what = f"linear_cross_entropy, {many.words:,} words, {where}: temporaries"
    yield Claim(what, f"itself, {Sizes().words:,} words", grown, "<= 1.0")


if __name__ == "__main__":
    main()
