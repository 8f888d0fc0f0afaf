"""`memory.remat_to_fit` compared with ``activation_memory_budget`` of torch.compile.

    pip install torch==2.13.0
    JAX_PLATFORMS=cpu python -m benchmarks.torch_memory_budget

Both train the same residual network with dropout, on CPU. torch takes a share of the residuals
that it would save; fnet takes bytes of the whole step. So the table compares what each saves or
holds, relative to its own plain step, with the FLOPs of its compiled programs.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.abn_against_torch import saved_bytes
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet import memory
from fnet.memory import BudgetError

BUDGETS = (0.9, 0.7, 0.5, 0.35, 0.2)
DEPTH, WIDTH, BATCH, DROPOUT = 12, 256, 2048, 0.1


class Row(NamedTuple):
    """Outcome of one budget: kept bytes and FLOPs relative to the plain step, and exactness."""

    kept: float
    flops: float
    difference: float


def main() -> None:
    args = argument_parser(__doc__).parse_args()
    torches = dict(torch_rows())
    ours = dict(fnet_rows())
    table = [
        {
            "budget": f"{budget:.2f}",
            "torch: saved": f"{torches[budget].kept:.2f}",
            "torch: FLOPs": f"{torches[budget].flops:.2f}",
            "torch: gradient": f"{torches[budget].difference:.0e}",
            "fnet: peak": f"{ours[budget].kept:.2f}" if budget in ours else "refused",
            "fnet: FLOPs": f"{ours[budget].flops:.2f}" if budget in ours else "",
            "fnet: gradient": f"{ours[budget].difference:.0e}" if budget in ours else "",
        }
        for budget in BUDGETS
    ]
    print(
        f"{DEPTH} residual blocks of two {WIDTH}-wide layers with GELU and dropout {DROPOUT}, "
        f"{BATCH} rows, float32. Relative to each plain step: bytes saved for the backward pass "
        "(torch), peak of the step (fnet), FLOPs of matrix products. gradient: largest difference "
        "from the plain step with the same seed, relative to the largest element.\n\n"
        f"{markdown_table(table)}"
    )
    publish(claims(torches, ours), args, "jax", "jaxlib", "torch")


def claims(torches: dict[float, Row], ours: dict[float, Row]) -> Iterator[Claim]:
    """Compare at each budget that fnet fits."""
    for budget, row in ours.items():
        yield Claim(f"remat_to_fit at {budget}: peak", "plain step", row.kept, f"<= {budget}")
        yield Claim(
            f"remat_to_fit at {budget}: gradient", "plain step", row.difference, "<= 1e-5", "error"
        )
    worst = max(row.difference for row in torches.values())
    yield Claim("torch's memory budget with dropout: gradient", "plain step", worst, kind="error")


class Block(nn.Module):
    """A residual block of two layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(nn.functional.dropout(nn.functional.gelu(self.a(x)), DROPOUT))


def torch_rows() -> Iterator[tuple[float, Row]]:
    """Compile the network with each budget of torch, and run it once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    x = torch.randn(BATCH, WIDTH)
    plain = torch_step(model, x, 1.0)
    for budget in BUDGETS:
        row = torch_step(model, x, budget)
        largest = max(float(g.abs().max()) for g in plain[2])
        pairs = zip(row[2], plain[2], strict=True)
        difference = max(float((a - b).abs().max()) for a, b in pairs) / largest
        yield budget, Row(row[0] / plain[0], row[1] / plain[1], difference)


def torch_step(
    model: nn.Module, x: torch.Tensor, budget: float
) -> tuple[int, int, list[torch.Tensor]]:
    """Saved bytes, FLOPs and gradients of a step with a fixed seed."""
    flops = 0

    def counted(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal flops
            with FlopCounterMode(display=False) as counter:
                results = graph(*args)
            flops += counter.get_total_flops()
            return results

        return run

    def boxed(graph: Any, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(counted(graph, inputs))  # type: ignore[no-any-return]

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=boxed,
        bw_compiler=boxed,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    with functorch_config.patch(activation_memory_budget=budget):
        compiled = torch.compile(model, backend=backend)
        parameters = [*model.parameters()]

        def step() -> Any:
            torch.manual_seed(1)
            return torch.autograd.grad(compiled(x).square().mean(), parameters)

        step()
        saved = saved_bytes(step, {x, *parameters})
        flops = 0
        return saved, *_counted_step(step, lambda: flops)


def _counted_step(
    step: Callable[[], Any], flops: Callable[[], int]
) -> tuple[int, list[torch.Tensor]]:
    gradients = [*step()]
    return flops(), gradients


def fnet_rows() -> Iterator[tuple[float, Row]]:
    """Plan the same network for shares of the plain step's peak."""
    rng = np.random.default_rng(0)

    def layer() -> dict[str, Any]:
        bound = WIDTH**-0.5
        return {
            "w": jnp.asarray(rng.uniform(-bound, bound, (WIDTH, WIDTH)), jnp.float32),
            "b": jnp.zeros(WIDTH),
        }

    params = [{"a": layer(), "b": layer()} for _ in range(DEPTH)]
    x, key = jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32), jax.random.key(1)
    optimizer = optax.sgd(0.1)
    whole = memory.remat_to_fit(loss, params, x, key, optimizer=optimizer, budget=2**40)[1].chosen
    for budget in BUDGETS:
        try:
            smaller, plan = memory.remat_to_fit(
                loss, params, x, key, optimizer=optimizer, budget=budget * whole.peak.total
            )
        except BudgetError:
            continue
        chosen = plan.chosen
        options = dict(chosen.compiler_options)
        ours, plain = (
            jax.jit(jax.grad(f), compiler_options=o)(params, x, key)
            for f, o in ((smaller, options), (loss, {}))
        )
        largest = max(float(abs(g).max()) for g in jax.tree.leaves(plain))
        differences = jax.tree.map(lambda a, b: float(abs(a - b).max()), ours, plain)
        yield (
            budget,
            Row(
                chosen.peak.total / whole.peak.total,
                chosen.cost.flops / whole.cost.flops,
                max(jax.tree.leaves(differences)) / largest,
            ),
        )


def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    for i, block in enumerate(params):
        h = jax.nn.gelu(x @ block["a"]["w"] + block["a"]["b"], approximate=False)
        kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - DROPOUT, h.shape)
        h = jnp.where(kept, h / (1 - DROPOUT), 0)
        x = x + h @ block["b"]["w"] + block["b"]["b"]
    return (x**2).mean()


if __name__ == "__main__":
    main()
