"""`fnet report`: a page about one or several runs that needs nothing but a browser."""

import base64
import datetime
import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup, escape
from rich.console import Console

import fnet
from train.errors import UserError
from train.output.curves import MOST_POINTS, describe, metrics_of
from train.output.progress import line_printer
from train.output.tables import MISSING
from train.report import overview, sections
from train.report.runs import PICTURES, Run, read_runs
from train.run.run_folder import RunFolder, atomic_write

_HERE = Path(__file__).parent
_BEGINS = b"<!doctype html>"
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:"
"""Lets a browser fetch nothing and run no script, whatever text a run's files hold."""
_THROUGHPUT = ("examples_per_second", "input_wait")
_POINTS_OF_A_PAGE = 18_000
"""Points of all curves, about a megabyte, so that a page of many runs opens at once."""


def report(folders: Sequence[RunFolder], out: Path | None, console: Console) -> Path:
    """Write the page about runs, finished or not, and return its path.

    By default it is report.html, in the folder of a single run, else in the working directory.
    """
    runs = read_runs(folders)
    path = out or (folders[0].report if len(folders) == 1 else Path("report.html"))
    reason = None
    try:
        if path.is_dir():
            reason = "it is a directory; name a file"
        elif path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            reason = "it is not a regular file"
        elif path.exists() and not path.read_bytes().lower().startswith(_BEGINS):
            reason = "the file there is not a report"
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, render(runs, time.time()))
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise UserError(f"cannot write {path}: {reason}; choose another file with --out")
    log = line_printer(console)
    log(f"report: {path}")
    for private in [f.private.absolute() for f in folders if f.private != f.path]:
        if private not in path.absolute().parents:
            log(f"do not publish it: it shows what is in {private}, which no guarantee covers")
    return path


def render(runs: Sequence[Run], now: float) -> str:
    """Return the page about runs, in ASCII so that no encoding garbles it."""
    metrics = metrics_of([run.curves for run in runs])
    if all(run.has_text for run in runs):
        title = "loss (nats per token)"
        metrics = [m._replace(title=title) if m.name == "loss" else m for m in metrics]
    curves = [curve for metric in metrics for curve in metric.curves.values()]
    hide = "body:has(#show{0}:not(:checked)) .chart .run{0} {{ display: none; }}\n"
    style = (_HERE / "style.css").read_text() + "".join(hide.format(i) for i in range(len(runs)))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    loader = jinja2.FileSystemLoader(_HERE)
    jinja = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["breakable"] = breakable
    figures = [overview.figures_of(run, i, metrics) for i, run in enumerate(runs)]
    page = jinja.get_template("page.html").render(
        runs=runs,
        several=len(runs) > 1,
        now=now,
        date=f"{datetime.datetime.fromtimestamp(now, datetime.UTC):%Y-%m-%d %H:%M} UTC",
        version=fnet.__version__,
        missing=MISSING,
        pictures=PICTURES,
        style=Markup(style),
        policy=f"{_POLICY}; style-src 'sha256-{digest}'",
        sections=sections,
        overview=overview,
        describe=describe,
        axis=sections.shared_axis(runs),
        points=min(max(_POINTS_OF_A_PAGE // max(len(curves), 1), 60), MOST_POINTS),
        longest=max((len(curve.values) for curve in curves), default=0),
        rates=[m for m in metrics if m.name in _THROUGHPUT],
        others=[m for m in metrics if m.name not in _THROUGHPUT],
        figures=figures[0],
        ranking=overview.ranking(runs, figures),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def breakable(text: str) -> Markup:
    """Let a long name break into lines where its parts meet."""
    return Markup(re.sub(r"(?<=[/_\]])|(?<=[a-z]\.)(?=[a-z])", "<wbr>", str(escape(text))))
