"""Kills a run of the digits at random moments, again and again, and resumes it each time.

    python -m benchmarks.kills --kills 100

``kill -9``, with a checkpoint every few steps, so that many fall into a save. After each, the
next start must go on from the newest checkpoint that was whole on disk. When a run has reached
its end, its last state must be bit for bit that of a run that nobody disturbed; then another
one begins, until there were as many kills.
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


def whole(out: Path) -> int | None:
    """The step of the newest checkpoint on disk; None without any."""
    steps = [int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    return max(steps, default=None)


def final_state(out: Path) -> list[np.ndarray]:
    """Every array of the last checkpoint."""
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


def trained(said: str) -> bool:
    """Whether a run told of a step."""
    return re.search(r"^step \d+/", said, re.MULTILINE) is not None


def measured(args: argparse.Namespace, folder: Path) -> Claim:
    """Kills runs in ``folder``; refuses a state that is not bit for bit an undisturbed one's."""
    moments = random.Random(args.seed)
    kills = in_training = runs = resumes = 0
    calm = folder / "calm"
    began = time.perf_counter()
    subprocess.run(command(calm, args), check=True, stdout=subprocess.DEVNULL)
    length = time.perf_counter() - began
    undisturbed = final_state(calm)
    while kills < args.kills:
        out = folder / f"run{runs}"
        words, expected = command(out, args), None
        while True:
            resume = (out / "config.json").is_file() and (out / "metrics.jsonl").is_file()
            process = start(words, resume)
            try:
                last = kills >= args.kills
                moment = None if last else moments.uniform(0, length / 3)
                said, _ = process.communicate(timeout=moment)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                said, _ = process.communicate()
                kills += 1
                in_training += trained(said)
            if found := re.search(r"resumed after step (\d+)", said):
                resumes += 1
                assert int(found[1]) == expected, f"resumed after {found[1]}, not {expected}"
            else:
                assert expected is None or not trained(said), f"began anew, not after {expected}"
            assert "damaged" not in said, said
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, said
            expected = whole(out)
            print(f"kill {kills}: newest checkpoint {expected}", file=sys.stderr, flush=True)
        same = [np.array_equal(a, b) for a, b in zip(final_state(out), undisturbed, strict=True)]
        assert all(same), f"{same.count(False)} arrays of {len(same)} differ"
        runs += 1
        shutil.rmtree(out)
    print(
        f"{kills} kills, {in_training} of them while it trained; {resumes} resumes, each from the "
        f"newest checkpoint on disk; {runs} runs of {args.steps} steps with a checkpoint every "
        f"{args.every}: every array of every last state is bit for bit that of an undisturbed run."
    )
    what = (
        f"{kills} times kill -9: share of the arrays of last states that are the same, bit for bit"
    )
    return Claim(what, "undisturbed runs", sum(same) / len(same), ">= 1.0", "quality")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all runs together")
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    parser.add_argument("--every", type=int, default=7, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills: expected at least 1, got {args.kills}")
    with tempfile.TemporaryDirectory() as folder:
        claim = measured(args, Path(folder))
    publish([claim], args, "jax", "jaxlib", "orbax-checkpoint")


if __name__ == "__main__":
    main()
