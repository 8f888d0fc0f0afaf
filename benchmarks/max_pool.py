"""Max pooling after a convolution compared with flax: memory and time of the gradient.

    python -m benchmarks.max_pool
    JAX_PLATFORMS=cpu python -m benchmarks.max_pool --target h100    # memory only

The input is 8 images of 112 x 112, convolved from 3 to 64 channels, in float32: the stem of an
image network without its norm. Temporaries are measured for the smallest program. flax is also
timed with JAX's default options, and the faster of the two counts.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compare, markdown_table
from benchmarks.networks import convolution
from fnet import layers
from fnet.memory.target import describe

IMAGES, KERNEL = (8, 112, 112, 3), (3, 3, 3, 64)
WINDOWS = ((3, 2, 1), (2, 2, 0))
"""Window, stride and padding: as in ResNet's stem, and without overlap."""
FLAX, OURS = "flax", "`layers.max_pool`"

Pool = Callable[[Array], Array]


def pools(window: int, stride: int, padding: int) -> dict[str, Pool]:
    ours = layers.max_pool(window, stride=stride, padding=padding)
    shape, strides, pads = (window, window), (stride, stride), [(padding, padding)] * 2
    return {
        FLAX: lambda x: nn.max_pool(x, shape, strides, pads),
        OURS: lambda x: ours.apply({}, {}, x, train=True)[0],
    }


def gradient(pool: Pool) -> jax.stages.Wrapped:
    """Gradient with respect to the kernel."""
    return jax.jit(jax.grad(lambda kernel, x: jnp.square(pool(convolution(x, kernel))).sum()))


def arrays() -> list[Array]:
    return [jax.random.normal(jax.random.key(i), s) for i, s in enumerate((KERNEL, IMAGES))]


def main() -> None:
    options = argument_parser(__doc__, rounds=15, target=True).parse_args()
    target = describe(options.target) if options.target else None
    rows, claims = [], []
    for window in WINDOWS:
        gradients = {name: gradient(pool) for name, pool in pools(*window).items()}
        temporaries, seconds = compare(FLAX, gradients, arrays, options.rounds, target)
        where = f", {target.name}" if target else ""
        what = "max_pool, window {}, stride {}, padding {}".format(*window) + where
        ours, theirs = temporaries[OURS], temporaries[FLAX]
        claims.append(Claim(f"{what}: temporaries", FLAX, ours / theirs, "<= 1.0"))
        row = {"": what, "MB": f"{ours / 1e6:.1f}", "flax MB": f"{theirs / 1e6:.1f}"}
        row["memory / flax"] = f"{ours / theirs:.2f}"
        if seconds:
            ratio = seconds[OURS] / seconds[FLAX]
            row["time / flax"] = f"{ratio:.2f}"
            claims.append(Claim(f"{what}: time", FLAX, ratio, "<= 1.0", "time"))
        rows.append(row)
    print(markdown_table(rows))
    publish(claims, options, "jax", "jaxlib", "flax")


if __name__ == "__main__":
    main()
