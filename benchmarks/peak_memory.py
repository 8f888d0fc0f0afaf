"""Predicted and measured memory of every recipe, as a page of the docs.

    python -m benchmarks.peak_memory                            # all recipes; half an hour
    python -m benchmarks.peak_memory --only digits text_mamba   # these again

Recipes train for a few steps on the CPU, with evaluations and checkpoints, each in a fresh process.
Recipes for images or published models get random images and random weights, at sizes that fit
this machine. The page compares ``peak_bytes_predicted`` with ``peak_bytes_seen`` of summary.json.
A prediction is good if it is within 5 % or 16 MB of the measured bytes, whichever is larger.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from benchmarks import machine
from benchmarks.claims import installed
from benchmarks.measure import markdown_table
from fnet.interop.huggingface import build_model

_SHORT = ("--train.steps", "30", "--train.eval-every", "15", "--checkpoint.every", "15")
_FEW = ("--train.steps", "6", "--train.eval-every", "3", "--checkpoint.every", "3")
_IMAGES = ("--data.path", "images")
_IMAGENET = (
    *_IMAGES,
    "--data.batch-size",
    "8",
    "--data.image-size",
    "128",
    "--data.resize",
    "146",
    *_FEW,
)
_CIFAR = (*_IMAGES, *_FEW)
_CAMVID = ("--data.path", "camvid", "--data.image-size", "128", *_FEW)
_LLAMA = ("--model.path", "llama", "--data.context", "256", "--data.vocabulary", "4096", *_FEW)
_CHAT = ("--data.path", "chat.jsonl", *_LLAMA)

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
    "cifar10_resnet": _CIFAR,
    "cifar10_revnet": _CIFAR,
    "classify": (*_IMAGES, "--data.batch-size", "16", *_FEW),
    "imagenet_resnet34": _IMAGENET,
    "imagenet_resnet50": _IMAGENET,
    "imagenet_resnet101": _IMAGENET,
    "imagenet_resnext101": _IMAGENET,
    "imagenet_resnext101_512": _IMAGENET,
    "imagenet_resnext101_batchnorm": _IMAGENET,
    "imagenet_resnext152": _IMAGENET,
    "imagenet_wider_resnet38": _IMAGENET,
    "imagenet_densenet264": _IMAGENET,
    "camvid_deeplab": _CAMVID,
    "segmentation": _CAMVID,
    "vit_finetune": (*_IMAGES, "--model.path", "vit", "--data.batch-size", "16", *_FEW),
    "finetune_lora": _CHAT,
    "finetune_full": _CHAT,
    "finetune_private": (*_CHAT, "--data.batch-size", "16", "--grad.microbatches", "4"),
    "finetune_dpo": ("--data.path", "pairs.jsonl", *_LLAMA),
}
"""Options of each recipe's run."""

_WRITTEN = (
    "A checkpoint in the background holds up to two copies of the state. How much of them exists "
    "at a step's peak differs from run to run."
)
REASONS = {
    "digits_diffusion": "The step's temporaries of 15.2 MiB come from the heap, where other arrays "
    "leave gaps that the next step's do not fit. glibc maps arrays separately from 16 MiB on. "
    "Mapped from 8 MiB on, the step needs 28 MiB instead of 58, and takes 1.16 times as long.",
    "cifar10_resnet": f"{_WRITTEN} 32 MB are counted.",
    "finetune_full": f"{_WRITTEN} 65 MB are counted; seven runs took 167 to 192 MB.",
    "finetune_lora": f"{_WRITTEN} Three runs took 58, 71 and 79 MB.",
    "finetune_private": f"{_WRITTEN} 34 MB are counted; four runs took 64 to 85 MB.",
    "imagenet_resnext101": "Workspaces of convolutions are estimated at 28 MB, and took 16.",
    "vit_finetune": "Not explained. Without occupied gaps of the heap, the process takes 404 MB.",
    "camvid_deeplab": "Buffers of convolutions, which XLA does not count, are estimated at 28 MiB.",
    "segmentation": "As `camvid_deeplab`.",
}
"""Known causes of predictions that leave the bound."""

VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "image_size": 224,
    "patch_size": 16,
    "id2label": {str(i): str(i) for i in range(1000)},
}
"""Sizes of ViT-Ti/16."""

FILES = "predictions.json", "predictions.md"
BOUND = "5 % or 16 MB"


def llama(width: int, blocks: int) -> dict[str, Any]:
    """Config of a Llama with a vocabulary of 16 times its width."""
    return {
        "model_type": "llama",
        "vocab_size": 16 * width,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
    }


def write_model(path: Path, config: Mapping[str, Any]) -> None:
    """Write a published model with random bfloat16 weights."""
    model = build_model(config)
    generator = np.random.default_rng(0)
    tensors = {
        t.name: generator.standard_normal(t.file_shape, np.float32)
        for t in model.tensors
        if not t.optional
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    halves = {name: a.astype(ml_dtypes.bfloat16) for name, a in tensors.items()}
    save_file(halves, path / "model.safetensors")


def is_good(predicted: int, measured: int) -> bool:
    """Whether a prediction is within 5 % or 16 MB, whichever is larger."""
    return abs(predicted - measured) <= max(0.05 * measured, 16e6)


def write_data(folder: Path, recipe: str) -> None:
    """Write the random images, examples and models that a recipe's run reads."""
    options = RUNS[recipe]
    generator = np.random.default_rng(0)
    if "images" in options:
        size = 32 if recipe.startswith("cifar10") else 256
        for i in range(192):
            path = folder / "images" / ("train", "val")[i % 3 // 2] / "abcd"[i % 4] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 255, (size // 4, size // 4, 3), np.uint8)
            Image.fromarray(pixels).resize((size, size)).save(path)
    if "camvid" in options:
        _write_camvid(folder / "camvid", generator)
    if "llama" in options:
        texts = [f"question {i}, answer {i * i}. " * (5 + i % 7) for i in range(200)]
        prompts, answers = zip(*((t[: len(t) // 3], t[len(t) // 3 :]) for t in texts), strict=True)
        examples = [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]
        (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, examples)))
        pairs = [
            {"prompt": p, "chosen": a, "rejected": a[::-1]}
            for p, a in zip(prompts, answers, strict=True)
        ]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        write_model(folder / "llama", llama(256, 4))
    if "vit" in options:
        write_model(folder / "vit", VIT)


def _write_camvid(folder: Path, generator: np.random.Generator) -> None:
    for split, count in (("train", 40), ("val", 12), ("test", 12)):
        for kind in (split, f"{split}annot"):
            (folder / kind).mkdir(parents=True)
        for i in range(count):
            image = Image.fromarray(generator.integers(0, 255, (12, 15, 3), np.uint8))
            mask = Image.fromarray(generator.integers(0, 12, (12, 15), np.uint8))
            image.resize((480, 360)).save(folder / split / f"{i}.png")
            mask = mask.resize((480, 360), Image.Resampling.NEAREST)
            mask.save(folder / f"{split}annot" / f"{i}.png")


def measure(recipe: str, folder: Path) -> tuple[int, int]:
    """Train a recipe in a fresh process, and return the predicted and the measured peak."""
    write_data(folder, recipe)
    command = [sys.executable, "-m", "fnet", "train", recipe, *RUNS[recipe], "--out", "run"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, env=environment)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return summary["peak_bytes_predicted"], summary["peak_bytes_seen"]


def as_page(described: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the page: machine, table and commands."""
    good = [is_good(run["predicted"], run["measured"]) for run in runs.values()]
    versions = sorted({f"jax {run['jax']}, jaxlib {run['jaxlib']}" for run in runs.values()})
    rows = [
        {
            "recipe": f"`{name}`",
            "predicted MB": f"{run['predicted'] / 1e6:.1f}",
            "measured MB": f"{run['measured'] / 1e6:.1f}",
            "predicted / measured": f"{run['predicted'] / run['measured']:.2f}",
            "within the bound": "yes" if within else "no",
            "date": run["date"],
            "with an earlier JAX": _earlier(run),
        }
        for (name, run), within in zip(runs.items(), good, strict=True)
    ]
    notes = [
        f"- `{name}`: {REASONS[name]}"
        for name, within in zip(runs, good, strict=True)
        if not within and name in REASONS
    ]
    if missing := [f"`{name}`" for name in RUNS if name not in runs]:
        notes.append(f"- Not measured: {', '.join(missing)}.")
    parts = (
        "# Predicted and measured memory",
        "[Memory](../memory.md) explains the prediction. Each recipe trains for a few steps on "
        "the CPU, in a fresh process.\nThe table compares `peak_bytes_predicted` with "
        "`peak_bytes_seen` of `summary.json`, one run each. The last column has both with an "
        "earlier JAX, where one of them differs by over 5 %.",
        f"{sum(good)} of {len(good)} recipes are within the bound: {BOUND} of the measured bytes, "
        "whichever is larger.\n`tests/train/run/test_predictions.py` (slow) fails if another one "
        "leaves it. "
        "`python -m benchmarks.peak_memory` writes this page.",
        markdown_table(rows),
        *["\n".join(notes)] * bool(notes),
        f"{machine.format_machine(described)}; {'; '.join(versions)}.",
        "Recipes for images or published models get random images and weights. `RUNS` in "
        "`benchmarks/peak_memory.py` has the options of each.",
    )
    return "\n\n".join(parts) + "\n"


def _earlier(run: Mapping[str, Any]) -> str:
    """Format the MB of an earlier JAX, if one of them differs by over 5 %."""
    old = run.get("earlier", run)
    if all(abs(run[key] / old[key] - 1) <= 0.05 for key in ("predicted", "measured")):
        return ""
    return f"{old['jax']}: {old['predicted'] / 1e6:.1f}, {old['measured'] / 1e6:.1f}"


def main() -> None:
    """Measure the recipes, and write the page after each of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RECIPE")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="Folder.")
    args = parser.parse_args()
    described = machine.describe()
    data, page = (args.out / name for name in FILES)
    runs: dict[str, Any] = {}
    if data.exists():
        saved = json.loads(data.read_text())
        if machine.same_hardware(saved["machine"], described):
            runs = saved["runs"]
    for recipe in args.only:
        with tempfile.TemporaryDirectory() as folder:
            predicted, measured = measure(recipe, Path(folder))
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        new = {"predicted": predicted, "measured": measured, "date": date}
        new |= installed("jax", "jaxlib")
        old = runs.get(recipe, {})
        earlier = old if old.get("jax") != new["jax"] else old.get("earlier")
        runs[recipe] = new | ({"earlier": earlier} if earlier else {})
        runs = {name: runs[name] for name in RUNS if name in runs}
        data.write_text(json.dumps({"machine": described, "runs": runs}, indent=1) + "\n")
        page.write_text(as_page(described, runs))
        verdict = "within" if is_good(predicted, measured) else "NOT within"
        print(f"{recipe}: {predicted:,} / {measured:,} bytes, {verdict} {BOUND}", flush=True)


if __name__ == "__main__":
    main()
