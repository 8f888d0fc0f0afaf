"""Progress of a run: a bar on a terminal, lines elsewhere."""

import functools
from collections.abc import Callable, Mapping
from typing import Self

from rich import progress as rich_progress
from rich.console import Console

from fnet.memory import format_bytes

_SHOWN = {
    "train/loss": "loss",
    "train/accuracy": "accuracy",
    "train/skipped": "skipped",
    "train/pixel_accuracy": "pixel accuracy",
    "not_private/loss": "loss (not private)",
    "not_private/accuracy": "accuracy (not private)",
    "not_private/pixel_accuracy": "pixel accuracy (not private)",
    "test/loss": "test loss",
    "test/accuracy": "test accuracy",
    "test/mean_iou": "test mean IoU",
    "train/noise_scale": "noise scale",
    "privacy/epsilon": "epsilon",
    "train/learning_rate": "lr",
}
"""Metrics that are shown, with their names."""


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line verbatim, without markup or line breaks."""
    show = functools.partial(
        console.print, highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    return lambda line: show(printable(line))


def printable(text: str) -> str:
    """Replace each byte of a file name that is not UTF-8 by a mark."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Progress:
    """Progress of a run: a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console, total: int):
        self._console, self._log = console, line_printer(console)
        self._bar = rich_progress.Progress(
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TaskProgressColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[metrics]}"),
            console=console,
            refresh_per_second=2,  # rich's default of 10 takes 3 % of two cores
            disable=not console.is_terminal,
        )
        self._total = total
        self._task = self._bar.add_task("steps", total=total, metrics="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        self._bar.update(self._task, completed=step)

    def log(
        self, step: int, line: Mapping[str, float], predicted: int, measured: int | None
    ) -> None:
        """Show a line of metrics, next to the bar or as a line of its own.

        Args:
          step: number of steps taken.
          line: a line of metrics.jsonl.
          predicted: predicted peak memory in bytes.
          measured: measured peak memory in bytes; None if it is not known.
        """
        metrics = [f"{name} {line[key]:.4g}" for key, name in _SHOWN.items() if key in line]
        metrics += [
            f"{line['examples_per_second']:,.0f} examples/s",
            f"input wait {line['input_wait']:.1%}",
            f"memory {format_bytes(measured)} (predicted {format_bytes(predicted)})",
        ]
        text = "  ".join(metrics)
        self._bar.update(self._task, completed=step, metrics=text)
        if not self._console.is_terminal:
            self._log(f"step {step}/{self._total}  {text}")
