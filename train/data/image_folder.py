"""Images in one folder a class, below train/ and val/ or test/."""

import os
from pathlib import Path

import numpy as np

from train.config import ImageFolder
from train.data import Arrays, Dataset, size
from train.data.augment import mixed, short_side
from train.data.decode import UnreadableError, decode
from train.data.files import (
    LOOKED_FOR,
    folders_in,
    held_out_folder,
    images_below,
    shortened,
    training_folder,
)
from train.data.image_batches import EvaluationImages, KeptImages, TrainingImages, check_cut
from train.data.workers import Workers
from train.errors import UserError


def load(config: ImageFolder) -> Dataset:
    """The images of a folder, read when a batch needs them.

    As torchvision's ImageFolder: a folder is a class, in the order of names; images lie at
    any depth below it. Rows are ``id`` int32 [N], counted through training and test images,
    and ``label`` int32 [N]. Batches have besides ``image`` uint8 [N, H, W, 3], in evaluation
    with crops [N, crops, H, W, 3], and ``weight`` float32 [N]: 0.0 for a file that cannot
    be read. With mixup, training batches have ``label_2`` and ``mix``: see `augment.mixed`.

    Raises:
      UserError: if there is no image, a class without one, or classes differ; if sizes or
        crops do not go together.
    """
    check_cut(config)
    if config.cache and config.crop == "resized":
        raise UserError(
            "data.cache: resized crops are decoded anew each time; give data.crop padded, "
            "reflected or centre"
        )
    if config.border and config.crops != 10:
        raise UserError(
            f"data.border: {config.border}, but the middle of an image is the same without it; "
            "give data.crops 10"
        )
    root = Path(config.path)
    train = training_folder(root, "train/ and val/ or test/, each with a folder a class")
    held_out = root / held_out_folder(root, config.test_split)
    classes = folders_in(train)
    _compare(train, classes, held_out, folders_in(held_out))
    files, labels = zip(*(_files(folder, classes) for folder in (train, held_out)), strict=True)
    # As bytes: the names of a million files take less than half of what strings do.
    paths = np.array(
        [
            os.fsencode(f"{folder.name}/{name}")
            for folder, names in zip((train, held_out), files, strict=True)
            for name in names
        ]
    )
    rows = {"id": np.arange(len(paths), dtype=np.int32), "label": np.concatenate(labels)}
    at = len(files[0])

    folder = os.fsencode(root)
    training = TrainingImages.of(config, folder)
    sizes = config.image_size, config.shorter_side
    evaluation = EvaluationImages(folder, *sizes, config.crops, training.fill, config.border)
    workers = Workers(config.workers)

    if config.cache:
        whole = EvaluationImages(folder, config.image_size, config.image_size, 1, training.fill)
        kept = KeptImages(whole, paths[:at], workers), KeptImages(evaluation, paths[at:], workers)

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        drawn = training.draw(size(rows), generator)
        if config.cache:
            made = kept[0](rows["id"])
            made["image"] = training.augmented(made["image"], drawn)
        else:
            made = workers(training, {"path": paths[rows["id"]]} | drawn)
        return mixed(rows | made, config.mixup, generator) if config.mixup else rows | made

    def prepare(rows: Arrays) -> Arrays:
        if config.cache:
            return rows | kept[1](rows["id"] - at)
        return rows | workers(evaluation, {"path": paths[rows["id"]]})

    def explain(id: int) -> str | None:
        path = root / os.fsdecode(paths[id])
        try:
            decode(str(path), short_side(config.shorter_side))
        except UnreadableError as error:
            return f"{path}: {error}"
        return None

    return Dataset(
        train={name: a[:at] for name, a in rows.items()},
        test={name: a[at:] for name, a in rows.items()},
        classes=tuple(classes),
        augment=augment,
        prepare=prepare,
        name=lambda row: str(root / os.fsdecode(paths[row])),
        explain=explain,
        max_bad_fraction=config.max_bad_fraction,
    )


def _compare(train: Path, classes: list[str], held_out: Path, names: list[str]) -> None:
    """Refuses what has no classes, or others to test on than to train on."""
    if not classes:
        found = images_below(train)
        besides = f"; its {len(found)} images belong in one folder a class" if found else ""
        raise UserError(f"data.path: no folders in {train}, which are the classes{besides}")
    missing = sorted(set(classes) - set(names))
    unknown = sorted(set(names) - set(classes))
    if missing or unknown:
        differences = [
            f"only in {folder}: {shortened(only)}"
            for folder, only in ((train, missing), (held_out, unknown))
            if only
        ]
        raise UserError(f"data.path: the classes differ: {'; '.join(differences)}")


def _files(folder: Path, classes: list[str]) -> tuple[list[str], np.ndarray]:
    """Paths below the folder, class by class, and their labels."""
    found = [images_below(folder / name) for name in classes]
    empty = [str(folder / name) for name, files in zip(classes, found, strict=True) if not files]
    if empty:
        what = "no image" if len(empty) == len(classes) else "no image of a class"
        raise UserError(f"data.path: {what} in {shortened(empty)}; looked for {LOOKED_FOR}")
    paths = [f"{name}/{f}" for name, files in zip(classes, found, strict=True) for f in files]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(files) for files in found])
    return paths, labels
