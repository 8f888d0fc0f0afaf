"""Predicted and measured peak memory of training on this CPU.

    python -m benchmarks.peak_memory

Recipes train for a few steps, with evaluations and checkpoints, each in a fresh process. So does a
DeepLab on a ResNet-18 with crops of 128 pixels, on a folder of random images. The table compares
``peak_bytes_predicted`` with ``peak_bytes_seen`` of summary.json. A prediction is good if it is
within 5 % or 16 MB, whichever is larger.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measure import markdown_table
from fnet.memory import format_bytes

_SHORT = ("--train.steps", "30", "--train.eval-every", "15", "--checkpoint.every", "15")
RUNS: dict[str, tuple[str, ...]] = {
    "digits": _SHORT,
    "digits_mlp": _SHORT,
    "digits_dp": ("--train.steps", "30"),
    "digits_revnet": _SHORT,
    "digits_noise_scale": _SHORT,
    "digits_diffusion": _SHORT,
    "text_transformer": _SHORT,
    "text_mamba": _SHORT,
    "text_hybrid": _SHORT,
    "resnet50_synthetic": (),
    "deeplab": (),
}
DEEPLAB = """
from train.config import Config, DeepLab, Optim, SegmentationFolder, Train

def config():
    return Config(
        name="deeplab",
        data=SegmentationFolder(path="images", classes=11, batch_size=8, image_size=128),
        model=DeepLab(backbone="resnet18"),
        optim=Optim(learning_rate=0.01),
        train=Train(steps=8, log_every=2),
    )
"""
_LEAST = 16 * 10**6


def is_good(predicted: int, measured: int) -> bool:
    """Whether a prediction is within 5 % or 16 MB, whichever is larger."""
    return abs(predicted - measured) <= max(0.05 * measured, _LEAST)


def write_deeplab(folder: Path) -> None:
    """Write the recipe of a DeepLab and its images."""
    (folder / "deeplab.py").write_text(DEEPLAB)
    write_images(folder / "images")


def write_images(folder: Path) -> None:
    """Write random images of CamVid's size with masks of 11 classes."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 12)):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for i in range(count):
            image = Image.fromarray(generator.integers(0, 255, (12, 15, 3), np.uint8))
            mask = Image.fromarray(generator.integers(0, 11, (12, 15), np.uint8))
            image.resize((480, 360)).save(folder / split / "images" / f"{i}.png")
            mask.resize((480, 360), Image.Resampling.NEAREST).save(
                folder / split / "masks" / f"{i}.png"
            )


def measure(name: str, flags: tuple[str, ...], folder: Path) -> tuple[int, int]:
    """Train in a fresh process, and return the predicted and the measured peak."""
    given = f"{name}.py" if name == "deeplab" else name
    out = folder / f"run_{name}"
    command = [sys.executable, "-m", "fnet", "train", given, *flags, "--out", str(out)]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    return summary["peak_bytes_predicted"], summary["peak_bytes_seen"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(RUNS), help="Runs to measure.")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_deeplab(folder)
        for run in args.only:
            predicted, measured = measure(run, RUNS[run], folder)
            row = {
                "run": run,
                "predicted": format_bytes(predicted),
                "measured": format_bytes(measured),
                "ratio": f"{predicted / measured:.2f}",
                "within 5 % or 16 MB": "yes" if is_good(predicted, measured) else "no",
            }
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
