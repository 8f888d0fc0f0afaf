"""Losses of the text recipes on a text, with and without the attention context, by seed.

    python -m benchmarks.text_recipes --path tinyshakespeare.txt

Each run is a program of its own, in a folder that is kept if ``--out`` names one, so that
a benchmark that was interrupted goes on. The text is split 90/10. The spread is the
standard deviation over seeds; of the difference, that of the pairs with equal seeds.
Options that are not its own, such as --train.steps 100, go to each run.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown

RECIPES = ("text_transformer", "text_mamba", "text_hybrid")


def run(recipe: str, context: str, seed: int, path: str, out: Path, more: list[str]) -> dict:
    """The summary of a run, trained if it is not there."""
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
    parser.add_argument("--path", required=True, help="a text file")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--out", help="where runs are kept")
    args, more = parser.parse_known_args()
    out = Path(args.out or tempfile.mkdtemp())
    rows, found = [], {}
    for recipe in args.recipes:
        losses: dict[str, list[float]] = {}
        for seed in args.seeds:
            for context in ("none", "lagged"):
                summary = run(recipe, context, seed, args.path, out, more)
                losses.setdefault(context, []).append(summary["metrics"]["test/loss"])
        found[recipe] = losses
        differences = [b - a for a, b in zip(losses["none"], losses["lagged"], strict=True)]
        rows.append(
            {
                "recipe": recipe,
                "parameters": f"{summary['parameters']:,}",
                "without context": spread(losses["none"]),
                "with context": spread(losses["lagged"]),
                "difference": spread(differences),
                "seconds a run": f"{summary['seconds']:.0f}",
            }
        )
        print(markdown(rows), flush=True)
    print(f"\nNats a token on the held-out part, mean and spread of seeds {list(args.seeds)}.")
    claimed = claims(found, len(args.seeds), Path(args.path).stem)
    publish(claimed, args, "jax", "jaxlib", "optax")


def claims(found: dict[str, dict[str, list[float]]], seeds: int, text: str) -> Iterator[Claim]:
    """Means over seeds; of other texts than tinyshakespeare without a target."""
    means = {
        recipe: {context: statistics.mean(of) for context, of in losses.items()}
        for recipe, losses in found.items()
    }
    aims = ("<= 1.8", "<= 0.05") if text == "tinyshakespeare" else ("", "")
    transformer = means.get("text_transformer", {}).get("none")
    for recipe, of in means.items():
        what = f"{recipe} on {text}, held-out nats a token, mean of {seeds} seeds"
        if recipe == "text_transformer":
            yield Claim(what, "nanoGPT states 1.88", of["none"], aims[0], "quality")
        if recipe == "text_mamba" and transformer:
            peer, above = f"text_transformer: {transformer:.3f}", of["none"] - transformer
            yield Claim(f"{what}: above the peer's", peer, above, aims[1], "quality")
        ratio = of["lagged"] / of["none"]
        yield Claim(f"{what}, with attention context", "without", ratio, kind="quality")


def spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.4f}"
    return f"{statistics.mean(values):+.4f} ± {statistics.stdev(values):.4f}".removeprefix("+")


if __name__ == "__main__":
    main()
