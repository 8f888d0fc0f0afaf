"""Image files below a folder."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from train.data import storage
from train.data.columns import normalized
from train.data.decode import EXTENSIONS
from train.errors import UserError, shorten

IMAGE_PATTERNS = f"files *.{', *.'.join(EXTENSIONS)}"
"""Patterns of image files, for error messages."""


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
