"""Lines of a run's metrics.jsonl, and averages over them."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, ValidationError

from fnet.privacy.audit import Audit
from train import limits
from train.config import Train
from train.stored import Count, Stored, adapter_of, read_bytes

NOT_PRIVATE = "not_private"
"""First part of the names of metrics that a guarantee of privacy does not cover."""

_TOO_LARGE, _MOST_STEPS = 1e100, 2**53
"""Numbers from here on count as infinite, so that ratios of two numbers stay finite; not every
integer from the second one on is a float64."""


class MetricsLine(Stored):
    """A line of metrics.jsonl: numbers, or null for a metric that is undefined.

    Values of other types, which somebody added, are left out.
    """

    model_config = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0, lt=_MOST_STEPS)]
    epoch: FiniteFloat = 0.0
    seconds: FiniteFloat = 0.0


class BadStep(Stored):
    """A line of bad_steps.jsonl: a step that was skipped."""

    model_config = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0, lt=_MOST_STEPS)]
    loss: str
    grad_norm: str
    origin: str
    examples: list[str] = Field([])


class Summary(Stored):
    """Contents of summary.json, as far as anybody reads it back."""

    steps: Count
    seconds: FiniteFloat
    metrics: dict[str, float | None] = Field({})
    noise_scale: float | None = None
    unreadable_files: Count | None = None
    ended_early: bool = False
    input_wait_reason: str | None = None
    quantization_errors: dict[str, float] = Field({})
    audit: Audit | None = None
    parameters: Count | None = None
    budget_bytes: Count | None = None
    peak_bytes_predicted: Count | None = None
    peak_bytes_seen: Count | None = None
    versions: dict[str, str] = Field({})
    logged: dict[str, list[int]] | None = None

    def is_of(self, step: int, total: int | None) -> bool:
        """Whether the run had finished, of so many steps, of which ``step`` is the last logged."""
        return self.steps >= max(step, 0 if self.ended_early else total or 0)


class _Owner(Stored):
    """First line of a log."""

    run: str


class Log(NamedTuple):
    """A .jsonl file of a run.

    Attributes:
      first: Its first line, which says whose it is; None without one.
      lines: Lines about steps.
      others: Number of other lines, such as one that a kill cut off.
    """

    first: dict[str, Any] | None
    lines: list[dict[str, Any]]
    others: int


def read_log(path: Path, kind: type[Stored] = MetricsLine) -> Log:
    """Read metrics.jsonl, or the lines of another kind. A missing file has none."""
    first, lines, others = None, list[dict[str, Any]](), 0
    content = read_bytes(path, limits.LOG) if os.path.lexists(path) else b""
    for i, text in enumerate(content.splitlines()):
        try:
            is_first = i == 0 and b'"step"' not in text
            adapter_of(_Owner if is_first else kind).validate_json(text)
        except ValidationError:
            others += bool(text.strip())
            continue
        line = json.loads(text)
        if is_first:
            first = line
        elif kind is MetricsLine:
            lines.append({k: v for k, v in line.items() if type(v) in (int, float, type(None))})
        else:
            lines.append(line)
    return Log(first, lines, others)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl about steps, or [] if there are none."""
    return read_log(path).lines


def total_steps(config: Train, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the steps of a whole run, or None if neither its config nor its lines tell."""
    epoch = finite(lines[-1].get("epoch")) if lines else math.nan
    if config.steps or not epoch > 0:
        return config.steps
    steps = config.epochs * lines[-1]["step"] / epoch
    return math.ceil(round(steps, 6)) if steps < _MOST_STEPS else None


def finite(value: Any) -> float:
    """Return a number from JSON as a float, and anything else as nan."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    if not abs(value) < _TOO_LARGE:
        return math.nan
    return float(value) if abs(value) > 1 / _TOO_LARGE else 0.0


def throughput(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the examples per second of a run's training steps, however often it was resumed."""
    windows = _windows(lines)
    seconds = sum(steps / rate for _, steps, rate in windows)
    return sum(steps for _, steps, _ in windows) / seconds if windows else None


def input_wait(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of a run's training time in which the device waited for input."""
    windows = [(steps / rate, line) for line, steps, rate in _windows(lines)]
    waited = sum(seconds * finite(line.get("input_wait", 0.0)) for seconds, line in windows)
    return waited / sum(seconds for seconds, _ in windows) if windows else None


def _windows(lines: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int, float]]:
    """Return lines with the number of steps that each stands for, and their speed."""
    steps = np.diff([line["step"] for line in lines], prepend=0).tolist()
    rates = [finite(line.get("examples_per_second")) for line in lines]
    windows = zip(lines, steps, rates, strict=True)
    return [(line, n, rate) for line, n, rate in windows if n > 0 and rate > 0]


def noise_scale(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the simple noise scale at the end of a run; None if it is not known."""
    course = noise_scale_course(lines)
    return course[-1][1] if course and course[-1][0] == lines[-1]["step"] else None


def noise_scale_course(lines: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the simple noise scale over a run, in examples: (step, tr(Sigma) / |G|^2).

    This is the batch size at which the noise of the gradient is as large as the gradient
    (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A). Both
    estimates are noisy, and unlike them their ratio is biased. Therefore each is averaged
    exponentially (half-life: a tenth of the run) before the division. Steps at which the average of
    |G|^2 is not positive are dropped.
    """
    names = "step", "train/grad_sq", "train/grad_var"
    rows = [[finite(line.get(name)) for name in names] for line in lines if line["step"] > 0]
    measured = [row for row in rows if not any(map(math.isnan, row))]
    course = []
    var = sq = last = 0.0
    for step, new_sq, new_var in measured:
        decay = 0.5 ** ((step - last) / (measured[-1][0] / 10))
        var = decay * var + (1 - decay) * new_var
        sq = decay * sq + (1 - decay) * new_sq
        last = step
        if sq > 0:
            course.append((step, var / sq))
    return course
