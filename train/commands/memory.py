"""``fnet memory``: predict the memory of training, without training."""

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from fnet.memory import Candidate, format_bytes, tree_bytes
from fnet.memory.target import Target
from train import arguments
from train import config as configs
from train.arguments import MemoryArguments
from train.commands.positional import positional
from train.config import Config, recipes
from train.errors import UserError
from train.output import plots
from train.output.memory_tables import (
    describe_candidate,
    devices_table,
    memory_tables,
    plan_summary,
    plan_table,
)
from train.output.progress import compiling, line_printer
from train.platform import use_cpu
from train.run.memory_report import memory_report
from train.run.mesh import make_cpu_devices
from train.run.planning import overhead, reserve
from train.run.prediction import predict_on, target_of
from train.run.run_folder import as_json, atomic_write
from train.run.setup import setup

_NOT_COUNTED = (
    "Not included, because only the device knows it: workspaces that cuDNN chooses at run time, "
    "and a TPU's small on-chip arrays."
)


def main(argv: list[str]) -> None:
    """Run ``fnet memory CONFIG``."""
    (given,), flags = positional(argv, "fnet memory CONFIG", MemoryArguments)
    options, config = arguments.read_with_config(
        MemoryArguments, recipes.load(given), flags, f"fnet memory {given}"
    )
    if options.target:
        use_cpu()  # nothing runs, so an accelerator of this machine does not matter
    else:
        make_cpu_devices(config.mesh)
    predict_memory(config, options, Console())


def predict_memory(config: Config, options: MemoryArguments, console: Console) -> None:
    """Print the predicted memory of a train step and write memory.json, memory.png and plan.png.

    Raises:
      UserError: for a budget that nothing fits, an unknown target or a missing compiler.
    """
    log = line_printer(console)
    count = config.mesh.data * config.mesh.fsdp
    targets: list[Target | None] = [None]
    if options.target is not None:
        targets = [target_of(name, count) for name in options.target.split(",")]
    if options.budget is not None:
        config = _replace(config, "memory", budget=options.budget)
    find_batch_size = options.batch_size == "auto"
    if find_batch_size and not (config.memory.budget or options.target):
        raise UserError("--batch-size auto: needs --budget or --target")
    if options.batch_size is not None and not find_batch_size:
        config = _replace(config, "data", batch_size=_batch_size(options.batch_size))
    run = setup(configs.check(config, "command line"), without_data=True)
    for note in run.notes:
        log(note)
    out = Path(options.out or f"runs/{config.name}-memory")

    with compiling(console) as show:

        def show_candidate(number: int, c: Candidate, limit: int | None) -> None:
            show(describe_candidate(number, c, limit))

        def show_size(size: int, peak: int) -> None:
            show(f"searching the largest batch size: {size} needs {format_bytes(peak)}")

        predictions = [
            predict_on(
                run,
                target,
                largest=find_batch_size,
                progress=show_candidate,
                size_progress=show_size,
            )
            for target in targets
        ]
        first = predictions[0]
        report = memory_report(first.run, first.planned)
    if len(predictions) == 1:
        console.print(*memory_tables(report, first.run.devices), sep="\n")
        if plan := first.planned.plan:
            console.print(plan_table(plan, reserve(first.run, first.target)))
            for text in plan_summary(plan, reserve(first.run, first.target)).splitlines():
                log(text)
    process = overhead(first.run, first.target)
    if process.always:
        step_peak, state_bytes = first.peak.total, tree_bytes(first.run.state_shapes)
        predicted = process.peak(state_bytes // first.run.devices, step_peak)
        what = "each device, with the runtime" if first.run.devices > 1 else "the process"
        log(f"Peak of {what}: {format_bytes(predicted)} ({process})")
    if options.target:
        console.print(devices_table(predictions))
        log(_NOT_COUNTED)
    if find_batch_size and len(predictions) == 1:
        size, policy = first.run.config.data.batch_size, first.planned.policy
        limit = first.run.config.memory.budget
        way = f"--memory.budget {limit}" if limit else f"--memory.policy {policy}"
        words = f"--data.batch-size {size} {way}"
        devices = first.run.devices
        each = f", {size // devices} for each of {devices} devices" if devices > 1 else ""
        log(f"largest batch size that fits: {size}{each}; train with {words}")
    content = report.as_dict() | {"predictions": [p.as_dict() for p in predictions]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / "memory.json", as_json(content))
        plots.memory(report, f"{config.name}: memory of a train step", out / "memory.png")
        if plan := first.planned.plan:
            reserved = reserve(first.run, first.target)
            title = f"{config.name}: peak memory and compute"
            plots.plan(plan, reserved, title, out / "plan.png")
    except OSError as error:
        raise UserError(
            f"cannot write to {out}: {error.strerror or error}; choose another --out"
        ) from error
    plots_of = "memory.png" + (", plan.png" if first.planned.plan else "")
    log(f"memory: {out / 'memory.json'}")
    log(f"plot: {out / plots_of}")


def _replace(config: Config, section: str, **values: Any) -> Config:
    replaced = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **{section: replaced})


def _batch_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:  # not a number, or one of thousands of digits
        size = 0
    if size < 1:
        raise UserError(f"--batch-size: expected a number of examples or auto, got {text}")
    return size
