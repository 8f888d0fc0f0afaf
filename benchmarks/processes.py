"""One, two and four processes that train the same network: losses, and what each of them holds.

    python -m benchmarks.processes

Parameters and the optimizer's state are spread over all processes, which find each other on
this machine and talk by gloo. Losses of every step are compared with those of one process; the
state's bytes are those that the compiled step takes as arguments in one process, which is what
lies in its memory. At last one process goes on from the checkpoint that four of them made.

Sums over several processes add in another order. What that changes in the last digit grows
with the steps, the faster the higher the learning rate.
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
from benchmarks.measure import markdown

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


def trained(folder: Path, processes: int, *words: str) -> None:
    """Trains the recipe in ``folder`` in so many processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for i in range(processes):
        command = [sys.executable, "-m", "train", "train", str(folder / "recipe.py"), *words]
        if processes > 1:
            command += ["--mesh.fsdp", str(processes), "--coordinator", f"localhost:{port}"]
            command += ["--processes", str(processes), "--process", str(i)]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
        )
    for process in started:
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(said)


def losses(out: Path) -> list[float]:
    """Of every step."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def measured(args: argparse.Namespace, folder: Path) -> list[Claim]:
    """Trains in ``folder`` with 1, 2 and 4 processes, and shows how they differ."""
    (folder / "recipe.py").write_text(RECIPE.format(**vars(args)))
    rows, claims = [], []
    for processes in (1, 2, 4):
        out = folder / f"of{processes}"
        trained(folder, processes, "--out", str(out))
        if processes == 1:
            whole, expected = read(out / "summary.json")["state_bytes"], losses(out)
        state = read(out / "summary.json")["state_bytes"]
        differences = [abs(a / b - 1) for a, b in zip(losses(out), expected, strict=True)]
        row = {
            "processes": str(processes),
            "largest difference of a loss": f"{max(differences):.1e}",
            "state in one process": f"{state:,} B",
            "of total / processes": f"{state * processes / whole:.3f}",
        }
        rows.append(row)
        if processes > 1:
            what = f"{processes} processes, {args.steps} steps"
            worst, share = max(differences), state * processes / whole
            claims += [
                Claim(
                    f"{what}: largest part a loss differs", "1 process", worst, "<= 1e-5", "error"
                ),
                Claim(f"{what}: state of one", f"total / {processes}", share, "<= 1.05"),
            ]
    print(markdown(rows))
    first, last = expected[0], expected[-1]
    print(f"\n{args.steps} steps, in which the loss falls from {first:.3f} to {last:.3f}.")
    trained(
        folder, 1, "--out", str(folder / "of4"), "--resume", "--train.steps", str(args.steps + 5)
    )
    print(f"One process went on from the four's checkpoint: loss {losses(folder / 'of4')[-1]:.3f}.")
    return claims


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=0.0005)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        claims = measured(args, Path(folder))
    publish(claims, args, "jax", "jaxlib", "orbax-checkpoint")


if __name__ == "__main__":
    main()
