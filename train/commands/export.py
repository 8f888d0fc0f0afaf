"""``fnet export``: a run's weights as safetensors or a published folder, or its network."""

import sys

from train.arguments import ExportArguments
from train.errors import printable
from train.run.model_files import export_model
from train.run.open_run import OpenRun
from train.run.program_files import export_program
from train.run.weight_files import export_weights


def main(words: list[str], options: ExportArguments) -> None:
    """Run ``fnet export RUN``."""
    opened, checked = OpenRun.of(words[0]), ""
    if options.format != "safetensors":
        path, checked = export_program(opened, options)
    elif opened.config.model.is_published:
        path = export_model(opened, options)
    else:
        path = export_weights(opened, options)
    print(printable(str(path)))
    if checked:
        print(checked, file=sys.stderr)
