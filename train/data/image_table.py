"""Images whose labels are in a table: CSV, JSON lines or Parquet."""

import functools
import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Gt, MinLen
from typing_extensions import override

from train.data import Dataset, Outputs, Scaling, columns, records, storage
from train.data.columns import choose
from train.data.files import check_folder, list_images, without_extension
from train.data.labeled_images import image_dataset
from train.data.photos import LabeledFiles
from train.data.placeholder import Placeholder
from train.data.records import Record
from train.data.splits import SPLIT_NAMES, check_split, describe_hold_out, hold_out_files
from train.errors import UserError, list_available, shorten

_NUMBERED = ("image_id", "id")
"""Columns of paths in tables that have no other one."""
_FILE_COLUMNS = (
    *("file", "file_name", "filename", "path", "file_path", "filepath"),
    *("image", "image_path", "image_name", "img", *_NUMBERED),
)
_LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "y")
_BOOLEANS = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0, "no": 0.0, "yes": 1.0}
_TABLES = (".csv", ".tsv", ".jsonl", ".parquet", ".gz")
_SEPARATORS = ("|", ";", ",", " ")
_DIGITS = re.compile(r"[-+]?[0-9]+")


@dataclass(frozen=True)
class ImageTable(LabeledFiles):
    """Images whose labels are in a table: CSV, JSON lines or Parquet."""

    evaluation_options = {"split": "test_split", "path": "path"} | LabeledFiles.evaluation_options

    source: Literal["image_table"] = "image_table"
    """Data source; --data.source NAME --help lists the fields of another one."""
    path: str = "labels.csv"
    """Table with a row per image: .csv, .tsv, .jsonl or .parquet, perhaps .gz."""
    images: str | None = None
    """Folder of the images, where the paths in the table begin; by default the table's."""
    file: Annotated[str, MinLen(1)] | None = None
    """Column of the paths; None is a usual name, such as file, filename or image."""
    label: tuple[Annotated[str, MinLen(1)], ...] = ()
    """Columns of the labels; empty is a usual name, such as label, or the only other column."""
    targets: Literal["class", "labels", "numbers"] = "class"
    """Kind of labels: a class, any number of labels per image, or numbers to predict."""
    label_mean: tuple[float, ...] = ()
    """Mean of each number to predict, which is subtracted; empty is the training labels'."""
    label_std: tuple[Annotated[float, Gt(0)], ...] = ()
    """Standard deviation of each number, by which it is divided; empty is the training labels'."""
    separator: Annotated[str, MinLen(1)] | None = None
    """Separates the labels in one column, such as |; None: each label is a column of 0 and 1."""
    split: Annotated[str, MinLen(1)] | None = None
    """Column of the split, train, val or test; None is the column split, if there is one."""
    group: Annotated[str, MinLen(1)] | None = None
    """Column of groups, such as patients: no group is both trained and tested on."""
    test_split: Annotated[str, MinLen(1)] | None = None
    """Split to test on; None is val, or test if there is no val."""

    @property
    @override
    def scaling(self) -> Scaling | None:
        return Scaling(self.label_mean, self.label_std) if self.label_mean else None

    def load(self, *, private: bool = False) -> Dataset:
        """Read the table; batches read the images, see `image_dataset`.

        Labels of batches are int32 [N] for classes, float32 [N, labels] of 0 and 1 for several
        labels, and float32 [N, numbers] for numbers, which are standardized.

        Raises:
          UserError: for a damaged table, columns that are not found, labels that are missing or of
            another kind, or options that exclude each other.
        """
        return load(self)

    @override
    def load_test(self, trained: Callable[[], Outputs]) -> Dataset:
        """Load only the test images, for a trained network: all of a table without splits."""
        return load(self, trained())

    @override
    def placeholder(self) -> Placeholder | None:
        if self.targets == "class":
            return super().placeholder()
        return None  # the number of outputs is in the table


class _Table(NamedTuple):
    """Records of a table, and the paths of their images, of a column, below a folder."""

    config: ImageTable
    rows: list[Record]
    column: str
    files: list[str]
    folder: Path

    def choose(
        self, option: str, given: str | None, found: Sequence[str] = (), usual: Sequence[str] = ()
    ) -> str:
        titles, path = self.rows[0].fields, self.config.path
        return choose(f"data.{option}", given, titles, path, "column", found, usual)


def load(config: ImageTable, trained: Outputs | None = None) -> Dataset:
    """Load the data of a config."""
    table, notes = _read(config)
    target, names = _TARGETS[config.targets](table, trained.names if trained else None)
    names = columns.check_names(names, "data.label")
    if not config.label:
        notes.append(f"labels are in the column {_label_columns(table)[0]} (data.label)")
    notes += _check_repeated(table, target)
    if trained is None:
        used = [table.column, *_label_columns(table), _split_column(table), config.group]
        every = (name for row in table.rows for name in row.fields)
        notes += columns.describe_unread("columns", [*filter(None, used)], every)
        root, listed = os.path.abspath(table.folder), list_images(table.folder).paths
        named = {os.path.normpath(os.path.join(root, name)) for name in table.files}
        if others := [name for name in listed if os.path.join(root, name) not in named]:
            some = shorten(others, 3)
            notes.append(f"left out {len(others):,} images in {table.folder} of no row: {some}")
        label = _label_columns(table)[0]
        if config.separator and not any(
            config.separator in str(r.fields[label]) for r in table.rows
        ):
            notes.append(f"no label has data.separator {config.separator}: one label per image")
    is_train, is_test, split_notes = _splits(table, target, is_whole=trained is not None)
    if trained is not None:
        if config.images is not None:
            notes.append(f"paths begin in {config.images}, as in the run; others must be absolute")
        is_train = np.zeros(len(is_test), bool)
        is_train[np.flatnonzero(is_test)[0]] = True
    rows = np.concatenate([np.flatnonzero(is_train), np.flatnonzero(is_test)])
    train, test = target[is_train], target[is_test]
    paths = [os.path.join(table.folder, table.files[row]) for row in rows]
    if trained is None and not np.ptp(train, axis=0).any():
        raise UserError(
            f"data.label: all {len(train):,} training images of {config.path} have the same label, "
            "so that there is nothing to learn"
        )
    if config.targets == "class" and trained is None:
        lacking = [names[i] for i in np.setdiff1d(test, train)]
        if lacking:
            raise UserError(
                f"data.label: no training image of {shorten(lacking)}, which is tested on; give "
                "other splits"
            )
    scaling = trained.scaling if trained else config.scaling
    count = len(names) if config.targets == "numbers" else 0
    if not len(config.label_mean) == len(config.label_std) in (0, count):
        raise UserError(
            f"data.label_mean, data.label_std: {len(config.label_mean)} and "
            f"{len(config.label_std)} numbers, but there are {count} to predict"
        )
    if config.targets == "numbers" and scaling is None:
        scaling = Scaling.of(train)
    if scaling is not None and trained is None:
        ranges = zip(names, *scaling, strict=True)
        parts = [f"{name} {mean:.4g} +- {std:.4g}" for name, mean, std in ranges]
        notes.append(f"numbers are standardized for training: {shorten(parts)}")

    def files(ids: np.ndarray) -> list[str]:
        return [paths[id] for id in ids.tolist()]

    return image_dataset(
        config,
        (train, test),
        files,
        paths.__getitem__,
        classes=names,
        compared=files,
        trained=trained is not None,
        scaling=scaling,
        notes=(*notes, *split_notes),
    )


def _read(config: ImageTable) -> tuple[_Table, list[str]]:
    if os.path.isdir(config.path):
        tables = [p for p in storage.walk(config.path, Counter()) if p.endswith(_TABLES)]
        found = list_available(sorted(tables), "tables in it")
        raise UserError(f"data.path: {config.path} is a folder; give one table{found}")
    rows = [*records.read(config.path, "data.path")]
    if not rows:
        raise UserError(f"data.path: {config.path} has no rows")
    titles = [*rows[0].fields]
    usual = _usual(titles, _FILE_COLUMNS)
    usual = [name for name in usual if name.lower() not in _NUMBERED] or usual
    column = choose("data.file", config.file, titles, config.path, "column", usual, usual)
    folder = Path(config.path).parent if config.images is None else Path(config.images)
    check_folder(folder)
    files, notes = _find_files(rows, column, folder)
    if config.file is None:
        notes.append(f"images are in the column {column} (data.file)")
    return _Table(config, rows, column, files, folder), notes


def _usual(titles: Iterable[str], names: Sequence[str]) -> list[str]:
    usual = [name for name in titles if name.lower() in names]
    return sorted(usual, key=lambda name: names.index(name.lower()))


def _cell(row: Record, column: str, option: str) -> Any:
    if column not in row.fields:
        others = list_available([*row.fields], "columns")
        raise UserError(f"{option}: {row.place}: no column {column}{others}")
    if row.fields[column] is None:
        raise UserError(f"{option}: {row.place}: {column} is empty; remove rows without one")
    if columns.is_missing(value := row.fields[column]):
        other = ", or give another name" if isinstance(value, str) else ""
        raise UserError(
            f"{option}: {row.place}: {column} is {str(value).strip()}, which stands for none; "
            f"remove rows without one{other}"
        )
    return value


def _find_files(rows: list[Record], column: str, folder: Path) -> tuple[list[str], list[str]]:
    """Return the path of each row's image below the folder, and what to tell about them.

    Names in another form of Unicode, or without an extension, are looked for in the folder.
    """
    cells = [_cell(row, column, "data.file") for row in rows]
    if isinstance(cells[0], dict | bytes):
        raise UserError(
            f"data.file: {rows[0].place}: {column} holds images; give the column of paths, or "
            "for one class per image data.source image_shards"
        )
    given = [*map(str, cells)]
    files = [posixpath.normpath(name.replace("\\", "/")) for name in given]
    folders = functools.cache(os.path.realpath)

    def resolve(name: str) -> str | None:
        path = os.path.join(folder, name)
        try:
            is_plain = S_ISREG(os.lstat(path).st_mode)
        except (OSError, ValueError):
            return None
        if is_plain:
            return os.path.join(folders(os.path.dirname(path)), os.path.basename(path))
        return os.path.realpath(path) if os.path.isfile(path) else None

    real = [*map(resolve, files)]
    missing = [i for i, path in enumerate(real) if path is None]
    notes: list[str] = []
    if missing:
        listed = list_images(folder).paths
        by_name, by_stem = {columns.normalized(path): path for path in listed}, defaultdict(list)
        for path in listed:
            by_stem[columns.normalized(without_extension(path))].append(path)
        for i in missing:
            files[i] = files[i].strip()
            stems = by_stem[columns.normalized(files[i])]
            if len(stems) > 1:
                raise UserError(
                    f"data.file: {rows[i].place}: {files[i]} can be {shorten(stems)}; give its "
                    "extension"
                )
            files[i] = by_name.get(columns.normalized(files[i]), stems[0] if stems else files[i])
            real[i] = resolve(files[i])
            if stems and not notes:
                notes.append(f"{column} has names without extension, such as {given[i]}")
        if not any(real):
            raise UserError(
                f"data.file: {rows[0].place}: no file {folder / files[0]}; {folder} holds "
                f"{shorten(listed) if listed else 'no images'}; data.images names the folder where "
                "the paths begin"
            )
    keys = [path or name for path, name in zip(real, files, strict=True)]
    shortest: dict[str, str] = {}  # one name for a file that rows name differently
    for key, name in zip(keys, files, strict=True):
        shortest[key] = min(shortest.get(key, name), name, key=lambda n: (len(n), n))
    return [shortest[key] for key in keys], notes


def _check_repeated(table: _Table, target: np.ndarray) -> list[str]:
    """Return a note about images that have several rows, which `labels` refuses."""
    by_file: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(table.files):
        by_file[name].append(i)
    several = {name: rows for name, rows in by_file.items() if len(rows) > 1}
    if not several:
        return []
    name, rows = next(iter(several.items()))
    if table.config.targets == "labels":
        raise UserError(
            f"data.label: {table.rows[rows[1]].place}: {name} has another row, but a row has all "
            "labels of its image; join them"
        )
    differ = sum(bool(np.ptp(target[rows], axis=0).any()) for rows in several.values())
    return [
        f"images with several rows, each of which is an example: {len(several):,}, such as {name}; "
        f"{differ:,} of them have different labels"
    ]


def _label_columns(table: _Table) -> tuple[str, ...]:
    config, titles = table.config, table.rows[0].fields
    if config.separator is not None and config.targets != "labels":
        raise UserError(
            f"data.separator: {config.separator}, but data.targets is {config.targets}; give labels"
        )
    if twice := [name for name, count in Counter(config.label).items() if count > 1]:
        raise UserError(f"data.label: {twice[0]} is given twice")
    if config.label:
        for name in (name for name in config.label if name not in titles):
            table.choose("label", name)
        return config.label
    usual = _usual(titles, _LABEL_COLUMNS)
    taken = {*_FILE_COLUMNS, config.file, config.group, config.split or "split"}
    index = {"", "unnamed: 0"}  # the index of a table of pandas
    others = usual or [name for name in titles if not {name, name.lower()} & (taken | index)]
    return (table.choose("label", None, others, usual),)


_Names = tuple[str, ...]


def _classes(table: _Table, known: _Names | None) -> tuple[np.ndarray, _Names]:
    """Return the label of each row, int32 [N], and the names of the classes.

    Integers are names of classes, too, in their order.
    """
    column, *others = _label_columns(table)
    if others:
        titles = [column, *others]
        raise UserError(
            f"data.label: {shorten(titles)} are {len(titles)} columns, but a class is in one; "
            "give data.targets labels or numbers"
        )
    values = [_cell(row, column, "data.label") for row in table.rows]
    labels = columns.parse_labels(values, lambda i: f"data.label: {table.rows[i].place}")
    names = known or tuple(map(str, np.unique(labels).tolist()))
    numbers = {columns.normalized(name): i for i, name in enumerate(names)}
    rows = zip(table.rows, map(str, labels.tolist()), strict=True)
    return np.array([_number(row, label, numbers) for row, label in rows], np.int32), names


def _number(row: Record, name: str, numbers: Mapping[str, int]) -> int:
    if name not in numbers:
        raise UserError(
            f"data.label: {row.place}: the network knows no label {name}; its labels are "
            f"{shorten([*numbers], 12)}"
        )
    return numbers[name]


def _labels(table: _Table, known: _Names | None) -> tuple[np.ndarray, _Names]:
    config, titles = table.config, _label_columns(table)
    values = [row.fields[titles[0]] for row in table.rows if row.find(titles[0])]
    first = next(iter(values), None)
    is_boolean = values != [] and all(str(value).strip().lower() in _BOOLEANS for value in values)
    if (len(titles) > 1 or is_boolean) and config.separator is None:
        names = known or titles
        if {*names} != {*titles}:
            raise UserError(
                f"data.label: the network knows {shorten(names, 12)}, not {shorten(titles, 12)}"
            )
        rows = [[_as_boolean(row, name) for name in names] for row in table.rows]
        return np.array(rows, np.float32), names
    if len(titles) > 1:
        raise UserError("data.separator: is for labels in one column; leave it out")
    if config.separator is None and not isinstance(first, list):
        used = next((s for s in _SEPARATORS if s in str(first)), "|")
        raise UserError(
            f"data.label: {titles[0]} of {config.path} is one column; give data.separator, such "
            f"as --data.separator '{used}', or one column of 0 and 1 for each label"
        )
    texts = [_split_labels(row, titles[0], config.separator) for row in table.rows]
    names = known or tuple(sorted({name for found in texts for name in found}))
    if not names:
        raise UserError(f"data.label: no row of {config.path} has a label")
    numbers = {columns.normalized(name): i for i, name in enumerate(names)}
    result = np.zeros((len(texts), len(names)), np.float32)
    for i, (row, found) in enumerate(zip(table.rows, texts, strict=True)):
        result[i, [_number(row, name, numbers) for name in found]] = 1
    return result, names


def _split_labels(row: Record, column: str, separator: str | None) -> list[str]:
    value = row.fields.get(column)
    if value is None:
        return []
    if isinstance(value, str) and re.fullmatch(r"\s*\[.*\]\s*", value, re.DOTALL):
        raise UserError(
            f"data.label: {row.place}: {column} is the text of a list, {value!r:.40}; "
            "separate labels by |, or write lists in .jsonl or .parquet"
        )
    if isinstance(value, list):
        parts = [part for part in value if part is not None]
        is_name = all(isinstance(part, str | int) for part in parts)
        if not is_name or len({*parts}) < len(parts):
            raise UserError(
                f"data.label: {row.place}: {column} is {value!r:.40}; expected names of labels, "
                "each once"
            )
    else:  # without a separator, other rows have lists
        parts = [value] if separator is None else str(value).split(separator)
    texts = [columns.normalized(text) for part in parts if (text := str(part).strip())]
    if missing := next(filter(columns.is_missing, texts), None):
        raise UserError(
            f"data.label: {row.place}: {column} has {missing}, which stands for none; leave the "
            "cell empty if the image has no label, or remove the row"
        )
    return texts


def _as_boolean(row: Record, column: str) -> float:
    text = str(_cell(row, column, "data.label")).strip().lower()
    text = text.removesuffix(".0")
    if text not in _BOOLEANS:
        raise UserError(
            f"data.label: {row.place}: {column} is {row.fields[column]!r:.40}; expected 0 or 1; "
            "for numbers give data.targets numbers"
        )
    return _BOOLEANS[text]


def _numbers(table: _Table, known: _Names | None) -> tuple[np.ndarray, _Names]:
    names = known or _label_columns(table)

    def number(row: Record, column: str) -> float:
        value = _cell(row, column, "data.label")
        try:
            number = columns.parse_number(value) if isinstance(value, str) else float(value)
            if _DIGITS.fullmatch(digits := str(value).strip()) and int(digits) != number:
                raise UserError(
                    f"data.label: {row.place}: {column} is {digits}, which 64 bits round to "
                    f"{int(number)}; subtract one number from all"
                )
            if abs(number) <= float(np.finfo(np.float32).max):
                return number
        except (ValueError, TypeError, OverflowError):
            pass
        comma = isinstance(value, str) and columns.DECIMAL_COMMA.fullmatch(value.strip())
        raise UserError(
            f"data.label: {row.place}: {column} is {value!r:.40}; expected a finite number"
            + (", with a point in place of the comma" if comma else "; remove rows without one")
        )

    rows = [[number(row, name) for name in names] for row in table.rows]
    return np.array(rows, np.float64), names


_Target = Callable[[_Table, _Names | None], tuple[np.ndarray, _Names]]
_TARGETS: Mapping[str, _Target] = {"class": _classes, "labels": _labels, "numbers": _numbers}


def _splits(
    table: _Table, target: np.ndarray, *, is_whole: bool
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    config, column = table.config, _split_column(table)
    groups = None if is_whole and column is None else _groups(table)
    notes = [] if is_whole else columns.describe_alike(groups or (), f"groups in {config.path}")
    if column is None:
        if config.test_split is not None:
            raise UserError(
                f"data.test_split: {config.path} has no column of splits; name one with data.split"
            )
        if is_whole:
            return np.zeros(len(target), bool), np.ones(len(target), bool), []
        classes = target if config.targets == "class" else None
        is_test = hold_out_files(config, table.files, classes, groups)
        whole = f" by {config.group}" if config.group else ""
        note = describe_hold_out(config, is_test, f"no column split in {config.path}", whole)
        return ~is_test, is_test, [] if is_whole else [note, *notes]
    given = check_split(config, f"{config.path} has the column {column}")
    named = [str(_cell(row, column, "data.split")).strip() for row in table.rows]
    kinds = {name: kind for kind, names in SPLIT_NAMES.items() for name in names}
    own = np.array([kinds.get(name.lower(), name) for name in named])
    there = Counter(own.tolist())
    test = config.test_split or next((s for s in ("val", "test") if s in there), None)
    test = kinds.get(str(test).lower(), test)
    if test not in there or ("train" not in there and not is_whole):
        raise UserError(
            f"data.split: {column} of {config.path} has {shorten([*there])}; expected train, and "
            f"{config.test_split or 'val or test'}"
        )
    is_train, is_test = own == "train", own == test
    by = {"data.file: the image": table.files, f"data.group: {config.group}": groups}
    for what, keys in by.items():
        both = {*np.array(keys)[is_train]} & {*np.array(keys)[is_test]} if keys else ()
        if both:
            raise UserError(
                f"{what} {shorten(sorted(both), 3)} is in train and in {test} in the column "
                f"{column} of {config.path}; keep it in one"
            )
    others = [f"{name} ({n:,})" for name, n in there.items() if name not in ("train", test)]
    note = f"rows of {shorten(others)} in the column {column} are not read; tested on: {test}"
    notes = [] if is_whole else [*given, *notes]
    return is_train, is_test, [note, *notes] if others and not is_whole else notes


def _split_column(table: _Table) -> str | None:
    given, found = table.config.split, _usual(table.rows[0].fields, ("split",))
    return table.choose("split", given, found) if given or found else None


def _groups(table: _Table) -> list[str] | None:
    if table.config.group is None:
        return None
    column = table.choose("group", table.config.group)
    groups = [
        columns.normalized(str(_cell(row, column, "data.group")).strip()) for row in table.rows
    ]
    known: dict[str, str] = {}
    for file, group in zip(table.files, groups, strict=True):
        if known.setdefault(file, group) != group:
            raise UserError(
                f"data.group: {file} has rows of {known[file]} and of {group} in the column "
                f"{column} of {table.config.path}, so that no split keeps both apart; give one "
                "group"
            )
    return groups
