"""Watch the memory, files and threads of one training run for hours.

    python -m benchmarks.soak --hours 2

The run trains a small network on pictures in a folder, with evaluations, checkpoints and
TensorBoard, if tensorboardX is installed. Every half minute this script reads the resident memory
of the run and its child processes, their threads and open files, and the files in the run's
folder. After the warm-up, the first tenth of the time, resident memory should stay flat: the
claims compare the medians of the first and the last tenth of what follows. The run is stopped as
by Ctrl-C and must save and end.
"""

import argparse
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.claims import Claim, argument_parser, publish


class Sample(NamedTuple):
    """One measurement of the run and its child processes."""

    seconds: float
    step: int
    resident_mb: float
    anonymous_mb: float
    threads: int
    open_files: int
    files: int


def write_pictures(folder: Path) -> None:
    """Write the handwritten digits as PNG files, one folder per class."""
    digits = load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).resize((32, 32)).save(path)


def command(pictures: Path, out: Path, checkpoint_every: int) -> list[str]:
    options = {
        "data.source": "image_folder",
        "data.path": pictures,
        "data.image-size": 32,
        "data.batch-size": 16,
        "model.widths": (8, 16),
        "model.blocks-per-stage": 1,
        "optim.schedule": "constant",
        "optim.learning-rate": 0.01,
        "train.steps": 10**7,
        "train.eval-every": 200,
        "checkpoint.every": checkpoint_every,
    }
    words = []
    for key, value in options.items():
        words += [f"--{key}", *map(str, value if isinstance(value, tuple) else (value,))]
    if importlib.util.find_spec("tensorboardX"):
        words.append("--tracking.tensorboard")
    return [sys.executable, "-m", "train", "train", "digits", "--out", str(out), *words]


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            pids += tree(int(child))
    return pids


def look(pid: int, out: Path, began: float) -> Sample:
    """Read the counters of the run and its child processes."""
    counts = dict.fromkeys(("VmRSS", "RssAnon", "Threads"), 0)
    open_files = 0
    for each in tree(pid):
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in counts:
                counts[key] += int(value.split()[0])
        open_files += sum(1 for _ in Path(f"/proc/{each}/fd").iterdir())
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return Sample(
        seconds=time.monotonic() - began,
        step=json.loads(lines[-1])["step"] if lines else 0,
        resident_mb=counts["VmRSS"] / 1e3,
        anonymous_mb=counts["RssAnon"] / 1e3,
        threads=counts["Threads"],
        open_files=open_files,
        files=sum(p.is_file() for p in out.rglob("*")),
    )


def watch(args: argparse.Namespace, folder: Path) -> list[Sample]:
    """Train for ``args.hours`` and return the samples after each ``args.every`` seconds."""
    pictures, out = folder / "pictures", folder / "run"
    write_pictures(pictures)
    samples: list[Sample] = []
    with (folder / "output.txt").open("w") as output:
        words = command(pictures, out, args.checkpoint_every)
        run = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        began = time.monotonic()
        while time.monotonic() - began < args.hours * 3600 and run.poll() is None:
            time.sleep(args.every)
            try:
                samples.append(look(run.pid, out, began))
            except FileNotFoundError:  # a child process or a file is gone: look again later
                continue
            s = samples[-1]
            print(
                f"{s.seconds:6.0f} s, step {s.step:6}: {s.resident_mb:.1f} MB resident, "
                f"{s.anonymous_mb:.1f} MB anonymous, {s.threads} threads, {s.open_files} open "
                f"files, {s.files} files in the run's folder",
                flush=True,
            )
        run.send_signal(signal.SIGINT)
        code = run.wait()
    print("\n".join((folder / "output.txt").read_text().splitlines()[-6:]))
    print(f"exit code after Ctrl-C: {code}")
    return samples


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--hours", type=float, default=2.0, help="Length of the run.")
    parser.add_argument("--every", type=float, default=30.0, help="Seconds between samples.")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="Steps between them.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = watch(args, Path(folder))
    later = [s for s in samples if s.seconds > 360 * args.hours] or samples
    tenth = max(len(later) // 10, 1)

    def growth(field: str) -> float:
        values = [getattr(s, field) for s in later]
        return statistics.median(values[-tenth:]) / statistics.median(values[:tenth])

    steps = later[-1].step - later[0].step
    claims = [
        Claim(
            f"a run of {args.hours:g} h, {steps} steps after warm-up: {what}",
            "the first tenth after warm-up",
            growth(field),
            "<= 1.01",
            "measured memory",
        )
        for field, what in (
            ("resident_mb", "resident memory in the last tenth"),
            ("threads", "threads"),
            ("open_files", "open files"),
            ("files", "files in the run's folder"),
        )
    ]
    publish(claims, args, "jax", "jaxlib", "orbax-checkpoint", "tensorboardX")


if __name__ == "__main__":
    main()
