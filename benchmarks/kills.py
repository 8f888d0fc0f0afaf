"""Kill a training run at random moments and resume it each time.

    python -m benchmarks.kills --kills 100

The run of the digits saves a checkpoint every few steps, so that many kills (``kill -9``)
interrupt a save. After each, the next start must resume from the newest complete checkpoint on
disk. The final state of a finished run must be bitwise equal to the state of an uninterrupted
run. Runs are repeated until the number of kills is reached.
"""

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.claims import Claim, argument_parser, publish
from train.run.checkpoints import Checkpoints
from train.run.run_folder import RunFolder
from train.run.setup import setup

RECIPE = "digits"


def command(out: Path, args: argparse.Namespace) -> list[str]:
    options = {
        "train.steps": args.steps,
        "train.eval-every": args.steps,
        "checkpoint.every": args.every,
    }
    words = [str(w) for key, value in options.items() for w in (f"--{key}", value)]
    return [sys.executable, "-m", "train", "train", RECIPE, "--out", str(out), *words]


def newest_checkpoint(out: Path) -> int | None:
    """Step of the newest checkpoint on disk, or None."""
    steps = [int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    return max(steps, default=None)


def final_state(out: Path) -> list[np.ndarray]:
    """Load every array of the last checkpoint."""
    folder = RunFolder(out)
    with Checkpoints(folder.checkpoints) as checkpoints:
        restored = checkpoints.restore(setup(folder.read_config()).state_shapes)
    assert restored is not None
    state = restored.state
    key = jax.random.key_data(state.key)
    leaves = (state.params, state.model_state, state.opt_state, state.ema, state.step, key)
    return [np.asarray(a) for a in jax.tree.leaves(leaves)]


def start(words: list[str], resume: bool) -> subprocess.Popen:
    return subprocess.Popen(
        [*words, *["--resume"] * resume],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def logged_a_step(output: str) -> bool:
    """Whether the output of a run has a line about a step."""
    return re.search(r"^step \d+/", output, re.MULTILINE) is not None


def measure(args: argparse.Namespace, folder: Path) -> Claim:
    """Kill runs in ``folder`` and check that their final states equal an uninterrupted run's."""
    moments = random.Random(args.seed)
    kills = in_training = runs = resumes = 0
    uninterrupted = folder / "uninterrupted"
    began = time.perf_counter()
    subprocess.run(command(uninterrupted, args), check=True, stdout=subprocess.DEVNULL)
    length = time.perf_counter() - began
    expected_state = final_state(uninterrupted)
    while kills < args.kills:
        out = folder / f"run{runs}"
        words, expected = command(out, args), None
        while True:
            resume = (out / "config.json").is_file() and (out / "metrics.jsonl").is_file()
            process = start(words, resume)
            try:
                last = kills >= args.kills
                moment = None if last else moments.uniform(0, length / 3)
                output, _ = process.communicate(timeout=moment)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                output, _ = process.communicate()
                kills += 1
                in_training += logged_a_step(output)
            if match := re.search(r"resumed after step (\d+)", output):
                resumes += 1
                assert int(match[1]) == expected, f"resumed after {match[1]}, not {expected}"
            else:
                restarted = expected is not None and logged_a_step(output)
                assert not restarted, f"started from scratch, not after {expected}"
            assert "damaged" not in output, output
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, output
            expected = newest_checkpoint(out)
            print(f"kill {kills}: newest checkpoint {expected}", file=sys.stderr, flush=True)
        pairs = zip(final_state(out), expected_state, strict=True)
        same = [np.array_equal(a, b) for a, b in pairs]
        assert all(same), f"{same.count(False)} arrays of {len(same)} differ"
        runs += 1
        shutil.rmtree(out)
    print(
        f"{kills} kills, {in_training} of them during training; {resumes} resumes, each from the "
        f"newest checkpoint on disk; {runs} runs of {args.steps} steps with a checkpoint every "
        f"{args.every}: every final array is bitwise equal to an uninterrupted run's."
    )
    what = f"kill -9, {kills} times: share of final arrays that are bitwise equal"
    return Claim(what, "uninterrupted runs", sum(same) / len(same), ">= 1.0", "quality")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="Kills in all runs together.")
    parser.add_argument("--steps", type=int, default=1500, help="Steps per run.")
    parser.add_argument("--every", type=int, default=7, help="Steps between checkpoints.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the moments.")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills: must be >= 1, got {args.kills}")
    with tempfile.TemporaryDirectory() as folder:
        claim = measure(args, Path(folder))
    publish([claim], args, "jax", "jaxlib", "orbax-checkpoint")


if __name__ == "__main__":
    main()
