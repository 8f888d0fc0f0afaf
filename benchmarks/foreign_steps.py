"""Budgets for train steps as strangers write them: exact, within the budget, and at what FLOPs.

    python -m benchmarks.foreign_steps [--programs NAME ...] [--out FOLDER]

The programs are those of `benchmarks.foreign_programs`. Each gets budgets of 95 to 20 % of the peak
of its plain step, with `fnet.memory.remat_to_fit` and a step of optax, and also with
`fnet.compile_step` if the loss is a mean over examples. Each program runs in a process of its own.

A step fits if its compiled peak is within the budget. Its gradient is compared with the plain one
by the norm of the difference. FLOPs are counted in traced programs (`fnet.memory.estimate_cost`).
Nothing is timed.
"""

import argparse
import json
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.foreign_programs import DOUBLE, PROGRAMS, Program
from benchmarks.measure import in_fresh_process, markdown_table
from fnet import memory

SHARES = (0.95, 0.70, 0.50, 0.35, 0.20)
TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}
"""Largest relative difference of a gradient from the plain one, by its narrowest dtype."""

TARGETS = {0.70: 1.01, 0.50: 1.02, 0.35: 1.10, 0.20: 1.30}
"""Largest median of the FLOPs, relative to the plain ones."""


def _floating(tree: Any) -> list[Any]:
    return [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.inexact)]


def difference(found: Any, expected: Any) -> float:
    """The norm of the difference, relative to the expected one."""

    def norm(arrays: list[Any]) -> float:
        return float(np.sqrt(sum(np.square(np.abs(a)).sum() for a in arrays)))

    a, b = ([np.asarray(x, np.complex128) for x in _floating(t)] for t in (found, expected))
    return norm([x - y for x, y in zip(a, b, strict=True)]) / norm(b)


def tolerance(params: Any) -> float:
    """Largest difference that counts as equal."""
    narrow = min(_floating(params), key=lambda a: jnp.finfo(a.dtype).bits)
    return TOLERANCES[str(narrow.dtype)]


Route = tuple[int, Callable[[int], dict[str, Any]]]
"""Bytes of the plain step, and what a budget gives."""


def with_remat_to_fit(program: Program) -> Route:
    """A train step of the user's own."""
    loss, params, batch, optimizer = (
        program.loss,
        program.params,
        program.batch,
        program.optimizer(),
    )
    has_aux = isinstance(jax.eval_shape(loss, params, batch), tuple)
    moments = optimizer.init(_floating(params))

    def value_and_grad(loss: Any) -> Any:
        return jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)

    def compiled(loss: Any, options: Any) -> int:
        def step(params: Any, moments: Any, batch: Any) -> Any:
            value, grads = value_and_grad(loss)(params, batch)
            leaves, structure = jax.tree.flatten(params)
            chosen = [i for i, a in enumerate(leaves) if jnp.issubdtype(a.dtype, jnp.inexact)]
            old, grads = [leaves[i] for i in chosen], jax.tree.leaves(grads)
            updates, moments = optimizer.update([grads[i] for i in chosen], moments, old)
            for i, new in zip(chosen, optax.apply_updates(old, updates), strict=True):
                leaves[i] = new
            return jax.tree.unflatten(structure, leaves), moments, value

        step = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
        return memory.peak(step.lower(params, moments, batch).compile()).total

    def gradient(loss: Any, options: Any) -> tuple[float, Any]:
        traced = jax.jit(value_and_grad(loss), compiler_options=options).trace(params, batch)
        value, grads = traced.lower().compile()(params, batch)
        return memory.estimate_cost(traced.jaxpr).flops, (value, grads)

    flops, plain = gradient(loss, None)

    def fit(budget: int) -> dict[str, Any]:
        fitted, plan = memory.remat_to_fit(loss, budget, params, batch, held=moments)
        options = plan.chosen.compiler_options
        more, found = gradient(fitted, options)
        return {
            "choice": str(plan.chosen),
            "candidates": len({str(c) for c in plan.candidates}),
            "peak": compiled(fitted, options),
            "difference": max(difference(a, b) for a, b in zip(found, plain, strict=True)),
            "flops": more / flops,
        }

    return compiled(loss, None), fit


def with_compile_step(program: Program) -> Route:
    """A step of `fnet.make_step`."""
    losses, batch, optimizer = program.losses, program.batch, program.optimizer()
    assert losses is not None

    def loss(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
        return losses(params, batch)

    def fresh() -> fnet.TrainState:
        params = jax.tree.map(jnp.copy, program.params)
        return fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))

    def gradient(state: fnet.TrainState) -> Any:
        moment = optax.tree_utils.tree_get(state.opt_state, "mu")
        return state.opt_state if moment is None else moment

    step, state = fnet.make_step(loss, optimizer), fresh()
    traced = step.trace(state, batch)
    flops, plain = memory.estimate_cost(traced.jaxpr).flops, traced.lower().compile()
    total = memory.peak(plain).total
    expected = gradient(plain(fresh(), batch)[0])

    def fit(budget: int) -> dict[str, Any]:
        tried: list[str] = []
        found = fnet.compile_step(
            step, state, batch, budget=budget, progress=lambda c: tried.append(str(c))
        )
        more = memory.estimate_cost(found.step.trace(state, batch).jaxpr).flops
        policy = found.step.remat
        chunks = getattr(policy, "chunks", 1)
        return {
            "choice": f"{policy}{f' in {chunks} chunks' if chunks > 1 else ''}",
            "candidates": len(set(tried)),
            "peak": found.report.peak.total,
            "difference": difference(gradient(found(fresh(), batch)[0]), expected),
            "flops": more / flops,
        }

    return total, fit


ROUTES = {"remat_to_fit": with_remat_to_fit, "compile_step": with_compile_step}


def measure(name: str, shares: Sequence[float], routes: Sequence[str]) -> list[dict[str, Any]]:
    """Plan, compile and run a program for budgets, in this process."""
    if name in DOUBLE:
        jax.config.update("jax_enable_x64", True)
    program, rows = PROGRAMS[name](), []
    for route in routes:
        if route == "compile_step" and program.losses is None:
            continue
        plain, fit = ROUTES[route](program)
        for share in shares:
            row = {"program": name, "route": route, "share": share, "plain": plain}
            row["tolerance"] = tolerance(program.params)
            try:
                row |= fit(int(share * plain))
            except memory.BudgetError as error:
                row["refused"] = str(error)
            except Exception:
                row["traceback"] = traceback.format_exc()
            rows.append(row)
    return rows


def is_unequal(row: dict[str, Any]) -> bool:
    """Whether a gradient differs from the plain one. NaN is not equal."""
    return "difference" in row and not row["difference"] <= row["tolerance"]


def is_over(row: dict[str, Any]) -> bool:
    """Whether the compiled step takes more than the budget."""
    return "peak" in row and row["peak"] > int(row["share"] * row["plain"])


def cell(row: dict[str, Any]) -> str:
    """What a budget gave."""
    if "refused" in row:
        return "refused"
    if "traceback" in row:
        return row["traceback"].splitlines()[-1].split(":")[0]
    notes = f" **off by {row['difference']:.1e}**" * is_unequal(row)
    notes += f" **takes {row['peak'] / row['plain']:.3f}**" * is_over(row)
    return f"{row['flops']:.2f}, {row['choice']} ({row['candidates']}){notes}"


def table(rows: list[dict[str, Any]]) -> str:
    """One line per program and route."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        key = row["program"], row["route"]
        about = {"program": key[0], "by": key[1], "plain MB": f"{row['plain'] / 1e6:.1f}"}
        lines.setdefault(key, about)[f"{row['share']:.0%}"] = cell(row)
    return markdown_table(list(lines.values()))


def not_monotone(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Budgets that are refused although a smaller one fits."""
    return [
        row
        for row in rows
        if "refused" in row
        and any(
            "peak" in other and other["share"] < row["share"]
            for other in rows
            if (other["program"], other["route"]) == (row["program"], row["route"])
        )
    ]


def claims(rows: list[dict[str, Any]]) -> Iterator[Claim]:
    """The counts that should be none, and the medians of FLOPs."""
    counts = {
        "gradients that differ from the plain ones": list(filter(is_unequal, rows)),
        "steps over the budget": list(filter(is_over, rows)),
        "tracebacks": [row for row in rows if "traceback" in row],
        "budgets refused although a smaller one fits": not_monotone(rows),
    }
    for what, found in counts.items():
        yield Claim(f"{what}, of {len(rows)} plans", "none", len(found), "<= 0", "count")
    for share in dict.fromkeys(row["share"] for row in rows):
        some = [row for row in rows if row["share"] == share]
        refused = sum("refused" in row for row in some)
        what = f"plans refused at {share:.0%} of the plain peak, of {len(some)}"
        yield Claim(what, "none", refused, "", "count")
        if flops := [row["flops"] for row in some if "flops" in row]:
            what = f"FLOPs at {share:.0%} of the plain peak, median"
            target = f"<= {TARGETS[share]}" if share in TARGETS else ""
            yield Claim(what, "the plain step", statistics.median(flops), target, "count")


def main() -> None:
    """Measure all programs."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="Programs."
    )
    parser.add_argument("--rows", type=Path, help="Folder that keeps the rows of each program.")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=list(SHARES), help="Budgets / plain peak."
    )
    parser.add_argument(
        "--routes", nargs="+", choices=ROUTES, default=list(ROUTES), help="Ways to use a budget."
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, shares, routes = options.worker
        found = measure(name, json.loads(shares), json.loads(routes))
        jax.effects_barrier()  # Programs print.
        print(json.dumps(found))
        return
    rows = []
    for name in options.programs:
        kept = options.rows and options.rows / f"{name}.json"
        if kept and kept.exists():
            rows += json.loads(kept.read_text())
            continue
        found = in_fresh_process(
            "foreign_steps", name, json.dumps(options.shares), json.dumps(options.routes)
        )
        if kept:
            options.rows.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
        rows += found
    print(table(rows))
    for row in rows:
        if text := row.get("refused") or row.get("traceback"):
            print(f"\n{row['program']}, {row['route']}, {row['share']:.0%}: {text.strip()}")
    publish(list(claims(rows)), options, "jax", "jaxlib", "optax", "flax")


if __name__ == "__main__":
    main()
