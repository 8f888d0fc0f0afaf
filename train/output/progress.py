"""What a run shows on the way: progress, or plain lines where there is no terminal."""

import functools
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from fnet.memory import format_bytes


def line_printer(console: Console) -> Callable[[str], None]:
    """``say(words)``: shows words as they are; no path in them is taken for markup or broken."""
    show = functools.partial(
        console.print, highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    return lambda words: show(printable(words))


def printable(words: str) -> str:
    """The words with a mark for each byte of a file's name that is not UTF-8."""
    return words.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Screen:
    """Progress of a run on a terminal, or as lines in a log."""

    def __init__(self, console: Console, total: int):
        self._console, self._say = console, line_printer(console)
        self._progress = Progress(
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=console,
            refresh_per_second=2,  # ten times, as is the default, take 3 % of two cores
            disable=not console.is_terminal,
        )
        self._total = total
        self._task = self._progress.add_task("steps", total=total, metrics="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, step: int) -> None:
        """Moves the bar to ``step`` steps taken."""
        self._progress.update(self._task, completed=step)

    def log(self, step: int, line: Mapping[str, float], predicted: int, seen: int | None) -> None:
        """Shows a line of metrics: beside the bar, or as a line of text."""
        rate = line["examples_per_second"]
        words = "  ".join(
            [f"{name} {line[key]:.4g}" for key, name in _SHOWN.items() if key in line]
            + [
                f"{rate:,.0f} examples/s",
                f"input wait {line['input_wait']:.1%}",
                f"memory {format_bytes(seen)} (predicted {format_bytes(predicted)})",
            ]
        )
        self._progress.update(self._task, completed=step, metrics=words)
        if not self._console.is_terminal:
            self._say(f"step {step}/{self._total}  {words}")


_SHOWN = {
    "train/loss": "loss",
    "train/accuracy": "accuracy",
    "train/skipped": "left out",
    "train/pixel_accuracy": "pixels",
    "test/accuracy": "test",
    "test/mean_iou": "mean IoU",
    "test/loss": "test loss",
    "train/noise_scale": "noise scale",
    "privacy/epsilon": "epsilon",
    "train/learning_rate": "lr",
}
