"""Picture of test images with their predictions."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train import data
from train.data import Arrays
from train.data.label_map import IGNORE
from train.data.masks import spread
from train.data.photos import Photos
from train.output import plots
from train.output.palette import palette
from train.run.evaluation import Evaluation, Evaluator, Trained
from train.run.setup import Setup
from train.tasks import kind_of
from train.tasks.targets import describe_output, describe_target

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

    24 classified images are shown: first errors, by decreasing probability, then correct ones, by
    increasing probability; with several labels or numbers, the largest losses. From up to 60
    segmented images, six are shown with both masks, from the worst to the best. A private run
    of which only covered results are written shows no test images.

    Returns:
      The pictures that were written.
    """
    written = []
    if evaluation.confusion is not None:
        plots.confusion_matrix(evaluation.confusion, run.task.dataset.classes, title, confusion)
        written.append(confusion)
    kind = kind_of(run.config)
    if run.config.is_release_only or not kind.labels_images:
        return written
    if kind.predicts == "masks":
        drawn = _draw_segmentations(run, evaluate, trained, title, examples)
    else:
        drawn = _draw_classifications(run, evaluation, title, examples)
    return [*written, examples] if drawn else written


def draw_augmented(run: Setup, path: Path) -> None:
    """Draw training images as the network sees them, augmented, if there are any.

    They are spread over the training images, and their random numbers are no run's own.
    """
    dataset, data_section = run.task.dataset, run.config.data
    if not isinstance(data_section, Photos) or run.config.is_release_only:
        return
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


def _draw_classifications(run: Setup, evaluation: Evaluation, title: str, path: Path) -> bool:
    dataset, known, kind = run.task.dataset, evaluation.examples, run.config.data.targets
    if kind != "class" and "outputs" not in known:
        return False
    targets = dataset.test["label"]
    if kind == "class":
        wrong, certain = known["prediction"] != targets, known["probability"]
        order = np.where(wrong, -certain, 1 + certain)
    else:
        wrong, order = known["loss"] != 0, -known["loss"]
    if kind == "labels":
        wrong = ((known["outputs"] > 0.5) != (targets > 0.5)).any(-1)
    num_images = int((known["weight"] != 0).sum())
    order = np.where(known["weight"] != 0, order, np.inf)
    shown = np.argsort(order, kind="stable")[: min(num_images, _NUM_CLASSIFIED)]
    if not len(shown):
        return False
    images = dataset.prepare({name: a[shown] for name, a in dataset.test.items()})["image"]
    if images.ndim == 5:  # several crops of each, of which the center one is shown
        images = images[:, images.shape[1] // 2 - 1]
    captions = [_caption(run, known, row, is_wrong=bool(wrong[row])) for row in shown]
    errors = int((wrong & (known["weight"] != 0)).sum())
    what = "the largest losses first"
    if kind == "class":
        what = "the most confident errors first"
        what = what if errors >= len(shown) else "errors first, then the least confident"
    counted = "" if kind == "numbers" else f"{errors:,} errors on "
    title = f"{title}: {counted}{num_images:,} test images; {what}"
    right = [kind == "numbers" or not wrong[row] for row in shown]
    plots.classifications(images, captions, right, title, path)
    return True


def _caption(run: Setup, known: Arrays, row: int, *, is_wrong: bool) -> str:
    """Return what is predicted for a test image, and what it is unless both are the same."""
    kind, names = run.config.data.targets, run.task.dataset.classes
    target = run.task.dataset.test["label"][row]
    truth = list(describe_target(kind, names, target).values())
    if kind == "class":
        predicted = [names[known["prediction"][row]]]
        share = f" {known['probability'][row]:.0%}"
    else:
        found = describe_output(kind, names, known["outputs"][row])
        predicted = [found["prediction"]] if kind == "labels" else list(found.values())
        share = ""
    texts = [
        _shorten(", ".join(f"{v:.4g}" if isinstance(v, float) else v or "none" for v in values))
        for values in (predicted, truth)
    ]
    return f"{texts[0]}{share}" + (f"\nis {texts[1]}" if is_wrong else "")


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
