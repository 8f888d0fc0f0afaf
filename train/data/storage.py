"""Files on this machine, and objects in remote storage (gs://, s3://, ...) through fsspec."""

import contextlib
import errno
import glob
import itertools
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO, Any, NamedTuple

from train import limits
from train.errors import UserError, shorten

_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
_CREDENTIALS = {
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
}
_BLOCK = 2**22
_REFUSED = re.compile(
    r"credential|forbidden|unauthori[sz]ed|access ?denied|permission|anonymous caller|\b40[13]\b",
    re.IGNORECASE,
)
_OF_TOOLS = frozenset(
    name.casefold()
    for name in (
        *("@eaDir", "#recycle", "#snapshot", "@SynoEAStream", "@tmp"),  # Synology
        *("@Recycle", "@Recently-Snapshot", "@__thumb"),  # QNAP
        *("lost+found", "Network Trash Folder", "Temporary Items"),
        *("__MACOSX", "Icon\r"),
        *("$RECYCLE.BIN", "System Volume Information", "FOUND.000"),
        *("Thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "ZbThumbnail.info"),
        *("__pycache__", "Picasa.ini"),
    )
)
"""Files and folders that other programs leave among data, which are never read."""
_STAMPS = ("generation", "ETag", "etag", "mtime", "LastModified", "updated", "created")
"""Properties of an object that change when it is written."""


class StorageError(Exception):
    """A file or an object cannot be read. The message is the path, the reason and the remedy."""


@contextlib.contextmanager
def reported(option: str, path: object) -> Iterator[None]:
    """Turn an error of reading a path into a `UserError` that begins with a config field."""
    try:
        yield
    except (StorageError, OSError) as error:
        place = getattr(error, "filename", None) or path  # perhaps a folder below it
        raise UserError(f"{option}: {as_storage_error(str(place), error)}") from error


def import_parquet(option: str, path: str) -> Any:
    """Import pyarrow with its reader of Parquet."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{option}: {path} needs pyarrow; pip install 'fnet-jax[parquet]'"
        ) from None
    return pyarrow


def parquet_batches(
    file: Any, size: int, where: str, groups: Sequence[int], columns: Sequence[str] | None = None
) -> Iterator[Any]:
    """Yield batches of rows of some row groups of a `pyarrow.parquet.ParquetFile`.

    A value that many rows share is in the file once, so that its rows are counted as they are read.
    In a small file that is before the first batch, because what is made of rows takes more memory.

    The file of ``size`` bytes is named in error messages by ``where``. No columns are all of them.

    Raises:
      UserError: if rows would unpack to bytes above the limit and 8 times the file.
    """

    def batches() -> Iterator[Any]:
        unpacked = 0
        for group in groups:
            encoded = file.metadata.row_group(group).total_byte_size
            limits.check_unpacked(encoded, size, where)
            # Each row may have all of it.
            rows = min(max(limits.UNPACKED.most // 8 // max(encoded, 1), 1), 64)
            for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
                unpacked += batch.nbytes
                limits.check_unpacked(unpacked, size, where)
                yield batch

    if size <= limits.UNPACKED.most // 8:
        for _ in batches():
            pass
    yield from batches()


class Stat(NamedTuple):
    """Size of a file in bytes, and a text that changes when the file is written."""

    size: int
    stamp: str


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as gs://bucket/file."""
    return "://" in path


def scheme(path: str) -> str:
    """Return the kind of storage of a URL, such as gs; "" for a path of this machine."""
    return path.partition("://")[0] if is_remote(path) else ""


def open_file(path: str, *, buffering: int = -1) -> IO[bytes]:
    """Open a file for reading, a remote one in large blocks.

    Raises:
      StorageError: if it cannot be opened.
    """
    try:
        if not is_remote(path):
            check_regular(path)
            return open(path, "rb", buffering)
        return filesystem(path).open(path, "rb", block_size=_BLOCK, cache_type="readahead")
    except Exception as error:  # a client library can raise anything
        raise as_storage_error(path, error) from error


def check_regular(path: str) -> None:
    """Raise `OSError` for a pipe, a socket or a device, which would block or never end."""
    if not S_ISREG(mode := os.stat(path).st_mode) and not S_ISDIR(mode):
        raise OSError(errno.EINVAL, "is a pipe, a socket or a device; save its content as a file")


def stat(path: str) -> Stat:
    """Return the size and the stamp of a file.

    Raises:
      StorageError: if there is no such file, or it is not accessible.
    """
    try:
        if not is_remote(path):
            status = os.stat(path)
            return Stat(status.st_size, str(status.st_mtime_ns))
        info = filesystem(path).info(path)
        return Stat(int(info["size"]), str(next((info[k] for k in _STAMPS if k in info), "")))
    except Exception as error:
        raise as_storage_error(path, error) from error


def read_ranges(paths: Sequence[str], starts: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Read parts of files on one kind of storage, concurrently if its client can.

    Returns:
      Bytes of each part, or a `StorageError`. Parts beyond the end of a file are shorter.

    Raises:
      StorageError: if a file of this machine cannot be read.
    """
    if not is_remote(paths[0]):
        with contextlib.ExitStack() as opened:
            by_path = {p: opened.enter_context(open_file(p, buffering=0)) for p in {*paths}}
            try:
                return [
                    os.pread(by_path[path].fileno(), size, start)
                    for path, start, size in zip(paths, starts, sizes, strict=True)
                ]
            except OSError as error:
                raise as_storage_error(paths[0], error) from error
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    files = filesystem(paths[0])
    found = files.cat_ranges(list(paths), list(starts), ends, on_error="return")
    return [
        as_storage_error(path, part) if isinstance(part, Exception) else part
        for path, part in zip(paths, found, strict=True)
    ]


def expand(path: str, skipped: Counter[str] | None = None) -> list[str] | None:
    """List the files that a folder or a pattern stands for, sorted; None for a path of one file.

    Patterns have ``*``, ``?``, ``[...]``, or braces as in WebDataset: ``{000..099}``, ``{a,b}``.
    Folders are searched at any depth. What `walk` leaves out is counted in ``skipped``.

    Raises:
      StorageError: if the storage is not accessible.
    """
    skipped = Counter() if skipped is None else skipped

    def visible(found: list[str]) -> list[str]:
        """Leave out hidden files, and what other programs leave, unless the path names them."""
        hidden = {
            file: part
            for file in found
            for name in file.split("/")
            if (part := hidden_part(name))
            and not any(name[0] == own[:1] and fnmatchcase(name, own) for own in path.split("/"))
        }
        skipped.update(hidden.values())
        return sorted({*found} - hidden.keys())

    if (several := list(_expand_braces(path))) != [path]:
        found = [file for part in several for file in expand(part, skipped) or [part]]
        return list(dict.fromkeys(found))
    try:
        if not is_remote(path):
            if os.path.isdir(path):
                return sorted(os.path.join(path, file) for file in walk(path, skipped))
            has_pattern = glob.has_magic(path) and not os.path.exists(path)
            return visible(glob.glob(path, recursive=True)) if has_pattern else None
        files = filesystem(path)
        if not glob.has_magic(path) and not files.isdir(path):
            return None
        names = files.glob(path) if glob.has_magic(path) else files.find(path)
        return visible([files.unstrip_protocol(name) for name in names])
    except Exception as error:
        raise as_storage_error(path, error) from error


def walk(folder: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the files below a folder of this machine, relative to it.

    Links are followed. Those that lead to themselves or to a folder around them are left out and
    counted, like pipes, sockets and devices, which would block, hidden names, and what other
    programs leave. A broken link is a file, which cannot be read later.
    """
    visits = Counter[tuple[int, int]]()

    def below(path: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
        here = _identity(path)
        if here in above:
            skipped["link to itself"] += 1
            return
        visits[here] += 1
        limits.LINKS.check(visits[here], path)
        with os.scandir(path) as entries:
            for entry in entries:
                if part := hidden_part(entry.name):
                    skipped[part] += 1
                    continue
                try:
                    is_folder, is_file = entry.is_dir(), entry.is_file()
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                    skipped["link to itself"] += 1
                    continue
                if is_folder:
                    yield from below(entry.path, f"{prefix}{entry.name}/", above | {here})
                elif is_file or not os.path.exists(entry.path):
                    yield prefix + entry.name
                else:
                    skipped["pipe, socket or device"] += 1

    around = [*Path(folder).resolve().parents]
    return below(folder, "", frozenset(_identity(str(parent)) for parent in around))


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def filesystem(path: str) -> Any:
    """Return fsspec's file system for a URL."""
    import fsspec

    return fsspec.filesystem(scheme(path))


def as_storage_error(path: str, error: Exception) -> StorageError:
    """Describe what went wrong with a path in one line, with what to do."""
    if isinstance(error, StorageError):
        return error
    kind = {"gcs": "gs", "s3a": "s3"}.get(scheme(path), scheme(path))
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{path} does not exist")
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    reason = reason or type(error).__name__
    if isinstance(error, ImportError) and kind:
        package = _PACKAGES.get(kind, "the package of fsspec for it")
        return StorageError(f"{path} needs {package} ({reason}); pip install {package}")
    if kind and isinstance(error, ValueError) and "Protocol" in reason:
        return StorageError(f"{path}: fsspec knows no storage {kind}://")
    names = " ".join(base.__name__ for base in type(error).__mro__[:-3])
    if kind and _REFUSED.search(f"{names} {reason}"):
        remedy = _CREDENTIALS.get(kind, f"give fsspec credentials for {kind}://")
        return StorageError(f"no permission to read {path} ({reason}); {remedy}")
    return StorageError(f"cannot read {path}: {reason}")


def cache_folder() -> Path:
    """Return the folder of fnet's caches; a temporary one for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fnet")
    except RuntimeError:
        return Path(tempfile.gettempdir(), "fnet")


def atomic_write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a file of a cache, which other processes may write at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        try:
            write(part.file)
            part.close()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def hidden_part(path: str) -> str:
    """Return the part of a path that is left out, ``"hidden"`` with a dot before it, or ``""``."""
    for part in re.split(r"[/\\]", path):
        if part.casefold() in _OF_TOOLS:
            return repr(part)[1:-1]
        if part.startswith(".") and part.strip("."):
            return "hidden"
    return ""


def kind_of(path: str) -> str:
    """Return what a file that is left out is counted as: its extension, as ``".txt"``."""
    _, dot, extension = path.rpartition("/")[2].rpartition(".")
    return f".{extension}" if dot else "no extension"


def describe_skipped(skipped: Counter[str]) -> tuple[str, ...]:
    """Return a note about all files and folders that are left out, or ()."""
    if not skipped:
        return ()
    kinds = shorten([f"{count:,} x {kind}" for kind, count in sorted(skipped.items())], 8)
    return (f"left out {skipped.total():,} files and folders: {kinds}",)


def _expand_braces(path: str) -> Iterator[str]:
    """Expand ``{000..099}`` and ``{a,b}``; a path with other braces is returned unchanged."""
    parts = re.split(r"\{(\d+\.\.\d+|[^{}]*,[^{}]*)\}", path)
    choices = []
    for text in parts[1::2]:
        first, dots, last = text.partition("..")
        if dots and first.isdigit() and last.isdigit():
            choices.append([f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)])
        else:
            choices.append(text.split(","))
    for chosen in itertools.product(*choices):
        yield "".join(a + b for a, b in itertools.zip_longest(parts[::2], chosen, fillvalue=""))
