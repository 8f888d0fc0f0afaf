"""Segmentation loss with upsampling, fused or not: memory and time of value and gradient.

    python -m benchmarks.pixel_cross_entropy

The logits are on a 64 x 64 grid and the labels on 512 x 512 pixels, in float32. Every program is
compiled with each of the options of `fnet.compile_step`, and the one with the lowest peak is
used. optax is also timed with JAX's default options, and the faster of the two counts.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compare, markdown_table
from fnet.losses.segmentation import pixel_cross_entropy

GRID, SIDE = 64, 512
CASES = ((8, 21), (2, 150))
"""Number of images and of classes."""

Losses = Callable[[Array, Array], Array]
OPTAX, OURS = "optax on upsampled logits", "`pixel_cross_entropy`"


def optax_losses(logits: Array, labels: Array) -> Array:
    """Baseline with optax: the mean over the labeled pixels of each image."""
    classes = logits.shape[-1]
    z = jax.image.resize(logits, (*labels.shape, classes), "bilinear", antialias=False)
    labeled = labels < classes
    losses = optax.softmax_cross_entropy_with_integer_labels(z, jnp.where(labeled, labels, 0))
    return (losses * labeled).sum((1, 2)) / jnp.maximum(labeled.sum((1, 2)), 1)


FUNCTIONS: dict[str, Losses] = {
    OPTAX: optax_losses,
    "optax under `jax.checkpoint`": jax.checkpoint(optax_losses),
    OURS: lambda logits, labels: pixel_cross_entropy(logits, labels).losses,
}


def arrays(images: int, classes: int) -> tuple[Array, Array]:
    """Random logits, and labels of which one in nine is ignored."""
    key, label_key = jax.random.split(jax.random.key(0))
    labels = jax.random.randint(label_key, (images, SIDE, SIDE), 0, classes * 9 // 8)
    labels = jnp.where(labels < classes, labels, 255).astype(jnp.uint8)
    return jax.random.normal(key, (images, GRID, GRID, classes)), labels


def main() -> None:
    options = argument_parser(__doc__, rounds=7).parse_args()
    rows, claims = [], []
    for images, classes in CASES:
        jitted = {
            name: jax.jit(jax.value_and_grad(lambda *a, f=f: f(*a).mean()))
            for name, f in FUNCTIONS.items()
        }
        make_arguments = functools.partial(arrays, images, classes)
        temporaries, seconds = compare(OPTAX, jitted, make_arguments, options.rounds)
        rows += [
            {
                "": name,
                "images": f"{images}",
                "classes": f"{classes}",
                "temporaries, MB": f"{size / 1e6:,.1f}",
                "memory / optax": f"{size / temporaries[OPTAX]:.3f}",
                "time / optax": f"{seconds[name] / seconds[OPTAX]:.2f}",
            }
            for name, size in temporaries.items()
        ]
        what = f"pixel_cross_entropy, {images} images, {classes} classes, value and gradient"
        claims += [
            Claim(f"{what}: temporaries", OPTAX, temporaries[OURS] / temporaries[OPTAX], "<= 0.05"),
            Claim(f"{what}: time", OPTAX, seconds[OURS] / seconds[OPTAX], "<= 1.0", "time"),
        ]
    print(markdown_table(rows))
    publish(claims, options, "jax", "jaxlib", "optax")


if __name__ == "__main__":
    main()
