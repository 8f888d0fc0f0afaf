"""``fnet memory``: predict the memory of training, without training."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from fnet.memory import Candidate, format_bytes
from fnet.memory.target import Target, describe, from_text
from train import arguments
from train import config as configs
from train.arguments import MemoryArguments
from train.commands.positional import positional
from train.config import Config, Mesh, recipes
from train.errors import UserError
from train.output import plots
from train.output.memory_tables import memory_tables, plan_summary, plan_table
from train.output.progress import line_printer
from train.run.memory_report import memory_report
from train.run.mesh import layout, make_cpu_devices
from train.run.planning import compile_chosen, largest_batch, limit, plan, reserve
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
    make_cpu_devices(config.mesh)
    if options.target:
        # Nothing runs, so that an accelerator of this machine, or its warnings, do not matter.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        jax.config.update("jax_platforms", "cpu")
    predict_memory(config, options, Console())


def predict_memory(config: Config, options: MemoryArguments, console: Console) -> None:
    """Print the predicted memory of a train step and write memory.json and memory.png.

    Raises:
      UserError: for a budget that nothing fits, an unknown target or a missing compiler.
    """
    log = line_printer(console)
    target = None if options.target is None else _target(options.target)
    if options.budget is not None:
        config = _replace(config, "memory", budget=options.budget)
    find_batch_size = options.batch_size == "auto"
    if options.batch_size is not None and not find_batch_size:
        config = _replace(config, "data", batch_size=_batch_size(options.batch_size))
    run = setup(configs.check(config, "command line"))
    if target is None:
        run = run.on(layout(run.config))
    elif run.config.mesh != Mesh():
        raise UserError("--target: describes one device; give --mesh.data 1 --mesh.fsdp 1")
    out = Path(options.out or f"runs/{config.name}-memory")

    with console.status("tracing") as status:

        def show_candidate(c: Candidate) -> None:
            status.update(f"compiled {c}: {format_bytes(c.peak.total)}")

        def show_size(size: int, peak: int) -> None:
            status.update(f"searching the largest batch size: {size} needs {format_bytes(peak)}")

        step_limit = limit(run, target)
        if find_batch_size:
            if step_limit is None:
                raise UserError("--batch-size auto: needs --budget or --target")
            unlimited = run._replace(config=_replace(run.config, "memory", budget=None))
            candidates = plan(unlimited, target=target, progress=show_candidate).candidates
            smallest = min(candidates, key=lambda c: c.peak.temporaries)
            size = largest_batch(run, smallest, step_limit, target=target, progress=show_size)
            if size is None:
                available = format_bytes(max(step_limit, 0))
                raise UserError(f"not even the smallest batch fits in {available}")
            log(_largest_batch_size(size, smallest))
            run = run.with_batch_size(size, smallest.microbatches)
            if not run.config.memory.budget:  # choose the fastest candidate that fits the target
                run = run._replace(config=_replace(run.config, "memory", budget=f"{step_limit}B"))
        found = plan(run, target=target, progress=show_candidate)
        status.update(f"compiling {found.chosen}")
        report = memory_report(run, compile_chosen(run, found, target=target))
        console.print(*memory_tables(report), sep="\n")
        console.print(plan_table(found, reserve(run, target)))
        log(plan_summary(found, reserve(run, target)))
        if target:
            log(_NOT_COUNTED)
        if step_limit is not None and not find_batch_size:
            # The smallest candidate without microbatches may allow a larger batch than the chosen.
            smallest = min(found.candidates, key=lambda c: (c.microbatches, c.peak.temporaries))
            by_policy = {c.policy: c for c in (found.chosen, smallest)}
            for candidate in by_policy.values():
                size = largest_batch(run, candidate, step_limit, target=target, progress=show_size)
                log(_largest_batch_size(size, candidate))
    try:
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / "memory.json", as_json(report.as_dict()))
        plots.memory(report, f"{config.name}: memory of a train step", out / "memory.png")
    except OSError as error:
        raise UserError(
            f"cannot write to {out}: {error.strerror or error}; choose another --out"
        ) from error
    log(f"memory: {out / 'memory.json'}\nplot: {out / 'memory.png'}")


def _largest_batch_size(size: int | None, candidate: Candidate) -> str:
    return f"largest batch size that fits: {size} (remat policy {candidate})"


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


def _target(given: str) -> Target:
    """Return a known device, or the one that a file describes."""
    path = Path(given)
    try:
        if path.is_file():
            return from_text(path.stem, path.read_text())
        return describe(given)
    except (ValueError, RuntimeError, OSError) as error:
        message = str(error).removeprefix("describe: ").removeprefix("from_text: ")
        raise UserError(f"--target: {message}") from error
