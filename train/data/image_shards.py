"""Images in shards: tar files as WebDataset writes them, or Parquet."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from annotated_types import MinLen
from typing_extensions import override

from train.config.section import Positive
from train.data import Dataset, storage
from train.data.columns import are_integers, as_labels, is_named, name_classes, read_names
from train.data.labeled_images import image_dataset
from train.data.order import Rows, ShuffledBatches
from train.data.photos import LabeledFiles
from train.data.shards import CACHE_BYTES, EXPECTED, Fields, Index, Shards, format_of, index_shards
from train.data.splits import check_split, content_keys, describe_hold_out, hold_out, split_of
from train.errors import UserError, shorten

_REMOTE_BATCHES = 2
"""Batches that are made at once, so that decoding does not wait for remote storage."""
_READ_AT_ONCE = 1024
_COMPARED = 2**30
"""Bytes of shards up to which copies of training images are looked for, which takes seconds."""


@dataclass(frozen=True)
class ImageShards(LabeledFiles):
    """Images in shards: tar files (WebDataset) or Parquet (Hugging Face)."""

    evaluation_options = {"path": "test_path"} | LabeledFiles.evaluation_options

    source: Literal["image_shards"] = "image_shards"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: Annotated[tuple[str, ...], MinLen(1)] = (".",)
    """Files, folders, patterns like 'train-{00..99}.tar', or URLs (gs://, s3://)."""
    weights: tuple[Positive, ...] = ()
    """Share of each path in the batches; empty is by the number of images."""
    test_path: tuple[str, ...] = ()
    """Shards to test on; empty is those named val or test, or test_fraction of the images."""
    image: Annotated[str, MinLen(1)] | None = None
    """Extension (tar), or column of the image; None finds it by its type or usual names."""
    label: Annotated[str, MinLen(1)] | None = None
    """Extension (cls, json.FIELD), or column of the label; None is a usual one."""
    class_names: Annotated[str, MinLen(1)] | None = None
    """File of class names, one per line; None takes those that come with the shards."""

    def load(self, *, private: bool = False) -> Dataset:
        """Find the images of shards; batches read them, see `image_dataset`.

        Training rows are in the order of `ShuffledBatches`.

        Raises:
          UserError: if there are no shards, too many of them are damaged, images or labels are not
            found, labels are not integers from 0 or names, or for options that exclude each other.
        """
        if self.weights and len(self.weights) != len(self.path):
            raise UserError(
                f"data.weights: {len(self.weights)} weights, but data.path has {len(self.path)}; "
                "give one per path"
            )
        skipped = Counter[str]()
        paths, test_paths = _find_shards(self, skipped)
        every = [*itertools.chain(*paths), *test_paths]
        indices = index_shards(every, Fields(self.image, self.label))
        notes = [*_check_damage(self, every, indices), *storage.describe_skipped(skipped)]
        notes += dict.fromkeys(note for index in indices for note in index.notes)
        counts = [len(index.labels) for index in indices]
        shard = np.repeat(np.arange(len(every), dtype=np.int32), counts)
        place = np.concatenate([index.places for index in indices])
        label, names = _labels(self, every, indices)

        # The source of each image: 0, 1, ... for training, -1 for testing.
        sources = [i for i, files in enumerate(paths) for _ in files] + [-1] * len(test_paths)
        source = np.repeat(np.array(sources, np.int64), counts)
        for i, path in enumerate(self.path):
            if not (source == i).any():
                raise UserError(f"data.path: there are no images in {path}")
        train, test = np.flatnonzero(source >= 0), np.flatnonzero(source < 0)
        others = Shards(every, indices)  # which keep nothing for batches
        shards = Shards(every, indices)
        if test_paths:
            notes += check_split(self, f"the test shards are {shorten(test_paths)}")
        else:
            keys = _keys(indices, others, shard, place)
            is_test = hold_out(self, keys, label)
            notes.append(
                describe_hold_out(self, is_test, f"no test shards in {shorten(self.path)}")
            )
            train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
        if not len(test):
            raise UserError(f"data.test_path: there are no images in {shorten(test_paths)}")
        rows = np.concatenate([train, test])
        shard, place = shard[rows], place[rows]
        labels = label[train], label[test]
        n = len(train)
        names = name_classes(labels, names, f"data.label: {shorten(self.path)}")
        are_remote = any(map(storage.is_remote, every))
        sizes = np.array([index.stat.size for index in indices])
        is_small = not are_remote and sizes.sum() <= _COMPARED
        return image_dataset(
            self,
            labels,
            lambda ids: shards.read(shard[ids], place[ids]),
            lambda id: shards.describe(int(shard[id]), place[id]),
            classes=names,
            compared=(lambda ids: others.read(shard[ids], place[ids])) if is_small else None,
            order=_order(self, source[train], shard[:n], place[:n], indices),
            batches_at_once=_REMOTE_BATCHES if are_remote else 1,
            # The sizes of shards stand for the images in them.
            file_bytes=lambda id: 0,
            contents=(sizes,),
            notes=notes,
        )

    @override
    def for_evaluation(self, options: Mapping[str, Any]) -> Self:
        path = {"path": (options["path"],)} if "path" in options else {}  # of several
        return super().for_evaluation({**options, **path})


load = ImageShards.load  # a name that scripts call


def _find_shards(config: ImageShards, skipped: Counter[str]) -> tuple[list[list[str]], list[str]]:
    """Find the training shards of each path, and the test shards, if there are any.

    Among the files of folders and patterns, names with train, val or test tell the splits. With a
    ``test_path``, others than training shards are not used.
    """
    train: list[list[str]] = []
    every: set[str] = set()
    tests: dict[str | None, list[str]] = {"val": [], "test": []}
    for path in config.path:
        files, has_several = _expand(path, "data.path", skipped)
        every |= {*files}
        root = os.path.commonpath(files) if len(files) > 1 else os.path.dirname(files[0])
        splits = [split_of(file.removeprefix(root)) if has_several else None for file in files]
        if found := sorted({split for split in splits if split and split in tests}):
            named = [*zip(splits, files, strict=True)]
            for split in found:
                tests[split] += [file for own, file in named if own == split]
            training = "train" if "train" in splits else None
            files = [file for own, file in named if own == training]
            if not files:
                raise UserError(
                    f"data.path: {path} has shards of {' and '.join(found)}, but none to train on"
                )
        train.append(files)
    test = tests["val"] or tests["test"]
    if config.test_path:
        expanded = (_expand(path, "data.test_path", skipped)[0] for path in config.test_path)
        test = [*itertools.chain(*expanded)]
    others = every.difference(test, *train)
    skipped.update(f"{storage.kind_of(file)} of another split" for file in others)
    trained_on = set(map(_identity, itertools.chain(*train)))
    if both := sorted(file for file in test if _identity(file) in trained_on):
        raise UserError(f"data.test_path: {shorten(both)} would be trained on, too")
    return train, test


def _identity(file: str) -> str:
    """Return the same name for a local file under any spelling and link."""
    return file if "://" in file else os.path.realpath(file)


def _expand(path: str, field: str, skipped: Counter[str]) -> tuple[list[str], bool]:
    with storage.reported(field, path):
        found = storage.expand(path, skipped)
    if found is None:
        return [path], False
    shards = [file for file in found if format_of(file)]
    if not shards and found:
        raise UserError(f"{field}: no shards in {path}, but {shorten(found)}; {EXPECTED}")
    if not shards:
        raise UserError(f"{field}: no files in {path}; {EXPECTED}")
    skipped.update(storage.kind_of(file) for file in {*found} - {*shards})
    return shards, True


def _keys(
    indices: Sequence[Index], shards: Shards, shard: np.ndarray, place: np.ndarray
) -> list[str]:
    """Return the name of each image; its content if it has none."""
    keys = [str(key) for index in indices for key in index.keys.tolist()]
    nameless = np.array([i for i, key in enumerate(keys) if not key], np.int64)
    for start in range(0, len(nameless), _READ_AT_ONCE):
        rows = nameless[start : start + _READ_AT_ONCE]
        read = shards.read(shard[rows], place[rows])
        contents = (c if isinstance(c, bytes) else str(c).encode() for c in read)
        for i, key in zip(rows.tolist(), content_keys(contents), strict=True):
            keys[i] = key
    return keys


def _check_damage(
    config: ImageShards, paths: Sequence[str], indices: Sequence[Index]
) -> tuple[str, ...]:
    damaged = [
        f"{path} is damaged: {index.problem}"
        for path, index in zip(paths, indices, strict=True)
        if index.problem
    ]
    if len(damaged) > config.max_bad_fraction * len(paths):
        raise UserError(
            f"data.path: {damaged[0]}; copy it again, or give data.max_bad_fraction "
            f"{len(damaged) / len(paths):.2g} to train without what is missing"
            + (f" ({len(damaged)} of {len(paths)} shards are damaged)" if len(damaged) > 1 else "")
        )
    return tuple(f"{problem}; what is missing is skipped" for problem in damaged)


def _labels(
    config: ImageShards, paths: Sequence[str], indices: Sequence[Index]
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    names = _class_names(config, paths, indices)
    found = [(path, i) for path, i in zip(paths, indices, strict=True) if len(i.labels)]
    if not found:
        raise UserError(f"data.path: there are no images in {shorten(paths)}")
    kinds = {index.labels.dtype.kind for _, index in found}
    labels = np.concatenate([index.labels for _, index in found])  # numbers become texts
    has_names = names is None or not {*names}.isdisjoint(labels.tolist())
    if kinds == {"i"} or (not has_names and are_integers(labels)):
        if config.class_names and are_integers(np.array(names)) and is_named(names or ()):
            given = f"names are numbers, {shorten(names or ())}, but not 0, 1, ..."
            raise UserError(f"data.class_names: {given}; a label may be one or count: rename them")
        return as_labels(labels.astype(np.int64), "data.label"), names
    if len(kinds) > 1 and not are_integers(labels):
        texts = next(path for path, index in found if index.labels.dtype.kind == "U")
        raise UserError(f"data.label: labels are names in {texts}, but numbers in other shards")
    names = names or tuple(np.unique(labels).tolist())
    numbers = {name: i for i, name in enumerate(names)}
    if len(numbers) < len(names):
        raise UserError("data.class_names: two classes have one name, so that labels are ambiguous")
    unknown = sorted(set(np.unique(labels).tolist()) - set(numbers))
    if unknown:
        raise UserError(f"data.class_names: no class {shorten(unknown)}, which are labels")
    return np.array([numbers[name] for name in labels.tolist()], np.int32), names


def _class_names(
    config: ImageShards, paths: Sequence[str], indices: Sequence[Index]
) -> tuple[str, ...] | None:
    if config.class_names is not None:
        return read_names(config.class_names, "data.class_names")
    found = {index.classes: path for path, index in zip(paths, indices, strict=True)}
    found.pop((), None)
    if len(found) > 1:
        (first, path), (second, other) = list(found.items())[:2]
        raise UserError(
            f"data.class_names: {path} has the classes {shorten(first)}, but {other} has "
            f"{shorten(second)}; give one file of class names if the labels are the same"
        )
    return next(iter(found), None)


def _order(
    config: ImageShards,
    source: np.ndarray,
    shard: np.ndarray,
    place: np.ndarray,
    indices: Sequence[Index],
) -> Callable[[int, int], ShuffledBatches]:
    """Return the order of training rows, which are sorted by source, shard and place."""
    block_bytes = np.array([index.block_bytes for index in indices])
    if not config.weights:
        source = np.zeros_like(source)
    is_first = block_bytes[shard] == 0
    is_first[:1] = True
    for a in (source, shard, place[:, 0]):
        is_first[1:] |= a[1:] != a[:-1]
    starts = np.flatnonzero(is_first)
    sizes = np.diff(starts, append=len(source))
    sources = [
        Rows(sizes[source[starts] == i], int(block_bytes[shard[source == i]].max()))
        for i in range(len(config.weights) or 1)
    ]
    weights = config.weights or (1.0,)

    def order(batch_size: int, seed: int) -> ShuffledBatches:
        return ShuffledBatches(sources, weights, batch_size, seed, CACHE_BYTES)

    return order
