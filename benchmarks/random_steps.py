"""Budgets for random train steps: exact, within the budget, and at what FLOPs.

    python -m benchmarks.random_steps [--seeds FIRST [LAST]] [--shares SHARE ...] [--rows FILE]

The programs are those of `benchmarks.random_losses`, measured as in `benchmarks.foreign_steps`. A
gradient that differs by more than rounding is computed again in double precision: if it agrees
there, sums in another order are the reason. XLA generates code without optimizing it.

Each program is a line of the file, and those that are there are not measured again. After a
failure, its number alone repeats it: ``python -m benchmarks.random_steps --seeds 17``.
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
from benchmarks.foreign_steps import ROUTES, claims, is_over, is_unequal, measure, not_monotone
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
    """What is wrong, with a command that repeats it."""
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
    publish(list(claims(rows)), options, "jax", "jaxlib", "optax")


if __name__ == "__main__":
    main()
