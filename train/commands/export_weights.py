"""``fnet export``: write a run's weights as safetensors, or its network as a program."""

import sys
from pathlib import Path

import fnet
from fnet.interop import torch as interop
from train import arguments
from train.arguments import ExportArguments
from train.commands.export_model import export_model
from train.commands.export_program import export_program
from train.commands.positional import positional
from train.errors import UserError, printable
from train.run import weight_files
from train.run.checkpoints import Checkpoints
from train.run.model_files import check_model
from train.run.run_folder import RunFolder


def main(argv: list[str]) -> None:
    """Run ``fnet export RUN``."""
    (given,), flags = positional(argv, "fnet export RUN", ExportArguments)
    options = arguments.read(ExportArguments, flags, f"fnet export {given}")
    folder = RunFolder.of(given)
    if options.format == "safetensors":
        print(printable(str(export_weights(folder, options))))
        return
    path, checked = export_program(folder, check_model(folder, folder.read_config()), options)
    print(printable(str(path)))
    print(checked, file=sys.stderr)


def export_weights(folder: RunFolder, options: ExportArguments) -> Path:
    """Write a run's weights with torch's names and layouts and return the path.

    The weights are a checkpoint's: averaged parameters if the run has them. The metadata name
    the network, its norm and its activation.

    Raises:
      UserError: if there is no run or no checkpoint, the network does not have these names, or
        the file cannot be written.
    """
    config = check_model(folder, folder.read_config())
    if (section := config.model.published) is not None:
        return export_model(folder, config, section, options)
    weight_files.check_network(config)
    out = Path(options.out) if options.out else folder.path / "weights.safetensors"
    if out.suffix != ".safetensors":
        raise UserError(f"--out: expected a file that ends in .safetensors, got {out}")
    with Checkpoints(folder.checkpoints, best=options.best) as checkpoints:
        params, state, _ = checkpoints.restore_network()
    network = weight_files.describe_network(config)
    norm, names = network["norm"], options.names
    try:
        arrays = interop.to_torch(params, state, names=names, norm=norm, for_norm=options.for_norm)
    except ValueError as error:
        raise UserError(f"{folder.path}: {weight_files.with_flags(error)}") from error
    metadata = {"names": names, "norm": options.for_norm or norm, "fnet": fnet.__version__}
    weight_files.write(out, arrays, {"format": "pt"} | network | metadata)
    return out
