"""Records of JSON lines, Parquet and CSV files, with the place of each one for error messages."""

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from train import limits
from train.data import storage
from train.data.columns import NO_TEXT, decode_text, normalized, parse_json
from train.data.splits import split_of
from train.errors import UserError, did_you_mean, list_available

_PARQUET = (".parquet", ".pq")
JSON_LINES = (".jsonl", ".ndjson")
_OF_FOLDERS = (*JSON_LINES, *_PARQUET)
_QUOTED = re.compile(r'\s+".*"\s*', re.DOTALL)  # the quotes would be part of the value
SEPARATORS = {".csv": ",", ".tsv": "\t"}
_KINDS = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


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
        """Return the value of a field."""
        value = self.fields.get(name)
        if value is None:
            names = list(self.fields)
            if name in names:
                raise UserError(f"{self.where}: {name} is empty")
            known = did_you_mean(name, names) or list_available(names, "fields")
            raise UserError(f"{self.where}: no field {name}{known}")
        return value

    def text(self, name: str) -> str:
        """Return the text of a field, which may be empty."""
        value = self.get(name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {name} must be a text, got {type(value).__name__}")
        return value


def read(path: str, option: str, notes: list[str] | None = None) -> Iterator[Record]:
    """Yield the records of a file in order: of Parquet or CSV by its suffix, else of JSON lines.

    The path is a file, or a folder of .jsonl, .jsonl.gz and .parquet files, which are read by name,
    at any depth; or the URL of one, such as gs://bucket/file.jsonl. What is left out goes to notes.

    Raises:
      UserError: if two files of a folder may have the same records, or are of different splits.
    """
    skipped = Counter[str]()
    with storage.reported(option, path):
        found = storage.expand(path, skipped)
    if found is None:
        return _read_file(path, option)
    files = [file for file in found if _suffix(file) in _OF_FOLDERS]
    skipped.update(map(storage.kind_of, {*found} - {*files}))
    if not files:
        left = "; ".join(("", *storage.describe_skipped(skipped)))
        raise UserError(f"{option}: the folder {path} has no .jsonl or .parquet files{left}")
    _check_folder(files, path, option)
    if notes is not None:
        notes += storage.describe_skipped(skipped)
    return itertools.chain.from_iterable(_read_file(file, option) for file in files)


def _suffix(path: str) -> str:
    return Path(path.lower().removesuffix(".gz")).suffix


def _check_folder(files: list[str], path: str, option: str) -> None:
    by_name: dict[str, str] = {}
    of_split: dict[str, str] = {}
    for file in files:
        name = file.lower().removesuffix(".gz").removesuffix(_suffix(file))
        if (other := by_name.setdefault(name, file)) != file:
            raise UserError(
                f"{option}: {other} and {file} may have the same records; move one elsewhere"
            )
        if split := split_of(file.removeprefix(path).lstrip("/")):
            of_split.setdefault(split, file)
    if "train" in of_split and len(of_split) > 1:
        train, other = of_split.pop("train"), next(iter(of_split.values()))
        raise UserError(
            f"{option}: {path} has {train} and {other}, of which one is to train on and one to "
            "test on; give --data.path and --data.test-path, which may be patterns in quotes"
        )


def _read_file(path: str, option: str) -> Iterator[Record]:
    suffix = _suffix(path)
    if suffix in SEPARATORS:
        return _read_csv(path, option)
    return (_read_parquet if suffix in _PARQUET else _read_json_lines)(path, option)


def _read_csv(path: str, option: str) -> Iterator[Record]:
    """Read a table whose first line names its columns.

    If it has no comma (.csv) or tab (.tsv), one of the others or a semicolon or | separates them.
    """
    with storage.reported(option, path), storage.open_file(path) as file:
        content = file.read()
    text = decode_text(content, path, option)
    separator = SEPARATORS[_suffix(path)]
    head = text.lstrip().partition("\n")[0]
    if separator not in head or (separator == "," and head.count(";") > head.count(",")):
        separator = max((separator, *",;\t|"), key=head.count)
    csv.field_size_limit(limits.LINE.most)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    columns: list[str] = []
    try:
        for values in reader:
            place = f"{path}, line {reader.line_num}"
            if not values:
                continue
            if not columns:
                columns = [normalized(value.strip()) for value in values]
                last = {name: i for i, name in enumerate(columns)}
                if twice := [name for i, name in enumerate(columns) if last[name] != i]:
                    raise UserError(f"{option}: {place}: two columns are called {twice[0]}")
                continue
            if len(values) != len(columns):
                raise UserError(
                    f"{option}: {place}: {len(values)} values, but the first line names "
                    f"{len(columns)} columns"
                )
            if quoted := [v for v in values if _QUOTED.fullmatch(v)]:
                raise UserError(
                    f"{option}: {place}: a quote follows a space: {quoted[0]!r:.40}; remove it"
                )
            fields = {k: v if v.strip() else None for k, v in zip(columns, values, strict=True)}
            yield Record(option, place, fields)
    except csv.Error as error:
        raise UserError(f"{option}: {path}, line {reader.line_num}: {error}") from None


def _read_json_lines(path: str, option: str) -> Iterator[Record]:
    with storage.reported(option, path), storage.open_file(path) as stored:
        file = _as_utf8(stored, path, option)
        # A line without an end is not read to where memory ends.
        lines = iter(lambda: file.readline(limits.LINE.most + 1), b"")
        for number, line in enumerate(lines, 1):
            place = f"{path}, line {number}"
            limits.LINE.check(len(line), f"{option}: {place}")
            if not line.strip():
                continue
            is_array = number == 1 and line.lstrip().startswith(b"[")
            hint = f"; for an array, jq -c '.[]' {path}" if is_array else ""
            if _suffix(path) not in (*JSON_LINES, ".json"):
                hint = "; tables are .csv, .tsv or .parquet"
            try:
                fields = parse_json(line)
            except (ValueError, RecursionError) as error:
                # The line is known; a decoder counts lines and columns from its start.
                why = getattr(error, "msg", None) or error
                raise UserError(
                    f"{option}: {place}: not JSON: {why}; each line must be a JSON object{hint}"
                ) from None
            if not isinstance(fields, dict):
                kind = _KINDS.get(type(fields), "a number")
                raise UserError(
                    f"{option}: {place}: expected a JSON object per line, got {kind}{hint}"
                )
            yield Record(option, place, fields)


def _as_utf8(file: IO[bytes], path: str, option: str) -> IO[bytes]:
    """Return a file in UTF-8 in place of one in UTF-16 or gzip."""
    first = file.read(8)
    file.seek(0)
    if first.startswith((b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff", *NO_TEXT)):
        text = decode_text(file.read(), path, option)
        return io.BytesIO(text.encode("utf-8", "surrogatepass"))
    return file


def _read_parquet(path: str, option: str) -> Iterator[Record]:
    pyarrow = storage.import_parquet(option, path)
    row, most = 0, limits.LINE._replace(what="the row")
    errors = storage.StorageError, OSError, UnicodeDecodeError, pyarrow.ArrowException
    try:
        with storage.open_file(path) as source, pyarrow.parquet.ParquetFile(source) as file:
            groups, size = range(file.num_row_groups), storage.stat(path).size
            for batch in storage.parquet_batches(file, size, f"{option}: {path}", groups):
                for i in range(batch.num_rows if batch.nbytes > most.most else 0):
                    place = f"{option}: {path}, row {row + i + 1}"
                    most.check(batch.slice(i, 1).nbytes, place)
                for fields in batch.to_pylist():
                    row += 1
                    yield Record(option, f"{path}, row {row}", fields)
    except errors as error:
        raise UserError(f"{option}: {storage.as_storage_error(path, error)}") from error
