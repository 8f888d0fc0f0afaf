"""Training and test examples: names of splits, and examples that are held out."""

import os
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from train.config.data import Data
from train.data.columns import normalized
from train.errors import UserError, did_you_mean, list_available, shorten

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Names of the folders, files and arrays of each split."""


def split_of(path: str) -> str | None:
    """Find train, val or test in a path, of a folder if it ends with ``/``; None if there is none.

    The outermost folder of such a name counts, as train2017; else a word of the file's name, or of
    the outermost folder that has one, as val_street.
    """
    *folders, name = path.lower().split("/")
    stems = [re.sub(r"[^a-z]+$", "", folder) for folder in folders]
    for words in (
        *([stem] for stem in stems),
        *(re.split(r"[^a-z]+", p) for p in (name, *folders)),
    ):
        for split, names in SPLIT_NAMES.items():
            if not set(names).isdisjoint(words):
                return split
    return None


def choose_training_split(names: Collection[str]) -> str | None:
    """Return the first usual name of the training split; None if there is none."""
    return next((name for name in SPLIT_NAMES["train"] if name in names), None)


def choose_test_split(given: str | None, names: Collection[str], where: object) -> str | None:
    """Return the given name of the test split, else the first usual one, of val before test."""
    others = sorted(set(names) - {choose_training_split(names)})
    if given is not None and given not in others:
        if given in names:
            raise UserError(
                f"data.test_split: {given} in {where} is the training split"
                f"{list_available(others, 'others')}"
            )
        raise UserError(
            f"data.test_split: no split {given} in {where}{did_you_mean(given, others)}"
            f"{list_available(others, 'others')}"
        )
    usual = (*SPLIT_NAMES["val"], *SPLIT_NAMES["test"])
    return given or next((name for name in usual if name in others), None)


def describe_splits(train: str, test: str, splits: Iterable[str]) -> tuple[str, ...]:
    """Return a note about other splits than the one to train on and the one to test on."""
    others = sorted({*splits} - {train, test})
    if not others:
        return ()
    return (f"trained on {train}, tested on {test}; not read: {shorten(others)} (data.test_split)",)


def hold_out(
    config: Data,
    keys: Iterable[object],
    labels: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> np.ndarray:
    """Choose about ``test_fraction`` of the examples by a hash of their keys, bool [N].

    The key of an example decides alone, so that one more example moves no other from training to
    testing. Only a class without any hash on one side of the fraction gives its nearest example.
    With groups, their names are the keys. Folds are of equal size, with equal shares of each class
    as far as groups allow; one more example may move others.

    Args:
      config: options of the data source.
      keys: names of the examples, or of their users; contents of those without names. Examples
        of equal keys stay together.
      labels: class of each example, int [N]; None if they have none.
      groups: group of each example; none is both trained and tested on.
    """
    names = [str(key) for key in keys]
    if config.folds is not None:
        return _fold(config, names, labels, groups)
    if groups is not None:
        return hold_out_users(config, np.array(groups), "group")
    hashes = hash_names(f"{config.split_seed} {name}" for name in names)
    unique, number = np.unique(hashes, return_inverse=True)
    is_test = unique < config.test_fraction * 2.0**64  # of each key, with all its rows
    classes = np.zeros(len(names), int) if labels is None else labels
    order = np.lexsort((hashes, classes))
    for rows in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        if number[rows[0]] == number[rows[-1]]:
            which = "" if labels is None else f" of each class, got only {names[rows[0]]}"
            raise UserError(
                f"data.test_fraction: {config.test_fraction} needs two or more examples{which}, "
                "which cannot be both trained and tested on"
            )
        is_test[number[rows[0]]] = True
        is_test[number[rows[-1]]] = False
    return is_test[number]


def hold_out_files(
    config: Data,
    paths: Sequence[str],
    labels: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> np.ndarray:
    """Choose images by their paths, as `hold_out` does, bool [N]; rows of one image stay together.

    So do files that differ in their extension alone, which can be one picture in two formats.
    """
    stems = Counter(os.path.splitext(path)[0] for path in {*paths})
    keys = [stem if stems[stem := os.path.splitext(path)[0]] > 1 else path for path in paths]
    if groups is None and config.folds is not None and len({*keys}) < len(keys):
        groups = keys
    return hold_out(config, keys, labels, groups)


def _fold(
    config: Data, names: Sequence[str], labels: np.ndarray | None, groups: Sequence[str] | None
) -> np.ndarray:
    from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold

    folds = config.folds
    assert folds is not None
    if config.fold > folds:
        raise UserError(f"data.fold: {config.fold}, but data.folds is {folds}")
    if labels is None:
        split = KFold(folds) if groups is None else GroupKFold(folds)
    else:
        split = StratifiedKFold(folds) if groups is None else StratifiedGroupKFold(folds)
        counts = np.bincount(labels)
        if (least := counts[counts > 0].min()) < folds:
            raise UserError(
                f"data.folds: {folds}, but a class has only {least} examples; give at most {least}"
            )
    if groups is not None and len({*groups}) < folds:
        raise UserError(f"data.folds: {folds}, but there are {len({*groups})} groups; give fewer")
    order = np.argsort(hash_names(f"{config.split_seed} {name}" for name in names))
    y = None if labels is None else labels[order]
    by_group = None if groups is None else np.array(groups)[order]
    chosen = [*split.split(np.zeros(len(order)), y, by_group)][config.fold - 1][1]
    is_test = np.zeros(len(order), bool)
    is_test[order[chosen]] = True
    return is_test


def describe_hold_out(config: Data, is_test: np.ndarray, why: str, by: str = "") -> str:
    """Say how many images are held out, why, and by which groups and options."""
    how = f"fold {config.fold} of {config.folds}" if config.folds else "data.test_fraction"
    return (
        f"{why}: {is_test.sum():,} of {len(is_test):,} images are held out for testing{by} ({how})"
    )


def check_split(config: Data, why: str) -> list[str]:
    """Refuse folds of data that are split already; return a note about other options in vain."""
    if config.folds is not None:
        raise UserError(
            f"data.folds: {config.folds}, but {why}, and folds are made of data without splits"
        )
    names = ("test_fraction", "split_seed")
    given = [name for name in names if getattr(config, name) != getattr(type(config), name)]
    return [f"data.{name}: has no effect, because {why}" for name in given]


def hold_out_users(config: Data, users: np.ndarray, what: str = "user") -> np.ndarray:
    """Choose rows by a hash of the ids of their users, bool [N]; no user is in both splits."""
    ids, number = np.unique(users, return_inverse=True)
    if len(ids) < 2:
        raise UserError(
            f"data.{what}: all examples are of the {what} {ids[0]}, which cannot be both trained "
            f"and tested on; give examples of more {what}s"
        )
    return hold_out(config, ids.tolist())[number]


def hold_out_rows(
    config: Data, contents: Iterable[bytes], labels: np.ndarray, users: np.ndarray | None
) -> np.ndarray:
    """Choose rows by a hash of their users, or else of their contents, bool [N]."""
    if users is not None:
        return hold_out_users(config, users)
    return hold_out(config, content_keys(contents), labels)


def describe_common(
    train: Iterable[tuple[str, Hashable]], test: Iterable[tuple[str, Hashable]], what: str
) -> tuple[str, ...]:
    """Return a note about test examples with the key of a training one; each has name and key."""
    originals: dict[Hashable, str] = {}
    for name, key in train:
        originals.setdefault(key, name)
    copies = [(name, originals[key]) for name, key in test if key in originals]
    return tuple(
        f"{len(copies):,} test {what} are training {what} or copies of them, such as {copy} of "
        f"{original}; they make test scores too good"
        for copy, original in copies[:1]
    )


def content_keys(contents: Iterable[bytes]) -> Iterator[str]:
    """Yield the keys of examples that have no names; copies have one, and so stay together."""
    for content in contents:
        yield f"{blake2b(content, digest_size=16).hexdigest()} 1"  # copies were counted before


def hash_names(names: Iterable[str]) -> np.ndarray:
    """Hash names, in any form of Unicode, to uniform 64-bit numbers, uint64 [N]."""
    digests = (
        blake2b(normalized(name).encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for name in names
    )
    return np.frombuffer(b"".join(digests), "<u8")


def hold_out_contents(config: Data, contents: Sequence[str], what: str) -> np.ndarray:
    """Choose examples by a hash of their contents, bool [N]; without a seed, the last ones."""
    if config.split_seed is not None:
        return hold_out(config, contents)
    count, fraction = len(contents), config.test_fraction
    num_test = round(fraction * count)
    if not 0 < num_test < count:
        raise UserError(
            f"data.test_fraction: {fraction} of {count} {what} leaves {num_test} for testing and "
            f"{count - num_test} for training; expected at least one each; give more, or another "
            "fraction"
        )
    return np.arange(count) >= count - num_test
