"""Budgets for train steps as strangers write them: exact, within the budget, and at what FLOPs.

    python -m benchmarks.foreign_steps [--programs NAME ...] [--rows FOLDER] [--resident]

`benchmarks.foreign_programs` has the programs. Each gets budgets of 95 to 20 % of the peak
of its plain step, with `fnet.memory.remat_to_fit` and a step of optax, and also with
`fnet.compile_step` if the loss is a mean over examples. Each program runs in a process of its own.

A step fits if its compiled peak is within the budget. Its gradient is compared with the plain one
by the norm of the difference. FLOPs are counted in traced programs (`fnet.memory.estimate_cost`).
Planning is in CPU seconds, relative to compiling the plain step. With ``--resident``, the
steps run, and the high-water mark of the process is compared with the budget. There, arrays from
64 KiB on are mapped separately. Otherwise, memory that a compiler freed before would not count.
"""

import argparse
import functools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.foreign_programs import DOUBLE, PROGRAMS, Program
from benchmarks.measure import in_fresh_process, markdown_table
from fnet import memory
from fnet.jaxpr import inner_jaxprs
from fnet.memory.assemble import Step
from train.run.process_memory import HighWater

SHARES = (0.95, 0.70, 0.50, 0.35, 0.20)
TOLERANCES = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-5, "float64": 1e-12}
"""Largest relative difference of a gradient from the plain one, by the narrowest type."""
STEPS = 3
"""Steps that run while resident memory is measured."""
MEASUREMENTS = 3
"""Measurements of the resident memory of a step."""

TARGETS = {0.70: 1.01, 0.50: 1.02, 0.35: 1.10, 0.20: 1.30}
"""Largest median of the FLOPs, relative to the plain ones."""


def _is_floating(a: Any) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.inexact))


def difference(found: Any, expected: Any) -> float:
    """The norm of the difference of floating arrays, relative to the norm of the expected ones.

    It is NaN if other numbers are finite than expected.
    """

    def flat(tree: Any) -> Any:
        leaves = [a for a in jax.tree.leaves(tree) if _is_floating(a)]
        return np.concatenate([np.zeros(0), *(np.ravel(a).astype(np.complex128) for a in leaves)])

    a, b = flat(found), flat(expected)
    finite = np.isfinite(b)
    if (np.isfinite(a) != finite).any():
        return float("nan")
    a, b = a[finite], b[finite]
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)


def greatest_difference(found: Any, expected: Any) -> float:
    """The difference of the value or of the gradient."""
    differences = [difference(a, b) for a, b in zip(found, expected, strict=True)]
    return float(np.max(differences))


def _types(jaxpr: Jaxpr) -> set[str]:
    """Names of the types of all arrays in a program."""
    found = {str(getattr(v.aval, "dtype", "")) for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        found |= {str(getattr(v.aval, "dtype", "")) for v in eqn.outvars}
        found = found.union(*map(_types, inner_jaxprs(eqn)))
    return found


def tolerance(program: Program) -> float:
    """Largest difference that counts as equal."""
    jaxpr = jax.make_jaxpr(program.loss)(program.params, program.batch).jaxpr
    return max(TOLERANCES.get(name, 0.0) for name in _types(jaxpr))


class Fitted(NamedTuple):
    """A step that a budget gave.

    Attributes:
      choice: How it fits.
      compiled: Number of programs that were compiled to find it.
      seconds: CPU seconds to find it, relative to compiling the plain step.
      peak: Bytes of the compiled step.
      difference: Of value and gradient from the plain ones.
      flops: FLOPs, relative to the plain ones.
      resident: Measures the bytes of the process while steps run.
    """

    choice: str
    compiled: int
    seconds: float
    peak: int
    difference: float
    flops: float
    resident: Callable[[], int]


Route = tuple[int, Callable[[int], Fitted], tuple[int, int]]
"""Bytes of the plain step, what a budget gives, and `estimated` of the plain step."""


def estimated(traced: jax.stages.Traced) -> tuple[int, int]:
    """Bytes of a step as they are estimated, and as the better of fnet's options compiles it."""
    donated = [a.donated for a in jax.tree.leaves(traced.args_info)]
    lowered = traced.lower()
    least = min(memory.estimate_peak(lowered, o).total for o in memory.CANDIDATE_OPTIONS["cpu"])
    return Step(traced.jaxpr, donated).estimate()[0], least


def timed(f: Callable[[], Any]) -> tuple[Any, float]:
    """Return a function's result, and its CPU seconds."""
    start = time.process_time()
    return f(), time.process_time() - start


def resident_bytes(step: Any, make_state: Callable[[], Any], batch: Any) -> int:
    """Peak memory of the process while a few steps run, the largest of some measurements.

    Memory in use before, such as the compiled programs, does not count. The batch does.
    """
    jax.block_until_ready(batch)

    def measure() -> int:
        memory_in_use = HighWater()
        state = make_state()
        for _ in range(STEPS):
            *state, _ = jax.block_until_ready(step(*state, batch))
        peak = memory_in_use.bytes()
        assert peak is not None, "this system does not report the peak memory of a process"
        return peak

    return max(measure() for _ in range(MEASUREMENTS)) + memory.tree_bytes(batch)


def first_moment(state: Any) -> Any:
    """The part of an optimizer's state that the first step makes a multiple of the gradient.

    None if it has none.
    """
    get = optax.tree_utils.tree_get
    return get(state, "mu", get(state, "trace"))


def with_remat_to_fit(program: Program) -> Route:
    """A train step of the user's own."""
    loss, params, batch = program.loss, program.params, program.batch
    optimizer = program.optimizer()
    has_aux = isinstance(jax.eval_shape(loss, params, batch), tuple)

    def trained(tree: Any, like: Any = None) -> Any:
        like = tree if like is None else like
        return jax.tree.map(lambda a, x: x if _is_floating(a) else None, like, tree)

    def fresh() -> tuple[Any, Any]:
        return jax.tree.map(jnp.copy, params), optimizer.init(trained(params))

    def value_and_grad(loss: Any) -> Any:
        return jax.value_and_grad(loss, has_aux=has_aux, allow_int=True)

    def trace(loss: Any, options: Any) -> Any:
        def step(params: Any, moments: Any, batch: Any) -> Any:
            value, grads = value_and_grad(loss)(params, batch)
            old = trained(params)
            updates, moments = optimizer.update(trained(grads, params), moments, old)
            new = optax.apply_updates(old, updates)
            return jax.tree.map(lambda a, b: a if b is None else b, params, new), moments, value

        step = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
        return step.trace(*jax.eval_shape(fresh), batch)

    def gradient(step: Any, loss: Any, options: Any) -> Any:
        _, moments, value = step(*fresh(), batch)
        if (moment := first_moment(moments)) is None:
            return jax.jit(value_and_grad(loss), compiler_options=options)(params, batch)
        return value, moment

    traced = trace(loss, None)
    flops = memory.estimate_cost(traced.jaxpr).flops
    plain, plain_seconds = timed(lambda: trace(loss, None).lower().compile())
    expected = gradient(plain, loss, None)
    known: dict[int, tuple[Any, Fitted]] = {}

    def fitted(loss: Any, chosen: Any) -> Fitted:
        options = chosen.compiler_options
        traced = trace(loss, options)
        step = traced.lower().compile()
        return Fitted(
            str(chosen),
            0,
            0.0,
            memory.peak(step).total,
            greatest_difference(gradient(step, loss, options), expected),
            memory.estimate_cost(traced.jaxpr).flops / flops,
            functools.partial(resident_bytes, step, fresh, batch),
        )

    def fit(budget: int) -> Fitted:
        progress: list[Any] = []
        (smaller, plan), seconds = timed(
            lambda: memory.remat_to_fit(
                loss, params, batch, optimizer=optimizer, budget=budget, progress=progress.append
            )
        )
        chosen = plan.chosen
        if id(chosen) not in known:  # another budget may choose the same program
            known[id(chosen)] = chosen, fitted(smaller, chosen)
        _, found = known[id(chosen)]
        return found._replace(compiled=len(progress), seconds=seconds / plain_seconds)

    return memory.peak(plain).total, fit, estimated(traced)


def with_compile_step(program: Program) -> Route:
    """A step of `fnet.make_step`."""
    losses, batch, optimizer = program.losses, program.batch, program.optimizer()
    assert losses is not None

    def loss(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
        return losses(params, batch)

    if first_moment(jax.eval_shape(optimizer.init, program.params)) is None:
        optimizer = optax.adam(1e-3)  # its state shows the gradient

    def fresh() -> fnet.TrainState:
        params = jax.tree.map(jnp.copy, program.params)
        return fnet.TrainState.create(params=params, optimizer=optimizer, key=jax.random.key(0))

    def gradient(step: Any) -> Any:
        state, metrics = step(fresh(), batch)
        return metrics["loss"], first_moment(state.opt_state)

    step = fnet.make_step(loss, optimizer)
    shapes = jax.eval_shape(fresh)
    traced = step.trace(shapes, batch)
    flops = memory.estimate_cost(traced.jaxpr).flops
    plain, plain_seconds = timed(lambda: step.lower(shapes, batch).compile())
    expected = gradient(plain)

    def fit(budget: int) -> Fitted:
        tried: list[Any] = []
        found, seconds = timed(
            lambda: fnet.compile_step(step, shapes, batch, budget=budget, progress=tried.append)
        )
        more = memory.estimate_cost(found.step.trace(shapes, batch).jaxpr).flops
        policy = found.step.remat
        chunks = getattr(policy, "chunks", 1)
        return Fitted(
            f"{policy}{f' in {chunks} chunks' if chunks > 1 else ''}",
            len(tried),
            seconds / plain_seconds,
            found.report.peak.total,
            greatest_difference(gradient(found), expected),
            more / flops,
            lambda: resident_bytes(found, lambda: (fresh(),), batch),
        )

    return memory.peak(plain).total, fit, estimated(traced)


ROUTES = {"remat_to_fit": with_remat_to_fit, "compile_step": with_compile_step}


def measure(
    name: str,
    program: Program,
    shares: Sequence[float],
    routes: Sequence[str],
    resident: bool = False,
) -> list[dict[str, Any]]:
    """Plan, compile and run a program for budgets, in this process."""
    rows = []
    for route in routes:
        if route == "compile_step" and program.losses is None:
            continue
        plain, fit, pair = ROUTES[route](program)
        for share in shares:
            row = {"program": name, "route": route, "share": share, "plain": plain}
            row["estimated"], row["least"] = pair
            row["tolerance"] = tolerance(program)
            try:
                fitted = fit(int(share * plain))
                row |= {k: v for k, v in fitted._asdict().items() if k != "resident"}
                if resident:
                    row["resident"] = fitted.resident()
            except memory.BudgetError as error:
                row["refused"] = str(error)
            except Exception:
                row["traceback"] = traceback.format_exc()
            rows.append(row)
    return rows


def is_unequal(row: dict[str, Any]) -> bool:
    """Whether a gradient differs from the plain one. NaN is not equal.

    Only a difference in double precision counts, if it is known.
    """
    if "double" in row:
        return not row["double"] <= 1e-9
    return "difference" in row and not row["difference"] <= row["tolerance"]


def is_over(row: dict[str, Any]) -> bool:
    """Whether the compiled step takes more than the budget."""
    return "peak" in row and row["peak"] > int(row["share"] * row["plain"])


def is_over_while_it_runs(row: dict[str, Any]) -> bool:
    """Whether the process takes more than the budget, by more than the runtime's own bytes."""
    return row.get("resident", 0) > 1.02 * int(row["share"] * row["plain"]) + 16e6


def cell(row: dict[str, Any]) -> str:
    """Result of a budget."""
    if "refused" in row:
        return "refused"
    if "traceback" in row:
        return row["traceback"].splitlines()[-1].split(":")[0]
    notes = f" **off by {row['difference']:.1e}**" * is_unequal(row)
    notes += f" **takes {row['peak'] / row['plain']:.3f}**" * is_over(row)
    notes += f" **{row.get('resident', 0) / 1e6:.1f} MB run**" * is_over_while_it_runs(row)
    return f"{row['flops']:.2f}, {row['choice']} ({row['compiled']}){notes}"


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
    return [r for r in rows if "refused" in r and any("peak" in o for o in _smaller(rows, r))]


def worse_than_smaller(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Budgets whose step takes more FLOPs than a smaller budget's."""
    some = [r for r in rows if "flops" in r]
    return [r for r in some if any(o["flops"] < 0.99 * r["flops"] for o in _smaller(some, r))]


def _smaller(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the same program and route with a smaller budget."""
    same = "program", "route"
    return [o for o in rows if o["share"] < row["share"] and all(o[n] == row[n] for n in same)]


def faults(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Faults, and the plans that have them."""
    found = {
        "gradients that differ from the plain ones": list(filter(is_unequal, rows)),
        "steps over the budget": list(filter(is_over, rows)),
        "tracebacks": [row for row in rows if "traceback" in row],
        "budgets refused although a smaller one fits": not_monotone(rows),
        "steps with more FLOPs than the step of a smaller budget": worse_than_smaller(rows),
    }
    if any("resident" in row for row in rows):
        what = "steps that take more than 1.02 of the budget and 16 MB in a process"
        found[what] = list(filter(is_over_while_it_runs, rows))
    return found


def by_share(rows: list[dict[str, Any]]) -> str:
    """A table of plans, refusals and FLOPs by budget."""
    lines = []
    for share in sorted({row["share"] for row in rows}, reverse=True):
        some = [row for row in rows if row["share"] == share]
        flops = sorted(row["flops"] for row in some if "flops" in row)
        compiled = [row["compiled"] for row in some if "compiled" in row]
        lines.append(
            {
                "budget / plain peak": f"{share:.0%}",
                "plans": str(len(some)),
                "refused": str(sum("refused" in row for row in some)),
                "FLOPs / plain, median": f"{statistics.median(flops or [np.nan]):.3f}",
                "90 % take at most": f"{np.quantile(flops or [np.nan], 0.9):.2f}",
                "programs compiled, median": f"{statistics.median(compiled or [np.nan]):g}",
            }
        )
    return markdown_table(lines)


def claims(rows: list[dict[str, Any]]) -> Iterator[Claim]:
    """The counts that should be none, and the medians of FLOPs."""
    for what, found in faults(rows).items():
        kind = "measured memory" if "in a process" in what else "count"
        yield Claim(f"{what}, of {len(rows)} plans", "none", len(found), "<= 0", kind)
    largest = max(row["share"] for row in rows)
    for when, is_first in (("first budget", True), ("later budgets", False)):
        some = [
            r["seconds"] for r in rows if "seconds" in r and (r["share"] == largest) == is_first
        ]
        if some:
            what = f"CPU seconds of planning, {when}, median"
            yield Claim(what, "compiling the plain step", statistics.median(some), "", "time")
    pairs = {(r["program"], r["route"]): (r["estimated"], r["least"]) for r in rows}.values()
    near = sum(abs(e - p) <= max(0.05 * p, 2**20) for e, p in pairs)
    yield Claim(f"plain peaks within 5 % or 1 MB, of {len(pairs)}", "compiled", near, "", "count")
    error = statistics.median(abs(e / p - 1) for e, p in pairs)
    yield Claim("error of the estimate of a plain peak, median", "compiled", error, "", "count")
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
    parser.add_argument("--resident", action="store_true", help="Run the steps.")
    options = parser.parse_args()
    if options.worker:
        name, shares, routes = options.worker
        if name in DOUBLE:
            jax.config.update("jax_enable_x64", True)
        settings = json.loads(shares), json.loads(routes), options.resident
        found = measure(name, PROGRAMS[name](), *settings)
        jax.effects_barrier()  # Programs print.
        print(json.dumps(found))
        return
    if options.resident:  # glibc reads these when a process starts
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"}
    rows = []
    for name in options.programs:
        kept = options.rows and options.rows / f"{name}.json"
        if kept and kept.exists():
            rows += json.loads(kept.read_text())
            continue
        given = name, json.dumps(options.shares), json.dumps(options.routes)
        found = in_fresh_process("foreign_steps", *given, *["--resident"] * options.resident)
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
