"""Whether a run that is resumed or evaluated finds the data, config and checkpoints that it had.

data.json says what they were. It has a checksum, so that damage is noticed.
"""

import base64
import contextlib
import importlib.metadata
import json
import math
import platform
import re
import zlib
from typing import Any, NamedTuple, Self

import jax
import numpy as np

import fnet
from train.config import Config
from train.config.data import Data
from train.data import Dataset, num_examples
from train.data.decode import file_crc
from train.data.splits import hash_names
from train.errors import UserError
from train.run.checkpoints import Stamp, why_damaged
from train.run.run_folder import RunFolder, code_of, describe_changes, fixed_fields, read_sealed
from train.run.seeds import describe_seed, keyed_checksum
from train.stored import Count, Stored, StoredError, parse

_MOST_BYTES, _MOST_SIZES = 2**31, 10_000
"""Contents of a checksum unless the run is private: bytes of an array, and rows of a split at
regular intervals, whose files it names with their sizes."""
_MOST_FILES, _MOST_FILE_BYTES = 1000, 2**28
"""Rows of these, at regular intervals, whose files are read."""
_MOST_NAMES = 10_000
"""Names of a split that data.json holds as hashes: those with the smallest ones."""
_BLOCK_BYTES = 2**24


class _Record(Stored):
    """Contents of data.json; the fields with a default are about the data, or a code of them.

    ``stamps`` are None if they are not known; ``trained_before`` are names of earlier data.
    """

    run: str | None
    stamps: list[tuple[str, str, str]] | None
    has_saved: bool
    trained_before: str | None
    config: dict[str, str]
    versions: dict[str, str]
    train: Count = 0
    test: Count = 0
    crc32: Count = 0
    train_names: str | None = None
    test_names: str | None = None
    keyed_checksum: str = ""


class _Names(NamedTuple):
    """Sorted hashes of names below a limit: all names, or a sample that is the same in any set."""

    hashes: np.ndarray
    limit: int

    @classmethod
    def of(cls, hashes: np.ndarray, limit: int = 2**64) -> Self:
        smallest = np.unique(hashes)[: _MOST_NAMES + 1]
        if len(smallest) > _MOST_NAMES:
            limit = int(smallest[-1])
        return cls(smallest[:_MOST_NAMES], limit)

    @classmethod
    def from_text(cls, text: str | None) -> Self:
        limit, _, hashes = (text or f"{2**64} ").partition(" ")
        return cls(np.frombuffer(base64.b64decode(hashes), "<u8"), int(limit))

    def as_text(self) -> str:
        return f"{self.limit} {base64.b64encode(self.hashes.tobytes()).decode()}"

    def below(self, limit: int) -> np.ndarray:
        return self.hashes[self.hashes <= np.uint64(limit - 1)]

    def union(self, other: Self) -> Self:
        limit = min(self.limit, other.limit)
        return self.of(np.concatenate([self.below(limit), other.below(limit)]), limit)

    def count_in(self, other: Self, of: int) -> int:
        """Count, or estimate, how many of the names are among others; there are ``of`` of them."""
        own = self.below(min(self.limit, other.limit))
        shared = int(np.isin(own, other.hashes).sum())
        return shared if len(own) == of else -(-shared * of // max(len(own), 1))


def stamp_of(folder: RunFolder, config: Config, data: dict[str, Any]) -> Stamp:
    """Return what a part of the run is trained with."""
    contents = fixed_fields(config), _record(folder, config, data, keyed=config.is_private)
    return Stamp(describe_seed(folder, config), *map(code_of, contents))


def write_data(
    folder: RunFolder, config: Config, data: dict[str, Any], *, begins: bool = False
) -> None:
    """Write data.json, by which `check_data` recognizes data and config.

    A part of the run that begins only adds its stamp: the rest is about the part that was trained
    last, until this one has saved a checkpoint. So a part that ends before hides no change.
    """
    stamp, then = [*stamp_of(folder, config, data)], dict[str, Any](stamps=[])
    if folder.has_trained:
        try:
            then = _read(folder, config, data)
        except UserError:  # `check_data` has reported it
            if begins:
                return
            then = {"stamps": None}  # not known any more
    stamps = then["stamps"]
    is_new = stamps is not None and stamp not in stamps
    record = then | {"stamps": [*stamps, stamp] if is_new else stamps}
    if not (begins and "run" in then):
        trained_before = then.get("trained_before")
        if "train_names" in then and then["train_names"] != data["train_names"]:
            trained_before = _trained_on(then).as_text()
        record |= _record(folder, config, data) | {
            "run": folder.id,
            "has_saved": then.get("has_saved", False) or bool(folder.saved_steps),
            "trained_before": trained_before,
            "config": fixed_fields(config),
            "versions": versions(),
        }
    if record != then:
        folder.write(folder.data, record)


def check_saved(folder: RunFolder) -> str | None:
    """Check that a run still has a checkpoint if it ever saved one.

    A run that has not saved one yet begins again, which the returned line says.

    Raises:
      UserError: if none is left, or if nothing says whether there was one.
    """
    if folder.saved_steps:
        return None
    what = f"no checkpoint is left in {folder.checkpoints}"
    if damaged := why_damaged(folder.checkpoints):
        what = damaged
    else:
        try:
            if not read_sealed(folder.data).get("has_saved"):
                return f"{folder.path} has no checkpoint yet: starting again at step 0"
        except UserError as error:
            what += f", and {error}"
    raise UserError(
        f"{what}: restore one as {folder.checkpoints}/STEP, or start a new run with another --out"
    )


def check_data(folder: RunFolder, config: Config, data: dict[str, Any]) -> list[str]:
    """Compare data, config and versions of a resumed run with those that it had.

    Returns:
      What changed and what that means, in lines for the user.

    Raises:
      UserError: if data or config changed in a private run, whose guarantee holds for one dataset
        and one mechanism, or if nothing says what they were.
    """
    if not folder.has_trained:
        return []
    is_private = config.is_private or folder.secret_seed.exists()
    try:
        then = _read(folder, config, data)
    except UserError as error:
        line = f"{error}: nothing else says which data and config this run began with"
        if not is_private:
            return [f"{line}; if they changed, the next batches are not those that were next"]
        raise UserError(
            f"{line}, and the guarantee holds for the same ones; restore the file, or start a new "
            "run with another --out"
        ) from error
    folder.check_owner(then["run"], folder.data)
    if is_private and describe_seed(folder, config) not in {s[0] for s in then["stamps"] or ()}:
        raise UserError(
            f"{folder.secret_seed}: is not the secret seed that this run began with; restore it, "
            "or start a new run with another --out"
        )
    changes = _changes(folder, config, then, data)
    if is_private and changes:
        raise UserError(
            f"{next(iter(changes))}; the guarantee holds for the same data and config: restore them"
        )
    now = versions()
    drawn_by = then["versions"].get("jax-privacy")
    if is_private and drawn_by != now.get("jax-privacy"):
        raise UserError(
            f"jax-privacy {drawn_by or 'of an unknown version'} drew the batches of this run, and "
            f"{now.get('jax-privacy')} may draw others; install the former to resume it"
        )
    if others := [
        f"{n} {v} then, {now.get(n)} now" for n, v in then["versions"].items() if v != now.get(n)
    ]:
        changes[f"versions: {', '.join(others)}"] = "the next steps may be rounded differently"
    return [f"{change}; {meaning}" for change, meaning in changes.items()]


def compare_data(folder: RunFolder, config: Config, data: dict[str, Any]) -> str | None:
    """Say how data and config of a run that is evaluated differ from those it was trained with."""
    if not folder.has_trained:
        return None
    try:
        then = _read(folder, config, data)
        folder.check_owner(then["run"], folder.data)
        return "; ".join(_changes(folder, config, then, data)) or None
    except UserError as error:
        return f"{error}: cannot tell whether the data are those that the run was trained on"


def versions() -> dict[str, str]:
    """Return the versions of fnet, Python and libraries, and the device."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    installed = {name: importlib.metadata.version(name) for name in packages}
    for name in ("dp-accounting", "jax-privacy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return {
        "fnet": fnet.__version__,
        "python": platform.python_version(),
        "device": jax.local_devices()[0].device_kind,
    } | installed


def _read(folder: RunFolder, config: Config, data: dict[str, Any]) -> dict[str, Any]:
    then = read_sealed(folder.data)
    always = {name for name, field in _Record.model_fields.items() if field.is_required()}
    if then.keys() != _record(folder, config, data).keys() | always:
        raise StoredError(folder.data, "an earlier version wrote it")
    parse(_Record, then, folder.data)
    return then


def _changes(
    folder: RunFolder, config: Config, then: dict[str, Any], data: dict[str, Any]
) -> dict[str, str]:
    changes, now = {}, _record(folder, config, data)
    parts = [] if config.is_release_only else _differences(then, now)
    if parts or any(then[name] != value for name, value in now.items()):
        what = "; ".join(parts) or "other rows"
        change = f"data: changed since {folder.path} was last trained: {what}"
        changes[change] = "the next batches are of the new data, in a new order"
    if edited := describe_changes(then["config"], fixed_fields(folder.read_config())):
        change = f"{folder.config}: changed since the run was last trained: {edited}"
        changes[change] = "the next steps follow the new config"
    return changes


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    counts = [f"{r['train']:,} training and {r['test']:,} test examples" for r in (then, now)]
    parts = [f"{counts[0]} then, {counts[1]} now"] if counts[0] != counts[1] else []
    if now["test_names"] is None or then["test_names"] is None:
        return parts
    train, test, old_train, old_test = (
        _Names.from_text(record[name])
        for record in (now, then)
        for name in ("train_names", "test_names")
    )
    every, old = train.union(test), old_train.union(old_test)
    limit = min(every.limit, old.limit)
    changes = {
        "new": np.setdiff1d(every.below(limit), old.below(limit)).size,
        "gone": np.setdiff1d(old.below(limit), every.below(limit)).size,
    }
    sampled = "" if limit == 2**64 else f" of {_MOST_NAMES:,}"
    for kind, count in changes.items():
        if count:
            parts.append(f"{count:,}{sampled} {'name is' if count == 1 else 'names are'} {kind}")
    if seen := test.count_in(_trained_on(then), now["test"]):
        parts.append(
            f"{seen:,} of {now['test']:,} test examples were trained on, so that test scores are "
            "too good"
        )
    return parts


def _trained_on(record: dict[str, Any]) -> _Names:
    earlier = _Names.from_text(record["trained_before"])
    return _Names.from_text(record["train_names"]).union(earlier)


def _record(
    folder: RunFolder, config: Config, data: dict[str, Any], *, keyed: bool | None = None
) -> dict[str, Any]:
    """Contents of data.json about the data: all, or a code that tells nothing without the key.

    No guarantee of privacy covers the description. So `grad.release_only` must not write it, and
    neither may the files of a private run that are published.
    """
    if not (config.is_release_only if keyed is None else keyed):
        return data
    return {"keyed_checksum": keyed_checksum(folder, config, json.dumps(data))}


def describe_data(dataset: Dataset, data: Data | None = None, *, private: bool) -> dict[str, Any]:
    """Return the number of examples, a checksum of their rows, contents and users, and their names.

    If the run is private, the checksum covers all of it and each file, however long that takes.
    Names are those below the paths of ``data``, which may move.
    """
    counts = num_examples(dataset.train) - dataset.canaries, num_examples(dataset.test)
    names = map(dataset.name, range(counts[0])), map(dataset.test_name or str, range(counts[1]))
    named = dataset.test_name is not None
    paths = (getattr(data, field, None) for field in ("path", "test_path", "images"))
    roots = "|".join(re.escape(path.rstrip("/")) for path in paths if isinstance(path, str))
    root = re.compile(rf"(?:(?<=^)|(?<=; )|(?<= in ))(?:{roots or '(?!)'})(?=$|[/,])")
    hashes = [hash_names(root.sub("", name) for name in split) for split in names[: 1 + named]]
    checksum = zlib.crc32(b"".join(split.tobytes() for split in hashes)) if private else 0
    first = 0
    for split, count in zip(hashes, counts, strict=False):
        rows = np.arange(count)
        if not private:
            rows = np.unique(np.linspace(0, count - 1, _MOST_SIZES).astype(int))
        sizes = np.array([dataset.file_bytes(first + i) for i in rows.tolist()], np.int64)
        checksum = zlib.crc32(split[rows].tobytes() + sizes.tobytes(), checksum)
        every = max(math.ceil(len(rows) / _MOST_FILES), math.ceil(sizes.sum() / _MOST_FILE_BYTES))
        for row in rows if private else rows[:: max(every, 1)]:
            for file in dataset.files(first + int(row)):
                checksum = file_crc(file, checksum)
        first += count
    arrays = {f"train {name}": a for name, a in sorted(dataset.train.items())}
    arrays |= {f"test {name}": a for name, a in sorted(dataset.test.items())}
    arrays |= {f"contents {i}": a for i, a in enumerate(dataset.contents)}
    if dataset.users is not None:
        arrays["users"] = dataset.users
    for name, a in arrays.items():
        checksum = zlib.crc32(f"{name} {a.dtype} {a.shape}".encode(), checksum)
        row_bytes = max(a[:1].nbytes, 1)
        step = max(_BLOCK_BYTES // row_bytes, 1)
        for start in range(0, len(a) if private else min(len(a), _MOST_BYTES // row_bytes), step):
            checksum = zlib.crc32(a[start : start + step].tobytes(), checksum)
    texts = [_Names.of(split).as_text() for split in hashes] if named else [None, None]
    found = {"train": counts[0], "test": counts[1], "crc32": checksum}
    return found | {"train_names": texts[0], "test_names": texts[1]}
