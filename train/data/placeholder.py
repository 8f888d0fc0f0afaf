"""Datasets without data, to predict a run's memory before its images or its tokenizer exist."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data import Arrays, Dataset, num_examples, repeat_row
from train.data.text import Text
from train.errors import shorten

_BATCHES = 100
"""Length of an epoch, which is unknown and does not change the memory."""
_NOT_A_PATH = frozenset("*?[{:")
"""Characters of patterns, URLs and names, of which nobody knows whether they are there."""


class Placeholder(NamedTuple):
    """A dataset of zeros.

    Attributes:
      dataset: Rows and batches with the shapes and dtypes of the real ones.
      note: What is assumed, for the user.
    """

    dataset: Dataset
    note: str


def missing_paths(paths: Sequence[str]) -> str | None:
    """Name the paths if none of them is there; otherwise None."""
    there = any(Path(path).exists() or set(path) & _NOT_A_PATH for path in paths)
    return None if there else shorten(paths)


def zeros(
    batch_size: int, batch: Arrays, test: Arrays, *, classes: int, missing: str
) -> Placeholder:
    """Return zeros in place of image files; ``batch`` and ``test`` are examples of one row."""
    common = {"id": np.zeros(1, np.int32), "weight": np.ones(1, np.float32)}
    names = tuple(str(i) for i in range(classes))
    note = f"no folder {missing}: {classes:,} classes are assumed"
    rows = _rows(batch_size)
    return Placeholder(_dataset(rows, names, common | batch, common | test), note)


def zero_tokens(data: Text, batch: Arrays, test: Arrays) -> Placeholder | None:
    """Return zeros in place of text whose vocabulary is given."""
    if data.vocabulary is None:
        return None
    tokens = {"tokens": np.zeros((1, data.context + 1), np.min_scalar_type(data.vocabulary - 1))}
    test = {"weight": np.ones(1, np.float32)} | test
    rows = _rows(data.batch_size)
    users = rows["id"] if data.user else None
    if "length" in batch:
        rows["length"] = np.full(len(rows["id"]), data.context, np.int32)
    dataset = _dataset(rows, (), tokens | batch, tokens | test)._replace(users=users)
    return Placeholder(dataset, f"vocabulary of {data.vocabulary:,} tokens; the text is not read")


def _rows(batch_size: int) -> Arrays:
    return {"id": np.arange(_BATCHES * batch_size, dtype=np.int32)}


def _dataset(rows: Arrays, classes: tuple[str, ...], batch: Arrays, test: Arrays) -> Dataset:
    return Dataset(
        train=rows,
        test={"id": rows["id"][:1]},
        classes=classes,
        augment=lambda chosen, generator: repeat_row(batch, num_examples(chosen)),
        prepare=lambda chosen: repeat_row(test, num_examples(chosen)),
    )
