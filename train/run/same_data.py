"""Whether a resumed run finds the data that it began with."""

import json
import zlib
from typing import Any

import numpy as np

from train.config import Config
from train.data import Dataset, num_examples
from train.errors import UserError
from train.run.run_folder import RunFolder, as_json, atomic_write

_MOST_BYTES, _MOST_NAMES = 2**28, 10_000
"""Bytes of an array, and names of training rows at regular intervals, that a checksum covers."""


def write_data(folder: RunFolder, config: Config, data: dict[str, Any]) -> None:
    """Write what `describe_data` returns to data.json.

    A run that only writes what its guarantee of privacy covers has no such file.
    """
    if not config.is_release_only:
        atomic_write(folder.data, as_json(data))


def check_data(folder: RunFolder, config: Config, now: dict[str, Any]) -> str | None:
    """Compare the data of a resumed run with those that it had before.

    Args:
      folder: folder of the run.
      config: config of the run.
      now: its data, from `describe_data`.

    Returns:
      What changed, in a line for the user; None if nothing did.

    Raises:
      UserError: if they changed in a private run, whose guarantee holds for one dataset.
    """
    try:
        then = json.loads(folder.data.read_bytes())
        before, after = (
            f"{d['train']:,} training and {d['test']:,} test examples" for d in (then, now)
        )
    except (OSError, ValueError, TypeError, LookupError):  # an earlier version, or damaged
        return None
    if then == now:
        return None
    what = f"{before} then, {after} now" if before != after else "other rows"
    changed = f"data: changed since {folder.path} was last trained: {what}"
    if config.is_private:
        raise UserError(f"{changed}; the guarantee holds for the same data: restore them")
    return f"{changed}; the next batches are of the new data, in a new order"


def describe_data(dataset: Dataset) -> dict[str, Any]:
    """Return the number of examples, and a checksum of their rows and names."""
    names = np.unique(np.linspace(0, num_examples(dataset.train) - 1, _MOST_NAMES).astype(int))
    text = "\n".join(dataset.name(i) for i in names.tolist())
    checksum = zlib.crc32(text.encode("utf-8", "surrogateescape"))
    for rows in (dataset.train, dataset.test):
        for name in sorted(rows):
            a = np.ascontiguousarray(rows[name])
            checksum = zlib.crc32(f"{name} {a.dtype} {a.shape}".encode(), checksum)
            checksum = zlib.crc32(a.view(np.uint8).reshape(-1)[:_MOST_BYTES].data, checksum)
    return {
        "train": num_examples(dataset.train),
        "test": num_examples(dataset.test),
        "checksum": checksum,
    }
