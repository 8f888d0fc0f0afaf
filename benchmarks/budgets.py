"""Budgets of 75 %, 50 % and 30 % of the plain peak: kept to in real steps, and their time.

    python -m benchmarks.budgets

A ResNet-50 (SGD with momentum, batch 64 at 128 x 128) and a transformer of 12 blocks
(AdamW, width 256, batch 16 of 256 tokens) are planned with `fnet.plan_step`, compiled
and trained for a few steps, each in a fresh process. Plain is the policy that keeps
all, with the whole batch at once, compiled for the least memory; it is timed as JAX compiles it
by default, where that is faster. Seen is the high-water mark of the process above what it held
once everything was compiled, and the batch; `RESERVE` of a budget is left to it. Processes are
interleaved; seconds a step are medians.
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
from benchmarks.measure import in_a_process, markdown
from benchmarks.networks import image_loss
from fnet import layers, models
from fnet.memory import Plan, format_bytes, tree_bytes
from train.run.process_memory import RUNTIME_OVERHEAD as RESERVE
from train.run.process_memory import HighWater, limit_freed_memory

SHARES = (1.0, 0.75, 0.5, 0.3)

Problem = tuple[fnet.Layer, optax.GradientTransformation, Callable[..., Any], dict[str, Any]]


def resnet50() -> Problem:
    """A ResNet-50 with in-place activated batch norm."""
    model = models.get("resnet50", num_classes=1000)
    batch = {
        "image": jax.ShapeDtypeStruct((64, 128, 128, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((64,), jnp.int32),
    }
    return model, optax.sgd(0.01, momentum=0.9), image_loss(model), batch


def transformer() -> Problem:
    """A language model of 12 transformer blocks."""
    width, words, tokens = 256, 8192, 256
    trunk = fnet.serial(
        blocks=layers.transformer(width, heads=8, blocks=12, causal=True),
        norm=layers.rms_norm(width),
    )

    def init(key: Array) -> tuple[Any, Any]:
        blocks, embedding, head = jax.random.split(key, 3)
        scale = width**-0.5
        return {
            "trunk": trunk.init(blocks)[0],
            "embedding": jax.random.normal(embedding, (words, width)) * scale,
            "head": jax.random.normal(head, (width, words)) * scale,
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
    """Plans, compiles and trains in this process."""
    model, optimizer, loss, shapes = PROBLEMS[name]()
    init = functools.partial(fnet.TrainState.create, model, optimizer)
    state_shapes = jax.eval_shape(init, jax.random.key(0))
    step = fnet.make_step(loss, optimizer)
    began = time.perf_counter()
    if budget is None:
        plan = fnet.plan_step(step, state_shapes, shapes, policies=("none",))
    else:
        plan = fnet.plan_step(step, state_shapes, shapes, budget, reserve=RESERVE)
    planned = time.perf_counter() - began
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
    most = memory.bytes()
    assert most is not None, "this system does not tell what a process has held"
    seen = most + tree_bytes(batch)  # which was there before
    if budget is None and steps > 1:  # what has no budget is compiled for time as well
        fast = step.lower(state_shapes, shapes).compile()
        seconds = min(seconds, timed(fast, state)[1], key=statistics.median)
    return {
        "chosen": str(c),
        "scheduled": "for memory" if "xla_cpu_scheduler_type" in c.compiler_options else "as usual",
        "predicted": executable.report.peak.total,
        "seen": seen,
        "seconds": seconds,
        "planned in": planned,
        "candidates": candidates(plan),
    }


def candidates(plan: Plan) -> list[str]:
    """What was compiled, for whoever wonders."""
    return [
        f"{c}, {format_bytes(c.peak.total)}, {c.cost.flops / 1e9:.0f} GFLOP"
        for c in plan.candidates
    ]


def main() -> None:
    parser = argument_parser(__doc__, rounds=2)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--steps", type=int, default=4, help="of each run; the first is not timed")
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
        plain = in_a_process("budgets", name, None, 1)["predicted"]
        runs: dict[float, list[dict[str, Any]]] = {share: [] for share in SHARES}
        for _ in range(options.rounds):
            for share, found in runs.items():
                budget = None if share == 1 else int(share * plain)
                found.append(in_a_process("budgets", name, budget, options.steps))
        seconds = {
            share: statistics.median(s for run in found for s in run["seconds"])
            for share, found in runs.items()
        }
        most = {share: max(run["seen"] for run in found) for share, found in runs.items()}
        claimed += claims(name, plain, most, seconds)
        for share, found in runs.items():
            seen = most[share]
            rows.append(
                {
                    "": name,
                    "budget MB": "none" if share == 1 else f"{share * plain / 1e6:.0f}",
                    "share": f"{share:.0%}",
                    "chosen": found[0]["chosen"],
                    "scheduled": found[0]["scheduled"],
                    "predicted MB": f"{found[0]['predicted'] / 1e6:.0f}",
                    "seen MB": f"{seen / 1e6:.0f}",
                    "seen / budget": f"{seen / (share * plain):.2f}",
                    "s a step": f"{seconds[share]:.2f}",
                    "time / plain": f"{seconds[share] / seconds[1.0]:.2f}",
                    "planned in s": f"{found[0]['planned in']:.0f}",
                }
            )
    print(markdown(rows))
    publish(claimed, options, "jax", "jaxlib", "optax")


def claims(
    name: str, plain: int, seen: dict[float, int], seconds: dict[float, float]
) -> Iterator[Claim]:
    """Of one network: each budget, kept to or not, and what it costs."""
    for share in SHARES[1:]:
        what = f"{name}, a budget of {share:.0%} of the plain step's predicted peak"
        used = seen[share] / int(share * plain)
        yield Claim(f"{what}: seen in a run", "the budget", used, "<= 1.0", "seen memory")
        ratio = seconds[share] / seconds[1.0]
        yield Claim(f"{what}: time of a step", "the plain step", ratio, "<= 1.4", "time")


if __name__ == "__main__":
    main()
