"""Linear layer and cross-entropy, fused or not: memory and time of value and gradients.

    python -m benchmarks.linear_cross_entropy
    JAX_PLATFORMS=cpu python -m benchmarks.linear_cross_entropy --target h100

The first command runs here and takes about two minutes on a CPU. Every program is compiled with
each of the options of `fnet.compile_step`, and the one with the lowest peak is used. optax is
also timed with JAX's default options, and the faster of the two counts. The three products that
every implementation needs are timed alone, as the limit of the claim about time. The second command
compiles for a device that is not present and reports memory only. It needs
``fnet-jax[target-gpu]`` or ``fnet-jax[target-tpu]``.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import Measured, compare, markdown_table
from fnet.losses.linear_cross_entropy import linear_cross_entropy
from fnet.memory.target import Target, describe

Losses = Callable[[Array, Array, Array], Array]


def optax_losses(x: Array, kernel: Array, labels: Array) -> Array:
    """Baseline with optax, whose losses have the dtype of the logits."""
    logits = (x @ kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Sizes(NamedTuple):
    """Sizes of x [tokens, width] and kernel [width, vocabulary]."""

    tokens: int = 1024
    width: int = 256
    vocabulary: int = 32_768
    dtype: str = "float32"

    @property
    def text(self) -> str:
        return f"{self.tokens:,} x {self.width:,} x {self.vocabulary:,}"

    def arrays(self, seed: int = 0) -> tuple[Array, Array, Array]:
        x_key, kernel_key, label_key = jax.random.split(jax.random.key(seed), 3)
        x = jax.random.normal(x_key, (self.tokens, self.width), self.dtype)
        kernel = jax.random.normal(kernel_key, (self.width, self.vocabulary), self.dtype)
        labels = jax.random.randint(label_key, (self.tokens,), 0, self.vocabulary)
        return x, kernel * self.width**-0.5, labels


OPTAX, OURS = "`x @ kernel`, optax", "`fnet.linear_cross_entropy`"
BOTH: dict[str, Losses] = {OPTAX: optax_losses, OURS: linear_cross_entropy}
PRODUCTS = "three matrix products alone"
VARIANTS: dict[str, Losses] = {
    # logits, and the gradients by x and kernel
    PRODUCTS: lambda x, kernel, labels: 0.5 * jnp.square(x @ kernel).sum(1),
    "optax under `jax.checkpoint`": jax.checkpoint(optax_losses),
    "fnet, chunk 256": functools.partial(linear_cross_entropy, chunk=256),
    "fnet, chunk 4,096": functools.partial(linear_cross_entropy, chunk=4096),
}


def value_and_gradients(losses: Losses) -> Callable[..., Any]:
    """Mean loss and its gradients by x and kernel."""
    return jax.value_and_grad(lambda *arrays: losses(*arrays).mean(), argnums=(0, 1))


GRADIENTS: dict[Sizes, dict[str, Losses]] = {
    Sizes(): BOTH | VARIANTS,
    Sizes(width=768): BOTH,
    Sizes(vocabulary=131_072): BOTH,
}
AHEAD_OF_TIME: dict[Sizes, dict[str, Losses]] = GRADIENTS | {
    Sizes(dtype="bfloat16"): BOTH,
    Sizes(8192, 2048, 131_072, "bfloat16"): BOTH,
}
LOSSES_ONLY: dict[Sizes, dict[str, Losses]] = {Sizes(): BOTH}


def main() -> None:
    options = argument_parser(__doc__, rounds=7, target=True).parse_args()
    target = describe(options.target) if options.target else None
    gradients = AHEAD_OF_TIME if target else GRADIENTS
    where = options.target or jax.default_backend()
    print(f"Value and gradients by x and kernel, {where}.\n")
    measured = measure(gradients, value_and_gradients, options.rounds, target)
    print(markdown_table(rows(measured)))
    print("\nLosses only.\n")
    losses_only = measure(LOSSES_ONLY, lambda losses: losses, options.rounds, target)
    print(markdown_table(rows(losses_only)))
    packages = "jax", "jaxlib", "optax", "jax-cuda13-plugin", "libtpu"
    publish(claims(measured, where), options, *packages)


def measure(
    cases: dict[Sizes, dict[str, Losses]],
    transform: Callable[[Losses], Callable[..., Any]],
    rounds: int,
    target: Target | None,
) -> dict[Sizes, Measured]:
    """Measure each function at each size."""
    measured = {}
    for sizes, functions in cases.items():
        jitted = {name: jax.jit(transform(f)) for name, f in functions.items()}
        measured[sizes] = compare(OPTAX, jitted, sizes.arrays, rounds, target)
    return measured


def rows(measured: dict[Sizes, Measured]) -> list[dict[str, str]]:
    """Build a row per size and function; ratios are relative to optax at the same size."""
    lines = []
    for sizes, (temporaries, seconds) in measured.items():
        for name, size in temporaries.items():
            line = {
                "": name,
                "tokens x width x vocabulary": sizes.text,
                "dtype": sizes.dtype,
                "temporaries, MB": f"{size / 1e6:,.1f}",
                "memory / optax": f"{size / temporaries[OPTAX]:.3f}",
            }
            if seconds:
                line |= {
                    "s": f"{seconds[name]:.3f}",
                    "time / optax": f"{seconds[name] / seconds[OPTAX]:.2f}",
                }
            lines.append(line)
    return lines


def claims(measured: dict[Sizes, Measured], where: str) -> Iterator[Claim]:
    """Claims at the default size, and about memory with a larger vocabulary."""
    temporaries, seconds = measured[Sizes()]
    what = f"linear_cross_entropy, {Sizes().text}, value and gradients, {where}"
    # A GPU computes the gradient in the forward pass, from a quarter of the logits.
    limit = "<= 0.03" if where == "cpu" else "<= 0.35"
    yield Claim(f"{what}: temporaries", "optax", temporaries[OURS] / temporaries[OPTAX], limit)
    if seconds:
        ratio, least = (seconds[name] / seconds[OPTAX] for name in (OURS, PRODUCTS))
        limit = (
            "The three matrix products that every implementation needs took 0.89 to 1.01 of "
            f"optax's time on two CPU cores. In this run they took {least:.2f}."
        )
        yield Claim(f"{what}: time", "optax", ratio, "<= 1.01", "time", limit)
    if where != "cpu":
        return
    large = Sizes(vocabulary=131_072)
    growth = measured[large].temporaries[OURS] / temporaries[OURS]
    what = f"linear_cross_entropy, vocabulary of {large.vocabulary:,}, {where}: temporaries"
    yield Claim(what, f"itself, vocabulary of {Sizes().vocabulary:,}", growth, "<= 1.0")


if __name__ == "__main__":
    main()
