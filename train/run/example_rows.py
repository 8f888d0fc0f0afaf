"""Rows of evaluation.csv: what is known of each test image, or text with a class."""

from collections.abc import Iterator
from typing import Any

from train.data import num_examples
from train.run.evaluation import Evaluation
from train.run.setup import Setup
from train.tasks import kind_of
from train.tasks.targets import describe_output, describe_target


def example_rows(run: Setup, evaluation: Evaluation, split: str = "test") -> list[dict[str, Any]]:
    """Return file, split, label, prediction, probability and loss of each test image or text.

    Several labels per image have the probability of each one, numbers their prediction. Segmented
    images have the share of right pixels. Unreadable files are left out. Networks that predict no
    labels have no rows, and neither has a private run of which only covered results are written.
    """
    if kind_of(run.config).predicts is None or run.config.is_release_only:
        return []
    return [*_rows(run, evaluation, split)]


def _rows(run: Setup, evaluation: Evaluation, split: str) -> Iterator[dict[str, Any]]:
    dataset, examples = run.task.dataset, evaluation.examples
    kind, names, name_of = run.config.data.targets, dataset.classes, dataset.test_name or str
    is_classifier = kind_of(run.config).predicts != "masks"
    for i in range(num_examples(dataset.test)):
        if not examples["weight"][i]:
            continue
        row: dict[str, Any] = {"file": name_of(i), "split": split}
        if is_classifier:
            row |= describe_target(kind, names, dataset.test["label"][i])
            if kind == "class":
                label, probability = examples["prediction"][i], examples["probability"][i]
                row |= {"prediction": names[label], "probability": float(probability)}
            else:
                row |= describe_output(kind, names, examples["outputs"][i])
        values = {"loss": examples["loss"][i]}
        if "pixel_accuracy" in examples:
            values["pixel_accuracy"] = examples["pixel_accuracy"][i]
        yield row | {name: float(value) for name, value in values.items()}
