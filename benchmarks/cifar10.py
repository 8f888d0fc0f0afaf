"""CIFAR-10 recipe with in-place norm, compared with flax's BatchNorm and relu.

    python -m benchmarks.cifar10 --path CIFAR10
    python -m benchmarks.cifar10 --path CIFAR10 --epochs 0      # steps and peaks only

Recipe, seed, batches and number of steps are the same; the activations are leaky_relu with slope
0.01 and relu. The peak is measured for the step compiled for one device. Times of steps are
interleaved medians; flax's step uses its fastest compiler options. With ``--out``, runs are saved
there, and an interrupted benchmark resumes.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import compile_with_each_option, fastest, markdown_table, step_caller
from benchmarks.vision_networks import flax_norm
from fnet import Layer, models
from train.config import Config, Mesh, ResNet9, recipes
from train.run.loop import train
from train.run.mesh import layout, make_cpu_devices
from train.run.planning import compile_step
from train.run.setup import setup


@dataclass(frozen=True)
class FlaxResNet9(ResNet9):
    """The same network with flax's norm and relu."""

    def build(self, image_shape: tuple[int, ...], num_classes: int) -> Layer:
        """Build the network for images [H, W, C]."""
        flax = {"norm": flax_norm, "activation": "relu"}
        return models.get(
            "resnet9", num_classes=num_classes, in_channels=image_shape[-1], **self.options | flax
        )


def forms(args: argparse.Namespace) -> dict[str, Config]:
    """Configs of the recipe by norm and remat policy."""
    recipe = recipes.load("cifar10_resnet")
    recipe = dataclasses.replace(
        recipe,
        data=recipe.data.replace(path=args.path),
        train=dataclasses.replace(
            recipe.train, seed=args.seed, epochs=args.epochs or recipe.train.epochs
        ),
    )
    segments = dataclasses.replace(recipe.memory, policy="segments")
    flax = FlaxResNet9(
        **{f.name: getattr(recipe.model, f.name) for f in dataclasses.fields(recipe.model)}
    )
    return {
        "flax": dataclasses.replace(recipe, model=flax),
        "in place": recipe,
        "in place, segments": dataclasses.replace(recipe, memory=segments),
    }


def steps(configs: dict[str, Config], rounds: int) -> tuple[dict[str, int], dict[str, float]]:
    """Measure peak bytes and seconds of a step."""
    runs = {}
    for form, config in configs.items():
        run = setup(config)
        runs[form] = run.on(layout(dataclasses.replace(config, mesh=Mesh())))
    programs = {form: compile_step(run).executable for form, run in runs.items()}
    candidates: dict[str, list[Any]] = {form: [program] for form, program in programs.items()}
    flax = runs["flax"]
    candidates["flax"] = compile_with_each_option(
        flax.step.lower(flax.state_shapes, flax.batch_shapes)
    )
    batch = next(iter(runs["in place"].training_batches(0)))
    calls = {
        form: [step_caller(p, runs[form].init(jax.random.key(0)), batch) for p in ps]
        for form, ps in candidates.items()
    }
    return {form: p.report.peak.total for form, p in programs.items()}, fastest(calls, rounds)


def train_once(config: Config, out: Path) -> dict[str, Any]:
    """Train unless the run is finished, and return its summary."""
    if not (out / "summary.json").is_file():
        resume = (out / "config.json").is_file()
        train(config, out, resume=resume, console=Console(file=sys.stderr))
    return json.loads((out / "summary.json").read_text())


def main() -> None:
    parser = argument_parser(__doc__, rounds=20)
    parser.add_argument("--path", required=True, help="Folder with train/ and test/.")
    parser.add_argument("--epochs", type=float, help="Epochs; the recipe's by default, 0 for none.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed.")
    parser.add_argument("--out", help="Folder for runs.")
    args = parser.parse_args()
    configs = forms(args)
    make_cpu_devices(configs["in place"].mesh)
    peaks, seconds = steps(configs, args.rounds)
    rows, claims = [], []
    packages = "jax", "jaxlib", "flax", "optax"
    for form, peak in peaks.items():
        row = {
            "": form,
            "peak": f"{peak / 1e6:.0f} MB",
            "peak / flax": f"{peak / peaks['flax']:.2f}",
            "step": f"{seconds[form]:.3f} s",
            "step / flax": f"{seconds[form] / seconds['flax']:.2f}",
        }
        rows.append(row)
        if form != "flax":
            what, baseline = f"CIFAR-10 step, {form}", "flax BatchNorm, relu"
            claims += [
                Claim(f"{what}: peak", baseline, peak / peaks["flax"]),
                Claim(f"{what}: time", baseline, seconds[form] / seconds["flax"], kind="time"),
            ]
    print(markdown_table(rows), flush=True)
    if args.epochs == 0:
        publish(claims, args, *packages)
        return
    out = Path(args.out or tempfile.mkdtemp())
    rows, accuracy = [], {}
    for form in ("in place", "flax"):
        summary = train_once(configs[form], out / form.replace(" ", "_"))
        accuracy[form] = summary["metrics"]["test/accuracy"]
        row = {
            "": form,
            "test accuracy": f"{summary['metrics']['test/accuracy']:.2%}",
            "steps": f"{summary['steps']:,}",
            "minutes": f"{summary['seconds'] / 60:.1f}",
        }
        rows.append(row)
        print(markdown_table([row]), file=sys.stderr, flush=True)
    print("\n" + markdown_table(rows))
    ours, theirs = accuracy["in place"], accuracy["flax"]
    what, baseline = "CIFAR-10 recipe: test accuracy", f"flax BatchNorm, relu: {theirs:.2%}"
    claims += [
        Claim(what, baseline, ours, ">= 0.9", "quality"),
        Claim(f"{what} below the baseline's", baseline, theirs - ours, "<= 0.005", "quality"),
    ]
    publish(claims, args, *packages)


if __name__ == "__main__":
    main()
