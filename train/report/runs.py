"""Runs as a report reads them from their folders, complete or not."""

import base64
import io
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import Field

from train.data.decode import UnreadableError, View, decode
from train.errors import UserError
from train.limits import PICTURE
from train.output.curves import read_curves
from train.output.formats import number
from train.output.logged import BadStep, MetricsLine, Summary, finite, throughput, total_steps
from train.output.memory_tables import StepMemory
from train.output.rows import read_csv
from train.run.run_folder import RunFolder
from train.stored import Count, Stored, StoredError, T, read_bytes


class ClassScore(Stored):
    """A class in evaluation.json: examples and accuracy, or pixels and IoU."""

    name: str
    examples: Count | None = None
    accuracy: float | None = None
    pixels: Count | None = None
    iou: float | None = None


class Evaluation(Stored):
    """Contents of evaluation.json, which `fnet eval` writes; ``description`` has its options."""

    step: Count
    description: str = ""
    metrics: dict[str, float | None] = Field({})
    classes: tuple[ClassScore, ...] = ()


_MEASURED = re.compile("(loss|probability|pixel_accuracy)$|predicted |label ")
"""Columns of numbers."""
_MISTAKES, _SIDE = 24, 96
"""Images in the list of mistakes, and the longer side of their pictures in pixels."""


def load_mistakes(path: Path) -> list[tuple[str, dict[str, str], str | None]]:
    """Return the images of an evaluation.csv that the network is most wrong about.

    Mistakes come first, by falling probability, and then others, by falling loss. Each has its
    file, texts by name, and a small picture as a data URI if the file is there.
    """

    def order(row: dict[str, str]) -> tuple[bool, float]:
        is_mistake = "probability" in row and row["prediction"] != row["label"]
        loss = float(row["loss"])
        return not is_mistake, -(float(row["probability"]) if is_mistake else loss)

    def texts(row: dict[str, str]) -> dict[str, str]:
        return {
            # Names of classes may look like numbers.
            name.replace("_", " "): number(float(value)) if _MEASURED.match(name) else value
            for name, value in row.items()
            if name not in ("file", "split") and not name.startswith("probability of ")
        }

    try:
        worst = sorted(read_csv(path), key=order)[:_MISTAKES]
        return [(row["file"], texts(row), _thumbnail(row["file"])) for row in worst]
    except (ValueError, KeyError) as error:
        raise StoredError(path, error) from error


def _thumbnail(file: str) -> str | None:
    """Return a small picture of an image file as a data URI; None if there is none."""

    def view(width: int, height: int) -> View:
        size = (max(round(side * _SIDE / max(width, height)), 1) for side in (width, height))
        return View((0, 0, width, height), (next(size), next(size)))

    try:
        pixels = decode(file, view)
    except UnreadableError:
        return None
    picture = io.BytesIO()
    Image.fromarray(pixels).save(picture, "JPEG", quality=80)
    return data_uri("jpeg", picture.getvalue())


def data_uri(kind: str, content: bytes) -> str:
    """Return a picture as text of a page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


class _Reader:
    """Read the files of a run. Why one is left out is added to the notes."""

    def __init__(self, folder: RunFolder):
        self._folder, self.notes = folder, list[str]()

    def read(self, path: Path, read: Callable[[Path], T]) -> T | None:
        """Return what a function reads, or None if there is no file or it cannot be read."""
        try:
            return read(path) if os.path.lexists(path) else None
        except StoredError as error:
            self.notes.append(f"{path.name} cannot be read: {error.reason}")
        except UserError as error:
            self.notes.append(str(error))
        return None

    def json(self, kind: type[T], path: Path) -> T | None:
        """Return the JSON in a file of the run as a type."""
        return self.read(path, lambda path: self._folder.read(kind, path))

    def log(self, path: Path, kind: type[Stored]) -> list[dict[str, Any]]:
        """Return the lines of a .jsonl file in the order of their steps."""
        log = self.read(path, lambda path: self._folder.read_log(path, kind))
        if log is None:
            return []
        if log.others:
            s = "s" * (log.others > 1)
            self.notes.append(f"{path.name}: ignored {log.others} incomplete line{s}")
        return sorted(log.lines, key=lambda line: line["step"])

    def picture(self, path: Path) -> str | None:
        """Return a PNG file as a data URI."""
        content = self.read(path, lambda path: read_bytes(path, PICTURE))
        if content and content.startswith(b"\x89PNG\r\n\x1a\n"):
            return data_uri("png", content)
        if content is not None:
            self.notes.append(f"{path.name} is not a PNG")
        return None

    def pictures(self, *folders: Path) -> dict[str, str]:
        """Return `PICTURES` that are in some folders."""
        paths = [folder / name for name in PICTURES for folder in {*folders}]
        return {path.name: uri for path in paths if (uri := self.picture(path))}


PICTURES = {
    "augmented.png": "Training images as the network sees them",
    "examples.png": "Test examples with predictions",
    "confusion.png": "Confusion matrix",
    "samples.png": "Samples",
    "attribution.png": "Training examples of the highest loss, which may have wrong labels",
}
"""Titles of the pictures that the page shows. It draws curves and memory itself."""


_MOST_PICTURED = 4
"""Evaluations with options whose pictures the page shows, the newest ones."""


class Run:
    """A run's folder.

    Attributes:
      label: Short name that no other run of the report has.
      lines: Lines of metrics.jsonl that have a step, in the order of their steps.
      total_steps: Steps of the whole run, or None if neither its config nor its lines tell.
      written: Time of the last line in seconds since 1970, or None.
      summary: Its summary.json; None until the run has finished once.
      memory: Its memory.json; None until a step is compiled.
      evaluations: Evaluations by `fnet eval`, the one without options first, with pictures as data
        URIs.
      mistakes: Images of its evaluation.csv that the network is most wrong about.
      pictures: `PICTURES` that exist, as data URIs.
      checkpoints: Steps that have a checkpoint, in rising order.
      owner: Process that uses the folder or was killed; None without one.
      notes: Remarks on what could not be read.
    """

    def __init__(self, folder: RunFolder, label: str):
        reader = _Reader(folder)
        self.folder, self.label, self.config = folder, label, folder.read_config()
        self.notes, self.checkpoints = reader.notes, folder.saved_steps
        self.lines = lines = reader.log(folder.metrics, MetricsLine)
        bad_steps = reader.log(folder.bad_steps, BadStep)
        self.bad_steps = [BadStep.model_validate(line) for line in bad_steps]
        self.total_steps = total_steps(self.config.train, lines)
        self.curves = read_curves(lines)
        self.written = folder.metrics.stat().st_mtime if lines else None
        self.summary = summary = reader.json(Summary, folder.summary)
        is_whole = summary and lines and lines[-1]["step"] <= summary.steps
        logged = summary.logged if summary and is_whole else None
        if logged is not None and folder.logged != logged:
            self.notes.append("metrics.jsonl was damaged, lost or changed since the run ended")
        self.memory = reader.json(StepMemory, folder.memory)
        self.evaluations = _read_evaluations(folder, reader)
        self.mistakes = reader.read(folder.rows, load_mistakes) or []
        self.pictures = reader.pictures(folder.path, folder.private)
        owner = _Reader(folder).read(folder.lock_file, read_bytes) or b""
        self.owner = owner.decode(errors="replace").strip() or None

    @property
    def has_text(self) -> bool:
        """Whether the network generates text, so that its loss is of tokens."""
        return self.config.model.task_for(self.config.data) == "language"

    @property
    def step(self) -> int:
        """Last logged step, or 0."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def epoch(self) -> float:
        """Epoch of the last logged step; nan if it is not known."""
        return finite(self.lines[-1].get("epoch")) if self.lines else math.nan

    @property
    def finished(self) -> bool:
        """Whether the summary is of the last step."""
        return self.summary is not None and self.summary.is_of(self.step, self.total_steps)

    @property
    def rate(self) -> float | None:
        """Examples per second of training steps."""
        return throughput(self.lines)

    @property
    def training_seconds(self) -> float | None:
        """Time spent in training steps, however often the run was resumed."""
        return self.step * self.config.data.batch_size / self.rate if self.rate else None

    def last(self, key: str) -> float | None:
        """Return the last value of a metric, or None."""
        curve = self.curves.get(key)
        return float(curve.values[-1]) if curve and len(curve.values) else None


def read_runs(folders: Sequence[RunFolder]) -> list[Run]:
    """Read the folders of runs."""
    paths: dict[Path, Path] = {}
    for folder in folders:
        real = Path(os.path.realpath(folder.path))
        if real in paths:
            other = "" if paths[real] == folder.path else f", as {paths[real]} and {folder.path}"
            raise UserError(f"{folder.path}: the same run is given twice{other}; give it once")
        paths[real] = folder.path
    names = [path.name for path in paths]
    labels = names if len(set(names)) == len(names) else [str(path) for path in paths.values()]
    return [Run(folder, label) for folder, label in zip(folders, labels, strict=True)]


def _read_evaluations(
    folder: RunFolder, reader: _Reader
) -> list[tuple[Evaluation, dict[str, str]]]:
    plain = reader.json(Evaluation, folder.evaluation)
    evaluations = [(plain, dict[str, str]())] if plain else []  # its pictures are the run's
    paths = folder.evaluations.glob(f"*/{folder.evaluation.name}")
    newest_first = sorted(paths, key=lambda path: (-path.lstat().st_mtime, path))
    for i, path in enumerate(newest_first):
        if result := reader.json(Evaluation, path):
            pictures = reader.pictures(path.parent) if i < _MOST_PICTURED else {}
            evaluations.append((result, pictures))
    if (more := len(newest_first) - _MOST_PICTURED) > 0:
        reader.notes.append(f"Pictures of {more} more evaluations are in {folder.evaluations}")
    return evaluations
