"""Image files below a folder."""

import io
import os
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from train.data import decode, storage
from train.data.columns import normalized
from train.data.masks import spread
from train.data.splits import describe_common
from train.errors import UserError

IMAGE_PATTERNS = "files *.jpg, *.png, *.webp or others that Pillow opens"
"""Patterns of image files, for error messages."""

_MOST_COMPARED = 20_000
"""Files from which on no copies are looked for, because that would take minutes on a disk."""
_MIDDLE, _UNREADABLE = 1024, -1
_MOST_OPENED, _MOST_DECODED = 1000, 32
_SHALLOW = 2**14
"""Largest value from which on images of 16 bits are taken to use them."""
_Id = TypeVar("_Id", bound=Hashable)


class ImageFiles(NamedTuple):
    """Image files below a folder.

    Attributes:
      paths: paths relative to the folder, sorted.
      skipped: number of files that are left out, by extension or by kind.
    """

    paths: list[str]
    skipped: Counter[str]


def list_images(folder: Path, read: Container[str] = ()) -> ImageFiles:
    """Find all image files below a folder, as `storage.walk` does.

    Names of other files that are ``read`` are not counted as left out.
    """
    skipped: Counter[str] = Counter()
    paths: list[str] = []
    with storage.reported("data.path", folder):
        for path in storage.walk(str(folder), skipped):
            if (kind := storage.kind_of(path)).lower()[1:] in decode.EXTENSIONS:
                paths.append(path)
            elif path.rpartition("/")[2] not in read:
                skipped[kind] += 1
    return ImageFiles(sorted(paths), skipped)


def without_extension(path: str) -> str:
    """Return a path without the extension of an image, if it has one."""
    stem, _, extension = path.rpartition(".")
    return stem if extension.lower() in decode.EXTENSIONS else path


def describe_files(
    train: Iterable[_Id],
    test: Iterable[_Id],
    file_of: Callable[[_Id], decode.File] = str,
    name: Callable[[_Id], str] = str,
) -> tuple[str, ...]:
    """Return the notes of `describe_images` and `describe_copies`.

    Images are paths, unless ``file_of`` gives their files, and ``name`` what the user calls them.
    """
    train, test = [*train], [*test]
    notes = describe_images([*train, *test], file_of, name)
    return notes + describe_copies(train, test, file_of, name)


def describe_images(
    images: Iterable[_Id],
    file_of: Callable[[_Id], decode.File] = str,
    name: Callable[[_Id], str] = str,
) -> tuple[str, ...]:
    """Return notes about images of which 8-bit RGB does not show all. See `describe_files`."""
    every = [*dict.fromkeys(images)]
    some = [every[i] for i in spread(len(every), _MOST_OPENED)]
    several = [id for id in some if decode.has_frames(file_of(id))]
    notes: tuple[str, ...] = ()
    if several:
        of = f" of {len(some):,} that were opened" if len(some) < len(every) else ""
        notes = (
            f"images of several frames or pages, of which the first is used: {len(several):,}{of}, "
            f"such as {name(several[0])}",
        )
    few = [some[i] for i in spread(len(some), _MOST_DECODED)]
    changes = [decode.changes_of_rgb(file_of(id)) for id in few]
    if clear := [id for id, (_, is_clear) in zip(few, changes, strict=True) if is_clear]:
        notes += (
            f"images with transparent pixels, of which the colors below are used: {len(clear):,} "
            f"of {len(few):,} that were decoded, such as {name(clear[0])}",
        )
    largest = max((value for value, _ in changes if value is not None), default=_SHALLOW)
    if largest < _SHALLOW:
        notes += (
            f"images of 16 bits have values of at most {largest:,} of 65,535, so that they become "
            "dark; scale them before saving",
        )
    return notes


def describe_copies(
    train: Iterable[_Id],
    test: Iterable[_Id],
    file_of: Callable[[_Id], decode.File] = str,
    name: Callable[[_Id], str] = str,
) -> tuple[str, ...]:
    """Return a note about copies of training images among test images. See `describe_files`.

    Of files of the same size the middle is compared, and the whole of those that agree. Of more
    than 20,000 images, only paths are compared.
    """
    splits = [dict.fromkeys(train), dict.fromkeys(test)]
    keys_of: Sequence[Callable[[Any], Hashable]] = (decode.file_bytes, _middle, _digest)
    if sum(map(len, splits)) > _MOST_COMPARED:
        if file_of is not str:
            return ()
        keys_of = (os.path.abspath,)
    for key_of in keys_of:
        keys = [{id: _key(key_of, file_of(id)) for id in ids} for ids in splits]
        common = {*keys[0].values()} & {*keys[1].values()} - {_UNREADABLE}
        splits = [{id: k for id, k in of.items() if k in common} for of in keys]
    named = [[(name(id), key) for id, key in of.items()] for of in splits]
    return describe_common(named[0], named[1], "images")


def _key(key_of: Callable[[decode.File], Hashable], file: decode.File) -> Hashable:
    try:
        return (
            _UNREADABLE if isinstance(file, decode.UnreadableError) else key_of(file) or _UNREADABLE
        )
    except OSError:  # reported where the image is read
        return _UNREADABLE


def _open(file: decode.File) -> IO[bytes]:
    return io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb")  # type: ignore[arg-type]


def _middle(file: decode.File) -> bytes:
    with _open(file) as opened:
        opened.seek(max(opened.seek(0, os.SEEK_END) - _MIDDLE, 0) // 2)
        return opened.read(_MIDDLE)


def _digest(file: decode.File) -> bytes:
    with _open(file) as opened:
        return file_digest(opened, blake2b).digest()  # type: ignore[arg-type]


def subfolders(folder: Path, skipped: Counter[str] | None = None) -> dict[str, str]:
    """List the folders in a folder, sorted, by `normalized` name; count what else there is."""
    names, skipped = [], Counter() if skipped is None else skipped
    with storage.reported("data.path", folder), os.scandir(folder) as entries:
        for entry in entries:
            if part := storage.hidden_part(entry.name):
                skipped[part] += 1
            elif entry.is_dir():
                names.append(entry.name)
            else:
                skipped[f"{storage.kind_of(entry.name)} next to folders"] += 1
    by_name: dict[str, str] = {}
    for name in sorted(names):
        if by_name.setdefault(normalized(name), name) != name:
            raise UserError(
                f"data.path: two folders in {folder} are called {name}, in two forms of Unicode; "
                "rename one"
            )
    return by_name


def check_folder(root: Path, remedy: str = "") -> None:
    """Raise `UserError` if the path that the user gave is not a folder."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"data.path: {root} {problem}{remedy}")
