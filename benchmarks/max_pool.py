"""Maxima of patches behind a convolution: memory and time of the gradient, to flax's.

    python -m benchmarks.max_pool
    JAX_PLATFORMS=cpu python -m benchmarks.max_pool --target h100    # memory alone

8 images of 112 x 112, 3 channels convolved to 64, float32: the stem of a network for images
without its norm. Temporaries are those of the compiler options with which they are fewest; flax
is timed under JAX's default options as well, and counts as what is faster.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import beside, markdown
from benchmarks.networks import convolution
from fnet import layers
from fnet.memory.target import describe

IMAGES, KERNEL = (8, 112, 112, 3), (3, 3, 3, 64)
PATCHES = ((3, 2, 1), (2, 2, 0))
"""Window, stride and padding: of ResNet's stem, and without an overlap."""
FLAX, OURS = "flax", "`layers.max_pool`"

Pool = Callable[[Array], Array]


def ways(window: int, stride: int, padding: int) -> dict[str, Pool]:
    ours = layers.max_pool(window, stride=stride, padding=padding)
    spread, steps, sides = (window, window), (stride, stride), [(padding, padding)] * 2
    return {
        FLAX: lambda x: nn.max_pool(x, spread, steps, sides),
        OURS: lambda x: ours.apply({}, {}, x, train=True)[0],
    }


def gradient(pool: Pool) -> jax.stages.Wrapped:
    """Of the kernel."""
    return jax.jit(jax.grad(lambda kernel, x: jnp.square(pool(convolution(x, kernel))).sum()))


def arrays() -> list[Array]:
    return [jax.random.normal(jax.random.key(i), s) for i, s in enumerate((KERNEL, IMAGES))]


def main() -> None:
    options = argument_parser(__doc__, rounds=15, target=True).parse_args()
    target = describe(options.target) if options.target else None
    rows, claims = [], []
    for patches in PATCHES:
        gradients = {name: gradient(pool) for name, pool in ways(*patches).items()}
        held, seconds = beside(FLAX, gradients, arrays, options.rounds, target)
        where = f", {target.name}" if target else ""
        what = "max_pool, window {}, stride {}, padding {}".format(*patches) + where
        claims.append(Claim(f"{what}: temporaries", FLAX, held[OURS] / held[FLAX], "<= 1.0"))
        row = {"": what, "MB": f"{held[OURS] / 1e6:.1f}", "flax MB": f"{held[FLAX] / 1e6:.1f}"}
        row["of flax's"] = f"{held[OURS] / held[FLAX]:.2f}"
        if seconds:
            ratio = seconds[OURS] / seconds[FLAX]
            row["time"] = f"{ratio:.2f}"
            claims.append(Claim(f"{what}: time", FLAX, ratio, "<= 1.0", "time"))
        rows.append(row)
    print(markdown(rows))
    publish(claims, options, "jax", "jaxlib", "flax")


if __name__ == "__main__":
    main()
