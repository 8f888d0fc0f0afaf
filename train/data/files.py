"""Image files below a folder, and which of the user's folders is to be tested on."""

import os
from collections.abc import Sequence
from pathlib import Path

from train.data.decode import EXTENSIONS
from train.errors import UserError, nearest

LOOKED_FOR = f"files *.{', *.'.join(EXTENSIONS)}"
"""In words."""


def images_below(folder: Path) -> list[str]:
    """Paths of all image files, relative to the folder, sorted.

    Links are followed, names that begin with a dot are passed over, and so is a folder that
    contains itself.
    """
    found: list[str] = []

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
                    found.append(prefix + entry.name)

    try:
        walk(str(folder), "", frozenset())
    except OSError as error:
        raise UserError(
            f"data.path: cannot look into {error.filename}: {error.strerror}"
        ) from error
    return sorted(found)


def folders_in(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, but for those that begin with a dot."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise UserError(f"data.path: cannot look into {folder}: {error.strerror}") from error


def held_out_folder(root: Path, name: str | None) -> str:
    """The folder to test on: the one that is named, else val or test.

    Raises:
      UserError: if it is not there, or is trained on.
    """
    there = folders_in(root)
    if name == "train":
        raise UserError(f"data.test_split: {root / name} is trained on; name another folder")
    if name is not None:
        if name not in there:
            raise UserError(f"data.test_split: no folder {root / name}{nearest(name, there)}")
        return name
    for usual in ("val", "test"):
        if usual in there:
            return usual
    raise UserError(
        f"data.path: no folder {root / 'val'} or {root / 'test'} to test on; "
        f"data.test_split names another{_there(there)}"
    )


def training_folder(root: Path, expected: str) -> Path:
    """``root/train``.

    Args:
      root: what the user gave.
      expected: what a folder of this kind holds, for the message.

    Raises:
      UserError: if it is not there.
    """
    if not root.is_dir():
        what = "is no folder" if root.exists() else "does not exist"
        raise UserError(f"data.path: {root} {what}; it is a folder that holds {expected}")
    if not (root / "train").is_dir():
        there = _there(folders_in(root))
        raise UserError(
            f"data.path: no folder {root / 'train'}; {root} is to hold {expected}{there}"
        )
    return root / "train"


def shortened(names: list[str], most: int = 5) -> str:
    """The first names, and how many there are more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def there_are(names: Sequence[str], what: str) -> str:
    """What there is, behind what there is not."""
    return f"; there are {shortened(list(names), 12)}" if names else f"; there are no {what}"


def _there(folders: list[str]) -> str:
    return f"; there are {shortened(folders)}" if folders else "; it holds no folders"
