"""Bytes of parameters and optimizer state per parameter of an 8 B model, by shapes.

    python -m benchmarks.optimizer_state

The model is Llama-3.1-8B with 8,030,261,248 parameters. Nothing is allocated or compiled: the
bytes are of `jax.eval_shape`. Gradients and activations are not included. With
`fnet.autodiff.optimizer_in_backward`, gradients are of one layer.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.contexts import LLAMA
from benchmarks.measure import markdown_table
from fnet import optim
from fnet.interop.huggingface import build_model
from fnet.memory import tree_bytes
from fnet.precision import cast_kernels

CARD = 24e9
OPTIMIZERS: dict[str, tuple[Any, bool]] = {
    "optax.adamw": (optax.adamw(1e-3), False),
    "optax.adamw, first moment bfloat16": (optax.adamw(1e-3, mu_dtype="bfloat16"), False),
    "optax.lion": (optax.lion(1e-3), False),
    "optax.contrib.muon": (optax.contrib.muon(1e-3), False),
    "optax.adafactor": (optax.adafactor(1e-3), False),
    "compact_adamw": (optim.compact_adamw(1e-3), True),
    "compact_lion": (optim.compact_lion(1e-3), True),
    "compact_sgd": (optim.compact_sgd(1e-3, momentum=0.9), True),
}
"""Optimizer by name, and whether its parameters are bfloat16."""


def bytes_each(name: str) -> tuple[float, float]:
    """Bytes of the parameters, and of the optimizer's state, per parameter."""
    optimizer, is_compact = OPTIMIZERS[name]
    params, _ = jax.eval_shape(build_model(LLAMA).init, jax.random.key(0))
    count = sum(a.size for a in jax.tree.leaves(params))
    if is_compact:
        params = jax.eval_shape(lambda p: cast_kernels(p, jnp.bfloat16), params)
    state = jax.eval_shape(optimizer.init, params)
    return tree_bytes(params) / count, tree_bytes(state) / count


def main() -> None:
    """Print the table."""
    rows = []
    for name in OPTIMIZERS:
        params, state = bytes_each(name)
        rows.append(
            {
                "bytes per parameter": name,
                "parameters": f"{params:.3g}",
                "state": f"{state:.4g}",
                "sum": f"{params + state:.4g}",
                "billion parameters whose state fits 24 GB": f"{CARD / (params + state) / 1e9:.2f}",
            }
        )
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
