"""``fnet report``: show runs as one HTML page."""

from pathlib import Path

from rich.console import Console

from train import arguments
from train.arguments import ReportArguments
from train.commands.positional import positional
from train.report import report
from train.run.run_folder import RunFolder


def main(argv: list[str]) -> None:
    """Run ``fnet report RUN...``."""
    runs, flags = positional(argv, "fnet report RUN...", ReportArguments)
    options = arguments.read(ReportArguments, flags, f"fnet report {' '.join(runs)}")
    folders = [RunFolder.of(run) for run in runs]
    report(folders, Path(options.out) if options.out else None, Console())
