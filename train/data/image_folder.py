"""Images in one folder per class, below train/ and val/ or test/."""

import os
from hashlib import sha256
from pathlib import Path

import numpy as np

from train.config import ImageFolder
from train.data import Arrays, Dataset
from train.data.augment import resize_shorter_side
from train.data.decode import UnreadableError, decode
from train.data.files import (
    IMAGE_PATTERNS,
    find_test_folder,
    find_training_folder,
    list_images,
    subfolders,
)
from train.data.image_batches import LabeledImages
from train.data.users import number_users
from train.errors import UserError, shorten


def load(config: ImageFolder) -> Dataset:
    """Find the images of a folder; batches read them.

    As in torchvision's ImageFolder, each folder is a class, in alphabetical order, and images lie
    at any depth below it. Rows are ``id`` int32 [N], which counts training images and then test
    images, and ``label`` int32 [N]. Batches add ``image`` uint8 [N, H, W, 3], or
    [N, crops, H, W, 3] in evaluation with several crops, and ``weight`` float32 [N], 0.0 for an
    unreadable file. With mixup, training batches add ``label_2`` and ``mix``: see `augment.mixup`.

    Raises:
      UserError: if there is no image, or a class has none; if training and test classes differ;
        or for options that exclude each other.
    """
    root = Path(config.path)
    train = find_training_folder(root, "train/ and val/ or test/, each with one folder per class")
    test = root / find_test_folder(root, config.test_split)
    classes = subfolders(train)
    _compare_classes(train, classes, test, subfolders(test))
    files, labels = zip(*(_find_files(folder, classes) for folder in (train, test)), strict=True)
    # As bytes, which take less than half the memory of strings.
    paths = np.array(
        [
            os.fsencode(f"{folder.name}/{name}")
            for folder, names in zip((train, test), files, strict=True)
            for name in names
        ]
    )
    rows = {"id": np.arange(len(paths), dtype=np.int32), "label": np.concatenate(labels)}
    num_train = len(files[0])

    def fetch(ids: np.ndarray) -> Arrays:
        return {"path": paths[ids]}

    images = LabeledImages(config, os.fsencode(root), fetch, num_train, len(paths) - num_train)

    def explain(id: int) -> str | None:
        path = root / os.fsdecode(paths[id])
        try:
            decode(str(path), resize_shorter_side(config.shorter_side))
        except UnreadableError as error:
            return f"{path}: {error}"
        return None

    return Dataset(
        users=None if config.user is None else _users(train, files[0]),
        train={name: a[:num_train] for name, a in rows.items()},
        test={name: a[num_train:] for name, a in rows.items()},
        classes=tuple(classes),
        augment=images.augment,
        prepare=images.prepare,
        reads_local=True,
        identity=sha256(b"\0".join(paths.tolist())).hexdigest()[:16],
        name=lambda row: str(root / os.fsdecode(paths[row])),
        explain=explain,
        max_bad_fraction=config.max_bad_fraction,
    )


def _users(folder: Path, files: list[str]) -> np.ndarray:
    """Number the users of training files ``CLASS/USER/...``, [N]."""
    parts = [file.split("/") for file in files]
    for file, names in zip(files, parts, strict=True):
        if len(names) < 3:
            raise UserError(
                f"data.user: {folder / file} is in no folder of a user; expected CLASS/USER/FILE"
            )
    return number_users(np.array([names[1] for names in parts]), len(files), "data.user")


def _compare_classes(train: Path, classes: list[str], test: Path, test_classes: list[str]) -> None:
    """Check that there are classes, the same for training and test."""
    if not classes:
        images = list_images(train)
        hint = f"; its {len(images)} images belong in one folder per class" if images else ""
        raise UserError(f"data.path: no folders in {train}, which are the classes{hint}")
    missing = sorted(set(classes) - set(test_classes))
    unknown = sorted(set(test_classes) - set(classes))
    if missing or unknown:
        differences = [
            f"only in {folder}: {shorten(names)}"
            for folder, names in ((train, missing), (test, unknown))
            if names
        ]
        raise UserError(f"data.path: the classes differ: {'; '.join(differences)}")


def _find_files(folder: Path, classes: list[str]) -> tuple[list[str], np.ndarray]:
    """Find the paths below a folder, class by class, and their labels."""
    files = [list_images(folder / name) for name in classes]
    empty = [str(folder / name) for name, names in zip(classes, files, strict=True) if not names]
    if empty:
        problem = "no image" if len(empty) == len(classes) else "no image of a class"
        raise UserError(f"data.path: {problem} in {shorten(empty)}; expected {IMAGE_PATTERNS}")
    paths = [f"{name}/{file}" for name, names in zip(classes, files, strict=True) for file in names]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(names) for names in files])
    return paths, labels
