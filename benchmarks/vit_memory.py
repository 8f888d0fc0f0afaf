"""Memory of a train step of ViT-B/16, fnet against flax linen; nothing is run.

    python -m benchmarks.vit_memory

Both networks have 86.6 million parameters, AdamW and donated state. flax uses its own
`MultiHeadDotProductAttention`. Temporaries are of the smallest program that XLA compiles with
`fnet.memory.CANDIDATE_OPTIONS`; residuals are what autodiff asks to save.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.claims import Claim, add_sizes, argument_parser, publish
from benchmarks.measure import markdown_table, temporaries
from fnet import models
from fnet.memory import compile_min_memory, format_bytes, residuals
from fnet.memory.target import compile_for, describe

WIDTH, BLOCKS, HEADS, PATCH, SIZE = 768, 12, 12, 16, 224


class LinenBlock(nn.Module):
    """A block of a transformer."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, dtype=self.dtype)(h, h)
        h = nn.Dense(4 * WIDTH, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(nn.gelu(h, approximate=False))


class LinenViT(nn.Module):
    """ViT-B/16."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Array) -> Array:
        window = (PATCH, PATCH)
        x = nn.Conv(WIDTH, window, strides=window, padding="VALID", dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, WIDTH)
        first = self.param("class_token", nn.initializers.zeros, (1, 1, WIDTH)).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, WIDTH)), x], axis=1)
        shape = (1, x.shape[1], WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), shape).astype(x.dtype)
        for _ in range(BLOCKS):
            x = LinenBlock(self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


def networks(dtype: Any) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Functions that initialize and that apply the network, by library."""
    ours, linen = models.get("vit_base", num_classes=1000), LinenViT(dtype)
    image = jax.ShapeDtypeStruct((1, SIZE, SIZE, 3), dtype)
    key = jax.random.key(0)
    return {
        "fnet": (
            lambda: ours.init(key)[0],
            lambda params, x: ours.apply(params, {}, x, train=True)[0],
        ),
        "flax": (lambda: linen.init(key, jnp.zeros(image.shape, dtype)), linen.apply),
    }


def main() -> None:
    parser = argument_parser(__doc__, target=True)
    add_sizes(parser, {"batch": 64})
    args = parser.parse_args()
    target = describe(args.target) if args.target else None
    optimizer = optax.adamw(1e-3)
    rows, claims = [], []
    for dtype in (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        images = jax.ShapeDtypeStruct((args.batch, SIZE, SIZE, 3), dtype)
        labels = jax.ShapeDtypeStruct((args.batch,), jnp.int32)
        saved, held = {}, {}
        for library, (init, apply) in networks(dtype).items():

            def loss(params: Any, x: Array, y: Array, apply: Callable[..., Array] = apply) -> Array:
                logits = apply(params, x).astype(jnp.float32)
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

            def step(
                params: Any, state: Any, x: Array, y: Array, loss: Callable[..., Array] = loss
            ) -> tuple[Any, Any, Array]:
                value, grads = jax.value_and_grad(loss)(params, x, y)
                updates, state = optimizer.update(grads, state, params)
                return optax.apply_updates(params, updates), state, value

            params = jax.eval_shape(init)
            shapes = params, jax.eval_shape(optimizer.init, params), images, labels
            saved[library] = sum(r.added for r in residuals(loss, params, images, labels))
            jitted = jax.jit(step, donate_argnums=(0, 1))
            if target is None:
                program = compile_min_memory(jitted.lower(*shapes))[0]
            else:
                program = compile_for(target, jitted, *shapes)
            held[library] = temporaries(program)
            rows.append({
                "dtype": name,
                "library": library,
                "residuals": format_bytes(saved[library]),
                "temporaries": format_bytes(held[library]),
            })  # fmt: skip
            print(rows[-1], flush=True)
        for what, by_library in (("residuals", saved), ("temporaries", held)):
            ratio = by_library["fnet"] / by_library["flax"]
            claims.append(Claim(f"ViT-B/16, batch {args.batch}, {name}: {what}", "flax", ratio))
    print(markdown_table(rows, left=2))
    publish(claims, args, "flax", "optax")


if __name__ == "__main__":
    main()
