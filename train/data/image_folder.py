"""Images in one folder per class, perhaps below train/ and val/ or test/."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import MinLen

from train.config.section import Count
from train.data import Dataset, Outputs, splits, storage
from train.data.columns import check_names, choose, clean_name, normalized, number_users
from train.data.files import IMAGE_PATTERNS, ImageFiles, check_folder, list_images, subfolders
from train.data.labeled_images import image_dataset
from train.data.order import SampledBatches
from train.data.photos import LabeledFiles
from train.errors import UserError, list_available, shorten

_EXPECTED = "one folder per class, or train/ and val/ or test/ that hold them"
_TABLE = "give data.source image_table"


@dataclass(frozen=True)
class ImageFolder(LabeledFiles):
    """Images in one folder per class, as torchvision's ImageFolder reads them."""

    evaluation_options = {"split": "test_split", "path": "path"} | LabeledFiles.evaluation_options

    source: Literal["image_folder"] = "image_folder"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "."
    """Folder with one folder per class, or with train/ and val/ or test/ that hold them."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Folder of the test images; None is val, or test if there is no val."""
    balanced: bool = False
    """Draw training images of each class equally often."""
    repeats: Count = 1
    """Repeated augmentation: how often each training image is drawn in a row."""
    user: Literal["folder"] | None = None
    """Set to folder if users are folders, CLASS/USER/*.png; privacy is then per user."""
    examples_per_user: Count | None = None
    """Largest number of examples of a user per step; needed with user."""

    def load(self, *, private: bool = False) -> Dataset:
        """Find the images of a folder; batches read them, see `image_dataset`.

        As in torchvision's ImageFolder, each folder is a class, in alphabetical order, and images
        lie at any depth below it. Without a test folder, a fraction of each class is held out.

        Raises:
          UserError: if there is no image, only one class, or a class has none; if training and test
            classes differ; or for options that exclude each other.
        """
        return load(self)

    def load_test(self, trained: Callable[[], Outputs]) -> Dataset:
        """Load only the test images, for a trained network. They may lack classes."""
        return load(self, trained().names)


def load(config: ImageFolder, trained: tuple[str, ...] | None = None) -> Dataset:
    """Load the data of a config."""
    root = Path(config.path)
    notes: tuple[str, ...] = ()
    if trained is None:
        classes, train, test, notes = _find_splits(config)
    else:
        classes = check_names(trained, "data.path")
        test = _find_test(config, classes)
        train = _Split(test.paths[:1], test.labels[:1], Counter())
    # As bytes, which take less than half the memory of strings.
    paths = np.array([os.fsencode(name) for name in (*train.paths, *test.paths)])

    def describe(id: int) -> str:
        return str(root / os.fsdecode(paths[id]))

    def files(ids: np.ndarray) -> list[str]:
        return [describe(id) for id in ids.tolist()]

    if config.balanced and config.class_weights and trained is None:
        notes += (
            "rare classes count twice: data.balanced draws all classes equally often, and "
            "data.class_weights makes the loss of rare ones larger; leave one of them out",
        )
    return image_dataset(
        config,
        (train.labels, test.labels),
        files,
        describe,
        classes=classes,
        compared=files,
        trained=trained is not None,
        users=None if config.user is None or trained else number_users(_users(root, train)),
        order=_order(config, train.labels),
        notes=notes + storage.describe_skipped(train.skipped + test.skipped),
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
    """Images of a split, files that are left out, and its folder below the root, as ``train/``."""

    paths: list[str]
    labels: np.ndarray
    skipped: Counter[str]
    prefix: str = ""

    def some(self, index: np.ndarray) -> "_Split":
        return self._replace(paths=[self.paths[i] for i in index], labels=self.labels[index])


def _find_splits(config: ImageFolder) -> tuple[tuple[str, ...], _Split, _Split, tuple[str, ...]]:
    root = Path(config.path)
    check_folder(root, f"; expected a folder with {_EXPECTED}; for a table {_TABLE}")
    skipped = Counter[str]()
    folders = subfolders(root, skipped)
    usual = {*itertools.chain(*splits.SPLIT_NAMES.values())}
    train_name, test_name = splits.choose_training_split(folders), None
    kinds = {splits.split_of(f"{name}/") for name in folders}
    are_splits = bool(usual & {name.lower() for name in folders}) or len(kinds - {None}) > 1
    if train_name or len(folders) == 1 or are_splits:
        if train_name is None:
            raise UserError(
                f"data.path: no folder {root / 'train'}; {root} must hold {_EXPECTED}"
                f"{list_available([*folders], 'folders')}"
            )
        test_name = splits.choose_test_split(config.test_split, folders, root)
        if test_name is not None:
            given = splits.check_split(config, f"{root} has the folder {test_name}")
    elif config.test_split is not None:
        raise UserError(
            f"data.test_split: {root} holds the classes themselves, and data.test_fraction of "
            "them is held out; move the training images into train/"
        )
    folder = root / (train_name or "")
    classes = subfolders(folder, skipped if train_name else None)
    if not classes:
        images = list_images(folder).paths
        hint = f"; its {len(images)} images belong in one folder per class" if images else ""
        hint += f"; for a table of their labels {_TABLE}" if images else ""
        raise UserError(f"data.path: no folders in {folder}, which are the classes{hint}")
    names = check_names(classes.values(), f"data.path: {folder}")
    if len(names) == 1:
        raise UserError(
            f"data.path: {folder} has only the class {names[0]}; give images of two or more"
        )
    if test_name is not None:
        sides = (folder, classes), (root / test_name, subfolders(root / test_name))
        differences = [
            f"only in {path}: {shorten(sorted(own[key] for key in own.keys() - others.keys()))}"
            for (path, own), (_, others) in (sides, sides[::-1])
            if own.keys() - others.keys()
        ]
        if differences:
            raise UserError(f"data.path: the classes differ: {'; '.join(differences)}")
        notes = splits.describe_splits(train_name or "", test_name, folders)
        subfolders(root / test_name, skipped)
        train = _find(root, train_name, names, skipped)
        return names, train, _find(root, test_name, names), (*notes, *given)
    whole = _find(root, train_name, names, skipped)
    keys = [path.removeprefix(whole.prefix) for path in whole.paths]
    users = None if config.user is None else _users(root, whole).tolist()
    is_test = splits.hold_out_files(config, keys, whole.labels, users)
    rows, test_rows = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    note = splits.describe_hold_out(config, is_test, f"no val/ or test/ in {root}")
    others = [name for name in folders.values() if train_name and name != train_name]
    if others:
        note += f"; {shorten(others)} next to {train_name} is not read: data.test_split"
    return names, whole.some(rows), whole.some(test_rows)._replace(skipped=Counter()), (note,)


def _find_test(config: ImageFolder, classes: Sequence[str]) -> _Split:
    root = Path(config.path)
    check_folder(root)
    known, folders, name = {*map(normalized, classes)}, subfolders(root), config.test_split
    if name is not None:  # even the training images, whose score is of interest, too
        name = choose("data.test_split", name, folders, root, "split")
    elif not {*folders} <= known:
        name = splits.choose_test_split(None, folders, root)
    folder = root / (name or "")
    unknown = [own for key, own in subfolders(folder).items() if key not in known]
    if unknown:
        raise UserError(
            f"data.path: the network knows no class {shorten(unknown)}, a folder of {folder}; its "
            f"classes are {shorten(classes, 12)}"
        )
    return _find(root, name, classes, all_classes=False)


def _users(root: Path, train: _Split) -> np.ndarray:
    parts = [path.removeprefix(train.prefix).split("/") for path in train.paths]
    for path, names in zip(train.paths, parts, strict=True):
        if len(names) < 3:
            raise UserError(
                f"data.user: {root / path} is in no folder of a user; expected CLASS/USER/FILE"
            )
    return np.array([clean_name(names[1]) for names in parts])


def _find(
    root: Path,
    split: str | None,
    classes: Sequence[str],
    skipped: Counter[str] | None = None,
    *,
    all_classes: bool = True,
) -> _Split:
    folder, prefix = root / (split or ""), f"{split}/" if split else ""
    there = subfolders(folder)
    names = [there.get(normalized(name), name) for name in classes]
    files = [
        list_images(folder / name) if (folder / name).is_dir() else ImageFiles([], Counter())
        for name in names
    ]
    empty = [str(folder / name) for name, f in zip(names, files, strict=True) if not f.paths]
    if len(empty) == len(classes) or (empty and all_classes):
        problem = "no image" if len(empty) == len(classes) else "no image of a class"
        raise UserError(f"data.path: {problem} in {shorten(empty)}; expected {IMAGE_PATTERNS}")
    return _Split(
        [f"{prefix}{n}/{path}" for n, f in zip(names, files, strict=True) for path in f.paths],
        np.repeat(np.arange(len(classes), dtype=np.int32), [len(f.paths) for f in files]),
        sum((f.skipped for f in files), skipped or Counter()),
        prefix,
    )
