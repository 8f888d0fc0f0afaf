"""``fnet train``: train a network from a config."""

import contextlib
from pathlib import Path

from rich.console import Console

from train.arguments import TrainArguments
from train.config import Config
from train.errors import UserError
from train.run.distributed import join, together
from train.run.loop import train
from train.run.mesh import make_cpu_devices
from train.run.open_run import OpenRun
from train.run.run_folder import RunFolder


def main(words: list[str], options: TrainArguments, config: Config) -> None:
    """Run ``fnet train CONFIG``."""
    resumed = RunFolder.of(words[0])
    if options.out:
        out = Path(options.out)
    elif options.resume and resumed.config.is_file():
        out = resumed.path
    else:
        out = Path(f"runs/{config.name}")

    if options.resume and (out / "config.json").is_file():
        OpenRun(RunFolder(out), config)  # its published model must be where it was

    if options.folds is not None and (options.distributed or options.profile):
        flag = "--distributed" if options.distributed else "--profile"
        raise UserError(f"{flag}: is for one run; leave it or --folds out")
    cluster = options.coordinator, options.processes, options.process
    is_distributed = options.distributed or any(value is not None for value in cluster)
    devices = config.mesh.data * config.mesh.fsdp
    make_cpu_devices(config.mesh, (options.processes or devices) if is_distributed else 1)
    is_first = join(*cluster, options.connect_timeout) if is_distributed else True
    console = Console(quiet=not is_first)
    with together() if is_distributed else contextlib.nullcontext():
        if options.folds is not None:
            from train.commands.folds import train_folds  # imports matplotlib for its report

            train_folds(config, options.folds, out, resume=options.resume, console=console)
            return
        train(config, out, resume=options.resume, console=console, profile=options.profile)
