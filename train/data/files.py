"""Image files below a folder."""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import NamedTuple

from train.data import storage
from train.data.columns import normalized
from train.data.decode import EXTENSIONS
from train.errors import UserError, shorten

IMAGE_PATTERNS = f"files *.{', *.'.join(EXTENSIONS)}"
"""Patterns of image files, for error messages."""

_MOST_COMPARED = 20_000
"""Files from which on no copies are looked for, because that would take minutes on a disk."""
_MIDDLE = 1024


class ImageFiles(NamedTuple):
    """Image files below a folder.

    Attributes:
      paths: paths relative to the folder, sorted.
      skipped: number of files that are left out, by extension or by kind.
    """

    paths: list[str]
    skipped: Counter[str]


def list_images(folder: Path) -> ImageFiles:
    """Find all image files below a folder, as `storage.walk` does."""
    skipped: Counter[str] = Counter()
    paths: list[str] = []
    with storage.reported("data.path", folder):
        for path in storage.walk(str(folder), skipped):
            _, dot, extension = path.rpartition("/")[2].rpartition(".")
            if extension.lower() in EXTENSIONS:
                paths.append(path)
            else:
                skipped[f"{dot}{extension}" if dot else "no extension"] += 1
    return ImageFiles(sorted(paths), skipped)


def describe_skipped(files: Iterable[ImageFiles]) -> tuple[str, ...]:
    """Return a note about all files that are left out, or ()."""
    skipped: Counter[str] = sum((f.skipped for f in files), Counter())
    if not skipped:
        return ()
    kinds = shorten([f"{count:,} x {kind}" for kind, count in sorted(skipped.items())])
    return (f"left out {skipped.total():,} files that are no images: {kinds}",)


def describe_copies(train: Iterable[str], test: Iterable[str]) -> tuple[str, ...]:
    """Return a note about test images that have the bytes of a training image, or ().

    Of files of the same size the middle is compared, and the whole of those that agree.
    """
    splits = [dict.fromkeys(train), dict.fromkeys(test)]
    if sum(map(len, splits)) > _MOST_COMPARED:
        return ()
    for key_of in (os.path.getsize, _middle, _digest):
        keys = [{path: _key(key_of, path) for path in paths} for paths in splits]
        common = {*keys[0].values()} & {*keys[1].values()} - {0}
        splits = [{p: k for p, k in of.items() if k in common} for of in keys]
    if not splits[1]:
        return ()
    path, key = next(iter(splits[1].items()))
    original = next(p for p, k in splits[0].items() if k == key)
    return (
        f"{len(splits[1]):,} test images are copies of training images, such as {path} of "
        f"{original}; they make test scores too good",
    )


def _key(key_of: Callable[[str], Hashable], path: str) -> Hashable:
    try:
        return key_of(path)
    except OSError:  # reported where the image is read
        return 0


def _middle(path: str) -> tuple[int, bytes]:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _MIDDLE, 0) // 2)
        return size, file.read(_MIDDLE)


def _digest(path: str) -> bytes:
    with open(path, "rb") as file:
        return file_digest(file, blake2b).digest()


def subfolders(folder: Path) -> dict[str, str]:
    """List the folders in a folder, sorted, by `normalized` name, without hidden ones."""
    with storage.reported("data.path", folder), os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    by_name: dict[str, str] = {}
    for name in names:
        if normalized(name) in by_name:
            raise UserError(
                f"data.path: two folders in {folder} are called {name}, in two forms of Unicode; "
                "rename one"
            )
        by_name[normalized(name)] = name
    return by_name


def check_folder(root: Path, remedy: str = "") -> None:
    """Raise `UserError` if the path that the user gave is not a folder."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"data.path: {root} {problem}{remedy}")
