"""Digits drawn by diffusion, judged by a classifier of real ones: as asked, varied and new.

    python -m benchmarks.digits_samples
    python -m benchmarks.digits_samples --classifier runs/digits --denoiser runs/digits_diffusion

Trains the recipes digits and digits_diffusion, and the latter again with the attention
context, unless folders of such runs are given. Each sampler then draws as many images of
every label, from the same noise, beside the test digits that no run has trained on.

As asked: the share that the classifier labels so. Nearest: the mean distance to the closest
training digit, in pixel values from 0 to 1; a model that has learned its examples by heart
comes closer than test digits do. Copies: the share of images closer to a training digit than
the closest 1 % of test digits. Variety: the mean distance between two images of one label.
"""

import functools
import json
import operator
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown
from train import cli
from train.arguments import ImageArguments
from train.commands.sample import sample_images
from train.config import Config, PreactResNet
from train.run.checkpoints import Checkpoints
from train.run.run_folder import RunFolder
from train.tasks import images
from train.tasks.diffusion import build_network

CONTEXT = ("--model.attention-context", "lagged")
CASES = (
    ("dpm_solver", 50, 1.5),
    ("dpm_solver", 50, 1.0),
    ("dpm_solver", 50, 3.0),
    ("dpm_solver", 20, 1.5),
    ("dpm_solver", 10, 1.5),
    ("ddim", 50, 1.5),
    ("ddpm", 50, 1.5),
    ("ddpm", 250, 1.5),
)
"""Sampler, steps, guidance; the first is what a run with the context is drawn with too."""


class Judged(NamedTuple):
    """What the module's first lines define, of images of one sampler."""

    as_asked: float
    nearest: float
    copies: float
    variety: float


class Judge:
    """What is measured of images [N, H, W, C] of labels [N].

    Args:
      classifier: the folder of a run of the recipe digits; its own split is the real digits.
    """

    def __init__(self, classifier: RunFolder):
        config = classifier.read_config()
        assert isinstance(config.model, PreactResNet)
        dataset = images.load(config)
        self.data, self.test = config.data, dataset.test
        self._train = _flat(dataset.train["image"])
        model = config.model.build(dataset.train["image"].shape[1:], len(dataset.classes))
        with Checkpoints(classifier.checkpoints) as checkpoints:
            params, state, _ = checkpoints.restore_network(model.init)
        self._logits = jax.jit(lambda x: model.apply(params, state, x, train=False)[0])
        self._copy = np.quantile(self._nearest(self.test["image"]), 0.01)

    def __call__(self, drawn: np.ndarray, labels: np.ndarray) -> Judged:
        right = np.asarray(self._logits(jnp.asarray(drawn))).argmax(-1) == labels
        nearest = self._nearest(drawn)
        between = [_distances(of, of) for of in (_flat(drawn[labels == i]) for i in set(labels))]
        variety = np.mean([d.sum() / (d.size - len(d)) for d in between])
        copies = (nearest < self._copy).mean()
        return Judged(*map(float, (right.mean(), nearest.mean(), copies, variety)))

    def _nearest(self, drawn: np.ndarray) -> np.ndarray:
        return _distances(_flat(drawn), self._train).min(1)


def _flat(a: np.ndarray) -> np.ndarray:
    return a.reshape(len(a), -1).astype(np.float64)


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Euclidean distances [N, M] of rows [N, P] and [M, P]."""
    square = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None] - 2 * a @ b.T
    return np.sqrt(np.maximum(square, 0))


def judged(
    run: RunFolder, cases: tuple, judge: Judge, each: int
) -> list[tuple[dict[str, str], Judged]]:
    """A row for each case, of a run of the recipe digits_diffusion, and what it is made of."""
    config = run.read_config()
    held_out = operator.attrgetter("source", "test_fraction", "split_seed")
    if held_out(config.data) != held_out(judge.data):
        raise SystemExit(f"{run.path} and the classifier hold out other digits: one saw the tests")
    network = build_network(config)
    with Checkpoints(run.checkpoints) as checkpoints:
        params, state, _ = checkpoints.restore_network(network[1].init)
    labels = np.repeat(np.arange(10), each)
    found = []
    for sampler, steps, guidance in cases:
        asked = ImageArguments(sampler=sampler, steps=steps, guidance=guidance)
        draw = functools.partial(
            sample_images, config, network, params, state, jnp.asarray(labels), asked
        )
        begun = time.perf_counter()
        drawn = np.asarray(draw())
        seconds = time.perf_counter() - begun
        of = judge(drawn, labels)
        row = _row(_name(config), sampler, str(steps), f"{guidance:g}", of, seconds)
        found.append((row, of))
    return found


def _name(config: Config) -> str:
    context = getattr(config.model, "attention_context", "none")
    return "drawn" if context == "none" else f"drawn, {context} context"


def _row(
    name: str, sampler: str, steps: str, guidance: str, of: Judged, seconds: float
) -> dict[str, str]:
    return {
        "digits": name,
        "sampler": sampler,
        "steps": steps,
        "guidance": guidance,
        "as asked": f"{of.as_asked:.1%}",
        "nearest": f"{of.nearest:.2f}",
        "copies": f"{of.copies:.1%}",
        "variety": f"{of.variety:.2f}",
        "seconds": f"{seconds:.1f}" if seconds else "",
    }


def _trained(given: str | None, recipe: str, out: Path, *overrides: str) -> RunFolder:
    if given is None:
        cli.main(["train", recipe, "--out", str(out), *overrides])
    return RunFolder(Path(given) if given else out)


def _said(run: RunFolder) -> str:
    summary = json.loads(run.summary.read_text())
    seen, predicted = summary["peak_bytes_seen"], summary["peak_bytes_predicted"]
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items())
    return (
        f"- {run.path.name}: {summary['parameters']:,} parameters, {summary['steps']} steps in "
        f"{summary['seconds']:.0f} s, {metrics}; peak {seen / 1e6:.1f} MB, {predicted / 1e6:.1f} "
        "MB predicted"
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--classifier", help="the folder of a run of digits")
    parser.add_argument("--denoiser", help="the folder of a run of digits_diffusion")
    parser.add_argument("--context", help=f"of one with {' '.join(CONTEXT)}")
    parser.add_argument("--each", type=int, default=100, help="images of each label")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        classifier = _trained(args.classifier, "digits", out / "digits")
        plain = _trained(args.denoiser, "digits_diffusion", out / "plain")
        context = _trained(args.context, "digits_diffusion", out / "context", *CONTEXT)
        judge = Judge(classifier)
        real = judge(judge.test["image"], judge.test["label"])
        drawn = judged(plain, CASES, judge, args.each)
        with_context = judged(context, CASES[:1], judge, args.each)
        print(f"\n{args.each} images of each label; seconds with compilation.\n")
        rows = [row for row, _ in (*drawn, *with_context)]
        print(markdown([_row("real, held out", "", "", "", real, 0.0), *rows]))
        print()
        print(*map(_said, (classifier, plain, context)), sep="\n")
    peer = f"the classifier; of real digits {real.as_asked:.1%}"
    claims = [
        Claim(f"{what}: share labelled as asked", peer, found[0][1].as_asked, ">= 0.9", "quality")
        for what, found in (("digits drawn", drawn), ("with attention context", with_context))
    ]
    publish(claims, args, "jax", "jaxlib", "optax")


if __name__ == "__main__":
    main()
