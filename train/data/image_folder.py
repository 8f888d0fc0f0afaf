"""Images in one folder per class, perhaps below train/ and val/ or test/."""

import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.config import ImageFolder
from train.data import Arrays, Dataset
from train.data.augment import resize_shorter_side
from train.data.decode import UnreadableError, decode
from train.data.files import (
    IMAGE_PATTERNS,
    SPLIT_NAMES,
    ImageFiles,
    check_folder,
    describe_skipped,
    file_bytes,
    find_test_folder,
    find_training_folder,
    list_images,
    subfolders,
)
from train.data.image_batches import LabeledImages
from train.data.labels import split_by_class
from train.data.sampling import SampledBatches
from train.data.users import number_users
from train.errors import UserError, did_you_mean, shorten


def load(config: ImageFolder, trained: tuple[str, ...] | None = None) -> Dataset:
    """Find the images of a folder; batches read them.

    As in torchvision's ImageFolder, each folder is a class, in alphabetical order, and images lie
    at any depth below it. Without a test folder, a fraction of each class is held out. Rows are
    ``id`` int32 [N], which counts training images and then test images, and ``label`` int32 [N].
    Batches add ``image`` uint8 [N, H, W, 3], or [N, crops, H, W, 3] in evaluation with several
    crops, and ``weight`` float32 [N], 0.0 for an unreadable file. With mixup, training batches add
    ``label_2`` and ``mix``: see `augment.mixup`.

    Args:
      config: the data source.
      trained: class names of a trained network, to load only test images. They may lack classes. A
        folder without splits is used whole, and one test image stands for the training set.

    Raises:
      UserError: if there is no image, only one class, or a class has none; if training and test
        classes differ; or for options that exclude each other.
    """
    root = Path(config.path)
    notes: tuple[str, ...] = ()
    if trained is None:
        classes, splits, notes = _find_splits(config)
    else:
        classes = list(trained)
        test = _find_test(config, classes)
        splits = (_Split(test.paths[:1], test.labels[:1], ImageFiles([], Counter())), test)
    notes += describe_skipped([s.files for s in splits])
    # As bytes, which take less than half the memory of strings.
    paths = np.array([os.fsencode(name) for split in splits for name in split.paths])
    labels = [split.labels for split in splits]
    rows = {"id": np.arange(len(paths), dtype=np.int32), "label": np.concatenate(labels)}
    num_train = len(splits[0].paths)

    def fetch(ids: np.ndarray) -> Arrays:
        return {"path": paths[ids]}

    images = LabeledImages(config, os.fsencode(root), fetch, num_train, len(paths) - num_train)

    def explain(id: int) -> str | None:
        path = root / os.fsdecode(paths[id])
        try:
            decode(str(path), resize_shorter_side(config.shorter_side), config.max_pixels)
        except UnreadableError as error:
            return f"{path}: {error}"
        return None

    return Dataset(
        users=None if config.user is None or trained else _users(root, splits[0].paths),
        train={name: a[:num_train] for name, a in rows.items()},
        test={name: a[num_train:] for name, a in rows.items()},
        classes=tuple(classes),
        augment=images.augment,
        prepare=images.prepare,
        reads_local=True,
        order=_order(config, rows["label"][:num_train]),
        name=lambda row: str(root / os.fsdecode(paths[row])),
        file_bytes=lambda row: file_bytes(os.path.join(os.fsencode(root), paths[row])),
        explain=explain,
        max_bad_fraction=config.max_bad_fraction,
        notes=notes,
    )


def _order(
    config: ImageFolder, labels: np.ndarray
) -> Callable[[int, int], Callable[[int], np.ndarray]] | None:
    if not config.balanced and config.repeats == 1:
        return None
    by_class = labels if config.balanced else None
    return lambda batch_size, seed: SampledBatches(
        by_class, len(labels), batch_size, config.repeats, seed
    )


class _Split(NamedTuple):
    """Images of a split: paths below the root, labels int32 [N], and all files that are there."""

    paths: list[str]
    labels: np.ndarray
    files: ImageFiles


def _find_splits(
    config: ImageFolder,
) -> tuple[list[str], tuple[_Split, _Split], tuple[str, ...]]:
    """Find the classes, the training and test images, and what to tell about them."""
    root = Path(config.path)
    expected = "one folder per class, or train/ and val/ or test/ that hold them"
    is_split = (root / "train").is_dir() or not _is_folder_of_classes(root)
    train = find_training_folder(root, expected) if is_split else root
    test_name = find_test_folder(root, config.test_split) if is_split else None
    if config.test_split is not None and test_name is None:
        raise UserError(
            f"data.test_split: {root} holds the classes themselves, and data.test_fraction of "
            "them is held out; move the training images into train/"
        )
    classes = subfolders(train)
    if not classes:
        images = list_images(train).paths
        hint = f"; its {len(images)} images belong in one folder per class" if images else ""
        raise UserError(f"data.path: no folders in {train}, which are the classes{hint}")
    if len(classes) == 1:
        raise UserError(
            f"data.path: {train} has only the class {classes[0]}; give images of two or more"
        )
    if test_name is not None:
        _compare_classes(train, classes, root / test_name, subfolders(root / test_name))
        return classes, (_find(root, train, classes), _find(root, root / test_name, classes)), ()
    whole = _find(root, train, classes)
    held_out = split_by_class(whole.labels, config.test_fraction, config.split_seed)
    rows, test_rows = (np.sort(indices) for indices in held_out)
    splits = tuple(
        whole._replace(paths=[whole.paths[i] for i in part], labels=whole.labels[part])
        for part in (rows, test_rows)
    )
    note = (
        f"no val/ or test/ in {root}: {len(test_rows):,} of {len(whole.paths):,} images are held "
        "out for testing (data.test_fraction)"
    )
    nothing = ImageFiles([], Counter())
    return classes, (splits[0], splits[1]._replace(files=nothing)), (note,)


def _find_test(config: ImageFolder, classes: list[str]) -> _Split:
    """Find the test images for a trained network."""
    root = Path(config.path)
    check_folder(root)
    there, name = subfolders(root), config.test_split
    if name is None and not {*there} <= {*classes}:
        name = find_test_folder(root, None)
    elif name is not None and name not in there:
        raise UserError(f"data.test_split: no folder {root / name}{did_you_mean(name, there)}")
    folder = root if name is None else root / name
    unknown = [name for name in subfolders(folder) if name not in classes]
    if unknown:
        raise UserError(
            f"data.path: the network knows no class {shorten(unknown)}, a folder of {folder}; its "
            f"classes are {shorten(classes, 12)}"
        )
    return _find(root, folder, classes, all_classes=False)


def _is_folder_of_classes(root: Path) -> bool:
    """Whether a folder holds classes, and no folder with the name of a split."""
    if not root.is_dir():
        return False
    names = subfolders(root)
    splits = itertools.chain(*SPLIT_NAMES.values())
    return len(names) > 1 and {name.lower() for name in names}.isdisjoint(splits)


def _users(root: Path, files: list[str]) -> np.ndarray:
    """Number the users of training files ``[train/]CLASS/USER/...``, [N]."""
    parts = [file.removeprefix("train/").split("/") for file in files]
    for file, names in zip(files, parts, strict=True):
        if len(names) < 3:
            raise UserError(
                f"data.user: {root / file} is in no folder of a user; expected CLASS/USER/FILE"
            )
    return number_users(np.array([names[1] for names in parts]), len(files), "data.user")


def _compare_classes(train: Path, classes: list[str], test: Path, test_classes: list[str]) -> None:
    """Check that the classes are the same for training and test."""
    missing = sorted(set(classes) - set(test_classes))
    unknown = sorted(set(test_classes) - set(classes))
    if missing or unknown:
        differences = [
            f"only in {folder}: {shorten(names)}"
            for folder, names in ((train, missing), (test, unknown))
            if names
        ]
        raise UserError(f"data.path: the classes differ: {'; '.join(differences)}")


def _find(root: Path, folder: Path, classes: list[str], *, all_classes: bool = True) -> _Split:
    """Find the images of each class below a folder."""
    files = [
        list_images(folder / name) if (folder / name).is_dir() else ImageFiles([], Counter())
        for name in classes
    ]
    empty = [str(folder / name) for name, f in zip(classes, files, strict=True) if not f.paths]
    if len(empty) == len(classes) or (empty and all_classes):
        problem = "no image" if len(empty) == len(classes) else "no image of a class"
        raise UserError(f"data.path: {problem} in {shorten(empty)}; expected {IMAGE_PATTERNS}")
    prefix = "" if folder == root else f"{folder.name}/"
    paths = [
        f"{prefix}{name}/{path}" for name, f in zip(classes, files, strict=True) for path in f.paths
    ]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(f.paths) for f in files])
    return _Split(paths, labels, ImageFiles([], sum((f.skipped for f in files), Counter())))
