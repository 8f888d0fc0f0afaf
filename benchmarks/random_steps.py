"""Budgets for random train steps: exact, within the budget, and at what FLOPs.

    python -m benchmarks.random_steps [--seeds FIRST [LAST]] [--shares SHARE ...] [--rows FILE]

`benchmarks.random_losses` makes the programs. They are measured as in `benchmarks.foreign_steps`. A
gradient that differs by more than rounding is computed again in double precision: if it agrees
there, sums in another order are the reason. XLA generates code without optimizing it.

Each program is a line of the file, and those that are there are not measured again. After a
failure, its number alone repeats it: ``python -m benchmarks.random_steps --seeds 17``. With
``--page`` and the rows of both benchmarks, it writes the page of the docs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10.")
)

import jax

from benchmarks.claims import argument_parser, publish
from benchmarks.foreign_steps import (
    ROUTES,
    by_share,
    claims,
    faults,
    is_over,
    is_unequal,
    measure,
    not_monotone,
    table,
)
from benchmarks.measure import markdown_table
from benchmarks.random_losses import random_loss

SHARES = (0.95, 0.85, 0.70, 0.60, 0.50, 0.35, 0.25, 0.20)
PROGRAMS_OF_A_PROCESS = 20


def measure_seed(
    seed: int, shares: Any, most_blocks: int = 4, routes: Sequence[str] = tuple(ROUTES)
) -> list[dict[str, Any]]:
    """Measure a program, and again in double precision where a gradient differs."""
    about, program = random_loss(seed, most_blocks)
    rows = measure(f"{seed}: {about}", program, shares, routes)
    for row in filter(is_unequal, rows):
        with jax.enable_x64(True):
            name, double = random_loss(seed, most_blocks)
            (again,) = measure(name, double, [row["share"]], [row["route"]])
        row["double"] = again.get("difference", float("nan"))
    return rows


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """A fault, with a command that repeats it."""
    found = []
    for row in rows:
        what = ""
        if "traceback" in row:
            what = row["traceback"]
        elif is_unequal(row):
            what = f"differs by {row['difference']:.1e}, double {row.get('double', 0):.1e}"
        elif is_over(row):
            what = f"takes {row['peak']:,} of {int(row['share'] * row['plain']):,} bytes"
        elif row in not_monotone(rows):
            what = "is refused although a smaller budget fits"
        if what:
            seed = row["program"].split(":")[0]
            again = f"python -m benchmarks.random_steps --seeds {seed}"
            found.append(
                f"{again} # {row['route']}, {row['share']:.0%}, {row['program']}\n  {what}"
            )
    return found


def page(random: list[dict[str, Any]], foreign: list[dict[str, Any]]) -> str:
    """The page of the docs."""

    def counted(rows: list[dict[str, Any]]) -> str:
        programs = len({row["program"] for row in rows})
        ran = sum("resident" in row for row in rows)
        found = {f"{what[0].upper()}{what[1:]}": len(bad) for what, bad in faults(rows).items()}
        header = {"": f"Of {len(rows):,} plans for {programs:,} programs", "number": ""}
        if ran:
            header["number"] = f"{ran} run"
        lines = [header, *({"": what, "number": str(n)} for what, n in found.items())]
        return markdown_table(lines)

    def largest(rows: list[dict[str, Any]]) -> float:
        is_float32 = [r for r in rows if "difference" in r and r["tolerance"] == 1e-5]
        return max(row["difference"] for row in is_float32)

    costly = {r["program"] for r in foreign if "refused" in r or r.get("flops", 0) > 1.02}
    return "\n\n".join(
        [
            "# Budgets for any train step",
            "[Fit a memory budget](../how_to/budget.md) explains the method. A budget is a share "
            "of the compiled bytes of the plain step.\nA step fits if its own compiled bytes are "
            "at most the budget. Its value and gradient are compared with the plain ones,\nby the "
            "norm of the difference: at most 1e-5 in float32, 2e-2 in bfloat16, 1e-2 in float16. "
            "FLOPs are counted in traced programs.\nXLA generated code without optimizing it.",
            "## Random steps",
            "A seed makes a loss of dense layers, convolutions, attention, gathers, scatters, "
            "loops, branches, derivative rules, casts and random keys,\nwith a mean over examples "
            "or a loss that couples the batch, and one of seven optimizers.",
            counted(random),
            "A program has plans of both `remat_to_fit` and, if its loss is a mean over examples, "
            "`compile_step`.",
            f"The largest difference in float32 is {largest(random):.1e}.",
            by_share(random),
            "A budget below arguments and results of the step can only be refused. "
            "Some of these steps keep few arrays, so their floor is high.",
            "## Steps as users write them",
            "Programs of `benchmarks/foreign_programs.py`, with `fnet.memory.remat_to_fit` and, if "
            "the loss is a mean, with `fnet.compile_step`.",
            counted(foreign),
            f"The largest difference in float32 is {largest(foreign):.1e}.",
            by_share(foreign),
            "Programs that take more than 1.02 times the FLOPs, or are refused, at one of the "
            "budgets. Each entry has FLOPs relative to the plain step, what was chosen (none: no "
            "remat policy), and the number of programs that were compiled.",
            table([row for row in foreign if row["program"] in costly]),
            "## Repeat",
            "```sh\npython -m benchmarks.foreign_steps --shares 0.7 0.5 0.35 0.2 --resident \\\n"
            "    --rows rows\n"
            "python -m benchmarks.random_steps --seeds 0 109 --rows random.jsonl \\\n"
            "    --foreign rows --page docs/benchmarks/any_step.md\n```",
            f"jax {version('jax')}, jaxlib {version('jaxlib')}, on a CPU.\n",
        ]
    )


def main() -> None:
    """Measure many programs, in processes of twenty."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 99], help="First and last program."
    )
    parser.add_argument(
        "--shares", nargs="+", type=float, default=list(SHARES), help="Budgets / plain peak."
    )
    parser.add_argument("--rows", type=Path, help="File that keeps the measured programs.")
    parser.add_argument("--foreign", type=Path, help="Rows of `benchmarks.foreign_steps`.")
    parser.add_argument("--page", type=Path, help="Write the page of the docs to this file.")
    parser.add_argument("--worker", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for seed in options.worker:
            try:
                rows = measure_seed(seed, options.shares)
            except Exception:  # the plain step fails
                name = {"program": f"{seed}: ", "route": "none", "share": 1.0, "plain": 0}
                rows = [name | {"traceback": traceback.format_exc()}]
            with options.rows.open("a") as file:
                file.write(json.dumps({"seed": seed, "rows": rows}) + "\n")
            print("\n".join(failures(rows)), end="", file=sys.stderr, flush=True)
            jax.clear_caches()
        return
    with tempfile.TemporaryDirectory() as folder:
        file = options.rows or Path(folder) / "rows.jsonl"
        file.touch()
        seeds = range(options.seeds[0], options.seeds[-1] + 1)
        while True:
            known = {x["seed"]: x["rows"] for x in map(json.loads, file.read_text().splitlines())}
            if not (missing := [seed for seed in seeds if seed not in known]):
                break
            command = [sys.executable, "-m", "benchmarks.random_steps", "--rows", str(file)]
            command += ["--shares", *map(str, options.shares)]
            some = map(str, missing[:PROGRAMS_OF_A_PROCESS])
            subprocess.run([*command, "--worker", *some], check=True)
    rows = [row for seed in seeds for row in known[seed]]
    print("\n".join(failures(rows)))
    print(f"{len(seeds)} programs")
    if options.page:
        names = sorted(options.foreign.glob("*.json"))
        foreign = [row for name in names for row in json.loads(name.read_text())]
        options.page.write_text(page(rows, foreign))
    publish(list(claims(rows)), options, "jax", "jaxlib", "optax")


if __name__ == "__main__":
    main()
