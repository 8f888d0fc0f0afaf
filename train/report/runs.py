"""Runs as a report reads them from their folders, complete or not."""

import base64
import csv
import io
import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from train.config import Config
from train.data.decode import UnreadableError, View, decode
from train.errors import UserError
from train.output.curves import Curve, read_curves
from train.output.formats import number
from train.output.logged import finite, read_metrics, throughput
from train.output.memory_tables import Count, StepMemory, Stored
from train.run.run_folder import RunFolder

T = TypeVar("T")

MOST_STEPS = 2**53
"""Not every integer from here on is a float64."""
_MOST_PICTURE_BYTES = 16 * 2**20


class Audit(Stored):
    """Result of an audit, see `fnet.privacy.audit.Audit`."""

    epsilon: FiniteFloat
    confidence: FiniteFloat
    canaries: Count
    guesses: Count
    correct: Count


class Summary(Stored):
    """Contents of summary.json."""

    steps: Count
    seconds: FiniteFloat
    metrics: dict[str, float | None] = Field({})
    noise_scale: float | None = None
    ended_early: bool = False
    input_wait_reason: str | None = None
    quantization_errors: dict[str, float] = Field({})
    audit: Audit | None = None
    parameters: Count | None = None
    budget_bytes: Count | None = None
    peak_bytes_predicted: Count | None = None
    peak_bytes_seen: Count | None = None
    versions: dict[str, str] = Field({})


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


class Mistake(NamedTuple):
    """An image that the network is most wrong about.

    Attributes:
      file: Its file.
      texts: Label, prediction, probability and loss by name.
      order: Its place by each name that the list can be sorted by.
      picture: Small picture as a data URI; None without a file.
    """

    file: str
    texts: dict[str, str]
    order: dict[str, int]
    picture: str | None


_MISTAKES, _SIDE = 24, 96
"""Images in the list of mistakes, and the longer side of their pictures in pixels."""


def load_mistakes(path: Path, notes: list[str]) -> list[Mistake]:
    """Return the images of an evaluation.csv that the network is most wrong about."""
    if (content := load_bytes(path, notes)) is None:
        return []
    try:
        rows = [*csv.DictReader(io.StringIO(content.decode("utf-8"), newline=""))]
        rows = worst_first([row | {"loss": float(row["loss"])} for row in rows])[:_MISTAKES]
    except (ValueError, KeyError, csv.Error) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return []
    order = {"worst": {id(row): i for i, row in enumerate(rows)}}
    for name in ("loss", "label", "prediction", "file"):
        if all(name in row for row in rows):
            by_name = sorted(rows, key=operator.itemgetter(name), reverse=name == "loss")
            order[name] = {id(row): i for i, row in enumerate(by_name)}
    return [
        Mistake(
            row["file"],
            {
                name.replace("_", " "): number(float(value)) if _is_measured(name) else value
                for name, value in row.items()
                if name not in ("file", "split") and not name.startswith("probability of ")
            },
            {name: places[id(row)] for name, places in order.items()},
            _thumbnail(row["file"]),
        )
        for row in rows
    ]


def _is_measured(column: str) -> bool:
    """Whether a column has numbers, not names, which may look like numbers."""
    return column in ("loss", "probability", "pixel_accuracy") or column.startswith(
        ("predicted ", "label ")
    )


def worst_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows: mistakes by falling probability, then others by falling loss."""

    def key(row: dict[str, Any]) -> tuple[bool, float]:
        is_mistake = "probability" in row and row["prediction"] != row["label"]
        return not is_mistake, -float(row["probability"] if is_mistake else row["loss"])

    return sorted(rows, key=key)


def _thumbnail(file: str) -> str | None:
    """Return a small picture of an image file as a data URI; None if there is none."""
    try:
        pixels = decode(file, lambda w, h: View((0, 0, w, h), _fit(w, h)))
    except UnreadableError:
        return None
    picture = io.BytesIO()
    Image.fromarray(pixels).save(picture, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(picture.getvalue()).decode()}"


def _fit(width: int, height: int) -> tuple[int, int]:
    scale = _SIDE / max(width, height)
    return max(round(width * scale), 1), max(round(height * scale), 1)


class BadStep(Stored):
    """A line of bad_steps.jsonl: a step that was skipped."""

    step: Count
    loss: str
    grad_norm: str
    origin: str
    examples: tuple[str, ...] = ()


def load(kind: type[T], path: Path, notes: list[str], value: Any = None) -> T | None:
    """Return the JSON in a file as a type, or None if there is no file or it does not fit.

    Why it cannot be read is added to the notes. ``value`` is its content, if it is read already.
    """
    try:
        if value is not None:
            return TypeAdapter(kind).validate_python(value)
        content = load_bytes(path, notes)
        return None if content is None else TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        notes.append(f"{path.name} cannot be read: {place}{first['msg']}")
        return None


def load_lines(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], float | None]:
    """Return the lines of a .jsonl file in the order of their steps, and when it was written."""
    # Read the bytes first: a running process may write more lines before the others are read.
    if (content := load_bytes(path, notes)) is None:
        return [], None
    try:
        written = path.stat().st_mtime
        lines = [x for x in read_metrics(path) if 0 <= finite(x["step"]) < MOST_STEPS]
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return [], None
    if (bad := sum(map(bool, map(bytes.strip, content.splitlines()))) - len(lines)) > 0:
        notes.append(f"{path.name}: ignored {bad} incomplete line{'s' * (bad > 1)}")
    return sorted(lines, key=lambda line: line["step"]), written


def load_picture(path: Path, notes: list[str]) -> str | None:
    """Return a PNG file as a data URI."""
    content = load_bytes(path, notes)
    if content and len(content) > _MOST_PICTURE_BYTES:
        notes.append(f"{path.name} is too large to show: {len(content) / 2**20:.0f} MiB")
    elif content and content.startswith(b"\x89PNG\r\n\x1a\n"):
        return f"data:image/png;base64,{base64.b64encode(content).decode()}"
    elif content is not None:
        notes.append(f"{path.name} is not a PNG")
    return None


def load_bytes(path: Path, notes: list[str]) -> bytes | None:
    """Return the contents of a file, or None if there is no file or it cannot be read."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
        return None


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


class Evaluated(NamedTuple):
    """An evaluation by `fnet eval`: its evaluation.json, and its pictures as data URIs."""

    result: Evaluation
    pictures: dict[str, str]


@dataclass
class Run:
    """A run's folder.

    Attributes:
      label: Short name that no other run of the report has.
      folder: The folder.
      config: Its config.json.
      lines: Lines of metrics.jsonl that have a step, in the order of their steps.
      curves: Metrics by name.
      written: Time of the last line in seconds since 1970, or None.
      summary: Its summary.json; None until the run has finished once.
      memory: Its memory.json; None until a step is compiled.
      evaluations: Evaluations by `fnet eval`, the one without options first.
      mistakes: Images of its evaluation.csv that the network is most wrong about.
      bad_steps: Its bad_steps.jsonl.
      pictures: `PICTURES` that exist, as data URIs.
      checkpoints: Steps that have a checkpoint, in rising order.
      owner: Process that uses the folder or was killed; None without one.
      notes: Remarks on what could not be read.
    """

    label: str
    folder: RunFolder
    config: Config
    lines: list[dict[str, Any]]
    curves: dict[str, Curve]
    written: float | None
    summary: Summary | None
    memory: StepMemory | None
    evaluations: list[Evaluated]
    mistakes: list[Mistake]
    bad_steps: list[BadStep]
    pictures: dict[str, str]
    checkpoints: list[int]
    owner: str | None
    notes: list[str]

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
    def total_steps(self) -> int | None:
        """Steps of the whole run, or None if neither its config nor its lines tell."""
        train = self.config.train
        if train.steps or not self.epoch > 0:
            return train.steps or None
        steps = train.epochs * self.step / self.epoch
        return math.ceil(round(steps, 6)) if steps < MOST_STEPS else None

    @property
    def finished(self) -> bool:
        """Whether the summary is of the last step."""
        last = max(self.step, self.total_steps or 0)
        if self.summary is None:
            return False
        return self.summary.steps >= (self.step if self.summary.ended_early else last)

    @property
    def training_seconds(self) -> float | None:
        """Time spent in training steps, however often the run was resumed."""
        rate = throughput(self.lines)
        return self.step * self.config.data.batch_size / rate if rate else None

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
    return [_read(folder, label) for folder, label in zip(folders, labels, strict=True)]


def _read(folder: RunFolder, label: str) -> Run:
    try:
        config = folder.read_config()
    except OSError as error:
        raise UserError(f"cannot read {folder.config}: {error.strerror or error}") from error
    notes: list[str] = []
    lines, written = load_lines(folder.metrics, notes)
    bad_steps, _ = load_lines(folder.bad_steps, notes)
    checkpoints = [p.name for p in folder.checkpoints.glob("[0-9]*") if p.name.isdecimal()]
    return Run(
        label=label,
        folder=folder,
        config=config,
        lines=lines,
        curves=read_curves(lines),
        written=written,
        summary=load(Summary, folder.summary, notes),
        memory=load(StepMemory, folder.memory, notes),
        evaluations=_read_evaluations(folder, notes),
        mistakes=load_mistakes(folder.rows, notes),
        bad_steps=load(list[BadStep], folder.bad_steps, notes, bad_steps) or [],
        pictures=_read_pictures(folder.path, notes),
        checkpoints=sorted(map(int, checkpoints)),
        owner=(load_bytes(folder.lock_file, []) or b"").decode(errors="replace").strip() or None,
        notes=notes,
    )


def _read_pictures(path: Path, notes: list[str]) -> dict[str, str]:
    pictures = {name: load_picture(path / name, notes) for name in PICTURES}
    return {name: uri for name, uri in pictures.items() if uri}


def _read_evaluations(folder: RunFolder, notes: list[str]) -> list[Evaluated]:
    plain = load(Evaluation, folder.evaluation, notes)
    evaluations = [Evaluated(plain, {})] if plain else []  # its pictures are the run's
    paths = folder.evaluations.glob(f"*/{folder.evaluation.name}")
    newest_first = sorted(paths, key=lambda path: (-path.stat().st_mtime, path))
    for i, path in enumerate(newest_first):
        if result := load(Evaluation, path, notes):
            pictures = _read_pictures(path.parent, notes) if i < _MOST_PICTURED else {}
            evaluations.append(Evaluated(result, pictures))
    if (more := len(newest_first) - _MOST_PICTURED) > 0:
        notes.append(f"Pictures of {more} more evaluations are in {folder.evaluations}")
    return evaluations
