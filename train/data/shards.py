"""Shards: files with many examples each. An index says where each example is and its label.

Each example can be read by itself, so that any order of examples can be read, by any process.
"""

import concurrent.futures
import functools
import json
import os
import re
import tarfile
import threading
import weakref
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import IO, Any, NamedTuple

import numpy as np

from train.data import storage
from train.data.decode import EXTENSIONS, UnreadableError
from train.data.storage import StorageError
from train.errors import TrainingError, UserError, did_you_mean, list_available, shorten

_SUFFIXES = {
    "tar": re.compile(r"\.tar$"),
    "parquet": re.compile(r"\.(parquet|pq)$"),
    "array_record": re.compile(r"\.array_?record(-\d+-of-\d+)?$"),
}
EXPECTED = "expected files *.tar, *.parquet or *.array_record"
_IMAGES = ("image", "img", "jpg", "jpeg", "png", "image/encoded", "pixel_values")
_LABELS = ("label", "labels", "cls", "class", "target", "fine_label", "image/class/label")
_THREADS = 16
"""Shards that are indexed or read at once."""
_LOCAL_THREADS = 4
CACHE_BYTES = 2**30
"""Bytes of row groups that are kept in memory."""
_INDEX_VERSION = 1


class Fields(NamedTuple):
    """Names of the image and the label of an example; None for the usual ones."""

    image: str | None
    label: str | None


class Index(NamedTuple):
    """Examples of one shard.

    Attributes:
      places: Where each example is, int64 [N, 2]. Tar: first byte and number of bytes. Parquet: row
        group and row in it. ArrayRecord: record, and 0.
      labels: Label of each example, int64 or str [N].
      block_bytes: Size of the largest row group; 0 if examples are read one by one.
      classes: Names of labels 0, 1, ..., if the shard has them.
      image: Name of the images' field.
      problem: Why the shard, or its end, is unreadable; "" if it is not.
      stat: Size and stamp of the file that was indexed.
    """

    places: np.ndarray
    labels: np.ndarray
    block_bytes: int = 0
    classes: tuple[str, ...] = ()
    image: str = ""
    problem: str = ""
    stat: storage.Stat = storage.Stat(0, "")


def format_of(path: str) -> str | None:
    """Return the format of a shard by its name: tar, parquet, array_record, or None."""
    return next((name for name, suffix in _SUFFIXES.items() if suffix.search(path)), None)


def index_shards(paths: Sequence[str], fields: Fields) -> list[Index]:
    """Index shards, several at once. Indices are kept in the cache folder.

    A truncated shard has the examples before its end, and a ``problem``.

    Raises:
      UserError: if a file is missing or not a shard, or its examples have no image or no label.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        try:
            return list(threads.map(lambda path: _index(path, fields), paths))
        except StorageError as error:
            raise UserError(f"data.path: {error}") from error


def _index(path: str, fields: Fields) -> Index:
    """Index a shard, or read its index from the cache folder."""
    kind = format_of(path)
    if kind is None:
        if re.search(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$", path):
            raise UserError(
                f"data.path: {path} is compressed, so that its examples cannot be found one by "
                "one; decompress it"
            )
        raise UserError(f"data.path: {path} has no known format; {EXPECTED}")
    file = storage.stat(path)
    folder = storage.cache_folder()
    key = repr((_INDEX_VERSION, os.path.abspath(path), *file, *fields))
    name = sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    saved = folder / "shards" / f"{name}.npz" if folder else None
    if saved is not None and (known := _load_index(saved)):
        return known._replace(stat=file)
    index = {"tar": _index_tar, "parquet": _index_parquet, "array_record": _index_array_record}
    found = index[kind](path, file.size, fields)
    if saved is not None and not found.problem:
        _save_index(found, saved)
    return found._replace(stat=file)


def _load_index(path: Any) -> Index | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            texts = json.loads(str(arrays["texts"]))
            return Index(
                arrays["places"],
                arrays["labels"],
                texts["block_bytes"],
                tuple(texts["classes"]),
                texts["image"],
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        return None  # there is none, or it is damaged


def _save_index(index: Index, path: Any) -> None:
    texts = {"block_bytes": index.block_bytes, "classes": index.classes, "image": index.image}
    part = path.with_name(f"{path.stem}-{os.getpid()}-{threading.get_ident()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(part, places=index.places, labels=index.labels, texts=json.dumps(texts))
        part.replace(path)
    except OSError:  # without it, only the next start is slower
        part.unlink(missing_ok=True)


# ---- Tar files, as WebDataset writes them: files with the same name up to its first dot are an
# example, such as 0001.jpg and 0001.cls.


def _index_tar(path: str, size: int, fields: Fields) -> Index:
    label, _, json_field = (fields.label or "cls").partition(".")
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    labels: dict[str, bytes] = {}
    with storage.open_file(path) as file:
        problem, last = "", ""
        for member, start, count in _tar_members(file):
            if not member:
                problem = f"it is damaged at byte {start:,}, after {last or 'no file'}"
                break
            if start + count > size:
                problem = (
                    f"it ends at byte {size:,}, but {member} has bytes {start:,} to "
                    f"{start + count:,}"
                )
                break
            folder, slash, name = member.rpartition("/")
            key, _, extension = name.partition(".")
            key, extension = folder + slash + key, extension.lower()
            if not key or key.rpartition("/")[2] == "":  # a hidden file
                continue
            parts = samples.setdefault(key, {})
            if extension in parts:
                raise UserError(f"data.path: {path} has {member} twice")
            parts[extension], last = (start, count), member
            if extension == label:
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
    kinds = sorted({extension for parts in samples.values() for extension in parts})
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
    return Index(_places(list(images.values())), _label_array(values), problem=problem)


def _tar_members(file: IO[bytes]) -> Iterator[tuple[str, int, int]]:
    """Yield name, first byte and number of bytes of each file; a name "" if the tar is damaged."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                end = tar.offset
                if member.isreg() and not member.issparse():
                    yield member.name, member.offset_data, member.size
            end = tar.offset
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            yield "", end, 0  # without the blocks of zeros that end a tar file
    except tarfile.TarError:
        yield "", end, 0


def _tar_label(path: str, key: str, content: bytes | None, label: str, field: str) -> Any:
    if content is None:
        raise UserError(f"data.label: {key} in {path} has no file *.{label}")
    text = content.decode(errors="replace").strip()
    if not field:
        return text
    try:
        return json.loads(text)[field]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"data.label: {key}.{label} in {path} has no field {field}") from None


def _places(places: Sequence[Any]) -> np.ndarray:
    return np.array(places, np.int64).reshape(-1, 2)


def _label_array(values: list[Any]) -> np.ndarray:
    """Convert labels to int64, or to str if one of them is not a number."""
    try:
        return np.array([int(value) for value in values], np.int64)
    except ValueError:
        return np.array([str(value) for value in values], str)


# ---- Parquet files, as Hugging Face's datasets library writes them: a column of images, each a
# struct of bytes and path or only bytes, and a column of labels.


def _index_parquet(path: str, size: int, fields: Fields) -> Index:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"data.path: {path} needs pyarrow; pip install 'fnet-jax[parquet]'"
        ) from None
    try:
        with storage.open_file(path) as source, pyarrow.parquet.ParquetFile(source) as file:
            schema, metadata = file.schema_arrow, file.metadata
            classes = _huggingface_classes(schema)
            images = [f.name for f in schema if _is_image_type(pyarrow, f.type)]
            image = _choose("image", path, fields.image, schema.names, images, _IMAGES)
            numbers = [f.name for f in schema if _is_label_type(pyarrow, f.type)]
            label = _choose(
                "label", path, fields.label, schema.names, list(classes) or numbers, _LABELS
            )
            column = file.read(columns=[label]).column(0)
            if column.null_count:
                raise UserError(f"data.label: {path} has {column.null_count} rows without {label}")
            if pyarrow.types.is_dictionary(column.type):
                column = column.cast(column.type.value_type)
            labels = _label_array(column.to_pylist())
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            block_bytes = max((_column_bytes(group, image) for group in groups), default=0)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())
        return Index(_places([]), np.zeros(0, np.int64), problem=f"of {size:,} bytes: {reason}")
    places = [(i, row) for i, group in enumerate(groups) for row in range(group.num_rows)]
    return Index(_places(places), labels, max(block_bytes, 1), classes.get(label, ()), image)


def _huggingface_classes(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names by column that the datasets library wrote."""
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


def _is_label_type(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)


def _column_bytes(group: Any, name: str) -> int:
    columns = (group.column(i) for i in range(group.num_columns))
    return sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.partition(".")[0] == name
    )


def _choose(
    field: str,
    path: str,
    given: str | None,
    names: Sequence[str],
    candidates: Sequence[str],
    usual: Sequence[str],
) -> str:
    """Choose the given name, or the only candidate, or the first usual name among several."""
    if given is not None:
        if given not in names:
            raise UserError(
                f"data.{field}: {path} has no {given}{did_you_mean(given, names)}"
                f"{list_available(list(names), 'columns')}"
            )
        return given
    found = [name for name in usual if name in candidates]
    if len(candidates) == 1 or found:
        return found[0] if found else candidates[0]
    raise UserError(
        f"data.{field}: {path} has {'several' if candidates else 'no'} columns that can be the "
        f"{field}; name one{list_available(list(names), 'columns')}"
    )


# ---- ArrayRecord files of tf.train.Example, as TensorFlow Datasets writes them.


def _index_array_record(path: str, size: int, fields: Fields) -> Index:
    reader = _array_record_reader(path)
    if not reader.ok():
        return Index(_places([]), np.zeros(0, np.int64), problem=_array_record_error(reader, size))
    count, image, label, values = reader.num_records(), "", "", []
    for start in range(0, count, 1024):
        for i, record in enumerate(reader.read(start, min(start + 1024, count)), start):
            example = parse_example(record)
            if example is None:
                raise UserError(f"data.path: record {i} of {path} is not a tf.train.Example")
            if not image:
                byte_fields = [name for name, value in example.items() if _is_bytes(value)]
                image = _choose("image", path, fields.image, list(example), byte_fields, _IMAGES)
                scalars = [n for n, v in example.items() if len(v) == 1 and n != image]
                label = _choose("label", path, fields.label, list(example), scalars, _LABELS)
            value = example.get(label) or [None]
            if value[0] is None or isinstance(value[0], float):
                raise UserError(f"data.label: record {i} of {path} has no {label}")
            values.append(value[0].decode() if isinstance(value[0], bytes) else value[0])
    places = [(i, 0) for i in range(count)]
    classes = _tfds_classes(path, label)
    return Index(_places(places), _label_array(values), 0, classes, image)


def _array_record_reader(path: str) -> Any:
    from array_record.python.array_record_module import ArrayRecordReader

    # For random access; the defaults read 16 MiB ahead.
    options = "readahead_buffer_size:0,max_parallelism:0"
    return ArrayRecordReader(storage.local_copy(path), options)


def _array_record_error(reader: Any, size: int) -> str:
    try:
        reader.read([0])
    except Exception as error:  # the binding raises RuntimeError and IndexError
        return f"of {size:,} bytes: {' '.join(str(error).split()).partition('; ')[0]}"
    return f"of {size:,} bytes: it is not an ArrayRecord file"


def _is_bytes(values: list[Any]) -> bool:
    return len(values) == 1 and isinstance(values[0], bytes)


def _tfds_classes(path: str, label: str) -> tuple[str, ...]:
    """Read the class names that TensorFlow Datasets wrote next to a shard."""
    folder, slash, _ = path.rpartition("/")
    try:
        with storage.open_file(f"{folder}{slash}{label}.labels.txt") as file:
            return tuple(file.read().decode().splitlines())
    except (StorageError, ValueError):
        return ()


def parse_example(record: bytes) -> dict[str, list[Any]] | None:
    r"""Parse a tf.train.Example: lists of bytes, float or int by feature name. None if it is none.

    Example:
      >>> parse_example(b"\n\x10\n\x0e\n\x05label\x12\x05\x1a\x03\n\x01\x07")
      {'label': [7]}
    """
    from google.protobuf.message import DecodeError

    try:
        features = example_type().FromString(record).features.feature
    except DecodeError:
        return None
    found = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        found[name] = list(getattr(feature, kind).value) if kind else []
    return found or None


@functools.cache
def example_type() -> Any:
    """Build the message type of tf.train.Example, which TensorFlow and only it would bring."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="fnet/tf_example.proto", package="fnet", syntax="proto3"
    )

    def message(parent: Any, name: str, *parts: tuple[str, int, int, str | None]) -> Any:
        added = parent.add(name=name)
        for field, number, label, kind in parts:
            options: dict[str, Any] = {"name": field, "number": number, "label": label}
            if kind and kind[0] == ".":
                options |= {"type": kinds.TYPE_MESSAGE, "type_name": kind}
            else:
                options["type"] = kinds.Type.Value(f"TYPE_{kind}")
            added.field.add(**options)
        return added

    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    types = file.message_type
    message(types, "BytesList", ("value", 1, many, "BYTES"))
    message(types, "FloatList", ("value", 1, many, "FLOAT"))
    message(types, "Int64List", ("value", 1, many, "INT64"))
    feature = message(
        types,
        "Feature",
        ("bytes_list", 1, one, ".fnet.BytesList"),
        ("float_list", 2, one, ".fnet.FloatList"),
        ("int64_list", 3, one, ".fnet.Int64List"),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message(types, "Features", ("feature", 1, many, ".fnet.Features.FeatureEntry"))
    entry = message(
        features.nested_type,
        "FeatureEntry",
        ("key", 1, one, "STRING"),
        ("value", 2, one, ".fnet.Feature"),
    )
    entry.options.map_entry = True
    message(types, "Example", ("features", 1, one, ".fnet.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("fnet.Example"))


# ---- Reading


class Shards:
    """Reads the encoded images of shards, several at once.

    Args:
      paths: paths of the shards.
      indices: their indices.

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
        self._blocks = _Blocks(self._read_row_group)
        self._footers: dict[int, Any] = {}
        self._records: dict[int, Any] = {}  # readers
        weakref.finalize(self, _close, self._records)  # before the libraries below them end
        self._opening = threading.Lock()

    @property
    def are_remote(self) -> bool:
        """Whether a shard is in remote storage."""
        return any(map(storage.is_remote, self.paths))

    def describe(self, shard: int, place: np.ndarray) -> str:
        """Describe an example to the user: its file, and its place in it."""
        path, (first, second) = self.paths[shard], place.tolist()
        if self._formats[shard] == "tar":
            return f"{path}, bytes {first:,} to {first + second:,}"
        if self._formats[shard] == "parquet":
            return f"{path}, row {second} of row group {first}"
        return f"{path}, record {first}"

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
        content = np.empty(len(shards), object)
        tasks: list[tuple[Callable[..., list[Any]], np.ndarray]] = []
        order = np.argsort(shards, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(order) else []
        tars: dict[str, list[np.ndarray]] = {}
        for part in parts:
            shard = shards[part[0]]
            if self._formats[shard] == "parquet":
                groups = places[part, 0]
                for group in np.unique(groups).tolist():
                    rows = part[groups == group]
                    if self._blocks.has((int(shard), group)):
                        found = self._read_rows(shards[rows], places[rows])
                        for i, value in zip(rows.tolist(), found, strict=True):
                            content[i] = value
                    else:
                        tasks.append((self._read_rows, rows))
            elif self._formats[shard] == "array_record":
                tasks.append((self._read_records, part))
            else:
                tars.setdefault(storage.scheme(self.paths[shard]), []).append(part)
        local = tars.pop("", [])
        for start in range(min(len(local), _LOCAL_THREADS)):
            tasks.append((self._read_tars, np.concatenate(local[start::_LOCAL_THREADS])))
        # The client of a remote storage has its own concurrency.
        tasks += [(self._read_remote_tars, np.concatenate(parts)) for parts in tars.values()]
        futures = [
            (rows, self._threads.submit(read, shards[rows], places[rows])) for read, rows in tasks
        ]
        try:
            for rows, future in futures:
                for i, value in zip(rows.tolist(), future.result(), strict=True):
                    content[i] = value
        except StorageError as error:
            raise TrainingError(
                f"data.path: {error}; when it is back, continue with --resume"
            ) from error
        finally:
            for _, future in futures:
                future.cancel()
        return content

    def _read_tars(self, shards: np.ndarray, places: np.ndarray) -> list[Any]:
        """Read images of local tar files, sorted by shard."""
        content: list[Any] = []
        current, file = -1, None
        try:
            for shard, (start, size) in zip(shards.tolist(), places.tolist(), strict=True):
                if shard != current:
                    if file is not None:
                        file.close()
                    current, file = shard, self._open(shard)
                assert file is not None
                content.append(_complete(os.pread(file.fileno(), size, start), start, size))
        except OSError as error:
            raise storage.as_storage_error(self.paths[current], error) from error
        finally:
            if file is not None:
                file.close()
        np.add.at(self.reads, shards, 1)
        return content

    def _read_remote_tars(self, shards: np.ndarray, places: np.ndarray) -> list[Any]:
        paths = [self.paths[shard] for shard in shards.tolist()]
        starts, sizes = places.T.tolist()
        content = storage.read_ranges(paths, starts, sizes)
        np.add.at(self.reads, shards, 1)
        return [_complete(*part) for part in zip(content, starts, sizes, strict=True)]

    def _read_records(self, shards: np.ndarray, places: np.ndarray) -> list[Any]:
        """Read images of one ArrayRecord file."""
        shard = int(shards[0])
        with self._opening:
            reader = self._records.get(shard)
            if reader is None:
                self._check_unchanged(shard, storage.stat(self.paths[shard]))
                reader = self._records[shard] = _array_record_reader(self.paths[shard])
        try:
            records = reader.read(places[:, 0].tolist())
        except Exception as error:  # the binding raises RuntimeError and IndexError
            reason = " ".join(str(error).split())
            raise StorageError(f"cannot read {self.paths[shard]}: {reason}") from error
        np.add.at(self.reads, shards, 1)
        return [_image_in(record, self._images[shard]) for record in records]

    def _read_rows(self, shards: np.ndarray, places: np.ndarray) -> list[Any]:
        """Read images of one row group of a Parquet file."""
        column = self._blocks.read((int(shards[0]), int(places[0, 0])))
        if isinstance(column, UnreadableError):
            return [column] * len(places)
        images = column.take(places[:, 1]).to_pylist()
        return [
            UnreadableError("there is no image") if image is None else image for image in images
        ]

    def _read_row_group(self, key: tuple[int, int]) -> Any:
        """Read the images of a row group: an Arrow array, or an `UnreadableError`."""
        import pyarrow
        import pyarrow.parquet

        shard, group = key
        path = self.paths[shard]
        try:
            with (
                self._open(shard) as source,
                pyarrow.parquet.ParquetFile(
                    source, metadata=self._footers.get(shard), pre_buffer=True
                ) as file,
            ):
                self._footers[shard] = file.metadata
                field = file.schema_arrow.field(self._images[shard])
                is_struct = pyarrow.types.is_struct(field.type)
                name = f"{field.name}.bytes" if is_struct else field.name
                column = file.read_row_group(group, columns=[name], use_threads=False).column(0)
            self.reads[shard] += 1
            column = column.combine_chunks()
            return column.field("bytes") if is_struct else column
        except pyarrow.ArrowInvalid as error:
            return UnreadableError(" ".join(str(error).split()))
        except OSError as error:
            if error.errno is None:  # Arrow's own error, of damaged data
                return UnreadableError(" ".join(str(error).split()))
            raise storage.as_storage_error(path, error) from error

    def _open(self, shard: int) -> IO[bytes]:
        """Open a shard, which must be as it was."""
        path = self.paths[shard]
        if storage.is_remote(path):
            return storage.open_file(path)
        file = storage.open_file(path, buffering=0)
        status = os.fstat(file.fileno())
        self._check_unchanged(shard, storage.stat_of(status))
        return file

    def _check_unchanged(self, shard: int, now: storage.Stat) -> None:
        before = self._stats[shard]
        if now != before:
            size = f"from {before.size:,} to {now.size:,} bytes" if now[0] != before[0] else "in it"
            raise StorageError(f"{self.paths[shard]} changed {size} since the run started")


def _image_in(record: bytes, name: str) -> Any:
    """Return the bytes of an image in a tf.train.Example, or an `UnreadableError`."""
    from google.protobuf.message import DecodeError

    try:
        example = example_type().FromString(record)
    except DecodeError:
        return UnreadableError("it is not a tf.train.Example")
    features = example.features.feature
    values = features[name].bytes_list.value if name in features else ()
    return values[0] if values else UnreadableError(f"there is no {name}")


def _close(readers: dict[int, Any]) -> None:
    for reader in readers.values():
        reader.close()


def _complete(content: Any, start: int, size: int) -> Any:
    """Return bytes of the wanted size, else an `UnreadableError`; raise other errors."""
    if isinstance(content, Exception):
        raise content
    if len(content) < size:
        return UnreadableError(f"the file ends at byte {start + len(content):,}")
    return bytes(content)


class _Blocks:
    """Blocks that are kept after they were read, up to a number of bytes.

    Args:
      read: ``key -> block``, an Arrow array or an `UnreadableError`.
    """

    def __init__(self, read: Callable[[Any], Any]):
        self._read, self._lock = read, threading.Lock()
        self._blocks: OrderedDict[Any, concurrent.futures.Future] = OrderedDict()

    def has(self, key: Any) -> bool:
        """Whether a block is in memory."""
        with self._lock:
            return key in self._blocks and self._blocks[key].done()

    def read(self, key: Any) -> Any:
        """Return a block, which one thread reads while others that need it wait."""
        with self._lock:
            future = self._blocks.get(key)
            is_new = future is None
            if future is None:
                future = self._blocks[key] = concurrent.futures.Future()
            self._blocks.move_to_end(key)
        if not is_new:
            return future.result()
        try:
            block = self._read(key)
        except BaseException as error:
            with self._lock:
                self._blocks.pop(key, None)
            future.set_exception(error)
            raise
        future.set_result(block)
        with self._lock:
            while len(self._blocks) > 1 and self._bytes() > CACHE_BYTES:
                self._blocks.popitem(last=False)
        return block

    def _bytes(self) -> int:
        done = (future.result() for future in self._blocks.values() if future.done())
        return sum(getattr(block, "nbytes", 0) for block in done)
