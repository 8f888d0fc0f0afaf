"""Memory budgets of 75 %, 50 % and 30 % of the plain peak: memory and time of real steps.

    python -m benchmarks.budgets

A ResNet-50 (SGD with momentum, batch 64 at 128 x 128) and a transformer of 12 blocks (AdamW,
width 256, batch 16 of 256 tokens) are planned with `fnet.plan_step`, compiled and trained for a
few steps, each in a fresh process. The plain step has remat policy "none" and the whole batch,
and is compiled for the least memory. It is timed with JAX's default options if that is faster.
The measured memory is the process's high-water mark above its memory after compilation, plus the
batch. `process_memory.overhead` of a budget is left for the process. Processes are interleaved,
and seconds per step are medians.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import in_fresh_process, markdown_table
from benchmarks.networks import image_loss
from fnet import layers, models
from fnet.cpu.heap import limit_freed_memory
from fnet.memory import Plan, format_bytes, tree_bytes
from train.run.process_memory import HighWater, overhead

SHARES = (1.0, 0.75, 0.5, 0.3)

Problem = tuple[fnet.Layer, optax.GradientTransformation, Callable[..., Any], dict[str, Any]]


def resnet50() -> Problem:
    """ResNet-50 with in-place activated batch norm."""
    model = models.get("resnet50", num_classes=1000)
    batch = {
        "image": jax.ShapeDtypeStruct((64, 128, 128, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((64,), jnp.int32),
    }
    return model, optax.sgd(0.01, momentum=0.9), image_loss(model), batch


def transformer() -> Problem:
    """Language model of 12 transformer blocks."""
    width, vocabulary, tokens = 256, 8192, 256
    trunk = fnet.serial(
        blocks=layers.transformer(width, heads=8, blocks=12, causal=True),
        norm=layers.rms_norm(width),
    )

    def init(key: Array) -> tuple[Any, Any]:
        blocks, embedding, head = jax.random.split(key, 3)
        scale = width**-0.5
        return {
            "trunk": trunk.init(blocks)[0],
            "embedding": jax.random.normal(embedding, (vocabulary, width)) * scale,
            "head": jax.random.normal(head, (width, vocabulary)) * scale,
        }, {}

    def loss(params: Any, state: Any, batch: Any, key: Array) -> tuple[Array, fnet.Aux]:
        x = params["embedding"][batch["token"]]
        x, _ = trunk.apply(params["trunk"], {}, x, key=key, train=True)
        losses = fnet.losses.cross_entropy(x @ params["head"], batch["next"])
        return losses.mean(-1), fnet.Aux(state, {})

    shape = jax.ShapeDtypeStruct((16, tokens), jnp.int32)
    model = fnet.Layer(init, trunk.apply)
    return model, optax.adamw(1e-3), loss, {"token": shape, "next": shape}


PROBLEMS = {"resnet50": resnet50, "transformer": transformer}


def measure(name: str, budget: int | None, steps: int) -> dict[str, Any]:
    """Plan, compile and train in this process."""
    model, optimizer, loss, shapes = PROBLEMS[name]()
    init = functools.partial(fnet.TrainState.create, model, optimizer)
    state_shapes = jax.eval_shape(init, jax.random.key(0))
    step = fnet.make_step(loss, optimizer)
    start = time.perf_counter()
    if budget is None:
        plan = fnet.plan_step(step, state_shapes, shapes, policies=("none",))
    else:
        reserve = overhead(state_shapes, shapes, 1).always
        plan = fnet.plan_step(step, state_shapes, shapes, budget, reserve=reserve)
    planning_seconds = time.perf_counter() - start
    c = plan.chosen
    executable = fnet.compile_step(
        step.replace(remat=c.policy, microbatches=c.microbatches),
        state_shapes,
        shapes,
        compiler_options=c.compiler_options,
    )
    make = jax.jit(init).lower(jax.random.key(0)).compile()
    batch = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)
    jax.block_until_ready(batch)
    memory = HighWater()
    state = make(jax.random.key(0))

    def timed(program: Callable[..., Any], state: Any) -> tuple[Any, list[float]]:
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            state, metrics = program(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
        assert jnp.isfinite(metrics["loss"])
        return state, seconds[1:]

    state, seconds = timed(executable.compiled, state)
    peak = memory.bytes()
    assert peak is not None, "this system does not report the peak memory of a process"
    measured = peak + tree_bytes(batch)  # The batch was allocated before.
    if budget is None and steps > 1:  # The plain step is also compiled for time.
        fast = step.lower(state_shapes, shapes).compile()
        seconds = min(seconds, timed(fast, state)[1], key=statistics.median)
    return {
        "chosen": str(c),
        "scheduled": "for memory" if "xla_cpu_scheduler_type" in c.compiler_options else "as usual",
        "predicted": executable.report.peak.total,
        "measured": measured,
        "seconds": seconds,
        "planning seconds": planning_seconds,
        "candidates": candidates(plan),
    }


def candidates(plan: Plan) -> list[str]:
    """Describe the candidates that were compiled."""
    return [
        f"{c}, {format_bytes(c.peak.total)}, {c.cost.flops / 1e9:.0f} GFLOP"
        for c in plan.candidates
    ]


def main() -> None:
    parser = argument_parser(__doc__, rounds=2)
    parser.add_argument(
        "--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="Networks."
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="Steps per run; the first is not timed."
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        limit_freed_memory()
        name, budget, steps = options.worker
        print(json.dumps(measure(name, None if budget == "None" else int(budget), int(steps))))
        return
    rows = []
    claimed: list[Claim] = []
    for name in options.problems:
        plain = in_fresh_process("budgets", name, None, 1)["predicted"]
        runs: dict[float, list[dict[str, Any]]] = {share: [] for share in SHARES}
        for _ in range(options.rounds):
            for share, results in runs.items():
                budget = None if share == 1 else int(share * plain)
                results.append(in_fresh_process("budgets", name, budget, options.steps))
        seconds = {
            share: statistics.median(s for run in results for s in run["seconds"])
            for share, results in runs.items()
        }
        measured = {
            share: max(run["measured"] for run in results) for share, results in runs.items()
        }
        claimed += claims(name, plain, measured, seconds)
        for share, results in runs.items():
            rows.append(
                {
                    "": name,
                    "budget MB": "none" if share == 1 else f"{share * plain / 1e6:.0f}",
                    "share": f"{share:.0%}",
                    "chosen": results[0]["chosen"],
                    "scheduled": results[0]["scheduled"],
                    "predicted MB": f"{results[0]['predicted'] / 1e6:.0f}",
                    "measured MB": f"{measured[share] / 1e6:.0f}",
                    "measured / budget": f"{measured[share] / (share * plain):.2f}",
                    "s per step": f"{seconds[share]:.2f}",
                    "time / plain": f"{seconds[share] / seconds[1.0]:.2f}",
                    "planning s": f"{results[0]['planning seconds']:.0f}",
                }
            )
    print(markdown_table(rows))
    publish(claimed, options, "jax", "jaxlib", "optax")


def claims(
    name: str, plain: int, measured: dict[float, int], seconds: dict[float, float]
) -> Iterator[Claim]:
    """Claim memory relative to the budget, and time relative to the plain step."""
    for share in SHARES[1:]:
        what = f"{name}, a budget of {share:.0%} of the plain step's predicted peak"
        used = measured[share] / int(share * plain)
        yield Claim(f"{what}: measured in a run", "the budget", used, "<= 1.0", "measured memory")
        ratio = seconds[share] / seconds[1.0]
        yield Claim(f"{what}: time of a step", "the plain step", ratio, "<= 1.4", "time")


if __name__ == "__main__":
    main()
