"""Whether a resumed run finds the data that it began with."""

import json
import zlib
from typing import Any

import numpy as np

from train.config import Config
from train.data import Dataset, num_examples
from train.errors import UserError
from train.run.run_folder import RunFolder, as_json, atomic_write
from train.run.seeds import keyed_checksum

_MOST_BYTES, _MOST_NAMES = 2**28, 10_000
"""What a checksum covers unless the run is private: bytes of an array, and training rows at regular
intervals, whose files it names."""
_BLOCK_BYTES = 2**24


def write_data(folder: RunFolder, config: Config, data: dict[str, Any]) -> None:
    """Write data.json, by which `check_data` recognizes the data."""
    atomic_write(folder.data, as_json(_record(folder, config, data)))


def _record(folder: RunFolder, config: Config, data: dict[str, Any]) -> dict[str, Any]:
    """What data.json holds: the description, or a code of it that tells nothing without the key.

    No guarantee of privacy covers the description, so `grad.release_only` must not write it.
    """
    if not config.is_release_only:
        return data
    return {"keyed_checksum": keyed_checksum(folder, config, json.dumps(data))}


def check_data(folder: RunFolder, config: Config, data: dict[str, Any]) -> str | None:
    """Compare the data of a resumed run with those that it had before.

    Args:
      folder: folder of the run.
      config: config of the run.
      data: its data now, from `describe_data`.

    Returns:
      What changed, in a line for the user; None if nothing did.

    Raises:
      UserError: if they changed in a private run, whose guarantee holds for one dataset, or if
        nothing says what they were.
    """
    if not folder.has_trained:
        return None
    now = _record(folder, config, data)
    try:
        then = json.loads(folder.data.read_bytes())
        if not isinstance(then, dict) or then.keys() != now.keys():
            raise ValueError("an earlier version wrote it, or it is damaged")
    except (OSError, ValueError) as error:
        if not config.is_private:
            return None
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"cannot read {folder.data} ({reason}): nothing else says which data this private run "
            "began with, and the guarantee holds for the same data; restore the file, or start a "
            "new run with another --out"
        ) from error
    if then == now:
        return None
    what = "other rows"
    if now is data and _count(then) != _count(now):
        what = f"{_count(then)} then, {_count(now)} now"
    changed = f"data: changed since {folder.path} was last trained: {what}"
    if config.is_private:
        raise UserError(f"{changed}; the guarantee holds for the same data: restore them")
    return f"{changed}; the next batches are of the new data, in a new order"


def _count(data: dict[str, Any]) -> str:
    train, test = (f"{n:,}" if isinstance(n, int) else "?" for n in (data["train"], data["test"]))
    return f"{train} training and {test} test examples"


def describe_data(dataset: Dataset, *, private: bool) -> dict[str, Any]:
    """Return the number of examples, and a checksum of their rows, contents, names and users.

    Args:
      dataset: the data.
      private: whether the checksum must cover all of it, however long that takes.
    """
    count = num_examples(dataset.train) - dataset.canaries
    rows = np.arange(count)
    if not private:
        rows = np.unique(np.linspace(0, count - 1, _MOST_NAMES).astype(int))
    files = "\n".join(f"{dataset.name(i)} {dataset.file_bytes(i)}" for i in rows.tolist())
    checksum = zlib.crc32(files.encode("utf-8", "surrogateescape"))
    arrays = [
        *((f"train {name}", a) for name, a in sorted(dataset.train.items())),
        *((f"test {name}", a) for name, a in sorted(dataset.test.items())),
        *((f"contents {i}", a) for i, a in enumerate(dataset.contents)),
    ]
    if dataset.users is not None:
        arrays.append(("users", dataset.users))
    for name, a in arrays:
        checksum = zlib.crc32(f"{name} {a.dtype} {a.shape}".encode(), checksum)
        row_bytes = max(a[:1].nbytes, 1)
        step = max(_BLOCK_BYTES // row_bytes, 1)
        for start in range(0, len(a) if private else min(len(a), _MOST_BYTES // row_bytes), step):
            checksum = zlib.crc32(a[start : start + step].tobytes(), checksum)
    return {
        "train": num_examples(dataset.train),
        "test": num_examples(dataset.test),
        "crc32": checksum,
    }
