"""``fnet export``: a run's weights as safetensors or a published folder, or its network."""

import sys

from train.arguments import ExportArguments, flag_of
from train.errors import UserError, printable
from train.run.model_files import export_model
from train.run.open_run import OpenRun
from train.run.program_files import export_program
from train.run.weight_files import export_weights


def main(words: list[str], options: ExportArguments) -> None:
    """Run ``fnet export RUN``."""
    opened, checked = OpenRun.of(words[0]), ""
    model = opened.config.model
    has_norm = getattr(model, "norm", None) in ("abn", "batch")
    counts = {"adapters": model.is_published, "names": not model.is_published, "for_norm": has_norm}
    for name in (name for name, does in counts.items() if getattr(options, name) and not does):
        raise UserError(f"{flag_of(name)}: has no effect on a run of {model.name}; leave it out")
    if options.format != "safetensors":
        path, checked = export_program(opened, options)
    elif model.is_published:
        path = export_model(opened, options)
    else:
        path = export_weights(opened, options)
    print(printable(str(path)))
    if checked:
        print(checked, file=sys.stderr)
