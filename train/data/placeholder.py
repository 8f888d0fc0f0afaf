"""Datasets without data, to predict a run's memory before its images or its tokenizer exist."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.config import ChatFile, Config, ImageShards, SegmentationFolder, TextFile
from train.config.data import Images
from train.data import Arrays, Dataset, num_examples
from train.data.class_table import PUBLISHED
from train.errors import shorten

_CLASSES = 1000
_VOC = [row for row in PUBLISHED["voc"] if not row.is_void]
_BATCHES = 100
"""Length of an epoch, which is unknown and does not change the memory."""


class Placeholder(NamedTuple):
    """A dataset of zeros.

    Attributes:
      dataset: Rows and batches with the shapes and dtypes of the real ones.
      note: What is assumed, for the user.
    """

    dataset: Dataset
    note: str


def load(config: Config) -> Placeholder | None:
    """Return zeros in place of data that the config describes but that are not there.

    Text is replaced if ``data.vocabulary`` is given, images if their folder does not exist.
    """
    data = config.data
    rows = {"id": np.arange(_BATCHES * data.batch_size, dtype=np.int32)}
    if isinstance(data, TextFile | ChatFile) and data.vocabulary is not None:
        dtype = np.min_scalar_type(data.vocabulary - 1)
        tokens = {"tokens": np.zeros((1, data.context + 1), dtype)}
        length = {"length": np.full(1, data.context, np.int32)}
        weight = {"weight": np.ones(1, np.float32)}
        if isinstance(data, ChatFile):
            tokens["target_mask"] = np.ones((1, data.context), bool)
            segment = {"segment": np.ones((1, data.context + 1), np.int32)}
            batch = tokens | segment | weight if data.packing else tokens | length
            test = batch | weight
        else:
            batch = tokens | length if data.separator else tokens
            test = tokens | length | weight
        if "length" in batch:
            rows["length"] = np.full(len(rows["id"]), data.context, np.int32)
        users = rows["id"] if data.user else None
        note = f"vocabulary of {data.vocabulary:,} tokens; the text is not read"
        return Placeholder(_dataset(rows, (), batch, test)._replace(users=users), note)
    if not isinstance(data, Images | SegmentationFolder):
        return None
    if isinstance(data, ImageShards):  # of which some may be patterns, URLs or names
        paths, marks = data.path, "*?[{:"
    else:
        paths, marks = (str(data.path),), ""
    if any(Path(path).exists() or set(path) & set(marks) for path in paths):
        return None
    image = np.zeros((1, data.image_size, data.image_size, 3), np.uint8)
    batch = {"id": np.zeros(1, np.int32), "image": image, "weight": np.ones(1, np.float32)}
    if isinstance(data, SegmentationFolder):
        table = [row for row in PUBLISHED.get(data.class_table or "", ()) if not row.is_void]
        classes = data.classes or len(data.mask_values) or len(table) or len(_VOC)
        test = batch = batch | {"mask": np.zeros(image.shape[:3], np.uint8)}
    else:
        classes = _CLASSES
        test = batch = batch | {"label": np.zeros(1, np.int32)}
        if data.mixup:
            batch = batch | {"label_2": np.zeros(1, np.int32), "mix": np.ones(1, np.float32)}
        if data.crops > 1:
            crops = np.broadcast_to(image[:, None], (1, data.crops, *image.shape[1:]))
            test = test | {"image": crops}
    names = tuple(str(i) for i in range(classes))
    note = f"no folder {shorten(paths)}: {classes:,} classes are assumed"
    return Placeholder(_dataset(rows, names, batch, test), note)


def _dataset(rows: Arrays, classes: tuple[str, ...], batch: Arrays, test: Arrays) -> Dataset:
    def repeat(example: Arrays, count: int) -> Arrays:
        return {name: np.broadcast_to(a, (count, *a.shape[1:])) for name, a in example.items()}

    return Dataset(
        train=rows,
        test={"id": rows["id"][:1]},
        classes=classes,
        augment=lambda chosen, generator: repeat(batch, num_examples(chosen)),
        prepare=lambda chosen: repeat(test, num_examples(chosen)),
    )
