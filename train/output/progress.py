"""Progress of a run: one line at the bottom of a terminal, or a line per interval in a log."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fnet.memory import format_bytes
from train.errors import at_most, printable
from train.output import tables
from train.output.formats import clock, duration, number

SHOWN = {
    "train/loss": ("train loss", 2),
    "not_private/loss": ("train loss (not private)", 2),
    "train/accuracy": ("train accuracy", 9),
    "not_private/accuracy": ("train accuracy (not private)", 9),
    "train/pixel_accuracy": ("train pixel accuracy", 9),
    "not_private/pixel_accuracy": ("train pixel accuracy (not private)", 9),
    "train/skipped": ("skipped steps", 4),
    "privacy/epsilon": ("epsilon", 4),
    "test/mean_iou": ("test mean IoU", 5),
    "test/accuracy": ("test accuracy", 5),
    "test/loss": ("test loss", 8),
    "train/noise_scale": ("noise scale", 10),
    "train/learning_rate": ("learning rate", 10),
}
"""Metrics that are shown, with their names and ranks."""
_SCORES = ("test/mean_iou", "test/accuracy", "test/loss")
"""Test metrics; the first that a run has always comes before its throughput."""

_STEP, _ETA, _BAR, _THROUGHPUT, _MEMORY, _WAIT = 0, 1, 3, 6, 7, 11
_SHORTEST_BAR, _LONGEST_BAR = 6, 24
_GAP = "  "

_LOG_SECONDS = 10  # between lines of a log
_TIMED_STEPS, _TIMED_SECONDS, _LONG, _MINUTES = 3, 2.0, 10.0, 120.0
"""The time of a run is estimated from so many steps and seconds, and printed if it is long; with
what shortens it, if it is minutes."""


class Field(NamedTuple):
    """A part of a line; higher ranks are dropped first in a narrow terminal."""

    rank: int
    text: str


def fit(fields: list[Field], width: int) -> tuple[int, str]:
    """Return the width of the bar and the text next to it, which fit into a line.

    Fields are dropped by rank, the highest first, until the rest fits. The bar is one of them, and
    fills what is left. A field of rank 0 is never dropped.
    """
    by_rank = sorted([*fields, Field(_BAR, " " * _SHORTEST_BAR)], key=lambda field: field.rank)
    while len(_GAP.join(f.text for f in by_rank)) > width and by_rank[-1].rank > 0:
        by_rank.pop()
    text = _GAP.join(f.text for f in fields if f in by_rank)
    has_bar = any(field.rank == _BAR for field in by_rank)
    return min(width - len(text) - len(_GAP), _LONGEST_BAR) if has_bar else 0, text


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line verbatim, without markup or line breaks."""
    plain: Any = dict.fromkeys(("highlight", "markup", "emoji"), False)
    return lambda line: console.print(printable(line), soft_wrap=True, **plain)


def show_table(console: Console, table: tables.Table, lines: Iterable[str]) -> None:
    """Print a table on a terminal, and lines elsewhere."""
    if console.is_terminal:
        console.print(tables.to_rich(table))
        return
    for line in lines:
        line_printer(console)(line)


@contextlib.contextmanager
def showing(
    console: Console, text: str, *, log_first: bool = True
) -> Iterator[Callable[[str], None]]:
    """Show a text at the bottom of a terminal, or as a line of a log; yield what shows another."""
    if console.is_terminal:
        described = TextColumn("{task.description}", markup=False)
        columns = SpinnerColumn(), described, TimeElapsedColumn()
        with Bars(*columns, console=console, transient=True) as shown:
            number = shown.add_task(text, total=None)
            yield lambda text: shown.update(number, description=text)
    else:
        log = line_printer(console)
        if log_first:
            log(text)
        yield log


class Progress:
    """Progress of a run: one line at the bottom of a terminal, or lines of a log.

    A log has the first line, each one with test metrics or of the last step, and one per 10 s.
    The remaining time follows from the mean time of a step since this object was entered,
    evaluations and checkpoints included. ``shorten`` says what would make a run shorter
    whose steps take so many seconds.
    """

    def __init__(
        self,
        console: Console,
        total: int,
        start: int = 0,
        now: Callable[[], float] = time.monotonic,
        shorten: Callable[[float], str] = lambda seconds: "",
    ):
        self._log, self._now, self._shorten = line_printer(console), now, shorten
        self._live = console.is_terminal and not console.is_dumb_terminal
        # rich's default of 4 refreshes a second takes time from steps on two cores.
        self._display = Live(console=console, get_renderable=lambda: self, refresh_per_second=2)
        self._start, self._step, self._total = start, start, total
        self._began = self._advanced = now()
        self._timed, self._logged = False, -math.inf
        self._metrics: dict[str, float] = {}
        self._widths: dict[str, int] = {}
        self._task = ""
        self._measured: int | None = None

    def __enter__(self) -> Self:
        self._began = self._advanced = self._now()
        if self._live:
            self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._display.stop()

    def advance(self, step: int) -> None:
        """Move on to ``step``. The first steps give an estimate of the time, which is printed."""
        self._step, self._advanced = step, self._now()
        taken, seconds = step - self._start, self._advanced - self._began
        if not self._timed and taken >= _TIMED_STEPS and seconds >= _TIMED_SECONDS:
            self._timed = True
            if (rest := self._remaining()) >= _LONG:
                self._log(
                    f"estimated time: {duration(rest)} for {self._total - step:,} more steps, "
                    f"from the first {taken:,}"
                    + (self._shorten(seconds / taken) if rest >= _MINUTES else "")
                )

    @contextlib.contextmanager
    def doing(self, task: str) -> Iterator[None]:
        """Show a task in the place of the remaining time, which it holds up."""
        self._task = task
        try:
            yield
        finally:
            self._task = ""

    def log(self, line: Mapping[str, float], measured: int | None) -> None:
        """Show a line of metrics; test metrics stay on the terminal until the next evaluation.

        ``measured`` is the peak memory in bytes; None if it is not known.
        """
        kept = {k: v for k, v in self._metrics.items() if k.startswith("test/")}
        self._metrics, self._measured = {**kept, **line}, measured
        is_due = self._now() - self._logged >= _LOG_SECONDS or self._step == self._total
        if not self._live and (is_due or any(k.startswith("test/") for k in line)):
            self._logged = self._now()
            step = f"step {self._step:,}/{self._total:,}"
            times = f"elapsed {clock(line['seconds'])}{_GAP}eta {clock(self._remaining())}"
            self._log(_GAP.join([step, times, *(f.text for f in self._fields(line))]))

    def _remaining(self) -> float:
        """Estimate the seconds until the last step; nan before the first one has ended."""
        taken = self._step - self._start
        if not taken:
            return float("nan")
        whole = (self._advanced - self._began) / taken * (self._total - self._step)
        return max(whole - (self._now() - self._advanced), 0.0)

    def _fields(self, metrics: Mapping[str, float]) -> Iterator[Field]:
        score = next((key for key in _SCORES if key in metrics), None)
        for key, (name, rank) in SHOWN.items():
            if key in metrics:
                text = at_most if key == "privacy/epsilon" else number
                value = self._steady(name, text(metrics[key]))
                yield Field(min(rank, 5) if key == score else rank, f"{name} {value}")
        if "examples_per_second" in metrics:
            rate = self._steady("rate", number(metrics["examples_per_second"]))
            yield Field(_THROUGHPUT, f"{rate} examples/s")
        if self._measured is not None:
            yield Field(_MEMORY, f"memory {self._steady('memory', format_bytes(self._measured))}")
        if "input_wait" in metrics:
            yield Field(_WAIT, f"input wait {metrics['input_wait']:.0%}")

    def _steady(self, name: str, text: str) -> str:
        """Pad a value in a terminal to its longest so far, so that the line does not jump."""
        self._widths[name] = max(self._widths.get(name, 0), len(text))
        return text.ljust(self._widths[name]) if self._live else text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = f"{self._total:,}"
        fields = [
            Field(_STEP, f"{self._step:>{len(total)},}/{total}"),
            Field(_ETA, self._task or f"eta {clock(self._remaining())}"),
            *self._fields(self._metrics),
        ]
        width, text = fit(fields, options.max_width)
        line = Table.grid(padding=(0, len(_GAP), 0, 0))
        cells = [ProgressBar(self._total, self._step, width)] if width else []
        line.add_row(*cells, Text(text, no_wrap=True, overflow="crop"))
        yield line
