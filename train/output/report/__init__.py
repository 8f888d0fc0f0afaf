"""`fnet report`: one or several runs as a page that needs nothing but a browser."""

import datetime
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import fnet
from train.errors import UserError
from train.output.progress import line_printer
from train.output.report.config import config, environment
from train.output.report.curves import along, metrics_of
from train.output.report.html import element, joined, page
from train.output.report.memory import memory
from train.output.report.overview import overview, title
from train.output.report.pictures import pictures
from train.output.report.progress import curves, throughput
from train.output.report.runs import Run, read_runs
from train.output.report.style import hiding
from train.run.run_folder import RunFolder, atomic_write

_BEGINS = "<!doctype html>"


def report(folders: Sequence[RunFolder], out: Path | None, console: Console) -> Path:
    """Writes the page about some runs, ended or not; gives its path.

    Args:
      folders: of the runs, at least one.
      out: the page; by default report.html in the folder of the run, of several runs in the
        folder where the command is given.
      console: where its path is said.

    Raises:
      UserError: for a folder without a run, one that is named twice, and a page that
        cannot be written, or would be written over something else.
    """
    runs = read_runs(folders)
    path = out or (folders[0].report if len(folders) == 1 else Path("report.html"))
    _check(path)
    text = as_html(runs, time.time())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error
    line_printer(console)(f"report: {path}")
    return path


def as_html(runs: Sequence[Run], now: float) -> str:
    """The page.

    Args:
      runs: at least one, no two with the same label.
      now: seconds since 1970.
    """
    metrics = metrics_of(runs)
    where = along(runs)
    sections = [
        curves(runs, metrics, where),
        throughput(runs, metrics, where),
        memory(runs),
        pictures(runs),
        config(runs),
        environment(runs),
    ]
    contents = {
        "curves": "Curves",
        "throughput": "Throughput",
        "memory": "Memory",
        "examples": "Examples",
        "config": "Config",
        "environment": "Environment",
    }
    links = [element("a", words, href=f"#{name}") for name, words in contents.items()]
    body = joined(
        [
            element(
                "header",
                overview(runs, metrics["scores"], now),
                element("nav", links, aria_label="contents"),
            ),
            element("main", sections),
            element("footer", f"Made by fnet {fnet.__version__}, {_moment(now)}."),
        ]
    )
    return page(f"{title(runs)}: fnet report", body, hiding(len(runs)))


def _moment(now: float) -> str:
    return f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _check(path: Path) -> None:
    """Refuses a path that holds something else than a report."""
    try:
        if path.is_dir():
            raise _cannot_write(path, "it is a folder; name a file")
        if path.exists() and not path.is_file():  # a pipe, say, which would be waited for
            raise _cannot_write(path, "it is no file")
        if path.exists():
            with path.open(errors="replace") as file:
                begins = file.read(len(_BEGINS))
            if begins.lower() != _BEGINS:
                raise _cannot_write(path, "there is a file that is no report")
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error


def _cannot_write(path: Path, reason: str) -> UserError:
    return UserError(f"cannot write {path}: {reason}; choose another file with --out")
