"""Training with one, two and four processes: losses, and memory of the state per process.

    python -m benchmarks.processes

Parameters and optimizer state are sharded over all processes, which run on this machine and
communicate by gloo. The losses of every step are compared with one process's. The state's
bytes are the arguments of the compiled step in one process. At the end, one process resumes from
the checkpoint of four.

Sums over several processes add in another order. The rounding differences grow with the number of
steps, faster with a higher learning rate.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table

RECIPE = """
from train.config import Checkpoint, Config, Digits, Optim, PreactResNet, Train

def config():
    return Config(
        name="spread",
        data=Digits(batch_size=64),
        model=PreactResNet(widths=(64, 128), blocks_per_stage=2),
        optim=Optim(name="sgd", learning_rate={learning_rate}, schedule="constant"),
        train=Train(steps={steps}, log_every=1, eval_every={steps}),
        checkpoint=Checkpoint(every={steps}, best=False),
    )
"""


def train(folder: Path, processes: int, *arguments: str) -> None:
    """Train the recipe in ``folder`` with several processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = []
    for i in range(processes):
        command = [sys.executable, "-m", "train", "train", str(folder / "recipe.py"), *arguments]
        if processes > 1:
            command += ["--mesh.fsdp", str(processes), "--coordinator", f"localhost:{port}"]
            command += ["--processes", str(processes), "--process", str(i)]
        running.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
        )
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(output)


def losses(out: Path) -> list[float]:
    """Read the loss of every step."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "step" in line]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def measure(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Train in ``folder`` with 1, 2 and 4 processes, and compare them."""
    (folder / "recipe.py").write_text(RECIPE.format(**vars(args)))
    rows, claims = [], []
    for processes in (1, 2, 4):
        out = folder / f"of{processes}"
        train(folder, processes, "--out", str(out))
        if processes == 1:
            total, expected = read(out / "summary.json")["state_bytes"], losses(out)
        state = read(out / "summary.json")["state_bytes"]
        differences = [abs(a / b - 1) for a, b in zip(losses(out), expected, strict=True)]
        row = {
            "processes": str(processes),
            "largest difference of a loss": f"{max(differences):.1e}",
            "state per process": f"{state:,} B",
            "relative to total / processes": f"{state * processes / total:.3f}",
        }
        rows.append(row)
        if processes > 1:
            what = f"{processes} processes, {args.steps} steps"
            worst, share = max(differences), state * processes / total
            claims += [
                Claim(
                    f"{what}: largest relative difference of a loss",
                    "1 process",
                    worst,
                    "<= 1e-5",
                    "error",
                ),
                Claim(f"{what}: state per process", f"total / {processes}", share, "<= 1.05"),
            ]
    print(markdown_table(rows))
    first, last = expected[0], expected[-1]
    print(f"\n{args.steps} steps; the loss falls from {first:.3f} to {last:.3f}.")
    train(folder, 1, "--out", str(folder / "of4"), "--resume", "--train.steps", str(args.steps + 5))
    print(
        f"One process resumed from the checkpoint of four: loss {losses(folder / 'of4')[-1]:.3f}."
    )
    return claims


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="Steps to train.")
    parser.add_argument("--learning-rate", type=float, default=0.0005, help="Learning rate.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        claims = measure(args, Path(folder))
    publish(claims, args, "jax", "jaxlib", "orbax-checkpoint")


if __name__ == "__main__":
    main()
