"""Held-out images with what a network makes of them, as a picture."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from train import data
from train.config import DeepLab
from train.output import plots
from train.run.evaluation import Evaluate, Trained
from train.run.setup import Setup

_LOOKED_AT = 512
"""Images with a label each from which those that are shown are taken."""
_ANSWERS = 24
_SEGMENTATIONS = 6


def draw(run: Setup, evaluate: Evaluate, trained: Trained, path: Path) -> bool:
    """Shows images of the test set, what is right, and what the network says.

    Of up to 512 images with one label each, evenly from the whole test set, the 24 of whose
    wrong label the network is surest, then those of whose right label it is least sure. Of
    images with masks six, evenly from the test set, with both masks. They are found by the
    program that was compiled to evaluate.

    Args:
      run: what was trained.
      evaluate: of that run.
      trained: the network.
      path: where the PNG is written.

    Returns:
      Whether there is one: not where nothing is classified.
    """
    if isinstance(run.config.model, DeepLab):
        return _segmentations(run, evaluate, trained, path)
    return _answers(run, evaluate, trained, path)


class _Answer(NamedTuple):
    image: np.ndarray
    label: int
    prediction: int
    probability: float

    @property
    def right(self) -> bool:
        return self.label == self.prediction

    @property
    def order(self) -> tuple[bool, float]:
        return self.right, self.probability if self.right else -self.probability


def _answers(run: Setup, evaluate: Evaluate, trained: Trained, path: Path) -> bool:
    found: list[_Answer] = []
    seen = wrong = 0
    for batch, predictions, probability in evaluate.shown(trained, _LOOKED_AT):
        assert probability is not None  # there is one label an image
        real = np.flatnonzero(batch["weight"])
        some = [
            _Answer(batch["image"][i], batch["label"][i], predictions[i], probability[i])
            for i in real
        ]
        seen, wrong = seen + len(some), wrong + sum(not a.right for a in some)
        found = sorted(found + some, key=lambda a: a.order)[:_ANSWERS]
    if not found:
        return False
    classes = run.task.dataset.classes
    # Of several crops of an image the middle one.
    images = np.stack(
        [a.image if a.image.ndim == 3 else a.image[len(a.image) // 2 - 1] for a in found]
    )
    words = [
        f"{_short(classes[a.prediction])} {a.probability:.0%}"
        + ("" if a.right else f"\nis {_short(classes[a.label])}")
        for a in found
    ]
    of_all = data.num_examples(run.task.dataset.test)
    of = "test images" if seen == of_all else f"of {of_all:,} test images"
    title = f"{run.config.name}: {wrong:,} of {seen:,} {of} wrong; the surest"
    if wrong < len(found):
        title = f"{run.config.name}: {wrong:,} of {seen:,} {of} wrong; then the least sure"
    plots.classifications(images, words, [a.right for a in found], title, path)
    return True


def _short(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _segmentations(run: Setup, evaluate: Evaluate, trained: Trained, path: Path) -> bool:
    found = []
    for batch, predictions, _ in evaluate.shown(trained, _SEGMENTATIONS):
        real = np.flatnonzero(batch["weight"])
        found += [(batch["image"][i], batch["mask"][i], predictions[i]) for i in real]
    if not found:
        return False
    images, truths, predictions = map(np.stack, zip(*found, strict=True))
    classes = run.task.dataset.classes
    total = data.num_examples(run.task.dataset.test)
    title = f"{run.config.name}: {len(found)} of {total:,} test images"
    plots.segmentations(images, truths, predictions, classes, title, path)
    return True
