"""Cross-entropy of every pixel from small features: memory and time of value and gradient.

    python -m benchmarks.pixel_cross_entropy

Logits of a 64 x 64 grid, labels of 512 x 512, float32. Every program is compiled with each of
the options that `fnet.compile_step` tries, and the one with the lowest peak is taken, the peers'
too; optax is timed under JAX's default options as well, and counts as what is faster.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import beside, markdown
from fnet.losses.segmentation import pixel_cross_entropy

GRID, SIDE = 64, 512
CASES = ((8, 21), (2, 150))
"""Images and classes."""

Losses = Callable[[Array, Array], Array]
OPTAX, OURS = "optax on resized logits", "`pixel_cross_entropy`"


def whole(logits: Array, labels: Array) -> Array:
    """As one writes it down: each image's mean over its pixels that have a label."""
    classes = logits.shape[-1]
    z = jax.image.resize(logits, (*labels.shape, classes), "bilinear", antialias=False)
    counted = labels < classes
    each = optax.softmax_cross_entropy_with_integer_labels(z, jnp.where(counted, labels, 0))
    return (each * counted).sum((1, 2)) / jnp.maximum(counted.sum((1, 2)), 1)


WAYS: dict[str, Losses] = {
    OPTAX: whole,
    "the same under `jax.checkpoint`": jax.checkpoint(whole),
    OURS: lambda logits, labels: pixel_cross_entropy(logits, labels).losses,
}


def arrays(images: int, classes: int) -> tuple[Array, Array]:
    """Logits, and labels of which one in nine is of no class."""
    key, label_key = jax.random.split(jax.random.key(0))
    labels = jax.random.randint(label_key, (images, SIDE, SIDE), 0, classes * 9 // 8)
    labels = jnp.where(labels < classes, labels, 255).astype(jnp.uint8)
    return jax.random.normal(key, (images, GRID, GRID, classes)), labels


def main() -> None:
    options = argument_parser(__doc__, rounds=7).parse_args()
    rows, claims = [], []
    for images, classes in CASES:
        jitted = {
            name: jax.jit(jax.value_and_grad(lambda *a, way=way: way(*a).mean()))
            for name, way in WAYS.items()
        }
        given = functools.partial(arrays, images, classes)
        held, seconds = beside(OPTAX, jitted, given, options.rounds)
        rows += [
            {
                "": name,
                "images": f"{images}",
                "classes": f"{classes}",
                "temporaries, MB": f"{size / 1e6:,.1f}",
                "of optax's": f"{size / held[OPTAX]:.3f}",
                "of optax's time": f"{seconds[name] / seconds[OPTAX]:.2f}",
            }
            for name, size in held.items()
        ]
        what = f"pixel_cross_entropy, {images} images, {classes} classes, value and gradient"
        claims += [
            Claim(f"{what}: temporaries", OPTAX, held[OURS] / held[OPTAX], "<= 0.05"),
            Claim(f"{what}: time", OPTAX, seconds[OURS] / seconds[OPTAX], "<= 1.0", "time"),
        ]
    print(markdown(rows))
    publish(claims, options, "jax", "jaxlib", "optax")


if __name__ == "__main__":
    main()
