"""Losses of the text recipes on a text file, with and without the attention context.

    python -m benchmarks.text_recipes --path tinyshakespeare.txt

Each run is a process of its own. With ``--out``, runs are saved there, and an interrupted
benchmark resumes. The text is split 90/10. The spread is the standard deviation over seeds;
differences are between runs with equal seeds. Other options, such as --train.steps 100, are
passed to each run.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table

RECIPES = ("text_transformer", "text_mamba", "text_hybrid")


def run(recipe: str, context: str, seed: int, path: str, out: Path, more: list[str]) -> dict:
    """Train unless the run is finished, and return its summary."""
    folder = out / f"{recipe}-{context}-{seed}"
    if not (folder / "summary.json").is_file():
        options = {"data.path": path, "model.attention-context": context, "train.seed": seed}
        words = [str(w) for key, value in options.items() for w in (f"--{key}", value)]
        resume = ["--resume"] if (folder / "config.json").is_file() else []
        program = [sys.executable, "-m", "train", "train", recipe, "--out", str(folder)]
        subprocess.run([*program, *resume, *words, *more], check=True, stdout=sys.stderr)
    return json.loads((folder / "summary.json").read_text())


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--path", required=True, help="Text file.")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="Recipes to train.")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), help="Seeds.")
    parser.add_argument("--out", help="Folder for runs.")
    args, more = parser.parse_known_args()
    out = Path(args.out or tempfile.mkdtemp())
    rows, losses_by_recipe = [], {}
    for recipe in args.recipes:
        losses: dict[str, list[float]] = {}
        for seed in args.seeds:
            for context in ("none", "lagged"):
                summary = run(recipe, context, seed, args.path, out, more)
                losses.setdefault(context, []).append(summary["metrics"]["test/loss"])
        losses_by_recipe[recipe] = losses
        differences = [b - a for a, b in zip(losses["none"], losses["lagged"], strict=True)]
        rows.append(
            {
                "recipe": recipe,
                "parameters": f"{summary['parameters']:,}",
                "without context": spread(losses["none"]),
                "with context": spread(losses["lagged"]),
                "difference": spread(differences),
                "seconds per run": f"{summary['seconds']:.0f}",
            }
        )
        print(markdown_table(rows), flush=True)
    print(f"\nNats per token on held-out text, mean and spread of seeds {list(args.seeds)}.")
    claimed = claims(losses_by_recipe, len(args.seeds), Path(args.path).stem)
    publish(claimed, args, "jax", "jaxlib", "optax")


def claims(
    losses_by_recipe: dict[str, dict[str, list[float]]], seeds: int, text: str
) -> Iterator[Claim]:
    """Claim means over seeds; only tinyshakespeare has targets."""
    means = {
        recipe: {context: statistics.mean(by_seed) for context, by_seed in losses.items()}
        for recipe, losses in losses_by_recipe.items()
    }
    targets = ("<= 1.8", "<= 0.05") if text == "tinyshakespeare" else ("", "")
    transformer = means.get("text_transformer", {}).get("none")
    for recipe, mean in means.items():
        what = f"{recipe} on {text}, held-out nats per token, mean of {seeds} seeds"
        if recipe == "text_transformer":
            yield Claim(what, "nanoGPT reports 1.88", mean["none"], targets[0], "quality")
        if recipe == "text_mamba" and transformer:
            difference = mean["none"] - transformer
            baseline = f"text_transformer: {transformer:.3f}"
            claim = f"{what}: difference to the baseline"
            yield Claim(claim, baseline, difference, targets[1], "quality")
        ratio = mean["lagged"] / mean["none"]
        yield Claim(f"{what}, with attention context", "without", ratio, kind="quality")


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):+.4f} ± {statistics.stdev(values):.4f}".removeprefix("+")


if __name__ == "__main__":
    main()
