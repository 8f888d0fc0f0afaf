"""Files of a run's folder as data, checked when they are read."""

import base64
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from train.output.logged import finite, read_metrics
from train.output.memory_tables import Count, Stored

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
    metrics: dict[str, float] = Field({})
    noise_scale: float | None = None
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
    metrics: dict[str, float] = Field({})
    classes: tuple[ClassScore, ...] = ()


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
