"""Train steps of six optimizers with a loss of `fnet.memory.remat_to_fit`: bytes and budget.

    python -m benchmarks.fitted_steps

A transformer of flax (4 blocks of width 192, 16 rows of 128 tokens) and a convolutional network
with group norm (8 blocks, 32 images of 32 x 32) get 40 to 90 % of the peak of their plain step. The
step of each optimizer donates parameters and optimizer state, is compiled with the
options of the plan, and is not run.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet import memory

SHARES = {"transformer": (0.7, 0.5, 0.4), "convolutional": (0.9, 0.75)}

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "lion": optax.lion(1e-4),
    "adafactor": optax.adafactor(1e-3),
}


class Transformer(nn.Module):
    """Blocks of attention and an MLP on tokens."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(1000, 192)(tokens)
        for _ in range(4):
            h = nn.LayerNorm()(x)
            x += nn.MultiHeadDotProductAttention(4)(h, h)
            x += nn.Dense(192)(nn.gelu(nn.Dense(768)(nn.LayerNorm()(x))))
        return nn.Dense(1000)(x)


class Convolutional(nn.Module):
    """Residual blocks of convolutions on images."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for channels in (32, 64, 128, 256):
            for _ in range(2):
                y = nn.relu(nn.GroupNorm(8)(nn.Conv(channels, (3, 3))(x)))
                x = nn.Conv(channels, (3, 3))(y) + nn.Conv(channels, (1, 1))(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(1000)(x.mean((1, 2)))


TOKENS = jax.ShapeDtypeStruct((16, 128), jnp.int32)
NETWORKS: dict[str, tuple[nn.Module, tuple[Any, Any]]] = {
    "transformer": (Transformer(), (TOKENS, TOKENS)),
    "convolutional": (
        Convolutional(),
        (
            jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32),
            jax.ShapeDtypeStruct((32,), jnp.int32),
        ),
    ),
}


def measure(name: str, optimizer: optax.GradientTransformation) -> list[dict[str, float]]:
    """Return planned and compiled bytes as shares of the budgets."""
    network, batch = NETWORKS[name]
    params = jax.eval_shape(network.init, jax.random.key(0), batch[0])
    moments = jax.eval_shape(optimizer.init, params)

    def loss(params: Any, x: Any, labels: Any) -> Any:
        logits = network.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def peak(loss: Any, compiler_options: Any) -> int:
        def step(params: Any, moments: Any, *batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *batch)
            updates, moments = optimizer.update(grads, moments, params)
            return optax.apply_updates(params, updates), moments, value

        step = jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options)
        return memory.peak(step.lower(params, moments, *batch).compile()).total

    rows, plain = [], peak(loss, None)
    for share in SHARES[name]:
        budget = int(share * plain)
        fitted, plan = memory.remat_to_fit(loss, params, *batch, optimizer=optimizer, budget=budget)
        planned = plan.chosen.peak.total
        compiled = peak(fitted, plan.chosen.compiler_options)
        rows.append(
            {
                "share": share,
                "planned": planned / budget,
                "compiled": compiled / budget,
                "deviation": (compiled - planned) / memory.tree_bytes(params),
            }
        )
    return rows


def main() -> None:
    """Measure all networks and optimizers."""
    options = argument_parser(__doc__).parse_args()
    rows, claimed = [], []
    for name in NETWORKS:
        for optimizer in OPTIMIZERS:
            for row in measure(name, OPTIMIZERS[optimizer]):
                rows.append(
                    {
                        "network": name,
                        "optimizer": optimizer,
                        "budget / plain": f"{row['share']:.0%}",
                        "planned / budget": f"{row['planned']:.3f}",
                        "step / budget": f"{row['compiled']:.3f}",
                        "(step - planned) / parameters": f"{row['deviation']:.2f}",
                    }
                )
                what = f"{name}, {optimizer}, {row['share']:.0%} of the plain step"
                claimed.append(Claim(what, "the budget", row["compiled"], "<= 1.0"))
    print(markdown_table(rows))
    publish(claimed, options, "jax", "jaxlib", "optax", "flax")


if __name__ == "__main__":
    main()
