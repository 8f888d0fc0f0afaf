"""Names of arrays, columns and classes, and labels, as people write them."""

import csv
import gzip
import io
import json
import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from train import limits
from train.data import storage
from train.errors import UserError, did_you_mean, list_available, shorten

_INTEGER = re.compile(r"-?[0-9]{1,18}")
DECIMAL_COMMA = re.compile(r"[-+]?[0-9]*,[0-9]+")
_PLAIN = re.compile(r"0|-?[1-9][0-9]{0,17}")
_COMMENT = re.compile(r"\s*#(?![0-9a-fA-F]{6}\b)")
"""Start of a line that is a comment, and not a color."""
_CVAT = re.compile(r":\d+,\d+,\d+")
"""Color in labelmap.txt of CVAT, whose fields are separated by colons."""
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1f\x7f]")
_BREAK = re.compile(r"\s*[\r\n]+\s*")
_JOINED = re.compile(r"\s*[|;,/]\s*")
_NEVER = "\x1f"
"""Separator of fields that no text has, because a name may have a comma."""
_NUMBERED = re.compile(r"(\d{1,9})[\s:;,.)=]")
TITLES = (
    *("name", "class", "classname", "names", "classes", "classnames"),
    *("category", "categories", "label"),
)
"""First lines of a list of names that are no name."""
NO_TEXT = {
    b"PAR1": "Parquet",
    b"PK\x03\x04": "a zip archive, such as .docx or .xlsx",
    b"%PDF": "PDF",
    b"SQLite format 3": "a data base of SQLite",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x89HDF": "HDF5",
}
"""First bytes of files that are no text, and what they are."""
_MISSING = (
    *("#N/A", "#NA", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "n/a", "nan", "null"),
)
"""Texts that pandas reads as missing, and R writes; None is a usual name of a class."""


def choose(
    option: str,
    given: str | None,
    names: Iterable[str],
    where: object,
    kind: str,
    candidates: Sequence[str] = (),
    usual: Sequence[str] = (),
) -> str:
    """Return the given name, else the only usual one of the candidates, else the only candidate.

    The config field ``option`` gives it. ``names`` are all there are, of a kind such as
    ``"column"``, in the file or data set ``where``.
    """
    available = list(names)
    if given is not None:
        if given not in available:
            raise UserError(
                f"{option}: no {kind} {given} in {where}{did_you_mean(given, available)}"
                f"{list_available(available, f'{kind}s')}"
            )
        return given
    found = [name for name in usual if name in candidates] or [*candidates]
    if len(found) == 1:
        return found[0]
    several = f"several {kind}s ({shorten(found)})" if found else f"no {kind}"
    what, flag = option.rpartition(".")[2].replace("_", " "), option.replace("_", "-")
    options = " or ".join(f"--{flag} {name}" for name in found[:2])
    raise UserError(
        f"{option}: {where} has {several} that can be the {what}; name one"
        f"{f', as with {options}' if found else ''}"
        f"{list_available(available, f'{kind}s')}"
    )


def normalized(name: str) -> str:
    """Return a name in Unicode's composed form; a Mac writes file names in another one."""
    return unicodedata.normalize("NFC", name)


def clean_name(text: str) -> str:
    """Return a name as it counts: in one form, without space around it and byte order marks."""
    return normalized(_BREAK.sub(" ", text.replace("\ufeff", "").strip()))


def parse_json(content: str | bytes) -> Any:
    """Parse JSON; raise `ValueError` if it is damaged, or an object has a field twice."""
    return json.loads(content, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields, names = dict(pairs), [name for name, _ in pairs]
    if len(fields) < len(pairs):
        raise ValueError(f"two fields are called {max(names, key=names.count)}")
    return fields


def describe_unread(what: str, used: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return a note about columns, fields or other parts of examples that are not read, or []."""
    every = dict.fromkeys(names)
    others = [name for name in every if name and name not in used]
    read = ", ".join(name for name in used if name in every)
    return [f"{what} {read} are read, and not {shorten(others)}"] if others else []


def read_lines(path: str, option: str) -> list[str]:
    """Read the lines of a text file in UTF-8, perhaps with a byte order mark."""
    with storage.reported(option, path), storage.open_file(path) as file:
        content = file.read()
    return decode_text(content, path, option).splitlines()


def decode_text(content: bytes, path: str, option: str, errors: str = "strict") -> str:
    """Decode a text file in UTF-8, or in UTF-16 with a byte order mark; gzip is unpacked."""
    if kind := next((kind for start, kind in NO_TEXT.items() if content.startswith(start)), ""):
        raise UserError(f"{option}: {path} is no text, but {kind}; give the text that it holds")
    try:
        if content.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(limits.UNPACKED.most + 1)
            limits.UNPACKED.check(len(content), f"{option}: {path}")
        is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig", errors)
        if "\0" in text and errors == "strict":
            raise UserError(
                f"{option}: {path} has NUL at symbol {text.index(chr(0)):,}, as UTF-16 without a "
                "byte order mark has; convert it to UTF-8"
            )
        return text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{option}: {path} is not UTF-8 at byte {error.start:,}; convert it"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{option}: {path} is damaged: {error}") from error


def read_rows(path: str, option: str, separator: str | None = None) -> list[list[str]]:
    """Read the rows of a small table as `csv` does, without comments: lines that begin with #.

    Without a separator, it is a tab, a semicolon or a comma, whichever the file has.

    Raises:
      UserError: if it is unreadable, or a line between others is empty, which would count for one
        reader and not for another.
    """
    with storage.reported(option, path), storage.open_file(path) as file:
        text = decode_text(file.read(), path, option)
    if separator is None:
        bare = re.sub('"[^"]*"', "", text)
        first = next((line for line in bare.splitlines() if not _COMMENT.match(line)), "")
        separator = next((c for c in "\t;" if c in first), ":" if _CVAT.search(first) else ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows, empty = [], 0
    try:
        for fields in reader:
            if not "".join(fields).strip():
                empty = empty or reader.line_num
            elif not _COMMENT.match(fields[0]):
                if empty:
                    raise UserError(
                        f"{option}: line {empty} of {path} is empty; expected a class name"
                    )
                rows.append([clean_name(field) for field in fields])
    except csv.Error as error:
        raise UserError(f"{option}: line {reader.line_num} of {path}: {error}") from error
    return rows


def read_names(path: str, option: str) -> tuple[str, ...]:
    """Read the names of labels 0, 1, ..., one per line, as `read_rows` does."""
    names = tuple(name for (name,) in read_rows(path, option, _NEVER))
    numbers = [int(match[1]) for name in names if (match := _NUMBERED.match(name))]
    is_count = sorted(numbers) in ([*range(len(names))], [*range(1, len(names) + 1)])
    if names and (names[0].lower() in TITLES or (is_count and numbers != sorted(numbers))):
        raise UserError(
            f"{option}: line 1 of {path} is {names[0]}, but names label 0, and line 2 label 1; "
            "leave titles out, and sort lines by their numbers"
        )
    return names


def is_missing(value: Any) -> bool:
    """Whether a cell of a table stands for none: NaN, or a text such as NA."""
    if isinstance(value, float):
        return value != value
    return isinstance(value, str) and value.strip() in _MISSING


def parse_labels(values: Iterable[Any], where: Callable[[int], str]) -> np.ndarray:
    """Convert labels to int64 [N], or to str [N] if one of them is a name.

    Texts are numbers if all of them are written as numbers are; 1_0 and 007 are names. Space around
    names does not count, nor does their form of Unicode.
    """
    texts = []
    for i, value in enumerate(values):
        text = str(int(value)) if isinstance(value, int) else value
        if is_missing(value):
            raise UserError(
                f"{where(i)} has the label {str(value).strip()}, which stands for none; leave it "
                "out, or give the class another name"
            )
        if not isinstance(text, str) or not text.strip() or _CONTROL.search(text):
            raise UserError(
                f"{where(i)} has the label {value!r:.40}; expected an integer from 0, or a name"
            )
        limits.CLASS_NAME.check(len(text), where(i))
        texts.append(clean_name(text))
    if all(map(_PLAIN.fullmatch, texts)):
        return np.array(texts, np.int64) if texts else np.zeros(0, np.int64)
    if not all(map(_INTEGER.fullmatch, texts)) and all(map(is_number, texts)):
        i = next(i for i, text in enumerate(texts) if not _INTEGER.fullmatch(text))
        raise UserError(
            f"{where(i)} has the label {texts[i]}, and all are numbers, but classes are names, or "
            "integers of up to 18 digits; to predict them give data.targets numbers (image_table)"
        )
    return np.array(texts, str)


def are_integers(labels: np.ndarray) -> bool:
    """Whether all labels are integers, perhaps with zeros before them, as 007."""
    return all(_INTEGER.fullmatch(str(label)) for label in np.unique(labels).tolist())


def parse_integer(text: str) -> int:
    """Return the integer that a text of digits stands for.

    Raises:
      ValueError: for anything else, such as 1_0, which `int` reads.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text!r} is not an integer")
    return int(text)


def is_number(text: str) -> bool:
    """Whether a text is a finite number, perhaps with a comma for its point."""
    if DECIMAL_COMMA.fullmatch(text):
        return True
    try:
        return math.isfinite(parse_number(text))
    except ValueError:
        return False


def parse_number(text: str) -> float:
    """Return the number that a text stands for.

    Raises:
      ValueError: for anything else, such as 1_0, which `float` reads.
    """
    if "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def as_labels(labels: np.ndarray, what: str) -> np.ndarray:
    """Convert labels to int32 [N], from integers [N] or [N, 1], or from one-hot rows [N, K]."""
    shape, kind = labels.shape, labels.dtype.kind
    if not labels.size:
        raise UserError(f"{what} is empty")
    if labels.ndim == 2 and shape[1] > 1 and kind in "buif":
        invalid = np.flatnonzero(((labels != 0) & (labels != 1)).any(1) | (labels.sum(1) != 1))
        if invalid.size:
            row = [f"{value:g}" for value in labels[invalid[0]].astype(float)]
            raise UserError(
                f"{what} has shape {shape}, but row {invalid[0]} is not one-hot: {shorten(row)}; "
                "give each image one label"
            )
        return labels.argmax(1).astype(np.int32)
    if labels.ndim == 0 or labels.ndim > 2 or (labels.ndim == 2 and shape[1] != 1):
        raise UserError(f"{what} has shape {shape}; expected [N], [N, 1] or one-hot [N, K]")
    labels = labels.reshape(-1)
    if kind not in "ui":
        raise UserError(f"{what} is {labels.dtype}; expected integers from 0")
    most = np.iinfo(np.int32).max
    invalid = np.flatnonzero((labels < 0) | (labels > most))
    if invalid.size:
        raise UserError(
            f"{what} has {labels[invalid[0]]} at index {invalid[0]}; expected integers from 0 to "
            f"{most}"
        )
    return labels.astype(np.int32)


def name_classes(
    labels: Sequence[np.ndarray], names: Sequence[str] | None, what: str
) -> tuple[str, ...]:
    """Return the names of labels 0, 1, ...; ``("0", "1", ...)`` if there are no names.

    Raises:
      UserError: if the training labels are of one class, a label has no name, a name is not UTF-8,
        or there are more classes than training examples and no names.
    """
    train = labels[0]
    largest = max(int(split.max()) for split in labels)
    if (train == train[0]).all():
        raise UserError(f"{what} has only the class {train[0]}; give examples of two or more")
    if names is None and largest >= len(train):
        raise UserError(
            f"{what} has label {largest}, which makes more classes than the {len(train):,} "
            "training examples; labels count classes from 0"
        )
    if names is not None and largest >= len(names):
        raise UserError(f"{what} has label {largest}, but there are {len(names)} class names")
    return tuple(map(str, range(largest + 1))) if names is None else check_names(names, what)


def check_names(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return class names, which reports and pictures show."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{what}: the class name {name} is not UTF-8; rename it") from None
    return tuple(names)


def describe_classes(names: Sequence[str], labels: np.ndarray | None = None) -> tuple[str, ...]:
    """Return notes about names that look alike, and about classes without images.

    Training images have a class, [N], or several labels, [N, labels].
    """
    notes = describe_alike(names, "classes")
    known = {*names}
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        notes.append(f"several classes are called {shorten(twice)}; reports cannot tell them apart")
    if "" in known:
        notes.append(f"class {names.index('')} has no name")
    if joined := [n for n in names if n not in (parts := _JOINED.split(n)) and known >= {*parts}]:
        notes.append(f"the class {joined[0]} joins others, as several labels of an image would be")
    held = np.arange(len(names)) if labels is None else labels
    held = np.flatnonzero(held.any(0)) if held.ndim == 2 else held
    if absent := np.setdiff1d(np.arange(len(names)), held).tolist():
        rule = "" if is_named(names) else "; labels that are numbers count classes from 0"
        some = shorten([names[i] for i in absent])
        notes.append(f"{len(names):,} classes, but no training image of {some}{rule}")
    return tuple(notes)


def describe_alike(names: Iterable[str], what: str) -> list[str]:
    """Return notes about up to three pairs of names that look alike, as 1 and 01.0."""
    seen = {n: "".join(c for c in n if unicodedata.category(c) != "Cf") for n in names}
    plain = {n: unicodedata.normalize("NFKC", name).strip().casefold() for n, name in seen.items()}
    key_of = {n: re.sub(r"\A(\d+)\.0*\Z", r"\1", key).lstrip("0") for n, key in plain.items()}
    last = {key: name for name, key in key_of.items()}
    pairs = [(name, last[key]) for name, key in key_of.items() if last[key] != name]
    return [
        f"{a} and {b} are two {what}, which differ in case, space or zeros" for a, b in pairs[:3]
    ]


def is_named(names: Sequence[str]) -> bool:
    """Whether outputs of a classifier have names, not their own numbers, such as LABEL_0."""
    numbers = [str(i) for i in range(len(names))]
    return [name.removeprefix("LABEL_") for name in names] != numbers


def order_of(classes: Sequence[str], names: Sequence[str]) -> tuple[list[int] | None, bool]:
    """Return the output of each class, and whether it follows from the names of the outputs.

    Without such names, the class 7 is the output 7. None if classes are neither names nor numbers.
    """
    wanted = [normalized(name) for name in classes]
    for own in (names, [str(i) for i in range(len(classes))]):
        places = {normalized(name): i for i, name in enumerate(own)}
        if len(places) == len(wanted) and {*wanted} == places.keys():
            return [places[name] for name in wanted], own is names or not is_named(names)
    return None, False


def check_users(ids: np.ndarray, examples: int, what: str) -> np.ndarray:
    """Return the users of examples, integers or strings [N]."""
    if ids.shape not in ((examples,), (examples, 1)) or ids.dtype.kind not in "uiUS":
        raise UserError(
            f"{what} is {ids.dtype} of shape {ids.shape}; expected one integer or string for each "
            f"of the {examples} examples"
        )
    if ids.dtype.kind == "S":
        ids = np.char.decode(ids, "utf-8", "surrogateescape")
    ids = ids.reshape(-1)
    return np.array([*map(clean_name, ids.tolist())]) if ids.dtype.kind == "U" else ids


def number_users(ids: np.ndarray) -> np.ndarray:
    """Number the users of examples from 0, int32 [N]."""
    return np.unique(ids, return_inverse=True)[1].astype(np.int32)
