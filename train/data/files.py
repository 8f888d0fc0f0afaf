"""Image files below a folder, and the folders of training and test images."""

import errno
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from train.data.decode import EXTENSIONS
from train.errors import UserError, did_you_mean, shorten

IMAGE_PATTERNS = f"files *.{', *.'.join(EXTENSIONS)}"
"""Patterns of image files, for error messages."""


SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
"""Names of the folders and files of each split."""

_NO_FILE = "pipe, socket or device"
_LOOP = "link to itself"


class ImageFiles(NamedTuple):
    """Image files below a folder.

    Attributes:
      paths: paths relative to the folder, sorted.
      skipped: number of files that are left out, by extension or by kind.
    """

    paths: list[str]
    skipped: Counter[str]


def list_images(folder: Path) -> ImageFiles:
    """Find all image files below a folder.

    Links are followed, and skipped if they lead to themselves or to a folder around them. Names
    that begin with a dot are skipped, and not counted. So are pipes, sockets and devices, which
    would block.
    """
    paths: list[str] = []
    skipped: Counter[str] = Counter()

    def walk(path: str, prefix: str, above: frozenset[tuple[int, int]]) -> None:
        status = os.stat(path)
        here = (status.st_dev, status.st_ino)
        if here in above:
            skipped[_LOOP] += 1
            return
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                try:
                    is_folder, is_file = entry.is_dir(), entry.is_file()
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                    skipped[_LOOP] += 1
                    continue
                _, dot, extension = entry.name.rpartition(".")
                if is_folder:
                    walk(entry.path, f"{prefix}{entry.name}/", above | {here})
                elif extension.lower() not in EXTENSIONS:
                    skipped[f"{dot}{extension}" if dot else "no extension"] += 1
                elif is_file or not os.path.exists(entry.path):  # a broken link is reported later
                    paths.append(prefix + entry.name)
                else:
                    skipped[_NO_FILE] += 1

    try:
        walk(str(folder), "", frozenset())
    except OSError as error:
        raise UserError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    return ImageFiles(sorted(paths), skipped)


def file_bytes(path: bytes) -> int:
    """Return the size of a file, -1 if it is unreadable."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def describe_skipped(files: Iterable[ImageFiles]) -> tuple[str, ...]:
    """Return a note about all files that are left out, or ()."""
    skipped: Counter[str] = sum((f.skipped for f in files), Counter())
    if not skipped:
        return ()
    kinds = shorten([f"{count:,} x {kind}" for kind, count in sorted(skipped.items())])
    return (f"left out {skipped.total():,} files that are no images: {kinds}",)


def subfolders(folder: Path) -> list[str]:
    """List the names of the folders in a folder, sorted, without names that begin with a dot."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise UserError(f"data.path: cannot read {folder}: {error.strerror}") from error


def find_test_folder(root: Path, name: str | None) -> str | None:
    """Find the folder of test images: the given name, or val, or test, or None.

    Raises:
      UserError: if the given one is missing, or is the training folder.
    """
    names = subfolders(root)
    if name == "train":
        raise UserError(f"data.test_split: {root / name} is the training set; name another folder")
    if name is not None:
        if name not in names:
            raise UserError(f"data.test_split: no folder {root / name}{did_you_mean(name, names)}")
        return name
    for default in ("val", "test"):
        if default in names:
            return default
    return None


def find_training_folder(root: Path, expected: str) -> Path:
    """Find ``root/train``.

    Args:
      root: folder that the user gave.
      expected: description of the folder's contents, for the error.

    Raises:
      UserError: if it is missing.
    """
    check_folder(root, f"; expected a folder with {expected}")
    if not (root / "train").is_dir():
        raise UserError(
            f"data.path: no folder {root / 'train'}; {root} must hold {expected}"
            f"{_available(subfolders(root))}"
        )
    return root / "train"


def check_folder(root: Path, remedy: str = "") -> None:
    """Raise `UserError` if the path that the user gave is not a folder."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"data.path: {root} {problem}{remedy}")


def _available(folders: list[str]) -> str:
    return f"; there are {shorten(folders)}" if folders else "; it holds no folders"
