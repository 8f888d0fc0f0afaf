"""Picture of test images with their predictions."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from train import data
from train.config import DeepLab
from train.output import plots
from train.run.evaluation import Evaluator, Trained
from train.run.setup import Setup

_MAX_CLASSIFIED = 512
"""Number of classified images from which the shown ones are chosen."""
_NUM_CLASSIFIED = 24
_NUM_SEGMENTED = 6


def draw(run: Setup, evaluate: Evaluator, trained: Trained, path: Path) -> bool:
    """Draw test images with labels and predictions.

    Of up to 512 classified images, spread over the test set, 24 are shown: first errors, by
    decreasing probability, then correct ones, by increasing probability. Of segmented images, six
    are shown with both masks. The compiled program of the evaluation is used.

    Args:
      run: setup of the run.
      evaluate: evaluator of the run.
      trained: parameters and model state.
      path: path of the PNG.

    Returns:
      Whether the picture was written; it is not without classes.
    """
    if isinstance(run.config.model, DeepLab):
        return _draw_segmentations(run, evaluate, trained, path)
    return _draw_classifications(run, evaluate, trained, path)


class _Classified(NamedTuple):
    image: np.ndarray
    label: int
    prediction: int
    probability: float

    @property
    def is_correct(self) -> bool:
        return self.label == self.prediction

    @property
    def order(self) -> tuple[bool, float]:
        return self.is_correct, self.probability if self.is_correct else -self.probability


def _draw_classifications(run: Setup, evaluate: Evaluator, trained: Trained, path: Path) -> bool:
    shown: list[_Classified] = []
    num_images = num_errors = 0
    for batch, predictions, probability in evaluate.predict(trained, _MAX_CLASSIFIED):
        assert probability is not None  # each image has one label
        classified = [
            _Classified(batch["image"][i], batch["label"][i], predictions[i], probability[i])
            for i in np.flatnonzero(batch["weight"])
        ]
        num_images += len(classified)
        num_errors += sum(not c.is_correct for c in classified)
        shown = sorted(shown + classified, key=lambda c: c.order)[:_NUM_CLASSIFIED]
    if not shown:
        return False
    classes = run.task.dataset.classes
    # Of several crops of an image, the center one is shown.
    images = np.stack(
        [c.image if c.image.ndim == 3 else c.image[len(c.image) // 2 - 1] for c in shown]
    )
    captions = [
        f"{_shorten(classes[c.prediction])} {c.probability:.0%}"
        + ("" if c.is_correct else f"\nis {_shorten(classes[c.label])}")
        for c in shown
    ]
    total = data.num_examples(run.task.dataset.test)
    part = "test images" if num_images == total else f"of {total:,} test images"
    order = "most confident errors first"
    if num_errors < len(shown):
        order = "errors, then least confident"
    title = f"{run.config.name}: {num_errors:,} of {num_images:,} {part} wrong; {order}"
    plots.classifications(images, captions, [c.is_correct for c in shown], title, path)
    return True


def _shorten(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _draw_segmentations(run: Setup, evaluate: Evaluator, trained: Trained, path: Path) -> bool:
    shown = []
    for batch, predictions, _ in evaluate.predict(trained, _NUM_SEGMENTED):
        rows = np.flatnonzero(batch["weight"])
        shown += [(batch["image"][i], batch["mask"][i], predictions[i]) for i in rows]
    if not shown:
        return False
    images, masks, predicted = map(np.stack, zip(*shown, strict=True))
    classes, total = run.task.dataset.classes, data.num_examples(run.task.dataset.test)
    title = f"{run.config.name}: {len(shown)} of {total:,} test images"
    plots.segmentations(images, masks, predicted, classes, title, path)
    return True
