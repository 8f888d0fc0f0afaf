"""Shards: files with many examples each. An index says where each example is and its label.

Each example can be read by itself, so that any order of examples can be read, by any process.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import re
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from train import limits
from train.data import storage
from train.data.columns import choose, describe_unread, parse_labels
from train.data.decode import EXTENSIONS, UnreadableError
from train.data.storage import StorageError
from train.errors import TrainingError, UserError, list_available, shorten

_FORMATS = {".tar": "tar", ".parquet": "parquet", ".pq": "parquet"}
EXPECTED = "expected files *.tar or *.parquet"
_RECORDS = re.compile(r"\.(array_?record|tfrecords?)(-\d+-of-\d+)?$")
"""Files of TensorFlow Datasets, which have to be converted."""
_IMAGES = ("image", "img", "jpg", "jpeg", "png", "image/encoded", "pixel_values")
_LABELS = ("label", "labels", "cls", "class", "target", "fine_label", "image/class/label")
_DOTTED = tuple(f".{extension}" for extension in EXTENSIONS)
_THREADS = 16
"""Shards that are indexed or read at once."""
CACHE_BYTES = 2**30
"""Bytes of row groups that are kept in memory."""
_INDEX_VERSION = 6


class Fields(NamedTuple):
    """Names of the image and the label of an example; None for the usual ones."""

    image: str | None
    label: str | None


class Index(NamedTuple):
    """Examples of one shard.

    Attributes:
      places: Where each example is, int64 [N, 2]. Tar: first byte and number of bytes. Parquet: row
        group and row in it.
      labels: Label of each example, int64 or str [N].
      keys: Name of each example, str [N]; "" for one without a name of its own.
      block_bytes: Size of the largest row group; 0 if examples are read one by one.
      classes: Names of labels 0, 1, ..., if the shard has them.
      image: Name of the images' field.
      notes: What of its examples is not read.
      problem: Why the shard, or its end, is unreadable; "" if it is not.
      stat: Size and stamp of the file that was indexed.
    """

    places: np.ndarray
    labels: np.ndarray
    keys: np.ndarray
    block_bytes: int = 0
    classes: tuple[str, ...] = ()
    image: str = ""
    notes: tuple[str, ...] = ()
    problem: str = ""
    stat: storage.Stat = storage.Stat(0, "")


def format_of(path: str) -> str | None:
    """Return the format of a shard by its name: tar, parquet, or None."""
    return _FORMATS.get(os.path.splitext(path)[1])


def index_shards(paths: Sequence[str], fields: Fields) -> list[Index]:
    """Index shards, several at once. Indices are kept in the cache folder.

    A truncated shard has the examples before its end, and a ``problem``.
    """

    def index(path: str) -> Index:
        with storage.reported("data.path", path):
            return _index(path, fields)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(index, paths))


def _index(path: str, fields: Fields) -> Index:
    kind = format_of(path)
    if kind is None:
        if re.search(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$", path):
            raise UserError(
                f"data.path: {path} is compressed, so that its examples cannot be found one by "
                "one; decompress it"
            )
        if _RECORDS.search(path):
            raise UserError(
                f"data.path: {path} has records of TensorFlow Datasets, which are not read; "
                "convert them to Parquet, as the page on shards shows"
            )
        raise UserError(f"data.path: {path} has no known format; {EXPECTED}")
    file = storage.stat(path)
    key = repr((_INDEX_VERSION, os.path.abspath(path), *file, *fields))
    name = sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    saved = storage.cache_folder() / "shards" / f"{name}.npz"
    if known := _load_index(saved):
        return known._replace(stat=file)
    found = (_index_tar if kind == "tar" else _index_parquet)(path, file.size, fields)
    if not found.problem:
        _save_index(found, saved)
    return found._replace(stat=file)


# NumPy parses headers as Python, which Python 3.11 cannot do in several threads (CPython #106905).
_HEADERS = threading.Lock()


def _load_index(path: Path) -> Index | None:
    try:
        with _HEADERS, np.load(path, allow_pickle=False) as arrays:
            texts = json.loads(str(arrays["texts"]))
            texts |= {name: tuple(texts[name]) for name in ("classes", "notes")}
            return Index(arrays["places"], arrays["labels"], arrays["keys"], **texts)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        return None  # there is none, or it is damaged


def _save_index(index: Index, path: Path) -> None:
    names = "block_bytes", "classes", "image", "notes"
    texts = json.dumps({name: getattr(index, name) for name in names})
    arrays: Any = {name: getattr(index, name) for name in ("places", "labels", "keys")}
    with contextlib.suppress(OSError):  # without it, only the next start is slower
        storage.atomic_write(path, lambda file: np.savez(file, texts=texts, **arrays))


# ---- Tar files, as WebDataset writes them: files with the same name up to its first dot are an
# example, such as 0001.jpg and 0001.cls.


def _index_tar(path: str, size: int, fields: Fields) -> Index:
    label, _, json_field = (fields.label or "cls").partition(".")
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    labels: dict[str, bytes] = {}
    left_out: set[str] = set()
    with storage.open_file(path) as file:
        problem, last = "", ""
        for member, start, count in _tar_members(file, path):
            if not member:
                problem = f"it is damaged at byte {start:,}, after {last or 'no file'}"
                break
            if start + count > size:
                problem = (
                    f"it ends at byte {size:,}, but {member} has bytes {start:,} to "
                    f"{start + count:,}"
                )
                break
            if part := storage.hidden_part(member):
                left_out.add(part)
                continue
            folder, slash, name = member.rpartition("/")
            key, _, extension = name.partition(".")
            key, extension = folder + slash + key, extension.lower()
            parts = samples.setdefault(key, {})
            if extension in parts:
                raise UserError(f"data.path: {path} has {member} twice")
            parts[extension], last = (start, count), member
            if extension == label:
                limits.LABEL_FILE.check(count, f"data.label: {member} in {path}")
                here = file.tell()
                file.seek(start)
                labels[key] = file.read(count)
                file.seek(here)
    names = [fields.image.lower()] if fields.image else list(EXTENSIONS)
    images = {}
    for key, parts in samples.items():
        found = [name for name in names if name in parts]
        if len(found) > 1:
            raise UserError(
                f"data.image: {key} in {path} has several images: {shorten(found)}; name one"
            )
        if found:
            images[key] = parts[found[0]]
        elif not fields.image and (others := [n for n in parts if n.endswith(_DOTTED)]):
            raise UserError(
                f"data.image: {key}.{others[0]} in {path} has several dots, but a name ends at its "
                f"first dot and {others[0]} is its kind; rename such files, or give data.image"
            )
    kinds = sorted({extension for parts in samples.values() for extension in parts})
    used = [kind for kind in kinds if kind in (*names, label)]
    notes = describe_unread("files", used, kinds)
    if left_out:
        notes.append(f"files and folders are left out of shards: {shorten(sorted(left_out))}")
    if not images and not problem:
        wanted = f"*.{fields.image}" if fields.image else "with an image"
        raise UserError(f"data.image: {path} has no file {wanted}{list_available(kinds, 'files')}")
    if problem:  # the label of the last example may be what is missing
        images = {key: image for key, image in images.items() if not labels or key in labels}
    if labels or fields.label:
        values = [_tar_label(path, key, labels.get(key), label, json_field) for key in images]
    else:
        values = [key.rpartition("/")[0].rpartition("/")[2] for key in images]
        if images and not all(values):
            raise UserError(
                f"data.label: {path} has no file *.{label}, and its images are in no folders, "
                f"which would be labels{list_available(kinds, 'files')}"
            )
    keys = list(images)
    found_labels = parse_labels(values, lambda i: f"data.label: {keys[i]} in {path}")
    if lacking := [key for key in samples if key not in images]:
        notes.append(f"{len(lacking):,} examples of {path} have no image, such as {lacking[0]}")
    places = _places(list(images.values()))
    return Index(places, found_labels, np.array(keys, str), notes=(*notes,), problem=problem)


class _Headers:
    """A tar file of which only headers and names are read, whatever size they say they have."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > limits.LABEL_FILE.most:
            raise tarfile.ReadError(f"a name of {size} bytes")
        return self._file.read(size)


def _tar_members(file: IO[bytes], path: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, first byte and number of bytes of each file; a name "" if the tar is damaged."""
    end, others = 0, 0
    headers: Any = _Headers(file)
    try:
        with tarfile.open(fileobj=headers, mode="r:") as tar:
            kept: list[Any] = vars(tar)["members"]  # all, which may be millions
            while member := tar.next():
                kept.clear()
                end = tar.offset
                if member.isreg() and not member.issparse():
                    yield member.name, member.offset_data, member.size
                else:
                    others += 1
                    limits.LINKS_AND_FOLDERS.check(others, f"data.path: {path}")
            end = tar.offset
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            yield "", end, 0  # without the blocks of zeros that end a tar file
    except (tarfile.TarError, ValueError):
        yield "", end, 0


def _tar_label(path: str, key: str, content: bytes | None, label: str, field: str) -> Any:
    if content is None:
        raise UserError(f"data.label: {key} in {path} has no file *.{label}")
    text = content.decode("utf-8-sig", "surrogateescape").strip()
    if not field:
        return text
    try:
        return json.loads(text)[field]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"data.label: {key}.{label} in {path} has no field {field}") from None


def _places(places: Sequence[Any]) -> np.ndarray:
    return np.array(places, np.int64).reshape(-1, 2)


# ---- Parquet files, as Hugging Face's datasets library writes them: a column of images, each a
# struct of bytes and path or only bytes, and a column of labels.


def _index_parquet(path: str, size: int, fields: Fields) -> Index:
    pyarrow = storage.import_parquet("data.path", path)
    try:
        with storage.open_file(path) as source, pyarrow.parquet.ParquetFile(source) as file:
            schema, metadata = file.schema_arrow, file.metadata
            classes = _huggingface_classes(schema)
            images = [f.name for f in schema if _is_image_type(pyarrow, f.type)]
            image = choose(
                "data.image", fields.image, schema.names, path, "column", images, _IMAGES
            )
            numbers = [f.name for f in schema if _is_label_type(pyarrow, f.type)]
            label = choose(
                "data.label", fields.label, schema.names, path, "column",
                list(classes) or numbers, _LABELS,
            )  # fmt: skip
            limits.ROWS.check(metadata.num_rows, f"data.path: {path}")
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            # Not of the column of images, because pyarrow aborts at a damaged one.
            block_bytes = max((group.total_byte_size for group in groups), default=0)
            where = f"data.path: {path}"
            batches = storage.parquet_batches(file, size, where, range(len(groups)), [label])
            values = (value.as_py() for batch in batches for value in batch.column(0))
            labels = parse_labels(values, lambda i: f"data.label: row {i} of {path}")
            keys = [""] * len(labels)
            if _has_paths(pyarrow, schema.field(image).type):
                column = [f"{image}.path"]
                batches = storage.parquet_batches(file, size, where, range(len(groups)), column)
                paths = [str(v["path"] or "") for b in batches for v in b.column(0).to_pylist()]
                keys = paths if len({*paths}) == len(paths) else keys
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        nothing = np.zeros(0, np.int64)
        return Index(_places([]), nothing, nothing, problem=f"of {size:,} bytes: {reason}")
    places = [(i, row) for i, group in enumerate(groups) for row in range(group.num_rows)]
    names, notes = classes.get(label, ()), describe_unread("columns", [image, label], schema.names)
    block_bytes, key_array = max(block_bytes, 1), np.array(keys, str)
    return Index(_places(places), labels, key_array, block_bytes, names, image, (*notes,))


def _huggingface_classes(schema: Any) -> dict[str, tuple[str, ...]]:
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: tuple(feature["names"])
            for name, feature in features.items()
            if feature.get("_type") == "ClassLabel"
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _is_image_type(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    if types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _is_image_type(pyarrow, kind.field(index).type)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _has_paths(pyarrow: Any, kind: Any) -> bool:
    index = kind.get_field_index("path") if pyarrow.types.is_struct(kind) else -1
    return index >= 0 and bool(pyarrow.types.is_string(kind.field(index).type))


def _is_label_type(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)


# ---- Reading


class Shards:
    """Reads the encoded images of shards, several at once.

    Attributes:
      paths: paths of the shards.
      reads: number of images, or row groups of Parquet, that were read from each shard so far.
    """

    def __init__(self, paths: Sequence[str], indices: Sequence[Index]):
        self.paths = tuple(paths)
        self._images = [index.image for index in indices]
        self._stats = [index.stat for index in indices]
        self.reads = np.zeros(len(paths), np.int64)
        self._formats = [format_of(path) for path in paths]
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS)
        blocks = CACHE_BYTES // max(1, *(index.block_bytes for index in indices))
        self._row_group = functools.lru_cache(max(blocks, 1))(self._read_row_group)
        self._footers: dict[int, Any] = {}

    def describe(self, shard: int, place: np.ndarray) -> str:
        """Describe an example to the user: its file, and its place in it."""
        path, (first, second) = self.paths[shard], place.tolist()
        if self._formats[shard] == "tar":
            return f"{path}, bytes {first:,} to {first + second:,}"
        return f"{path}, row {second} of row group {first}"

    def read(self, shards: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Read encoded images.

        Args:
          shards: indices of shards [N].
          places: as in `Index`, [N, 2].

        Returns:
          Array of objects [N]: bytes, or an `UnreadableError`.

        Raises:
          TrainingError: if a shard has disappeared, was written to, or is not accessible.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, (shard, first) in enumerate(
            zip(shards.tolist(), places[:, 0].tolist(), strict=True)
        ):
            groups.setdefault(self._group(shard, first), []).append(i)
        read = {"tar": self._read_tars, "parquet": self._read_rows}
        content = np.empty(len(shards), object)
        futures = [
            (rows, self._threads.submit(read[kind], shards[rows], places[rows]))
            for (kind, *_), rows in groups.items()
        ]
        try:
            for rows, future in futures:
                for i, value in zip(rows, future.result(), strict=True):
                    content[i] = value
        except StorageError as error:
            raise TrainingError(
                f"data.path: {error}; when it is back, continue with --resume"
            ) from error
        finally:
            for _, future in futures:
                future.cancel()
        return content

    def _group(self, shard: int, first: int) -> tuple[Any, ...]:
        kind = self._formats[shard]
        if kind == "parquet":
            return kind, shard, first
        # The client of a remote storage has its own concurrency.
        return kind, storage.scheme(self.paths[shard]) or shard

    def _read_tars(self, shards: np.ndarray, places: np.ndarray) -> list[Any]:
        for shard in np.unique(shards).tolist():
            self._check_unchanged(shard)
        paths = [self.paths[shard] for shard in shards.tolist()]
        starts, sizes = places.T.tolist()
        content = storage.read_ranges(paths, starts, sizes)
        np.add.at(self.reads, shards, 1)
        return [_complete(*part) for part in zip(content, starts, sizes, strict=True)]

    def _read_rows(self, shards: np.ndarray, places: np.ndarray) -> list[Any]:
        column = self._row_group(int(shards[0]), int(places[0, 0]))
        if isinstance(column, UnreadableError):
            return [column] * len(places)
        images = [column[row].as_py() for row in places[:, 1].tolist()]
        return [
            UnreadableError("there is no image") if image is None else image for image in images
        ]

    def _read_row_group(self, shard: int, group: int) -> Any:
        path = self.paths[shard]
        pyarrow = storage.import_parquet("data.path", path)
        self._check_unchanged(shard)
        try:
            with (
                storage.open_file(path, buffering=0) as source,
                pyarrow.parquet.ParquetFile(
                    source, metadata=self._footers.get(shard), pre_buffer=True
                ) as file,
            ):
                self._footers[shard] = file.metadata
                field = file.schema_arrow.field(self._images[shard])
                is_struct = pyarrow.types.is_struct(field.type)
                name = f"{field.name}.bytes" if is_struct else field.name
                size, where = self._stats[shard].size, f"data.path: {path}"
                batches = storage.parquet_batches(file, size, where, [group], [name])
                columns = [batch.column(0) for batch in batches]
            self.reads[shard] += 1
            return pyarrow.chunked_array([c.field("bytes") if is_struct else c for c in columns])
        except MemoryError:  # one of Arrow's, too
            raise
        except pyarrow.ArrowException as error:
            return UnreadableError(" ".join(str(error).split()))
        except OSError as error:
            if error.errno is None:  # Arrow's own error, of damaged data
                return UnreadableError(" ".join(str(error).split()))
            raise storage.as_storage_error(path, error) from error

    def _check_unchanged(self, shard: int) -> None:
        """Check that a shard is as it was. Remote ones would be asked for each batch."""
        path, before = self.paths[shard], self._stats[shard]
        if storage.is_remote(path):
            return
        now = storage.stat(path)
        if now != before:
            size = f"from {before.size:,} to {now.size:,} bytes" if now[0] != before[0] else "in it"
            raise StorageError(f"{path} changed {size} since the run started")


def _complete(content: Any, start: int, size: int) -> Any:
    """Return bytes of the wanted size, else an `UnreadableError`; raise other errors."""
    if isinstance(content, Exception):
        raise content
    if len(content) < size:
        return UnreadableError(f"the file ends at byte {start + len(content):,}")
    return bytes(content)
