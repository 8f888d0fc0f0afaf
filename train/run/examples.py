"""Picture of test images with their predictions."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train import data
from train.data.masks import IGNORE, spread
from train.output import plots
from train.output.palette import palette
from train.run.evaluation import Evaluation, Evaluator, Trained
from train.run.setup import Setup
from train.tasks import kind_of
from train.tasks.targets import describe_target

_MAX_CLASSIFIED = 512
"""Number of classified images from which the shown ones are chosen."""
_NUM_CLASSIFIED = 24
_NUM_AUGMENTED = 24
_MAX_SEGMENTED = 60
"""Number of segmented images from which the shown ones are chosen."""
_NUM_SEGMENTED = 6
_MEMORY = 2**27
"""Bytes of segmented images to choose from."""


def draw_results(
    run: Setup,
    evaluate: Evaluator,
    trained: Trained,
    evaluation: Evaluation,
    title: str,
    confusion: Path,
    examples: Path,
) -> list[Path]:
    """Draw the confusion matrix, and test images with labels and predictions.

    A private run of which only covered results are written shows no test images.

    Returns:
      The pictures that were written: none without classes.
    """
    if evaluation.confusion is None:
        return []
    plots.confusion_matrix(evaluation.confusion, run.task.dataset.classes, title, confusion)
    if run.config.is_release_only:
        return [confusion]
    drawn = draw(run, evaluate, trained, title, examples)
    return [confusion, examples] if drawn else [confusion]


def draw(run: Setup, evaluate: Evaluator, trained: Trained, title: str, path: Path) -> bool:
    """Draw test images with labels and predictions; return whether there are any.

    From up to 512 classified images, spread over the test set, 24 are shown: first errors, by
    decreasing probability, then correct ones, by increasing probability. From up to 60 segmented
    images, six are shown with both masks, from the worst to the best. The compiled program of the
    evaluation is used.
    """
    if kind_of(run.config).predicts == "masks":
        return _draw_segmentations(run, evaluate, trained, title, path)
    return _draw_classifications(run, evaluate, trained, title, path)


def draw_augmented(run: Setup, path: Path) -> bool:
    """Draw training images as the network sees them, augmented; return whether there are any.

    They are spread over the training images, and their random numbers are no run's own.
    """
    dataset, data_section = run.task.dataset, run.config.data
    if data_section.as_photos is None or run.config.is_release_only:
        return False
    rows = data.select_rows(dataset.train, spread(data.num_examples(dataset.train), _NUM_AUGMENTED))
    batch = data.augment_rows(dataset, rows, np.random.default_rng(0))
    names, kind = dataset.classes, data_section.targets
    mix = batch.get("mix")
    shares = {"label": mix} if mix is None else {"label": mix, "label_2": 1 - mix}
    captions = []
    for i in range(data.num_examples(rows)):
        texts = []
        for key, share in shares.items():
            if share is None or share[i] > 0:
                shown = describe_target(kind, names, batch[key][i])
                text = _shorten(", ".join(map(str, shown.values())))
                texts.append(text if share is None else f"{share[i]:.0%} {text}")
        captions.append("\n".join(texts))
    plots.classifications(
        batch["image"], captions, [True] * len(captions), f"{run.config.name}: augmented", path
    )
    return True


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


def _draw_classifications(
    run: Setup, evaluate: Evaluator, trained: Trained, title: str, path: Path
) -> bool:
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
    part = "" if num_images == total else f", a sample of {total:,}"
    order = "the most confident errors first"
    if num_errors < len(shown):
        order = "errors first, then the least confident"
    title += f": {num_errors:,} errors on {num_images:,} test images{part}; {order}"
    plots.classifications(images, captions, [c.is_correct for c in shown], title, path)
    return True


def _shorten(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


class _Segmented(NamedTuple):
    image: np.ndarray
    mask: np.ndarray
    prediction: np.ndarray

    @property
    def accuracy(self) -> float:
        """Share of the labeled pixels that are right; 0 without any."""
        labeled = self.mask != IGNORE
        return float((self.mask == self.prediction)[labeled].sum() / max(labeled.sum(), 1))


def _draw_segmentations(
    run: Setup, evaluate: Evaluator, trained: Trained, title: str, path: Path
) -> bool:
    segmented: list[_Segmented] = []
    pixels = math.prod(run.batch_shapes["mask"].shape[1:])
    most = min(max(_MEMORY // (5 * pixels), _NUM_SEGMENTED), _MAX_SEGMENTED)
    for batch, predictions, _ in evaluate.predict(trained, most):
        rows = np.flatnonzero(batch["weight"])
        segmented += [_Segmented(batch["image"][i], batch["mask"][i], predictions[i]) for i in rows]
    if not segmented:
        return False
    segmented.sort(key=lambda s: s.accuracy)
    shown = [_crop(segmented[i]) for i in spread(len(segmented), _NUM_SEGMENTED)]
    dataset = run.task.dataset
    total = data.num_examples(dataset.test)
    title = f"{title}: {len(shown)} of {total:,} test images, from the worst to the best"
    images, masks, predicted = zip(*shown, strict=True)
    captions = [f"prediction, {s.accuracy:.0%} of pixels right" for s in shown]
    colors = palette(dataset.label_map)
    plots.segmentations(images, masks, predicted, dataset.classes, colors, captions, title, path)
    return True


def _crop(s: _Segmented) -> _Segmented:
    """Crop to the image: the padding beyond has one color, and is ignored in the mask."""
    is_padding = (s.image == s.image[-1, -1]).all(-1) & (s.mask == IGNORE)
    if is_padding.all():
        return s
    height, width = (int(np.flatnonzero(~is_padding.all(axis))[-1]) + 1 for axis in (1, 0))
    return _Segmented(*(a[:height, :width] for a in s))
