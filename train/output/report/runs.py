"""A run's folder as a report reads it: what is there, how far the run came, what is missing."""

import base64
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from train.config import Config
from train.errors import UserError
from train.output.report.files import BadStep, Evaluated, Memory, Summary
from train.run.run_folder import RunFolder, read_metrics

PICTURES = {
    "examples.png": "test examples with what the network says of them",
    "confusion.png": "what was taken for what",
    "samples.png": "samples",
}
"""What is shown of a run's pictures; its curves and its memory are drawn anew."""

_MOST_PICTURE_BYTES = 16 * 2**20
_LARGEST = 1e100
"""Beyond it a number is as good as infinite, and below one over it as 0: ratios would be."""
_MOST_STEPS = 2**53
"""Beyond it not every step is a float64."""

T = TypeVar("T")


class Course(NamedTuple):
    """A metric over a run, where it was logged and finite.

    Attributes:
      steps: [N], float64, not falling.
      epochs: [N], float64; nan where the line has none.
      values: [N], float64.
      dropped: how many values were not finite.
    """

    steps: np.ndarray
    epochs: np.ndarray
    values: np.ndarray
    dropped: int = 0


class Picture(NamedTuple):
    """A PNG file.

    Attributes:
      name: of the file.
      uri: the whole of it.
      width: in pixels.
      height: in pixels.
    """

    name: str
    uri: str
    width: int
    height: int


class Run(NamedTuple):
    """All that a report shows of a run.

    Attributes:
      label: short, and no other run's in the report.
      folder: where it lies.
      config: of the run.
      lines: of metrics.jsonl, those with a step, by step.
      courses: of each metric.
      written: when the last line was, seconds since 1970; None where there is none.
      summary: None where the run has not ended.
      memory: None where no step was compiled.
      evaluated: None where `fnet eval` was not called.
      bad_steps: those that were left out, because they were not finite.
      pictures: those of `PICTURES` that are there.
      checkpoints: steps, rising.
      owner: the process that writes into the folder, or was killed; None where there is none.
      notes: what is damaged, in words.
    """

    label: str
    folder: RunFolder
    config: Config
    lines: list[dict[str, Any]]
    courses: dict[str, Course]
    written: float | None
    summary: Summary | None
    memory: Memory | None
    evaluated: Evaluated | None
    bad_steps: list[BadStep]
    pictures: list[Picture]
    checkpoints: list[int]
    owner: str | None
    notes: list[str]

    @property
    def step(self) -> int:
        """The last that is logged; 0 where none is."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def epoch(self) -> float | None:
        """That of the last step."""
        return _finite(self.lines[-1].get("epoch")) if self.lines else None

    @property
    def planned(self) -> int | None:
        """Steps of the whole run; None where only its data would tell."""
        train = self.config.train
        if train.steps:
            return train.steps
        if not self.epoch or self.epoch < 0:
            return None
        steps = train.epochs * self.step / self.epoch
        return math.ceil(round(steps, 6)) if steps < _MOST_STEPS else None

    @property
    def ended(self) -> bool:
        """Whether the summary is that of the last step there is."""
        return self.summary is not None and self.summary.steps >= max(self.step, self.planned or 0)

    @property
    def training_seconds(self) -> float | None:
        """Time in training steps alone, of all that is logged, however often it was resumed."""
        return _training_seconds(self.courses, self.config.data.batch_size)


def read_runs(folders: Sequence[RunFolder]) -> list[Run]:
    """Everything that lies in the folders of some runs.

    Raises:
      UserError: for a folder that holds no run, or cannot be read, and for one that
        is named twice.
    """
    there: dict[Path, RunFolder] = {}
    for folder in folders:
        path = Path(os.path.realpath(folder.path))
        if path in there:
            also = there[path].path
            words = "" if also == folder.path else f", as {also} and as {folder.path}"
            raise UserError(f"{folder.path}: the same run is named twice{words}; name it once")
        there[path] = folder
    names = [path.name for path in there]
    alone = len(set(names)) == len(names)
    labels = names if alone else [str(folder.path) for folder in folders]
    return [_read(folder, label) for folder, label in zip(folders, labels, strict=True)]


def _read(folder: RunFolder, label: str) -> Run:
    try:
        config = folder.read_config()
    except OSError as error:
        raise UserError(f"cannot read {folder.config}: {error.strerror or error}") from error
    notes: list[str] = []
    lines, written = _lines(folder.metrics, notes)
    bad, _ = _lines(folder.bad_steps, notes)
    return Run(
        label=label,
        folder=folder,
        config=config,
        lines=lines,
        courses=_courses(lines),
        written=written,
        summary=_json(folder.summary, Summary, notes),
        memory=_json(folder.memory, Memory, notes),
        evaluated=_json(folder.evaluation, Evaluated, notes),
        bad_steps=_checked(bad, BadStep, folder.bad_steps.name, notes),
        pictures=[p for name in PICTURES if (p := _picture(folder.path / name, notes))],
        checkpoints=_checkpoints(folder.checkpoints),
        owner=_owner(folder.lock_file),
        notes=notes,
    )


def _lines(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], float | None]:
    if not path.is_file():
        return [], None
    try:
        # Counted before it is read: a run that goes on may write a line in between.
        with path.open("rb") as file:
            whole = sum(1 for line in file if line.strip())
        written = path.stat().st_mtime
        found = read_metrics(path)
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {_reason(error)}")
        return [], None
    good = [line for line in found if _is_step(line["step"])]
    if (bad := whole - len(good)) > 0:
        words = "line is" if bad == 1 else "lines are"
        notes.append(f"{path.name}: {bad} {words} cut off or without a step, left out")
    return sorted(good, key=lambda line: line["step"]), written


def _courses(lines: Sequence[dict[str, Any]]) -> dict[str, Course]:
    rows: dict[str, list[int]] = {}
    found: dict[str, list[float]] = {}
    for row, line in enumerate(lines):
        for key, value in line.items():
            if type(value) is float or type(value) is int:  # and not bool, which is an int
                rows.setdefault(key, []).append(row)
                found.setdefault(key, []).append(value)
    steps, epochs = (
        np.array([_finite(line.get(key)) for line in lines], np.float64)  # None becomes nan
        for key in ("step", "epoch")
    )
    courses = {}
    for key, all_ in found.items():
        if key in ("step", "epoch"):
            continue
        values = np.array([v if -_LARGEST < v < _LARGEST else math.nan for v in all_], np.float64)
        values = np.where(np.abs(values) <= 1 / _LARGEST, 0.0, values)
        finite = ~np.isnan(values)
        there = np.array(rows[key])[finite]
        dropped = int((~finite).sum())
        courses[key] = Course(steps[there], epochs[there], values[finite], dropped)
    return courses


def _is_step(value: Any) -> bool:
    number = _finite(value)
    return number is not None and 0 <= number < _MOST_STEPS


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -_LARGEST < value < _LARGEST:
        return None
    return float(value) if abs(value) > 1 / _LARGEST else 0.0


def _training_seconds(courses: dict[str, Course], batch_size: int) -> float | None:
    rate = courses.get("examples_per_second")
    if rate is None or not len(rate.values) or not (rate.values > 0).all():
        return None
    examples = np.diff(rate.steps, prepend=0.0) * batch_size
    return float((examples / rate.values).sum())


def _json(path: Path, kind: type[T], notes: list[str]) -> T | None:
    if not path.is_file():
        return None
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        notes.append(f"{path.name} cannot be read: {_reason(error)}")
    return None


def _checked(lines: list[Any], kind: type[T], name: str, notes: list[str]) -> list[T]:
    try:
        return TypeAdapter(list[kind]).validate_python(lines)  # type: ignore[valid-type]
    except ValidationError as error:
        notes.append(f"{name} cannot be read: {_reason(error)}")
    return []


def _picture(path: Path, notes: list[str]) -> Picture | None:
    if not path.is_file():
        return None
    try:
        size = path.stat().st_size
        if size > _MOST_PICTURE_BYTES:
            notes.append(f"{path.name} is too large to be put in, {size / 2**20:.0f} MiB")
            return None
        content = path.read_bytes()
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {_reason(error)}")
        return None
    # Portable Network Graphics, 5.2 and 11.2.2: the signature, then IHDR with both sides.
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[12:16] != b"IHDR" or len(content) < 33:
        notes.append(f"{path.name} is not a PNG")
        return None
    width, height = struct.unpack(">II", content[16:24])
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Picture(path.name, uri, width, height)


def _checkpoints(folder: Path) -> list[int]:
    try:
        return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())
    except OSError:
        return []


def _owner(lock: Path) -> str | None:
    try:
        return lock.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    return str((isinstance(error, OSError) and error.strerror) or error)
