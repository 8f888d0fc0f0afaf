"""Effect of the reversible stack's rounding grid on training, with the digits.

    python -m benchmarks.reversible_grid

This trains a small reversible network, and the same network without rounding, on scikit-learn's
digits with the same seeds and batches. It prints loss and test accuracy of both and takes about
five minutes.
"""

from collections.abc import Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from benchmarks.networks import image_loss
from fnet import Layer, models
from fnet.layer import Children, Params, State

BATCH, EPOCHS = 64, 15


def coupled(blocks: Sequence[tuple[Layer, Layer]], *, restore: bool = True) -> Layer:
    """`fnet.reversible` without a grid: no rounding, and all activations saved."""
    del restore
    pairs = [{"f": f, "g": g} for f, g in blocks]

    def apply(
        params: Params, state: State, x: Array, *, key: Array | None = None, train: bool
    ) -> tuple[Array, State]:
        x1, x2 = jnp.split(x, 2, axis=-1)
        for i, pair in enumerate(pairs):
            child = Children(pair, params[str(i)], state[str(i)], None, train)
            x1 = x1 + child("f", x2)
            x2 = x2 + child("g", x1)
            state = state | {str(i): child.state}
        return jnp.concatenate([x1, x2], -1), state

    return Layer(REVERSIBLE(blocks).init, apply)


REVERSIBLE = fnet.reversible


def network() -> Layer:
    return models.get(
        "revnet",
        num_classes=10,
        in_channels=1,
        widths=(32, 64),
        blocks=(3, 3),
        bottleneck=False,
        small_images=True,
    )


def train(model: Layer, seed: int) -> tuple[float, float]:
    """Train; return the mean loss of the last epoch and the test accuracy."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    split = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=seed
    )
    train_x, test_x, train_y, test_y = split
    steps = EPOCHS * len(train_x) // BATCH
    schedule = fnet.optim.make_schedule("cosine", 0.1, steps, warmup_steps=20)
    optimizer = fnet.optim.make_optimizer("sgd", schedule, nesterov=True, weight_decay=5e-4)
    state = fnet.TrainState.create(model, optimizer, jax.random.key(seed))
    step = fnet.make_step(image_loss(model), optimizer)
    rng = np.random.default_rng(seed)
    losses: list[Array] = []
    for _ in range(EPOCHS):
        order = rng.permutation(len(train_x))[: len(train_x) // BATCH * BATCH]
        losses = []
        for rows in order.reshape(-1, BATCH):
            state, metrics = step(state, {"image": train_x[rows], "label": train_y[rows]})
            losses.append(metrics["loss"])
    logits, _ = model.apply(state.params, state.model_state, jnp.asarray(test_x), train=False)
    return float(jnp.stack(losses).mean()), float((logits.argmax(-1) == test_y).mean())


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    args = parser.parse_args()
    seeds = range(args.seeds)
    with_grid = [train(network(), seed) for seed in seeds]
    with mock.patch("fnet.models.revnet.reversible", coupled):
        without = [train(network(), seed) for seed in seeds]
    rows = [
        {
            "seed": str(seed),
            "loss, grid": f"{a[0]:.5f}",
            "loss, no grid": f"{b[0]:.5f}",
            "accuracy, grid": f"{a[1]:.4f}",
            "accuracy, no grid": f"{b[1]:.4f}",
        }
        for seed, a, b in zip(seeds, with_grid, without, strict=True)
    ]
    means = np.mean([[*a, *b] for a, b in zip(with_grid, without, strict=True)], axis=0)
    rows.append(
        dict(
            zip(
                rows[0],
                [
                    "mean",
                    *(f"{means[i]:.5f}" for i in (0, 2)),
                    *(f"{means[i]:.4f}" for i in (1, 3)),
                ],
                strict=True,
            )
        )
    )
    print(markdown_table(rows))
    what = f"reversible network on a grid, digits, mean of {len(seeds)} seeds: test error"
    errors = [1 - float(means[i]) for i in (1, 3)]
    baseline = f"without a grid: {errors[1]:.2%}"
    ratio = errors[0] / errors[1] if errors[1] else float("nan")
    publish([Claim(what, baseline, ratio, kind="quality")], args, "jax", "jaxlib", "scikit-learn")


if __name__ == "__main__":
    main()
