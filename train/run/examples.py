"""Tables and pictures of an evaluation: scores of classes, and test examples with predictions."""

import hashlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from train import data, output
from train.data.label_map import IGNORE
from train.data.masks import spread
from train.data.photos import Photos
from train.errors import shorten
from train.output.curves import describe
from train.output.palette import palette
from train.output.progress import line_printer, show_table
from train.output.rows import as_csv
from train.output.tables import MISSING, Table
from train.run.evaluation import Evaluation, Evaluator, Trained
from train.run.run_folder import RunFolder, atomic_write
from train.run.setup import Setup
from train.tasks import kind_of
from train.tasks.scores import iou_by_class
from train.tasks.targets import KINDS, ByClass, Labels, Numbers, OneClass

_MAX_CLASSES = 40
"""Largest number of rows in the table of classes."""
_NUM_CLASSIFIED = 24
_NUM_AUGMENTED = 24
_MAX_SEGMENTED = 60
"""Number of segmented images from which the shown ones are chosen."""
_NUM_SEGMENTED = 6
_MEMORY = 2**27
"""Bytes of segmented images to choose from."""


def targets_of(run: Setup) -> OneClass | Labels | Numbers:
    """Return the targets of a run's images or texts."""
    return KINDS[run.config.data.targets](run.task.dataset)


def class_scores(run: Setup, evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return name, number of examples or pixels, and scores of each class or label, if any.

    A score that is undefined is None.
    """
    dataset, confusion, unit = run.task.dataset, evaluation.confusion, "examples"
    found: ByClass | None
    if kind_of(run.config).predicts is None:
        return []
    if kind_of(run.config).predicts == "masks":
        assert confusion is not None  # because there are classes
        unit, found = "pixels", (confusion.sum(1), {"iou": iou_by_class(confusion)})
    else:
        examples, target = evaluation.examples, dataset.test["label"]
        if "outputs" in examples:
            there = examples["weight"] != 0
            examples = {name: a[there] for name, a in examples.items()}
            target = target[there]
        found = targets_of(run).by_class(examples, target, confusion)
    if found is None:
        return []
    count, values = found
    return [
        {"name": name, unit: int(count[i])}
        | {key: None if np.isnan(value[i]) else float(value[i]) for key, value in values.items()}
        for i, name in enumerate(dataset.classes)
    ]


def describe_undefined(run: Setup, evaluation: Evaluation) -> list[str]:
    """Return a line about the scores of an evaluation that are undefined, or none.

    Such are the recall and the AUC of a class without test examples, and the R2 of a number that is
    the same in all of them.
    """
    if not math.isfinite(evaluation.metrics.get("loss", 0.0)):
        return []  # the outputs are at fault, not the examples
    scores_of: dict[str, list[str]] = defaultdict(list)
    for row in class_scores(run, evaluation):
        for score, value in row.items():
            if value is None and score != "accuracy":  # which is the recall
                scores_of[row["name"]].append(describe(score)[0])
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, scores in scores_of.items():
        names_of[f"{', '.join(scores)} of "].append(name)
    parts = [scores + shorten(names) for scores, names in names_of.items()]
    parts += [describe(name)[0] for name, value in evaluation.metrics.items() if math.isnan(value)]
    if not parts:
        return []
    return [f"undefined on these test examples, and left out of means: {'; '.join(parts)}"]


def print_scores(run: Setup, evaluation: Evaluation, console: Console) -> None:
    """Print metrics and class scores, as a table on a terminal and as lines elsewhere.

    With more than 40 classes, only those with the lowest scores are printed.
    """
    log = line_printer(console)
    for name, value in evaluation.test_metrics.items():
        log(f"{name} undefined" if value is None else f"{name} {value:.6g}")
    for line in describe_undefined(run, evaluation):
        log(line)
    scores = class_scores(run, evaluation)
    if not scores:
        return
    _, unit, score, *_ = scores[0]
    title, _ = describe(score)
    if len(scores) > _MAX_CLASSES:
        defined = [c for c in scores if c[score] is not None]
        lowest = sorted(defined, key=lambda c: c[score])[:_MAX_CLASSES]
        log(f"the {len(lowest)} of {len(scores)} classes with the lowest {title}:")
        scores = lowest
    rows, lines = [], []
    for c in scores:
        name, count, value = c["name"], f"{c[unit]:,}", c[score]
        rows.append((name, count, None if value is None else f"{value:.2%}"))
        shown = MISSING if value is None else f"{value:.4f}"
        lines.append(f"{title} of {name}: {shown} ({count} {unit})")
    show_table(console, Table("", ("class", unit, title), rows), lines)


def text_metrics(run: Setup, evaluation: Evaluation) -> dict[str, float]:
    """Return the perplexity of a language model, and its bits per byte if they are known."""
    if kind_of(run.config).generates != "text":
        return {}
    loss = evaluation.metrics["loss"]
    with np.errstate(over="ignore"):
        metrics = {"perplexity": float(np.exp(loss))}
    ratio = run.task.dataset.tokens_per_byte()
    return metrics if ratio is None else metrics | {"bits_per_byte": loss * ratio / np.log(2)}


def example_rows(run: Setup, evaluation: Evaluation, split: str = "test") -> list[dict[str, Any]]:
    """Return file, split, label, prediction, probability and loss of each test image or text.

    Several labels per image have the probability of each one, numbers their prediction. Segmented
    images have the share of right pixels. Unreadable files are left out. Networks that predict no
    labels have no rows, and neither has a private run of which only covered results are written.
    """
    if kind_of(run.config).predicts is None or run.config.is_release_only:
        return []
    dataset, examples = run.task.dataset, evaluation.examples
    name_of = dataset.test_name or str
    num_train = data.num_examples(dataset.train) - dataset.canaries
    targets = None if kind_of(run.config).predicts == "masks" else targets_of(run)
    rows = []
    for i in range(data.num_examples(dataset.test)):
        if not examples["weight"][i]:
            continue
        row: dict[str, Any] = {"file": name_of(i), "split": split}
        row |= dataset.place(num_train + i)
        if targets:
            row |= targets.describe(dataset.test["label"][i]) | targets.predicted(examples, i)
        values = {"loss": examples["loss"][i]}
        if "pixel_accuracy" in examples:
            values["pixel_accuracy"] = examples["pixel_accuracy"][i]
        rows.append(row | {name: float(value) for name, value in values.items()})
    return rows


def files_for(folder: RunFolder, options: Mapping[str, Any]) -> tuple[RunFolder, str]:
    """Return where an evaluation with some options is written, and ``"split test, flip"``.

    Without options, it is the folder that training writes to, too. Other options do not overwrite.
    """
    if not options:
        return folder, ""
    names, descriptions = list[str](), list[str]()
    for name, value in options.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        texts = [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
        descriptions.append(" ".join([name.replace("_", " "), *texts]))
        text = "+".join(texts)
        safe = re.sub(r"[^\w.+-]", "_", Path(text).name or "root")[-60:]
        if safe != text:  # two folders can have the same name
            digest = hashlib.sha256(os.fsencode(os.path.abspath(text))).hexdigest()
            safe = f"{safe}-{digest[:6]}"
        names.append(f"{name}={safe}" if texts else name)
    return RunFolder(folder.evaluations / ",".join(names)), ", ".join(descriptions)


def write(
    run: Setup,
    evaluate: Evaluator,
    trained: Trained,
    evaluation: Evaluation,
    title: str,
    files: RunFolder,
    split: str = "test",
) -> dict[str, Path]:
    """Draw the confusion matrix, and test images with labels and predictions; write their rows.

    24 classified images are shown: first errors, by decreasing probability, then correct ones, by
    increasing probability; with several labels or numbers, the largest losses. From up to 60
    segmented images, six are shown with both masks, from the worst to the best. A private run
    of which only covered results are written shows no test images.

    Returns:
      What was written, by its name for people.
    """
    written, kind = dict[str, Path](), kind_of(run.config)
    if evaluation.confusion is not None:
        classes, picture = run.task.dataset.classes, files.confusion
        output.plots.confusion_matrix(evaluation.confusion, classes, title, picture)
        written["confusion matrix"] = picture
    if kind.labels_images and not run.config.is_release_only:
        if kind.predicts == "masks":
            drawn = _draw_segmentations(run, evaluate, trained, title, files.examples)
        else:
            drawn = _draw_classifications(run, evaluation, title, files.examples)
        written |= {"examples": files.examples} if drawn else {}
    if rows := example_rows(run, evaluation, split):
        atomic_write(files.rows, as_csv(rows))
        written["images" if kind.labels_images else "texts"] = files.rows
    return written


def draw_augmented(run: Setup, path: Path) -> None:
    """Draw training images as the network sees them, augmented, if there are any.

    They are spread over the training images, and their random numbers are no run's own.
    """
    dataset, data_section = run.task.dataset, run.config.data
    if not isinstance(data_section, Photos) or run.config.is_release_only:
        return
    chosen = spread(data.num_examples(dataset.train), _NUM_AUGMENTED)
    rows = {name: a[chosen] for name, a in dataset.train.items()}
    batch = dataset.augmented(rows, np.random.default_rng(0))  # with numbers as they are
    targets, mix = targets_of(run), batch.get("mix")
    shares = {"label": mix} if mix is None else {"label": mix, "label_2": 1 - mix}
    captions = []
    for i in range(data.num_examples(rows)):
        texts = []
        for key, share in shares.items():
            if share is None or share[i] > 0:
                shown = targets.describe(batch[key][i])
                text = _shorten(", ".join(map(str, shown.values())))
                texts.append(text if share is None else f"{share[i]:.0%} {text}")
        captions.append("\n".join(texts))
    output.plots.classifications(
        batch["image"], captions, [True] * len(captions), f"{run.config.name}: augmented", path
    )


def _draw_classifications(run: Setup, evaluation: Evaluation, title: str, path: Path) -> bool:
    dataset, known, targets = run.task.dataset, evaluation.examples, targets_of(run)
    if "prediction" not in known and "outputs" not in known:
        return False
    wrong, order = targets.worst(known, dataset.test["label"])
    is_counted = known["weight"] != 0
    num_images = int(is_counted.sum())
    order = np.where(is_counted, order, np.inf)
    shown = np.argsort(order, kind="stable")[: min(num_images, _NUM_CLASSIFIED)]
    if not len(shown):
        return False
    images = dataset.prepare({name: a[shown] for name, a in dataset.test.items()})["image"]
    if images.ndim == 5:  # several crops of each, of which the center one is shown
        images = images[:, images.shape[1] // 2 - 1]
    errors = int((wrong & is_counted).sum())
    counted = f"{errors:,} errors on " if targets.has_errors else ""
    what = "the largest losses first"
    if isinstance(targets, OneClass):
        what = "the most confident errors first"
        what = what if errors >= len(shown) else "errors first, then the least confident"
    title = f"{title}: {counted}{num_images:,} test images; {what}"
    captions = []
    for i in shown:
        found = targets.predicted(known, i)
        share = f" {found['probability']:.0%}" if "probability" in found else ""
        text = _join(v for n, v in found.items() if not n.startswith("probability")) + share
        if wrong[i]:
            text += f"\nis {_join(targets.describe(dataset.test['label'][i]).values())}"
        captions.append(text)
    right = [not (targets.has_errors and wrong[i]) for i in shown]
    output.plots.classifications(images, captions, right, title, path)
    return True


def _join(values: Iterable[Any]) -> str:
    return _shorten(", ".join(f"{v:.4g}" if isinstance(v, float) else v or "none" for v in values))


def _shorten(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _draw_segmentations(
    run: Setup, evaluate: Evaluator, trained: Trained, title: str, path: Path
) -> bool:
    segmented: list[tuple[float, tuple[np.ndarray, ...]]] = []
    pixels = math.prod(run.batch_shapes["mask"].shape[1:])
    most = min(max(_MEMORY // (5 * pixels), _NUM_SEGMENTED), _MAX_SEGMENTED)
    for batch, predictions in evaluate.predict(trained, most):
        for i in np.flatnonzero(batch["weight"]):
            image, mask, prediction = batch["image"][i], batch["mask"][i], predictions[i]
            labeled = mask != IGNORE
            right = (mask == prediction)[labeled].sum() / max(labeled.sum(), 1)
            segmented.append((float(right), (image, mask, prediction)))
    if not segmented:
        return False
    segmented.sort(key=lambda item: item[0])
    shown = [segmented[i] for i in spread(len(segmented), _NUM_SEGMENTED)]
    images, masks, predicted = zip(*(_crop(*arrays) for _, arrays in shown), strict=True)
    dataset = run.task.dataset
    total = data.num_examples(dataset.test)
    title = f"{title}: {len(shown)} of {total:,} test images, from the worst to the best"
    captions = [f"prediction, {right:.0%} of pixels right" for right, _ in shown]
    output.plots.segmentations(
        images, masks, predicted, dataset.classes, palette(dataset.label_map), captions, title, path
    )
    return True


def _crop(image: np.ndarray, mask: np.ndarray, prediction: np.ndarray) -> list[np.ndarray]:
    """Crop to the image: the padding beyond has one color, and is ignored in the mask."""
    height, width = mask.shape
    is_padding = (image == image[-1, -1]).all(-1) & (mask == IGNORE)
    if not is_padding.all():
        height, width = (int(np.flatnonzero(~is_padding.all(axis))[-1]) + 1 for axis in (1, 0))
    return [a[:height, :width] for a in (image, mask, prediction)]
