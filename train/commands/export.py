"""``fnet export``: a run's weights as safetensors or a published folder, or its network."""

import sys

from train.arguments import ExportArguments, read_command
from train.errors import printable
from train.run.model_files import export_model
from train.run.open_run import OpenRun
from train.run.program_files import export_program
from train.run.weight_files import export_weights


def main(argv: list[str]) -> None:
    """Run ``fnet export RUN``."""
    (given,), options = read_command(argv, "fnet export RUN", ExportArguments)
    opened, checked = OpenRun.of(given), ""
    if options.format != "safetensors":
        path, checked = export_program(opened, options)
    elif opened.config.model.is_published:
        path = export_model(opened, options)
    else:
        path = export_weights(opened, options)
    print(printable(str(path)))
    if checked:
        print(checked, file=sys.stderr)
