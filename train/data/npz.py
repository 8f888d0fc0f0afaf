"""Arrays of an .npz file: which are images and labels, and of which part."""

import os
import re
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.config import ArrayFile
from train.data.files import there_are
from train.errors import UserError, nearest

_IMAGES = ("x", "image", "images", "data")
_LABELS = ("y", "label", "labels", "target", "targets")
_TRAINING, _HELD_OUT = "train", ("val", "test")
_EXPECTED = "it is an .npz file, or a folder with train.npz and, to test on, val.npz or test.npz"


class Part(NamedTuple):
    """Where the examples of a part are.

    Attributes:
      path: of the file.
      images, labels: names of arrays in it.
    """

    path: Path
    images: str
    labels: str


def parts_of(config: ArrayFile) -> list[Part]:
    """What to train on and, if there is such a part, what to test on.

    Raises:
      UserError: if files or arrays are missing, several could be meant, or both parts are one.
    """
    root = Path(config.path)
    (images, *test_images), (labels, *test_labels) = config.images or [""], config.labels or [""]
    training, held_out = (images, labels), ("".join(test_images), "".join(test_labels))
    if root.is_dir():
        there = sorted(path.stem for path in root.glob("*.npz"))
        if _TRAINING not in there:
            raise UserError(
                f"data.path: no file {root / _TRAINING}.npz; {_EXPECTED}{there_are(there, 'files')}"
            )
        parts = [_part(root / f"{_TRAINING}.npz", ("", _TRAINING), training)]
        test = _test_part(config, root, there)
        if test is None and any(held_out):
            raise UserError(
                f"data.test_split: {root} holds neither val.npz nor test.npz; name the file with "
                f"{' and '.join(filter(None, held_out))}{there_are(there, 'files')}"
            )
        parts += [_part(root / f"{test}.npz", ("", test), held_out)] if test else []
    else:
        there = sorted({part for _, part in filter(None, map(_parse, names_in(root))) if part})
        parts = [_part(root, ("", _TRAINING), training)]
        test = _test_part(config, root, there)
        if test or any(held_out):
            parts.append(_part(root, (test or _HELD_OUT[-1],), held_out))
    if len(parts) == 2 and parts[0][:2] == parts[1][:2]:
        raise UserError(
            f"data.test_split: {parts[0].images} in {parts[0].path} would be trained on and tested "
            "on; name other images for one of them"
        )
    return parts


def names_in(path: Path) -> list[str]:
    """The arrays of a file.

    Raises:
      UserError: if it is not there, or no .npz file.
    """
    try:
        with open(path, "rb") as file:
            is_zip = zipfile.is_zipfile(file)
    except FileNotFoundError:
        raise UserError(f"data.path: {path} does not exist; {_EXPECTED}") from None
    except OSError as error:
        raise UserError(f"data.path: cannot read {path}: {error.strerror}") from error
    if not is_zip:
        what = "is cut short, or no .npz file" if os.path.getsize(path) else "is empty"
        raise UserError(f"data.path: {path} {what}; numpy.savez writes such files")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return list(arrays.files)
    except Exception as error:  # a damaged file makes parsers raise whatever they meet
        raise _unreadable(path, error) from error


def read(path: Path, name: str) -> np.ndarray:
    """An array of a file, whole.

    Raises:
      UserError: if it is damaged, or holds Python objects.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            array = arrays[name]
    except Exception as error:
        raise _unreadable(f"{name} in {path}", error) from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"data.path: {name} in {path} is no array")
    return array


def _test_part(config: ArrayFile, root: Path, there: Collection[str]) -> str | None:
    """The part to test on: the one that is named, else val or test, else none."""
    name = config.test_split
    if name is not None and name not in there:
        raise UserError(
            f"data.test_split: no part {name} in {root}{nearest(name, there)}"
            f"{there_are(sorted(there), 'parts')}"
        )
    return name or next((part for part in _HELD_OUT if part in there), None)


def _part(path: Path, parts: Sequence[str], given: Sequence[str]) -> Part:
    """The arrays of a part of a file, by the given names, or where they are "" by usual ones."""
    names = names_in(path)
    found = []
    for what, words, name in zip(("images", "labels"), (_IMAGES, _LABELS), given, strict=True):
        usual = [n for n in names if _parse(n) in [(words, part.lower()) for part in parts]]
        if name and name not in names:
            raise UserError(
                f"data.{what}: no array {name} in {path}{nearest(name, names)}"
                f"{there_are(names, 'arrays')}"
            )
        if not name and len(usual) > 1:
            raise UserError(
                f"data.{what}: {' and '.join(usual)} in {path} could both be meant; name one"
            )
        if not name and not usual:
            of = "" if _TRAINING in parts else f" of {parts[-1]}"
            raise UserError(
                f"data.{what}: no array in {path} is called as {what}{of} usually are "
                f"({', '.join(_usual(words, parts))}, ...); name one{there_are(names, 'arrays')}"
            )
        found.append(name or usual[0])
    return Part(path, *found)


def _parse(name: str) -> tuple[tuple[str, ...], str] | None:
    """``"X_train"`` -> ``(_IMAGES, "train")``, ``"label"`` -> ``(_LABELS, "")``; else None."""
    words = re.split(r"[_\-. ]", name.lower())
    for kind in (_IMAGES, _LABELS):
        rest = [word for word in words if word not in kind]
        if len(rest) == len(words) - 1 < 2:
            return kind, "".join(rest)
    return None


def _usual(words: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Some names that would have been found."""
    return [word if not part else f"{word}_{part}" for part in parts for word in words[:3]]


def _unreadable(what: object, error: Exception) -> UserError:
    reason = str(error) or type(error).__name__
    if "Object arrays" in reason:
        return UserError(
            f"data.path: {what} holds Python objects, which only pickle could read, and pickle "
            "runs what a file says; save numbers, or names as an array of strings"
        )
    return UserError(f"data.path: cannot read {what}: {reason}")
