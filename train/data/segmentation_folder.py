"""Images and their masks: files of the same name below images/ and masks/."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train.config import SegmentationFolder
from train.data import Arrays, Dataset, size
from train.data.augment import fitted, in_bytes
from train.data.decode import UnreadableError
from train.data.files import LOOKED_FOR, held_out_folder, images_below, training_folder
from train.data.image_batches import IGNORE, EvaluationMasks, TrainingMasks, decode_pair
from train.data.workers import Workers
from train.errors import UserError

Pair = tuple[str, str]
"""Paths of an image and of its mask."""


def load(config: SegmentationFolder) -> Dataset:
    """Images with a label for each pixel, read when a batch needs them.

    An image's mask has its name, up to the extension; the values of a grey mask, or the
    indices of a palette's, are the labels, and 255 is none. Rows are ``id`` int32 [N],
    counted through training and test images. Batches have besides ``image`` uint8
    [N, H, W, 3], ``mask`` uint8 [N, H, W], 255 where nothing is to be counted, and
    ``weight`` float32 [N]: 0.0 for an example of which a file cannot be used.

    Raises:
      UserError: if there is no image, an image without mask or a mask without image, or
        nobody says how many classes there are.
    """
    if config.scale[0] > config.scale[1]:
        raise UserError(f"data.scale: {config.scale[0]} is more than {config.scale[1]}")
    root = Path(config.path)
    train, test = _splits(root, config)
    names = _classes(root, config)
    pairs = np.array([[os.fsencode(name) for name in pair] for pair in train + test])
    ids = np.arange(len(pairs), dtype=np.int32)

    fill = in_bytes(config.mean)
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

    def files(rows: Arrays) -> Arrays:
        of = pairs[rows["id"]]
        return {"path": of[:, 0], "mask_path": of[:, 1]}

    def augment(rows: Arrays, generator: np.random.Generator) -> Arrays:
        return rows | workers(training, files(rows) | training.draw(size(rows), generator))

    def prepare(rows: Arrays) -> Arrays:
        return rows | workers(evaluation, files(rows))

    def explain(id: int) -> str | None:
        image, mask = pairs[id]
        try:
            decode_pair(
                folder, image, mask, len(names), lambda w, h: fitted(w, h, config.image_size)
            )
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


def _splits(root: Path, config: SegmentationFolder) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train and to test on, paths relative to the root."""
    if _holds_pairs(root):
        if config.test_split is not None:
            raise UserError(
                f"data.test_split: {root} itself holds images/ and masks/, and data.test_fraction "
                "of them is held out; move the training images into train/"
            )
        pairs = _pairs(root, "")
        order = np.random.default_rng(config.split_seed).permutation(len(pairs))
        held_out = round(config.test_fraction * len(pairs))
        if not 0 < held_out < len(pairs):
            raise UserError(
                f"data.test_fraction: {config.test_fraction} of {len(pairs)} images leaves none to "
                f"{'train' if held_out else 'test'} on"
            )
        test = set(order[:held_out].tolist())
        split: tuple[list[Pair], list[Pair]] = [], []
        for i, pair in enumerate(pairs):
            split[i in test].append(pair)
        return split
    training_folder(root, "images/ and masks/, or train/ and val/ or test/, each with both")
    held_out_name = held_out_folder(root, config.test_split)
    for name in ("train", held_out_name):
        if not _holds_pairs(root / name):
            missing = [n for n in ("images", "masks") if not (root / name / n).is_dir()]
            raise UserError(f"data.path: no folder {root / name / missing[0]}")
    return _pairs(root, "train/"), _pairs(root, f"{held_out_name}/")


def _holds_pairs(folder: Path) -> bool:
    return (folder / "images").is_dir() and (folder / "masks").is_dir()


def _pairs(root: Path, prefix: str) -> list[Pair]:
    """The images below one images/ with the masks below the masks/ beside it."""
    found = {}
    for kind in ("images", "masks"):
        folder = root / f"{prefix}{kind}"
        files = images_below(folder)
        if not files:
            raise UserError(f"data.path: no image in {folder}; looked for {LOOKED_FOR}")
        by_name = {name.rpartition(".")[0]: name for name in files}
        if len(by_name) < len(files):
            twice = next(f for f in files if by_name[f.rpartition(".")[0]] != f)
            other = by_name[twice.rpartition(".")[0]]
            raise UserError(f"data.path: {twice} and {other} in {folder} have the same name")
        found[kind] = by_name
    images, masks = found["images"], found["masks"]
    for kind, here, there, other in (
        ("image", images, masks, "mask"),
        ("mask", masks, images, "image"),
    ):
        alone = [name for name in here if name not in there]
        if alone:
            raise UserError(
                f"data.path: the {kind} {root / prefix / (kind + 's') / here[alone[0]]} has no "
                f"{other}: no file {root / prefix / (other + 's') / alone[0]}.*"
                + (f"; nor have {len(alone) - 1} others" if alone[1:] else "")
            )
    return [(f"{prefix}images/{images[n]}", f"{prefix}masks/{masks[n]}") for n in images]


def _classes(root: Path, config: SegmentationFolder) -> tuple[str, ...]:
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
            what = f"that names {len(names)}" if path.is_file() else "there is no such file"
            raise UserError(
                f"data.classes: how many labels there are, 2 to {IGNORE}, or a name a line of "
                f"{path}; {what}"
            )
        return tuple(names)
    if names and len(names) != config.classes:
        raise UserError(f"data.classes: {config.classes}, but {path} names {len(names)}")
    return tuple(names) or tuple(str(i) for i in range(config.classes))
