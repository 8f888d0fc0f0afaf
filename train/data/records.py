"""Records of JSON lines and Parquet files, with the place of each one for error messages."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from train.data import storage
from train.errors import UserError, did_you_mean, list_available

_PARQUET = (".parquet", ".pq")


class Record(NamedTuple):
    """Record of a file.

    Attributes:
      option: Config field or flag that names the file.
      place: File, and line or row.
      fields: Values by field name.
    """

    option: str
    place: str
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        """Option and place, which begin an error message."""
        return f"{self.option}: {self.place}"

    def find(self, *names: str) -> str | None:
        """Return the first of the names that this record has with a value."""
        return next((name for name in names if self.fields.get(name) is not None), None)

    def get(self, name: str) -> Any:
        """Return the value of a field.

        Raises:
          UserError: if it is missing.
        """
        value = self.fields.get(name)
        if value is None:
            names = list(self.fields)
            known = did_you_mean(name, names) or list_available(names, "fields")
            raise UserError(f"{self.where}: no field {name}{known}")
        return value

    def text(self, name: str) -> str:
        """Return the text of a field, which may be empty.

        Raises:
          UserError: if it is missing, or not a text.
        """
        value = self.get(name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {name} must be a text, got {type(value).__name__}")
        return value


def read(path: str, option: str) -> Iterator[Record]:
    """Yield the records of a file in order: of Parquet by its suffix, else of JSON lines.

    Args:
      path: File, or a folder of .jsonl and .parquet files, which are read by name; or the URL of
        one, such as gs://bucket/file.jsonl.
      option: Config field or flag that names it, for error messages.

    Raises:
      UserError: if a file is unreadable, a line is not a JSON object, or a folder has no files.
    """
    try:
        if storage.is_remote(path):
            found = storage.expand(path)
        else:
            found = None
            if Path(path).is_dir():
                found = [str(Path(path, name)) for name in sorted(os.listdir(path))]
    except storage.StorageError as error:
        raise UserError(f"{option}: {error}") from error
    except OSError as error:
        raise UserError(f"{option}: cannot read {path}: {error.strerror}") from error
    if found is None:
        return _read_file(path, option)
    files = [file for file in found if Path(file).suffix in (".jsonl", *_PARQUET)]
    if not files:
        raise UserError(f"{option}: the folder {path} has no .jsonl or .parquet files")
    return itertools.chain.from_iterable(_read_file(file, option) for file in files)


def _read_file(path: str, option: str) -> Iterator[Record]:
    is_parquet = Path(path).suffix in _PARQUET
    return (_read_parquet if is_parquet else _read_json_lines)(path, option)


def _read_json_lines(path: str, option: str) -> Iterator[Record]:
    try:
        with _open(path, option) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{option}: {place}: not JSON: {error}; each line must be a JSON object"
                        f"{_hint(line, path) if number == 1 else ''}"
                    ) from None
                if not isinstance(fields, dict):
                    raise UserError(
                        f"{option}: {place}: expected a JSON object per line, got {_kind(fields)}"
                        f"{_hint(line, path) if number == 1 else ''}"
                    )
                yield Record(option, place, fields)
    except OSError as error:
        raise UserError(
            f"{option}: cannot read {path}: {error.strerror}; give a file of JSON lines"
        ) from error


def _hint(line: bytes, path: str) -> str:
    """Say how to convert a file that is CSV or one JSON array."""
    if Path(path).suffix.lower() == ".csv":
        return "; convert CSV with csv.DictReader and json.dumps"
    return f"; for an array, jq -c '.[]' {path}" if line.lstrip().startswith(b"[") else ""


def _read_parquet(path: str, option: str) -> Iterator[Record]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{option}: {path} needs pyarrow; pip install 'fnet-jax[parquet]'"
        ) from None
    row = 0
    try:
        with _open(path, option) as source, pyarrow.parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(1024):
                for fields in batch.to_pylist():
                    row += 1
                    yield Record(option, f"{path}, row {row}", fields)
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{option}: cannot read {path}: {reason}") from error


def _open(path: str, option: str) -> IO[bytes]:
    if not storage.is_remote(path):
        return open(path, "rb")
    try:
        return storage.open_file(path)
    except storage.StorageError as error:
        raise UserError(f"{option}: {error}") from error


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
