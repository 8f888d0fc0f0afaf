"""Tables of an evaluation: scores of each class, undefined ones, and a row per test example."""

import math
from collections import defaultdict
from typing import Any

import numpy as np

from train.data import num_examples
from train.errors import shorten
from train.output.curves import describe
from train.run.evaluation import Evaluation
from train.run.setup import Setup
from train.tasks import kind_of
from train.tasks.scores import accuracy_by_class, auc, by_class, iou_by_class
from train.tasks.targets import describe_output, describe_target, label_scores


def class_scores(run: Setup, evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return name, number of examples or pixels, and scores of each class or label, if any.

    A score that is undefined is None.
    """
    dataset, confusion, unit = run.task.dataset, evaluation.confusion, "examples"
    values: dict[str, np.ndarray]
    outputs = evaluation.examples.get("outputs")
    if outputs is not None:
        there = evaluation.examples["weight"] != 0
        outputs, label = outputs[there], dataset.test["label"][there]
    if run.config.data.targets == "labels":
        assert outputs is not None  # because few labels are predicted
        values, count = label_scores(outputs, label), label.sum(0)
    elif confusion is None:
        return []
    elif kind_of(run.config).predicts == "masks":
        unit, count, values = "pixels", confusion.sum(1), {"iou": iou_by_class(confusion)}
    else:
        values = {"accuracy": accuracy_by_class(confusion)} | by_class(confusion)
        if outputs is not None:
            values["auc"] = auc(outputs, label[:, None] == np.arange(len(confusion)))
        count = confusion.sum(1)
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


def example_rows(run: Setup, evaluation: Evaluation, split: str = "test") -> list[dict[str, Any]]:
    """Return file, split, label, prediction, probability and loss of each test image or text.

    Several labels per image have the probability of each one, numbers their prediction. Segmented
    images have the share of right pixels. Unreadable files are left out. Networks that predict no
    labels have no rows, and neither has a private run of which only covered results are written.
    """
    if kind_of(run.config).predicts is None or run.config.is_release_only:
        return []
    dataset, examples = run.task.dataset, evaluation.examples
    kind, names, name_of = run.config.data.targets, dataset.classes, dataset.test_name or str
    num_train = num_examples(dataset.train) - dataset.canaries
    is_classifier = kind_of(run.config).predicts != "masks"
    rows = []
    for i in range(num_examples(dataset.test)):
        if not examples["weight"][i]:
            continue
        row: dict[str, Any] = {"file": name_of(i), "split": split}
        row |= dataset.place(num_train + i)
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
        rows.append(row | {name: float(value) for name, value in values.items()})
    return rows
