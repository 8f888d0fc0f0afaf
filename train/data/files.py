"""Image files below a folder, and the folders of training and test images."""

import os
from pathlib import Path

from train.data.decode import EXTENSIONS
from train.errors import UserError, did_you_mean, shorten

IMAGE_PATTERNS = f"files *.{', *.'.join(EXTENSIONS)}"
"""Patterns of image files, for error messages."""


def list_images(folder: Path) -> list[str]:
    """Find the paths of all image files, relative to the folder, sorted.

    Links are followed. Names that begin with a dot are skipped, and so is a folder that contains
    itself.
    """
    paths: list[str] = []

    def walk(path: str, prefix: str, above: frozenset[tuple[int, int]]) -> None:
        status = os.stat(path)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    walk(entry.path, f"{prefix}{entry.name}/", above | {here})
                elif entry.name.rpartition(".")[2].lower() in EXTENSIONS:
                    paths.append(prefix + entry.name)

    try:
        walk(str(folder), "", frozenset())
    except OSError as error:
        raise UserError(f"data.path: cannot read {error.filename}: {error.strerror}") from error
    return sorted(paths)


def subfolders(folder: Path) -> list[str]:
    """List the names of the folders in a folder, sorted, without names that begin with a dot."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise UserError(f"data.path: cannot read {folder}: {error.strerror}") from error


def find_test_folder(root: Path, name: str | None) -> str:
    """Find the folder of test images: the given name, or val, or test.

    Raises:
      UserError: if it is missing, or is the training folder.
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
    raise UserError(
        f"data.path: no folder {root / 'val'} or {root / 'test'} to test on; "
        f"name another one with data.test_split{_available(names)}"
    )


def find_training_folder(root: Path, expected: str) -> Path:
    """Find ``root/train``.

    Args:
      root: folder that the user gave.
      expected: description of the folder's contents, for the error.

    Raises:
      UserError: if it is missing.
    """
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"data.path: {root} {problem}; expected a folder with {expected}")
    if not (root / "train").is_dir():
        raise UserError(
            f"data.path: no folder {root / 'train'}; {root} must hold {expected}"
            f"{_available(subfolders(root))}"
        )
    return root / "train"


def _available(folders: list[str]) -> str:
    return f"; there are {shorten(folders)}" if folders else "; it holds no folders"
