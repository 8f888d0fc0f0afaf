"""``fnet report``: show runs as one HTML page."""

from pathlib import Path

from rich.console import Console

from train.arguments import ReportArguments
from train.report import report
from train.run.run_folder import RunFolder


def main(words: list[str], options: ReportArguments) -> None:
    """Run ``fnet report RUN...``."""
    folders = [RunFolder.of(run) for run in words]
    report(folders, Path(options.out) if options.out else None, Console())
