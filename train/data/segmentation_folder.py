"""Images and their segmentation masks: files of the same name below images/ and masks/."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.config import SegmentationFolder
from train.data import Arrays, Dataset, num_examples
from train.data.augment import fit, to_uint8
from train.data.decode import UnreadableError
from train.data.files import (
    IMAGE_PATTERNS,
    find_test_folder,
    find_training_folder,
    list_images,
)
from train.data.image_batches import IGNORE, EvaluationMasks, TrainingMasks, decode_pair
from train.data.workers import Workers
from train.errors import UserError

Pair = tuple[str, str]
"""Paths of an image and of its mask."""


def load(config: SegmentationFolder) -> Dataset:
    """Find images and masks; batches read them.

    A mask has the name of its image, up to the extension. Its labels are the values of a gray
    image or the indices of a palette image; 255 is ignored. Rows are ``id`` int32 [N], which
    counts training images and then test images. Batches add ``image`` uint8 [N, H, W, 3], ``mask``
    uint8 [N, H, W], 255 outside the image, and ``weight`` float32 [N], 0.0 for an unreadable file.

    Raises:
      UserError: if there is no image, an image or a mask without the other, or no number of
        classes.
    """
    if config.scale[0] > config.scale[1]:
        raise UserError(f"data.scale: {config.scale[0]} is more than {config.scale[1]}")
    root = Path(config.path)
    train, test = _find_splits(root, config)
    names = _class_names(root, config)
    pairs = np.array([[os.fsencode(name) for name in pair] for pair in train + test])
    ids = np.arange(len(pairs), dtype=np.int32)

    fill = to_uint8(config.mean)
    folder = os.fsencode(root)
    training = TrainingMasks(
        root=folder,
        size=config.image_size,
        classes=len(names),
        scale=config.scale,
        flip=config.flip,
        color_jitter=config.color_jitter,
        lighting=config.lighting,
        fill=fill,
    )
    evaluation = EvaluationMasks(folder, config.image_size, len(names), fill)
    workers = Workers(config.workers)

    def paths(rows: Arrays) -> Arrays:
        selected = pairs[rows["id"]]
        return {"path": selected[:, 0], "mask_path": selected[:, 1]}

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        draws = training.draw(num_examples(rows), generator)
        return rows | workers(training, paths(rows) | draws)

    def prepare(rows: Arrays) -> Arrays:
        return rows | workers(evaluation, paths(rows))

    def explain(id: int) -> str | None:
        image, mask = pairs[id]
        try:
            decode_pair(folder, image, mask, len(names), lambda w, h: fit(w, h, config.image_size))
        except UnreadableError as error:
            return str(error)
        return None

    return Dataset(
        train={"id": ids[: len(train)]},
        test={"id": ids[len(train) :]},
        classes=names,
        augment=augment,
        prepare=prepare,
        name=lambda row: str(root / os.fsdecode(pairs[row][0])),
        explain=explain,
        max_bad_fraction=config.max_bad_fraction,
    )


def _find_splits(root: Path, config: SegmentationFolder) -> tuple[list[Pair], list[Pair]]:
    """Find training and test pairs, as paths relative to the root."""
    if _holds_pairs(root):
        if config.test_split is not None:
            raise UserError(
                f"data.test_split: {root} itself holds images/ and masks/, and data.test_fraction "
                "of them is held out; move the training images into train/"
            )
        pairs = _find_pairs(root, "")
        order = np.random.default_rng(config.split_seed).permutation(len(pairs))
        num_test = round(config.test_fraction * len(pairs))
        if not 0 < num_test < len(pairs):
            raise UserError(
                f"data.test_fraction: {config.test_fraction} of {len(pairs)} images leaves none "
                f"to {'train' if num_test else 'test'} on"
            )
        test = set(order[:num_test].tolist())
        splits: tuple[list[Pair], list[Pair]] = [], []
        for i, pair in enumerate(pairs):
            splits[i in test].append(pair)
        return splits
    find_training_folder(root, "images/ and masks/, or train/ and val/ or test/, each with both")
    test_folder = find_test_folder(root, config.test_split)
    for name in ("train", test_folder):
        if not _holds_pairs(root / name):
            missing = [n for n in ("images", "masks") if not (root / name / n).is_dir()]
            raise UserError(f"data.path: no folder {root / name / missing[0]}")
    return _find_pairs(root, "train/"), _find_pairs(root, f"{test_folder}/")


def _holds_pairs(folder: Path) -> bool:
    return (folder / "images").is_dir() and (folder / "masks").is_dir()


def _find_pairs(root: Path, prefix: str) -> list[Pair]:
    """Match the images below an images/ folder with the masks below its masks/ folder."""
    files_by_name = {}
    for kind in ("images", "masks"):
        folder = root / f"{prefix}{kind}"
        files = list_images(folder)
        if not files:
            raise UserError(f"data.path: no image in {folder}; expected {IMAGE_PATTERNS}")
        by_name = {file.rpartition(".")[0]: file for file in files}
        if len(by_name) < len(files):
            duplicate = next(f for f in files if by_name[f.rpartition(".")[0]] != f)
            other = by_name[duplicate.rpartition(".")[0]]
            raise UserError(f"data.path: {duplicate} and {other} in {folder} have the same name")
        files_by_name[kind] = by_name
    images, masks = files_by_name["images"], files_by_name["masks"]
    for kind, own, partners, partner_kind in (
        ("image", images, masks, "mask"),
        ("mask", masks, images, "image"),
    ):
        single = [name for name in own if name not in partners]
        if single:
            raise UserError(
                f"data.path: the {kind} {root / prefix / (kind + 's') / own[single[0]]} has no "
                f"{partner_kind}: no file {root / prefix / (partner_kind + 's') / single[0]}.*"
                + (f"; nor have {len(single) - 1} others" if single[1:] else "")
            )
    return [(f"{prefix}images/{images[n]}", f"{prefix}masks/{masks[n]}") for n in images]


def _class_names(root: Path, config: SegmentationFolder) -> tuple[str, ...]:
    """Class names from classes.txt, or ``("0", "1", ...)``."""
    path = root / "classes.txt"
    names: Sequence[str] = ()
    if path.is_file():
        try:
            names = path.read_text("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.path: cannot read {path}: {error}") from error
        names = [name.strip() for name in names if name.strip()]
    if config.classes is None:
        if not 2 <= len(names) <= IGNORE:
            problem = f"names {len(names)}" if path.is_file() else "does not exist"
            raise UserError(
                f"data.classes: give the number of classes, 2 to {IGNORE}, or one name per line "
                f"of {path}, which {problem}"
            )
        return tuple(names)
    if names and len(names) != config.classes:
        raise UserError(f"data.classes: {config.classes}, but {path} names {len(names)}")
    return tuple(names) or tuple(str(i) for i in range(config.classes))
