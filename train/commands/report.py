"""``fnet report``: show runs as one HTML page."""

from pathlib import Path

from rich.console import Console

from train.arguments import ReportArguments, read_command
from train.report import report
from train.run.run_folder import RunFolder


def main(argv: list[str]) -> None:
    """Run ``fnet report RUN...``."""
    runs, options = read_command(argv, "fnet report RUN...", ReportArguments)
    folders = [RunFolder.of(run) for run in runs]
    report(folders, Path(options.out) if options.out else None, Console())
