"""Memory plans of other libraries' networks, compared with hand-placed `jax.checkpoint`.

    python -m benchmarks.planning [--checkouts FOLDER]

A ResNet-50 (flax linen, 224 x 224), a transformer (Equinox), a diffusion U-Net (flax nnx), and the
public models of `benchmarks.public_models` are planned with `fnet.plan_step`. Budgets are 70, 50
and 35 % of what the plain step takes in a process, and the bytes of each ``jax.checkpoint``
placed by hand. Microbatches are not allowed.

Each program is compiled and runs for a few steps in a process of its own. Bytes are of the
process: predicted, by the compiled program and `train.run.process_memory`; measured, as the
high-water mark above the process's memory after compilation. FLOPs are counted in the traced
step (`fnet.memory.estimate_cost`). Time is CPU seconds of all threads in the shortest step,
which other programs on the machine change little. The plain step is also timed as `jax.jit`
compiles it, and the faster of the two counts.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fnet
from benchmarks.checkpointed import HAND, Hand, Problem, gpt, resnet50, unet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import in_fresh_process, markdown_table
from benchmarks.public_models import PUBLIC, public_problem
from fnet.cpu.heap import limit_freed_memory, occupy_gaps
from fnet.memory import BudgetError, estimate_cost, tree_bytes
from train.run.process_memory import HighWater, overhead

SHARES = {0.7: "<= 1.05", 0.5: "<= 1.15", 0.35: "<= 1.35"}
STEPS = 3
PLAIN = HAND["none"]

OWN: dict[str, Callable[[Hand], Problem]] = {"resnet50": resnet50, "gpt": gpt, "unet": unet}


def build(name: str, hand: Hand, checkouts: str) -> Problem:
    """Make the train step of a network."""
    if name in OWN:
        return OWN[name](hand)
    return public_problem(name, hand, Path(checkouts))


def process_bytes(state: Any, batch: Any) -> int:
    """Bytes of the process besides the program: without checkpoint files."""
    more = overhead(state, batch, 1)
    return more.always - more.background


def run_steps(program: Callable[..., Any], p: Problem) -> tuple[int, float]:
    """Train from the first state; return the measured bytes and CPU seconds of a step."""
    make = jax.jit(p.init).lower(jax.random.key(0)).compile()
    batch = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), p.batch)
    jax.block_until_ready(batch)
    occupy_gaps()
    memory, seconds = HighWater(), []
    state = make(jax.random.key(0))
    for _ in range(STEPS):
        jax.block_until_ready(state)
        start = time.process_time()
        state, metrics = program(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.process_time() - start)
    assert jnp.isfinite(metrics["loss"]), metrics
    peak = memory.bytes()
    assert peak is not None, "this system does not report the peak memory of a process"
    return peak + tree_bytes(batch), min(seconds)  # The batch was allocated before.


def hand_placed(name: str, variant: str, checkouts: str) -> dict[str, Any]:
    """Measure a hand-placed variant, compiled with the options of a plan."""
    p = build(name, HAND[variant], checkouts)
    state = jax.eval_shape(p.init, jax.random.key(0))
    executable = fnet.compile_step(p.step, state, p.batch)
    measured, seconds = run_steps(executable.compiled, p)
    if HAND[variant] is PLAIN:
        seconds = min(seconds, run_steps(p.step.lower(state, p.batch).compile(), p)[1])
    return {
        "flops": estimate_cost(p.step.trace(state, p.batch).jaxpr).flops,
        "predicted": executable.report.peak.total + process_bytes(state, p.batch),
        "measured": measured,
        "step": seconds,
        "state": tree_bytes(state),
    }


def planned(name: str, budget: int, checkouts: str) -> dict[str, Any]:
    """Plan for a budget of the process, compile the chosen program, and measure it."""
    p = build(name, PLAIN, checkouts)
    state = jax.eval_shape(p.init, jax.random.key(0))
    reserve = process_bytes(state, p.batch)
    start, cpu = time.perf_counter(), time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def progress(candidate: Any) -> None:
        print(
            f"{time.perf_counter() - start:.0f} s: {candidate}, "
            f"{(candidate.peak.total + reserve) / budget:.3f} of the budget",
            file=sys.stderr,
        )

    try:
        plan = fnet.plan_step(
            p.step,
            state,
            p.batch,
            budget,
            reserve=reserve,
            microbatch_choices=(1,),
            progress=progress,
        )
    except BudgetError as error:
        return {"error": str(error)}
    planning = {
        "programs": len(plan.candidates),
        "planning": time.process_time() - cpu,
        "host": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    }
    c = plan.chosen
    executable = fnet.compile_step(
        p.step.replace(remat=c.policy), state, p.batch, compiler_options=c.compiler_options
    )
    measured, seconds = run_steps(executable.compiled, p)
    return planning | {
        "flops": c.cost.flops,
        "predicted": executable.report.peak.total + reserve,
        "measured": measured,
        "step": seconds,
    }


def missing(name: str, checkouts: str) -> str | None:
    """Why a network cannot be measured, or None."""
    try:
        build(name, PLAIN, checkouts)
    except (FileNotFoundError, ImportError) as error:
        return f"{name}: {error}"
    return None


WORKERS: dict[str, Callable[..., Any]] = {
    "hand": hand_placed,
    "plan": lambda name, budget, checkouts: planned(name, int(budget), checkouts),
    "missing": lambda name, _, checkouts: missing(name, checkouts),
}


def row(name: str, case: str, result: dict[str, Any], plain: dict[str, Any]) -> dict[str, str]:
    """Format one program, relative to the plain one."""
    empty = dict.fromkeys(("predicted", "measured", "flops", "step"), float("nan"))
    figures = empty | result
    return {
        "network": name,
        "program": case,
        "predicted MB": f"{figures['predicted'] / 1e6:.0f}",
        "measured MB": f"{figures['measured'] / 1e6:.0f}",
        "share of plain": f"{figures['measured'] / plain['measured']:.2f}",
        "FLOPs": f"{figures['flops'] / plain['flops']:.3f}",
        "time": f"{figures['step'] / plain['step']:.2f}",
        "programs": str(result.get("programs", "")),
        "CPU s to plan": f"{result['planning']:.0f}" if "planning" in result else "",
    }


def compare(name: str, run: Callable[..., Any]) -> Iterator[tuple[dict[str, str], list[Claim]]]:
    """Measure a network's programs; yield a row and its claims for each."""
    hand = {variant: run("hand", name, variant) for variant in HAND}
    plain = hand["none"]
    for variant, result in hand.items():
        yield row(name, variant, result, plain), [prediction(f"{name}, {variant}", result)]
    cases: list[tuple[str, int, float, str]] = [
        (f"{share:.0%} of the plain bytes", int(share * plain["predicted"]), 1.0, target)
        for share, target in SHARES.items()
    ]
    cases += [
        (f"the bytes of {variant}", h["predicted"], h["flops"] / plain["flops"], "<= 1.0")
        for variant, h in hand.items()
        if variant != "none" and not is_beaten(h, hand.values())
    ]
    for case, budget, baseline, target in cases:
        result = run("plan", name, budget)
        claims = []
        if "error" in result:
            print(f"{name}, {case}: {result['error']}", file=sys.stderr)
        else:
            what = f"{name}, a plan within {case}"
            flops = result["flops"] / plain["flops"] / baseline
            against = "the plain step" if baseline == 1 else case.removeprefix("the bytes of ")
            claims = [
                Claim(f"{what}: FLOPs", against, flops, target, "count"),
                Claim(f"{what}: compiled programs", "", result["programs"], "<= 10", "count"),
                Claim(
                    f"{what}: measured in a run",
                    "the budget",
                    result["measured"] / budget,
                    "<= 1.0",
                    "measured memory",
                ),
                prediction(what, result),
            ]
        yield row(name, f"plan: {case}", result, plain), claims


def is_beaten(result: dict[str, Any], others: Iterable[dict[str, Any]]) -> bool:
    """Whether another program needs fewer bytes with no more FLOPs."""
    return any(
        o["predicted"] < result["predicted"] and o["flops"] <= result["flops"] for o in others
    )


def prediction(what: str, result: dict[str, Any]) -> Claim:
    """Claim that a prediction is within 5 % or 16 MB of the measured bytes."""
    error = abs(result["predicted"] - result["measured"])
    bound = max(0.05 * result["measured"], 16e6)
    claim = f"{what}: error of the prediction"
    return Claim(claim, "5 % or 16 MB", error / bound, "<= 1.0", "measured memory")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--checkouts", default=".", help="Folder of checkouts of public models.")
    parser.add_argument("--problems", nargs="+", choices=[*OWN, *PUBLIC], help="Networks.")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        limit_freed_memory()
        task, *arguments = options.worker
        print(json.dumps(WORKERS[task](*arguments)))
        return

    def run(task: str, name: str, argument: object) -> Any:
        return in_fresh_process("planning", task, name, argument, options.checkouts)

    rows: list[dict[str, str]] = []
    claims: list[Claim] = []
    absent = []
    for name in options.problems or [*OWN, *PUBLIC]:
        if reason := run("missing", name, ""):
            absent.append(reason)
            continue
        for figures, more in compare(name, run):
            rows.append(figures)
            claims += more
    print(markdown_table(rows, left=2) if rows else "Nothing to measure.")
    publish(claims, options, "jax", "jaxlib", "flax", "equinox", "dm-haiku", missing=absent)


if __name__ == "__main__":
    main()
